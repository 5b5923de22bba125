import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, picture, tree
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream import packing as squares
from ptlf.stream.pack import Pack, verify_pack
from ptlf.stream.packing import labelled_dataset, pack_folder, pack_images


def packed(source: Path, tmp_path: Path, name: str = "set", size: int = 8, **options: Any) -> Pack:
    return pack_folder(source, tmp_path / "root", name, size=size, progress=False, **options)


def refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        packed(*args, **options)


def pixels(*files: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(file)) for file in files]


def test_train_and_val_folders_in_natural_order(tmp_path: Path) -> None:
    tree(tmp_path / "s" / "train", "c10", "c2", "c1", files=2)
    tree(tmp_path / "s" / "val", "c1", "c2", "c10", files=1)
    pack = packed(tmp_path / "s", tmp_path)
    assert pack.names == ("c1", "c2", "c10")
    assert pack.labels("train").tolist() == [0, 0, 1, 1, 2, 2] and pack.labels("test").tolist() == [0, 1, 2]
    assert np.array_equal(pack.images("test")[1:2], pixels(tmp_path / "s/val/c2/0.png"))


def test_task_folders(tmp_path: Path) -> None:
    tree(tmp_path / "s", "task10", "task2")
    pack = packed(tmp_path / "s", tmp_path, folders="tasks")
    assert (pack.folders, pack.names) == ("tasks", ("task2", "task10"))
    refused("folders='classes'", tmp_path / "s", tmp_path, "t", folders="tasks", test_fraction=0.5)


def test_nested_and_hidden_files(tmp_path: Path) -> None:
    source = tree(tmp_path / "s", "a", "train", files=1)  # a class may be called so
    tree(source / "a", "deep", files=2)
    (source / "a" / ".DS_Store").write_bytes(b"x")
    os.symlink(source / "a", source / "a" / "deep" / "loop")
    pack = packed(source, tmp_path)
    files = [source / file for file in ("a/0.png", "a/deep/0.png", "a/deep/1.png", "train/0.png")]
    assert np.array_equal(pack.images("train"), pixels(*files)) and pack.names == ("a", "train")


def test_test_fraction_holds_out_every_kth_file(tmp_path: Path) -> None:
    source = tree(tmp_path / "s", "a", "b", files=6)
    pack = packed(source, tmp_path, test_fraction=1 / 3)
    assert pack.labels("train").tolist() == [0] * 4 + [1] * 4
    held = [source / file for file in ("a/2.png", "a/5.png", "b/2.png", "b/5.png")]
    assert np.array_equal(pack.images("test"), pixels(*held))
    refused(r"test_fraction 0\.1 leaves no test image", source, tmp_path, "few", test_fraction=0.1)
    refused("between 0 and 1", source, tmp_path, "few", test_fraction=1.5)
    tree(tmp_path / "split" / "train", "a")
    tree(tmp_path / "split" / "test", "a")
    refused("there are test images; use one", tmp_path / "split", tmp_path, "both", test_fraction=0.5)


def test_names_restrict_and_order(tmp_path: Path) -> None:
    for split in ("train", "test", "val"):
        tree(tmp_path / "s" / split, "a", "b", "c", files=1)
    pack = packed(tmp_path / "s", tmp_path, names=["c", "a"])
    assert pack.names == ("c", "a")
    assert np.array_equal(pack.images("train")[:1], pixels(tmp_path / "s/train/c/0.png"))
    refused("train/d: No such file", tmp_path / "s", tmp_path, "other", names=["a", "d", "e"])


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tree(tmp_path / "s", "a") / "b").mkdir()
    (tmp_path / "flat" / "train").mkdir(parents=True)
    for split, names in {"train": "a", "test": "az"}.items():
        tree(tmp_path / "odd" / split, *names)
        tree(tmp_path / "other" / split, names[-1])
    for source, message in {
        "nowhere": "nowhere is no folder",
        "empty": "empty holds no folders",
        "s": "s/b holds no images",
        "flat": "flat holds no folders",
        "odd": "has test images of 'z', of which there are no training images",
        "other": "other/test holds none of the folders of .*train",
    }.items():
        refused(message, tmp_path / source, tmp_path)


def animation() -> bytes:
    return encoded(picture(), "GIF", save_all=True, append_images=[picture(), picture()])


BAD = {
    "empty.png": (b"", "empty file"),
    "cut.jpg": (encoded(picture(64, 64), "JPEG")[:-700], "truncated"),
    "cut.png": (encoded(picture(64, 64), "PNG")[:-700], ""),
    "cut_header.png": (encoded(picture(), "PNG")[:20], ""),
    "moving.gif": (animation(), "3 frames"),
    "pages.tiff": (encoded(picture(), "TIFF", save_all=True, append_images=[picture()]), "2 frames"),
    "notes.png": (b"these are no pixels", "not an image"),
    "phone.heic": (b"\0\0\0\x18ftypheic" + bytes(40), "HEIC is not read here, convert it to JPEG or PNG"),
    "phone.jpg": (b"\0\0\0\x18ftypmif1" + bytes(40), "HEIF is not read here, convert"),
    "camera.DNG": (encoded(picture(), "TIFF"), r"RAW format \(.DNG\) is not read here, convert"),
    "float.tiff": (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "floating-point"),
    "wide.tiff": (encoded(Image.new("I", (8, 8), 70000), "TIFF"), "16 bits"),
}


