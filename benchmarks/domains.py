"""Small labelled image sets of several domains, cut from data sets in public GitHub repositories.

`python domains.py CLONES OUT [--only signs cells]` writes OUT/DOMAIN.npz (images, labels, groups, classes), and the
signs as JPEG files as well. CLONES/OWNER+NAME is a checkout of github.com/OWNER/NAME:

    get() { git clone https://github.com/$1/$2 "CLONES/$1+$2" && git -C "CLONES/$1+$2" checkout $3; }
    get Deo0330 split_minidataset 557ebcae
    get krupallad09 Traffic_Sign 84191b4b
    get zlima testtensor f6a0f746
    get AuralinACC Blood-Cell-Classification d2e7b75e
    get mohamedScikitLearn Arabic-character-recognition-using-ANN-and-CNN- 80768d03
    get pan8915 DeepTexture 522f46f6
    get MarcoCaruso02 plantvillage ba7acfb9
"""

import argparse
import hashlib
import re
from pathlib import Path

import numpy as np
from PIL import Image

SIZE, SEED, QUALITY, JPEG_DOMAIN = 64, 0, 95, "signs"

# `pattern` reads the class (named in `classes`) and the parts of a group from a path. A group is one sign, place
# or writer with several pictures; without `group` every picture is its own.
SOURCES = {
    "photos": {
        "repo": "Deo0330+split_minidataset",
        "files": "val/*/*.jpg",
        "pattern": r"val/(?P<cls>n\d+)/",
        "each": 50,
        "classes": "n01532829=house finch, n01704323=triceratops, n01749939=green mamba, n01770081=harvestman, "
        "n01843383=toucan, n01910747=jellyfish, n02108089=boxer, n02129165=lion, n02165456=ladybug, "
        "n02606052=rock beauty, n02687172=aircraft carrier, n02871525=bookshop, n03047690=clog, "
        "n03220513=dome, n03272010=electric guitar, n03417042=garbage truck, n03924679=photocopier, "
        "n04146614=school bus, n04258138=solar dish, n04604644=worm fence, n04612504=yawl, n07697537=hotdog, "
        "n07747607=orange, n13054560=bolete",
    },
    "signs": {
        "repo": "krupallad09+Traffic_Sign",
        "files": "GTSRB/Final_Training/Images/*/*.ppm",
        "each": 120,
        "smallest": 48,
        "pattern": r"/(?P<cls>\d{5})/(?P<track>\d{5})_\d{5}\.ppm",
        "group": lambda part: part["cls"] + part["track"],
        "classes": "00001=speed limit 30, 00002=speed limit 50, 00009=no passing, 00011=right of way, 00012=priority "
        "road, 00013=yield, 00014=stop, 00017=no entry, 00025=road work, 00038=keep right",
    },
    "satellite": {  # neighbouring numbers can show the same place
        "repo": "zlima+testtensor",
        "files": "AID/*/*.jpg",
        "each": 120,
        "pattern": r"AID/(?P<cls>\w+)/[a-z]+_(?P<ten>\d*)\d\.jpg",
        "group": lambda part: part["cls"] + part["ten"],
        "classes": "Airport=airport, Beach=beach, Bridge=bridge, DenseResidential=dense residential, "
        "Farmland=farmland, Forest=forest, Parking=parking, Port=port, StorageTanks=storage tanks, Viaduct=viaduct",
    },
    "cells": {
        "repo": "AuralinACC+Blood-Cell-Classification",
        "files": "PBC*/*/[A-Z]*.jpg",
        "pattern": r"DIB/(?P<cls>\w+)/",
        "each": 150,
        "classes": "basophil, eosinophil, erythroblast, ig=immature granulocyte, lymphocyte, monocyte, neutrophil, "
        "platelet",
    },
    "letters": {  # a writer's sheet holds 28 letters, 8 times each
        "repo": "mohamedScikitLearn+Arabic-character-recognition-using-ANN-and-CNN-",
        "files": "train/*.png",
        "each": 120,
        "pattern": r"id_(?P<id>\d+)_label_(?P<cls>\d+)\.png",
        "group": lambda part: str((int(part["id"]) - 1) // 224),
        "classes": "1=alef, 2=beh, 5=jeem, 8=dal, 12=seen, 14=sad, 18=ain, 22=kaf, 24=meem, 26=heh",
    },
    "textures": {
        "repo": "pan8915+DeepTexture",
        "files": "images/*/*.jpg",
        "pattern": r"images/(?P<cls>\w+)/",
        "each": 120,
        "classes": "banded, blotchy, braided, bubbly, bumpy, chequered, cobwebbed, cracked, crosshatched, crystalline",
    },
    "leaves": {
        "repo": "MarcoCaruso02+plantvillage",
        "files": "dataset_less/*/*.JPG",
        "each": 120,
        "pattern": r"/Tomato___(Tomato_)?(?P<cls>[A-Za-z_]+)",
        "classes": "Bacterial_spot, Early_blight, Late_blight, Leaf_Mold, Septoria_leaf_spot, Spider_mites, "
        "Target_Spot, Yellow_Leaf_Curl_Virus, mosaic_virus, healthy",
    },
}


def read(file, smallest):
    """The centre square of an image file at SIZE x SIZE, or None for an image that is too small."""
    image = Image.open(file).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((SIZE, SIZE), Image.BICUBIC)) if side >= smallest else None  # antialiased


