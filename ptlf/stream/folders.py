"""Folders of images, a folder per class or per task, to packed sets."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError, info
from ptlf.stream.disk import disk_errors, images_below, natural, note_passed, quote_names
from ptlf.stream.pack import Folders, Pack, check_name, check_target
from ptlf.stream.rows import Row, hold_out, list_split, number_classes
from ptlf.stream.squares import SKIP, PackOptions, write_squares


def pack_folder(
    source: Path,
    root: Path,
    name: str,
    *,
    size: int,
    folders: Folders = "classes",
    test_fraction: float = 0.0,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Pack:
    """Pack a folder of images: `train/NAME/...` (and `test/` or `val/`), or `NAME/...` directly.

    There is one folder per class or per task, with files at any depth; hidden files (".x") are ignored, and such as
    notes.txt passed over. `names` selects and orders the folders. If there is no test folder, `test_fraction` holds out
    evenly spaced files of each class.
    options: of `PackOptions`.
    """
    source, target, packing = Path(source), Path(root) / name, PackOptions(**options)
    check_name(name)
    check_target(target, packing.overwrite)
    if test_fraction and folders == "tasks":
        raise UserError("test_fraction needs folders='classes'; give tasks their own test/ folder")
    passed, skipped, splits = list[Path](), list[dict[str, str]](), {}
    with disk_errors(source):
        trees = split_folders(source)
        chosen = list(names or subfolders(trees["train"]))
        if not chosen or (trees["train"] == source and {*chosen} <= {"train", "test", "val"}):
            empty = source / chosen[0] if chosen else source
            raise UserError(f"{empty} holds no folders; put the images into one folder per class or task")
        extra = [] if names or "test" not in trees else [*({*subfolders(trees["test"])} - {*chosen})]
        if extra:
            raise UserError(f"{trees['test']} has folders that {trees['train']} lacks: {quote_names(sorted(extra))}")
        for split, tree in trees.items():
            files = {name: images_below(tree / name, passed) for name in chosen}
            for name in [name for name in chosen if not files[name]]:
                if packing.on_error != "skip":
                    raise UserError(f"{tree / name} holds no images; fill it or remove it, or {SKIP}")
                skipped.append({"file": str(tree / name), "why": "a folder without images"})
                chosen.remove(name)
            splits[split] = list_split([Row(str(file), file, name) for name in chosen for file in files[name]])
        note_passed(source, passed)
    if test_fraction:
        splits = hold_out(splits, test_fraction)
    pack = Pack(target, size, folders, (), skipped=skipped, source=str(source.resolve()))
    return write_squares(pack, splits, packing, partial(number_classes, source=str(source), names=names))


def split_folders(source: Path) -> dict[str, Path]:
    """{"train": folder} or {"train": folder, "test": folder}: `train` and `test` (or `val`), if there are folders in
    `train`; else the source itself."""
    if not source.is_dir():
        raise UserError(f"{source} is no folder; give one that holds a folder per class or task")
    inside, trees = subfolders(source), {"train": source}
    if "train" in inside and (known := subfolders(source / "train")):
        trees = {"train": source / "train"}
        tests = [source / split for split in ("test", "val") if split in inside]
        usable = [test for test in tests if {*known} & {*subfolders(test)}]
        if tests and not usable:
            raise UserError(f"{tests[0]} holds none of the folders of {source / 'train'}")
        if usable:
            trees["test"] = usable[0]
        if unused := {*inside} - {tree.name for tree in trees.values()}:
            info(f"not read from {source}: {quote_names(sorted(unused))}")
    return trees


def subfolders(folder: Path) -> list[str]:
    return sorted((e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")), key=natural)