def test_a_bad_image_is_refused_or_skipped_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, root = tree(tmp_path / "source", "a", "b"), tmp_path / "root"
    for file, (content, why) in BAD.items():
        bad = source / "a" / file
        bad.write_bytes(content)
        refused(f"{bad} cannot be used: .*{why}.*--on-error skip", source, tmp_path)
        assert not root.exists() or os.listdir(root) == [], file
        bad.rename(tmp_path / file)
    for file in BAD:
        (tmp_path / file).rename(source / "a" / file)
    refused(" and 1 more, or", source, tmp_path)
    pack = packed(source, tmp_path, on_error="skip")
    skipped = {Path(entry["file"]).name: entry["why"] for entry in pack.skipped}
    assert set(skipped) == set(BAD) and all(re.search(why, skipped[file]) for file, (_, why) in BAD.items())
    told = capsys.readouterr().err
    assert all(file in told for file in BAD)
    assert pack.labels("train").tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(pack.images("train")[5:], pixels(source / "b" / "2.png"))
    assert verify_pack(root, "set", progress=False) == []


def test_files_that_are_no_images_by_their_ending_are_left_out(tmp_path: Path) -> None:
    """Whatever has another ending, or none, must be an image."""
    source, root = tree(tmp_path / "source", "a", "b"), tmp_path / "root"
    expected, alone = packed(source, tmp_path, "plain"), pack_images(source / "a", root / "plain-a", 8, progress=False)
    (source / "a" / "notes.txt").write_text("fine weather")
    (source / "a" / "deep").mkdir()
    (source / "a" / "deep" / "LABELS.JSON").write_text("{}")
    assert packed(source, tmp_path).splits == expected.splits
    assert pack_images(source / "a", root / "a", 8, progress=False).splits == alone.splits
    (source / "readme.md").write_text("two classes")  # which the folders are nevertheless
    assert labelled_dataset(source, 8, 1 / 3).names == ("a", "b")
    (source / "b" / "picture").write_text("words")
    refused(r"b/picture cannot be used: not an image", source, tmp_path, "other")


def test_a_class_whose_images_all_fail(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", "a", "b", "c")
    for file in (source / "b").iterdir():
        file.write_bytes(b"")
    pack = packed(source, tmp_path, on_error="skip")
    assert (pack.names, pack.labels("train").tolist()) == (("a", "c"), [0, 0, 0, 1, 1, 1])
    for file in (*(source / "a").iterdir(), *(source / "c").iterdir()):
        file.write_bytes(b"")
    refused("no readable image is left in train", source, tmp_path, "other", on_error="skip")


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_how_a_rectangle_becomes_a_square(tmp_path: Path, fit: str) -> None:
    """A picture of three stripes, red, green and blue, twice as wide as high."""
    stripes = np.zeros((24, 48, 3), np.uint8)
    for stripe in range(3):
        stripes[:, 16 * stripe : 16 * (stripe + 1), stripe] = 255
    (tmp_path / "s" / "a").mkdir(parents=True)
    Image.fromarray(stripes).save(tmp_path / "s" / "a" / "0.png")
    pack = packed(tmp_path / "s", tmp_path, size=12, fit=fit)
    assert pack.fit == json.loads((pack.path / "pack.json").read_text())["fit"] == fit
    (image,) = pack.images("train")
    row, red, green, blue = image[6], [255, 0, 0], [0, 255, 0], [0, 0, 255]
    assert row[6].tolist() == green
    edge = 0 if fit == "crop" else 1  # crop: the middle half; 4 of 24 columns on each side are not green
    above = [127, 127, 127] if fit == "pad" else green
    assert [row[edge].tolist(), row[11 - edge].tolist(), image[0, 6].tolist()] == [red, blue, above]
    if fit == "pad":
        assert (image[:3] == 127).all() and (image[9:] == 127).all() and not (image[3:9] == 127).all()
    elif fit == "crop":
        assert (row[:, 1] > 127).sum() == 8
    refused("unknown fit 'fold'", tmp_path / "s", tmp_path, "other", size=12, fit="fold")


def test_several_workers_give_the_same_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "BATCH_BYTES", 8 * 8 * 3 * 2)  # two images per batch
    source = tree(tmp_path / "s", "a", "b", files=7)
    (source / "a" / "1.png").write_bytes(b"")
    (source / "b" / "6.png").write_bytes(b"no")
    one, three = (packed(source, tmp_path, f"set{workers}", workers=workers, on_error="skip") for workers in (1, 3))
    assert one.splits == three.splits and one.skipped == three.skipped and one.splits["train"].count == 12
    refused("workers must be at least 1, not 0", source, tmp_path, "no", workers=0)
