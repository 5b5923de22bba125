"""A small ViT that knows the digits 0 to 4, and the digits 5 to 9 as new images, for benchmarks/pretrained.py.

python benchmarks/pretrained_digits.py OUT
python benchmarks/pretrained.py OUT --encoder.weights OUT/vit --only digits59 --name vit
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import ptlf

SETTINGS = {
    "encoder.depth": 6, "encoder.width": 96, "encoder.heads": 3, "encoder.patch": 4, "views.name": "gentle",
    "training.epochs": 60, "training.batch": 64, "training.optimizer.name": "adamw", "training.lr": 5e-4,
}  # fmt: skip


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    large = [Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32)) for image in digits.images]
    images = np.stack([np.asarray(image.convert("RGB")) for image in large])
    for name, first in (("photos", 0), ("digits59", 5)):  # photos.npz is what the encoder knew
        rows = (digits.target >= first) & (digits.target < first + 5)
        labels, groups = digits.target[rows] - first, np.arange(rows.sum())
        np.savez_compressed(out / f"{name}.npz", images=images[rows], labels=labels, groups=groups)
    learner = ptlf.Learner("vit-tiny", "simclr", "finetune", out / "vit", size=32, **SETTINGS)
    learner.learn(np.load(out / "photos.npz")["images"], "known")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
