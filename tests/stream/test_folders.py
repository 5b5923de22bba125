from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture, tree
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream import squares
from ptlf.stream.folders import pack_folder
from ptlf.stream.pack import verify_pack
from ptlf.stream.packing import labelled_dataset, pack_images


def test_train_and_val_folders_in_natural_order(tmp_path: Path) -> None:
    tree(tmp_path / "s" / "train", "c10", "c2", "c1", files=2)
    tree(tmp_path / "s" / "val", "c1", "c2", "c10", files=1)
    pack = pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, progress=False)
    assert pack.names == ("c1", "c2", "c10")
    assert pack.labels("train").tolist() == [0, 0, 1, 1, 2, 2] and pack.labels("test").tolist() == [0, 1, 2]
    assert np.array_equal(pack.images("test")[1], np.asarray(Image.open(tmp_path / "s/val/c2/0.png")))


def test_task_folders(tmp_path: Path) -> None:
    tree(tmp_path / "s", "task10", "task2")
    pack = pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, folders="tasks", progress=False)
    assert (pack.folders, pack.names) == ("tasks", ("task2", "task10"))
    with pytest.raises(UserError, match="folders='classes'"):
        pack_folder(tmp_path / "s", tmp_path / "root", "t", size=8, folders="tasks", test_fraction=0.5)


def test_nested_and_hidden_files(tmp_path: Path) -> None:
    source = tree(tmp_path / "s", "a", files=1)
    tree(source / "a", "deep", files=2)
    (source / "a" / ".DS_Store").write_bytes(b"x")
    os.symlink(source / "a", source / "a" / "deep" / "loop")
    pack = pack_folder(source, tmp_path / "root", "set", size=8, progress=False)
    files = ["a/0.png", "a/deep/0.png", "a/deep/1.png"]
    assert np.array_equal(pack.images("train"), [np.asarray(Image.open(source / file)) for file in files])


def test_test_fraction_holds_out_every_kth_file(tmp_path: Path) -> None:
    source = tree(tmp_path / "s", "a", "b", files=6)
    pack = pack_folder(source, tmp_path / "root", "set", size=8, test_fraction=1 / 3, progress=False)
    assert pack.labels("train").tolist() == [0] * 4 + [1] * 4
    held = [np.asarray(Image.open(source / file)) for file in ("a/2.png", "a/5.png", "b/2.png", "b/5.png")]
    assert np.array_equal(pack.images("test"), held)
    with pytest.raises(UserError, match=r"test_fraction 0\.1 leaves no test image"):
        pack_folder(source, tmp_path / "root", "few", size=8, test_fraction=0.1, progress=False)
    with pytest.raises(UserError, match="between 0 and 1"):
        pack_folder(source, tmp_path / "root", "few", size=8, test_fraction=1.5, progress=False)


def test_names_restrict_and_order(tmp_path: Path) -> None:
    tree(tmp_path / "s" / "train", "a", "b", "c", files=1)
    tree(tmp_path / "s" / "test", "a", "b", "c", files=1)
    pack = pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, names=["c", "a"], progress=False)
    assert pack.names == ("c", "a")
    assert np.array_equal(pack.images("train")[0], np.asarray(Image.open(tmp_path / "s/train/c/0.png")))
    with pytest.raises(UserError, match="train/d: No such file"):
        pack_folder(tmp_path / "s", tmp_path / "root", "other", size=8, names=["a", "d", "e"], progress=False)