def build(clones, repo, files, pattern, each, classes, group=None, smallest=0):
    """A random choice of `each` images of every class."""
    names = dict(sorted((item.split("=") * 2)[:2] for item in classes.split(", ")))
    found, rows, root = {cls: [] for cls in names}, [], clones / repo
    for path in sorted(file.relative_to(root).as_posix() for file in root.glob(files)):
        part = re.search(pattern, path)
        if part and part["cls"] in names:
            found[part["cls"]].append((path, group(part) if group else path))
    rng = np.random.default_rng(SEED)
    for label, cls in enumerate(names):
        wanted = len(rows) + each
        for index in rng.permutation(len(found[cls])):
            image = read(root / found[cls][index][0], smallest) if len(rows) < wanted else None
            if image is not None:
                rows.append((image, label, found[cls][index][1]))
        assert len(rows) == wanted, f"{repo}: too few images of {cls}"
    images, labels, groups = zip(*rows, strict=True)
    groups = np.unique(groups, return_inverse=True)[1]
    return {
        "images": np.stack(images),
        "labels": np.array(labels, np.int64),
        "groups": groups.astype(np.int64),
        "classes": np.array([name.replace("_", " ").lower() for name in names.values()]),
    }


def write_jpegs(folder, images, labels, classes):
    """Two random halves without labels (monday, tuesday), and every image under labelled/CLASS."""
    order, half = np.random.default_rng(SEED).permutation(len(images)), len(images) // 2
    places = [(index, f"{'tuesday' if n >= half else 'monday'}/{n % half:04d}.jpg") for n, index in enumerate(order)]
    places += [(n, f"labelled/{classes[label].replace(' ', '_')}/{n:04d}.jpg") for n, label in enumerate(labels)]
    for index, place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index]).save(folder / place, quality=QUALITY)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("clones", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for domain in args.only:
        data = build(args.clones, **SOURCES[domain])
        np.savez_compressed(args.out / f".{domain}.npz", **data)
        (args.out / f".{domain}.npz").rename(args.out / f"{domain}.npz")
        if domain == JPEG_DOMAIN:
            write_jpegs(args.out / "jpeg" / domain, data["images"], data["labels"], data["classes"])
        digest = hashlib.sha256(b"".join(data[key].tobytes() for key in ("images", "labels", "groups"))).hexdigest()
        print(f"{domain}: {len(data['images'])} images, {data['groups'].max() + 1} groups, sha256 {digest[:16]}")
