"""Image folders to packs: which file belongs to which class and split, and what happens to unreadable files."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from ptlf.core.errors import UserError, unknown
from ptlf.core.processes import info, warn
from ptlf.stream.archives import Chunk
from ptlf.stream.decode import FITS, Fit, ImageFile, decoders
from ptlf.stream.disk import disk_errors, images_below, note_passed
from ptlf.stream.pack import Folders, Pack, check_name, check_writable_target, natural, quote_names, write_pack

OnError = Literal["refuse", "skip"]

SHOWN_SKIPS = 20
SKIP = "give --on-error skip (on_error='skip')"


@dataclass(frozen=True)
class PackOptions:
    on_error: OnError = "refuse"  # for an image that cannot be decoded, and a folder without images
    fit: Fit = "crop"  # how images become squares
    workers: int | None = None  # decoding processes; None: by the number of images
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.on_error not in ("refuse", "skip"):
            raise unknown("on_error", self.on_error, ("refuse", "skip"))
        if self.fit not in FITS:
            raise unknown("fit", self.fit, FITS)


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
    if folders not in ("classes", "tasks"):
        raise unknown("folders", folders, ("classes", "tasks"))
    check_name(name)
    check_writable_target(target, packing.overwrite)
    skipped: list[dict[str, str]] = []
    with disk_errors(source):
        trees = split_folders(source)
        if names is None:
            names = subfolders(trees["train"])
            if "test" in trees and (extra := set(subfolders(trees["test"])) - set(names)):
                raise UserError(
                    f"{trees['test']} has folders that {trees['train']} lacks: {quote_names(sorted(extra))}"
                )
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
        splits = hold_out(splits["train"], names, test_fraction)
    pack = Pack(target, size, folders, tuple(names), skipped=skipped, source=str(source.resolve()))
    return pack_files(pack, splits, packing)


def pack_files(pack: Pack, splits: Mapping[str, Sequence[ImageFile]], options: PackOptions) -> Pack:
    """Decode the listed image files and pack them, in this order. `pack` describes the set, without splits. Of skipped
    images, so are folders in which no other is left."""
    pack, before = replace(pack, fit=options.fit), list(pack.skipped)
    total = sum(map(len, splits.values()))
    enough = min(os.cpu_count() or 1, 1 + total // 1000)  # starting a process costs about as much as 1000 images
    workers = enough if options.workers is None else options.workers
    if pack.size < 1 or workers < 1:
        raise UserError(f"size and workers must be at least 1, not {pack.size} and {workers}")

    with decoders(workers) as decode:

        def chunks(files: Sequence[ImageFile]) -> Iterator[Chunk]:
            seen: set[int] = set()
            for images, labels, problems in decode(files, pack.size, pack.fit):
                if problems and options.on_error == "refuse":
                    raise broken(problems, "packed")
                pack.skipped.extend({"file": file, "why": why} for file, why in problems)
                seen.update(labels.tolist())
                yield images, labels
            if empty := {file.label for file in files} - seen:
                if files is splits["train"] and seen and options.on_error == "skip":
                    raise Emptied(empty)
                raise UserError(
                    f"no readable image is left in {quote_names(pack.names[label] for label in sorted(empty))}"
                )

        streams = {split: (len(files), chunks(files)) for split, files in splits.items()}
        try:
            made = write_pack(pack, streams, overwrite=options.overwrite, progress=options.progress)
        except Emptied as emptied:
            return pack_files(*without(emptied.labels, pack, splits, before), options)
    note_skipped(made, total)
    return made


def broken(problems: Sequence[tuple[str, str]], word: str) -> UserError:
    """problems: names and reasons, of those images that were looked at together with the first."""
    (file, why), more = problems[0], len(problems) - 1
    others = f" and at least {more} more" if more else ""
    return UserError(f"{file} cannot be {word}: {why}; repair or remove it{others}, or {SKIP}")


class Emptied(Exception):
    """No readable image is left in the folders with these labels."""

    def __init__(self, labels: set[int]) -> None:
        super().__init__(labels)
        self.labels = labels


def without(
    labels: set[int], pack: Pack, splits: Mapping[str, Sequence[ImageFile]], before: Sequence[dict[str, str]]
) -> tuple[Pack, dict[str, list[ImageFile]]]:
    """The set without the folders that have these labels. before: what was skipped before the images were read."""
    kept = [label for label in range(len(pack.names)) if label not in labels]
    number = {label: place for place, label in enumerate(kept)}
    files = {
        split: [file._replace(label=number[file.label]) for file in part if file.label in number]
        for split, part in splits.items()
    }
    left_out = [{"file": pack.names[label], "why": "a folder without a readable image"} for label in sorted(labels)]
    names = tuple(pack.names[label] for label in kept)
    return replace(pack, names=names, skipped=[*before, *left_out]), files


def is_empty(folder: Path) -> bool:
    return folder.is_dir() and not images_below(folder, [])


def note_skipped(made: Pack, total: int) -> None:
    tell_skipped(made.name, made.skipped, total, f", all named in {made.path / 'pack.json'}")


def tell_skipped(name: str, skipped: Sequence[dict[str, str]], total: int, where: str = "") -> None:
    """where: all of them are named."""
    if skipped:
        lines = [f"{name}: skipped {len(skipped)}, of {total} images:"]
        lines += [f"{entry['file']}: {entry['why']}" for entry in skipped[:SHOWN_SKIPS]]
        if len(skipped) > SHOWN_SKIPS:
            lines.append(f"and {len(skipped) - SHOWN_SKIPS} more{where}")
        warn("\n  ".join(lines))


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


def list_images(tree: Path, names: Sequence[str], passed: list[Path]) -> list[ImageFile]:
    """passed: takes the files that are no images by their ending."""
    if missing := [name for name in names if not (tree / name).is_dir()]:
        raise UserError(f"{tree} has no folder {quote_names(missing)}")
    listed = [images_below(tree / name, passed) for name in names]
    if [] in listed:
        raise UserError(f"{tree / names[listed.index([])]} holds no images; fill it or remove it, or {SKIP}")
    return [ImageFile(label, str(file)) for label, files in enumerate(listed) for file in files]


def held_out(labels: Iterable[Any], fraction: float) -> list[bool]:
    """Whether each image is for testing. A fraction of 1/k holds out every k-th image of each class; other fractions
    are spaced as evenly as possible."""
    if not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction}; it must lie between 0 and 1")
    share, seen, held = Fraction(fraction).limit_denominator(1000), dict[Any, int](), list[bool]()
    for label in labels:
        place = seen[label] = seen.get(label, 0) + 1
        held.append(int(place * share) > int((place - 1) * share))
    return held


def hold_out(files: Sequence[ImageFile], names: Sequence[str], fraction: float) -> dict[str, list[ImageFile]]:
    splits: dict[str, list[ImageFile]] = {"train": [], "test": []}
    for file, is_test in zip(files, held_out((file.label for file in files), fraction), strict=True):
        splits["test" if is_test else "train"].append(file)
    for split, part in splits.items():
        if empty := set(range(len(names))) - {file.label for file in part}:
            shown = quote_names(names[label] for label in sorted(empty))
            raise UserError(f"test_fraction {fraction} leaves no {split} image in {shown}; it has too few files")
    return splits
