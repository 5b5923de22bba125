"""`ptlf data`: get, pack, check and list data sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.stream import fetch
from ptlf.stream.disk import quote_names
from ptlf.stream.folders import pack_folder
from ptlf.stream.images import is_image_folder
from ptlf.stream.pack import Folders, Pack, list_packs, verify_pack
from ptlf.stream.packing import pack_images

NO_PACKS = "no packed data sets in {}; `ptlf data get cifar10` gets one"


def data_get(name: str, data_root: str | None, **how: Any) -> None:
    show_pack(fetch.get(name, fetch.data_root(data_root), **how))


def data_pack(source: Path, name: str, data_root: str | None, folders: Folders, **how: Any) -> None:
    root = fetch.data_root(data_root)
    if is_image_folder(source):
        pack = pack_folder(source, root, name, folders=folders, **how)
        show_pack(pack)
        if folders == "tasks":
            print(f"  the order of the tasks, by their names: {quote_names(pack.names)}")
    elif folders == "tasks":
        raise UserError(f"--folders tasks is for a folder of image folders, and {source} is none; leave it out")
    else:
        show_pack(pack_images(source, root / name, **how))


def data_verify(names: Sequence[str], data_root: str | None) -> None:
    root = fetch.data_root(data_root)
    names = names or [pack.name for pack in list_packs(root)]
    if not names:
        raise UserError(NO_PACKS.format(root))
    problems = {name: verify_pack(root, name) for name in names}
    for name, found in problems.items():
        print(f"{name}: {'; '.join(found) if found else 'as packed'}")
    if any(problems.values()):
        raise UserError("damaged: " + ", ".join(name for name, found in problems.items() if found))


def data_list(data_root: str | None) -> None:
    root = fetch.data_root(data_root)
    packs = list_packs(root)
    if not packs:
        print(NO_PACKS.format(root))
    for pack in packs:
        show_pack(pack)


def show_pack(pack: Pack) -> None:
    counts = ", ".join(f"{split.count} {name}" for name, split in pack.splits.items())
    images = f"{counts} images of {pack.size} px{'' if pack.fit == 'crop' else f', {pack.fit}'}"
    print(f"{pack.name}: {images}, {len(pack.names)} {pack.folders}, in {pack.path}")
