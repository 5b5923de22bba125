"""Folders of images, a folder per class or per task, to packed sets."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from ptlf.core.errors import UserError, info, unknown
from ptlf.stream.disk import disk_errors, images_below, natural, note_passed, quote_names
from ptlf.stream.pack import Folders, Pack, check_name, check_writable_target
from ptlf.stream.rows import Classes, ImageSplit, Row, hold_out, list_split
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
    if folders not in get_args(Folders):
        raise unknown("folders", folders, get_args(Folders))
    check_name(name)
    check_writable_target(target, packing.overwrite)
    skipped: list[dict[str, str]] = []
    with disk_errors(source):
        trees = split_folders(source)
        if names is None:
            names = subfolders(trees["train"])
            if "test" in trees and (extra := set(subfolders(trees["test"])) - set(names)):
                lacking = quote_names(sorted(extra))
                raise UserError(f"{trees['test']} has folders that {trees['train']} lacks: {lacking}")
        if packing.on_error == "skip":
            empty = [name for name in names if is_empty(trees["train"] / name)]
            skipped = [{"file": str(trees["train"] / name), "why": "a folder without images"} for name in empty]
            names = [name for name in names if name not in empty]
        passed: list[Path] = []
        splits = {split: list_images(tree, names, passed) for split, tree in trees.items()}
        note_passed(source, passed)
    if test_fraction:
        if folders == "tasks":
            raise UserError("test_fraction needs folders='classes'; give tasks their own test/ folder")
        if "test" in splits:
            raise UserError("test_fraction is given, but the source has a test folder; use one of them")
        splits = hold_out(splits["train"], test_fraction)
        for split, part in splits.items():
            if without := set(names) - set(part.all_labels()):
                shown = quote_names(sorted(without, key=natural))
                raise UserError(f"test_fraction {test_fraction} leaves no {split} image in {shown}; it has too few")
    pack = Pack(target, size, folders, (), skipped=skipped, source=str(source.resolve()))
    place = {name: index for index, name in enumerate(names)}
    return write_squares(pack, splits, packing, Classes(str(source)), place.__getitem__)


def is_empty(folder: Path) -> bool:
    return folder.is_dir() and not images_below(folder, [])


def split_folders(source: Path) -> dict[str, Path]:
    """{"train": folder} or {"train": folder, "test": folder}. A `train` without subfolders is a class of that name."""
    if not source.is_dir():
        raise UserError(f"{source} is no folder; give one that holds a folder per class or task")
    inside = subfolders(source)
    known = subfolders(source / "train") if "train" in inside else []
    if not known and set(inside) <= {"train", "test", "val"}:
        empty = source / inside[0] if inside else source
        raise UserError(f"{empty} holds no folders; put the images into one folder per class or task")
    if not known:
        note_unused(source, inside)
        return {"train": source}
    tests = [source / split for split in ("test", "val") if split in inside]
    usable = [test for test in tests if set(known) & set(subfolders(test))]
    if tests and not usable:
        raise UserError(f"{tests[0]} holds none of the folders of {source / 'train'}")
    trees = dict(zip(("train", "test"), (source / "train", *usable), strict=False))
    note_unused(source, [tree.name for tree in trees.values()])
    note_unused(trees["train"], known)
    return trees


def note_unused(folder: Path, used: Iterable[str]) -> None:
    unused = sorted({entry.name for entry in folder.iterdir() if not entry.name.startswith(".")} - set(used))
    if unused:
        info(f"not packed from {folder}: {quote_names(unused)}")


def subfolders(folder: Path) -> list[str]:
    return sorted((e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")), key=natural)


def list_images(tree: Path, names: Sequence[str], passed: list[Path]) -> ImageSplit:
    """passed: takes the files that are no images by their ending."""
    if missing := [name for name in names if not (tree / name).is_dir()]:
        raise UserError(f"{tree} has no folder {quote_names(missing)}")
    rows: list[Row] = []
    for name in names:
        files = images_below(tree / name, passed)
        if not files:
            raise UserError(f"{tree / name} holds no images; fill it or remove it, or {SKIP}")
        rows += [Row(str(file), file, name) for file in files]
    return list_split(rows)