def test_what_is_not_packed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test", "val"):
        tree(tmp_path / "s" / split, "a", files=1)
    pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, progress=False)
    assert "s: 'val'" in capsys.readouterr().err


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    pack = pack_folder(tree(tmp_path / "s", "car", "train"), tmp_path / "root", "set", size=8, progress=False)
    assert pack.names == ("car", "train")


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    def refused(source: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            pack_folder(source, tmp_path / "root", "set", size=8, progress=False)

    refused(tmp_path / "nowhere", "nowhere is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty holds no folders")
    source = tree(tmp_path / "s", "a")
    (source / "b").mkdir()
    refused(source, "s/b holds no images")
    (tmp_path / "flat" / "train").mkdir(parents=True)
    refused(tmp_path / "flat", "flat/train holds no folders")
    tree(tmp_path / "odd" / "train", "a")
    tree(tmp_path / "odd" / "test", "a", "z")
    refused(tmp_path / "odd", "lacks: 'z'")


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
        with pytest.raises(UserError, match=f"{bad} cannot be used: .*{why}.*--on-error skip"):
            pack_folder(source, root, "set", size=8, progress=False)
        assert not root.exists() or os.listdir(root) == [], file
        bad.rename(tmp_path / file)
    for file in BAD:
        (tmp_path / file).rename(source / "a" / file)
    pack = pack_folder(source, root, "set", size=8, on_error="skip", progress=False)
    skipped = {Path(entry["file"]).name: entry["why"] for entry in pack.skipped}
    assert set(skipped) == set(BAD) and all(re.search(why, skipped[file]) for file, (_, why) in BAD.items())
    told = capsys.readouterr().err
    assert all(file in told for file in BAD)
    assert pack.labels("train").tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(pack.images("train")[5], np.asarray(Image.open(source / "b" / "2.png")))
    assert verify_pack(root, "set", progress=False) == []


def test_bad_images_are_counted(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", "a", "b")
    for name in ("x.heic", "y.heic"):
        (source / "a" / name).write_bytes(b"nothing")
    told = "x.heic cannot be used: not an image in a known format; repair or remove it and at least 1 more, or"
    with pytest.raises(UserError, match=told):
        pack_folder(source, tmp_path, "set", size=8, progress=False)


def test_files_that_are_no_images_by_their_ending_are_passed_over(tmp_path: Path, capsys) -> None:
    """They are counted. Whatever has another ending, or none, must be an image."""
    source = tree(tmp_path / "source", "a", "b")
    expected = pack_folder(source, tmp_path / "root", "plain", size=8, progress=False)
    alone = pack_images(source / "a", tmp_path / "root" / "plain-a", 8, progress=False)
    (source / "a" / "notes.txt").write_text("fine weather")
    (source / "a" / "deep").mkdir()
    (source / "a" / "deep" / "LABELS.JSON").write_text("{}")
    (source / "b" / "notes.txt").write_text("rain")
    capsys.readouterr()
    pack = pack_folder(source, tmp_path / "root", "set", size=8, progress=False)
    assert pack.splits == expected.splits and not pack.skipped
    told = f"note: passed over 3 files in {source} that by the ending (.json, .txt) are no images\n"
    assert capsys.readouterr().err == told
    assert pack_images(source / "a", tmp_path / "root" / "a", 8, progress=False).splits == alone.splits
    assert f"passed over 2 files in {source / 'a'}" in capsys.readouterr().err
    (source / "readme.md").write_text("two classes")  # which the folders are nevertheless
    data = labelled_dataset(source, 8, 1 / 3)
    assert data.names == ("a", "b") and len(data.train) == 4
    assert "passed over 4 files" in capsys.readouterr().err
    for file in (source / "b").glob("*.png"):
        file.unlink()
    with pytest.raises(UserError, match=r"b holds no images; .* --on-error skip"):
        pack_folder(source, tmp_path / "root", "empty", size=8, progress=False)
    (source / "b" / "picture").write_text("words")
    with pytest.raises(UserError, match=r"b/picture cannot be used: not an image"):
        pack_folder(source, tmp_path / "root", "other", size=8, progress=False)


def test_a_class_whose_images_all_fail(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", "a", "b", "c")
    for file in (source / "b").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be used: empty file"):
        pack_folder(source, tmp_path / "root", "set", size=8, progress=False)
    pack = pack_folder(source, tmp_path / "root", "set", size=8, on_error="skip", progress=False)
    assert (pack.names, pack.labels("train").tolist()) == (("a", "c"), [0, 0, 0, 1, 1, 1])
    assert [Path(entry["file"]).parent.name for entry in pack.skipped] == ["b"] * 3
    assert np.array_equal(pack.images("train")[5], np.asarray(Image.open(source / "c" / "2.png")))
    for file in (*(source / "a").iterdir(), *(source / "c").iterdir()):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no readable image is left in train"):
        pack_folder(source, tmp_path / "root", "other", size=8, on_error="skip", progress=False)


def test_test_images_that_all_fail(tmp_path: Path) -> None:
    for split in ("train", "test"):
        tree(tmp_path / "s" / split, "a", "b")
    for file in (tmp_path / "s" / "test").glob("*/*"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no readable image is left in test"):
        pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, on_error="skip", progress=False)


def test_an_empty_folder_is_skipped_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tree(tmp_path / "s", "a", "c")
    (source / "b").mkdir()
    with pytest.raises(UserError, match=r"s/b holds no images; .* --on-error skip"):
        pack_folder(source, tmp_path / "root", "set", size=8, progress=False)
    pack = pack_folder(source, tmp_path / "root", "set", size=8, on_error="skip", progress=False)
    assert (pack.names, pack.labels("train").tolist()) == (("a", "c"), [0, 0, 0, 1, 1, 1])
    assert pack.skipped == [{"file": str(source / "b"), "why": "a folder without images"}]
    assert "s/b: a folder without images" in capsys.readouterr().err


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_how_a_rectangle_becomes_a_square(tmp_path: Path, fit: str) -> None:
    """A picture of three stripes, red, green and blue, twice as wide as high."""
    pixels = np.zeros((24, 48, 3), np.uint8)
    for stripe in range(3):
        pixels[:, 16 * stripe : 16 * (stripe + 1), stripe] = 255
    (tmp_path / "s" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "s" / "a" / "0.png")
    pack = pack_folder(tmp_path / "s", tmp_path / "root", "set", size=12, fit=fit, progress=False)
    assert pack.fit == fit
    assert json.loads((pack.path / "pack.json").read_text())["fit"] == fit
    (image,) = pack.images("train")
    row, red, green, blue = image[6], [255, 0, 0], [0, 255, 0], [0, 0, 255]
    assert row[6].tolist() == green
    if fit == "squash":
        assert [row[1].tolist(), row[10].tolist(), image[0, 6].tolist()] == [red, blue, green]
    elif fit == "pad":
        assert [row[1].tolist(), row[10].tolist(), image[0, 6].tolist()] == [red, blue, [127, 127, 127]]
        assert (image[:3] == 127).all() and (image[9:] == 127).all() and not (image[3:9] == 127).all()
    else:  # the middle half: 4 of 24 columns on each side are not green
        assert [row[0].tolist(), row[11].tolist(), image[0, 6].tolist()] == [red, blue, green]
        assert (row[:, 1] > 127).sum() == 8
    with pytest.raises(UserError, match="unknown fit 'fold'"):
        pack_folder(tmp_path / "s", tmp_path / "root", "other", size=12, fit="fold", progress=False)


def test_several_workers_give_the_same_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "BATCH_BYTES", 8 * 8 * 3 * 2)  # two images per batch
    source = tree(tmp_path / "s", "a", "b", files=7)
    (source / "a" / "1.png").write_bytes(b"")
    (source / "b" / "6.png").write_bytes(b"no")
    options = {"size": 8, "on_error": "skip", "progress": False}
    one = pack_folder(source, tmp_path / "one", "set", workers=1, **options)
    two = pack_folder(source, tmp_path / "two", "set", workers=3, **options)
    assert one.splits == two.splits and one.skipped == two.skipped and one.splits["train"].count == 12
    with pytest.raises(UserError, match="workers must be at least 1, not 0"):
        pack_folder(source, tmp_path / "no", "set", workers=0, **options)
