"""A folder of images a day, from Python: learn, test, take back, embed.

    python examples/folders.py runs/days

The images are scikit-learn's digits, written as PNG files. The encoder starts from random weights; give `Learner`
yours.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import ptlf


def write_images(folder: Path, rows: np.ndarray, by_class: bool) -> Path:
    data = load_digits()
    for row in rows:
        where = folder / str(data.target[row]) if by_class else folder
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray((data.images[row] * 15.9).astype(np.uint8)).save(where / f"{row:04}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    out = (options := parser.parse_args()).out
    order = np.random.default_rng(0).permutation(1797)
    monday = write_images(out / "monday", order[:600], by_class=False)
    tuesday = write_images(out / "tuesday", order[600:1200], by_class=False)
    labelled = write_images(out / "labelled", order[1200:], by_class=True)

    learner = ptlf.Learner(out=out / "run", size=8, **{"views.name": "digits", "training.epochs": options.epochs})
    learner.learn(monday)
    learner.learn(tuesday)
    print(learner.tasks)
    for name, probe in learner.evaluate(labelled=labelled).items():
        print(f"{name}: {probe['accuracy']:.1f} % of the labelled images")
    learner.undo()  # as if Tuesday had not been learnt
    print(learner.tasks, learner.embed(labelled).shape)


if __name__ == "__main__":
    main()
