from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptlf.errors import UserError
from ptlf.stream import pack as packing
from ptlf.stream.pack import (
    BadImage,
    decode_image,
    list_packs,
    natural,
    open_pack,
    pack_folder,
    verify_pack,
    write_pack,
)

RNG = np.random.default_rng(0)


def picture(width: int = 24, height: int = 24) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decoded(content: bytes, size: int) -> np.ndarray:
    return decode_image(io.BytesIO(content), size)


def tree(folder: Path, *classes: str, files: int = 3) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(files):
            picture(8, 8).save(folder / name / f"{index}.png")
    return folder


def arrays(count: int = 6, size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (count, size, size, 3), dtype=np.uint8), np.arange(count) % 2


def small_pack(root: Path, name: str = "set", **options: object) -> packing.Pack:
    return write_pack(root, name, names=["a", "b"], folders="classes", splits={"train": arrays()}, size=4, **options)


# ------------------------------------------------------------------------------------------------- writing and reading


def test_arrays_and_streams_give_the_same_files(tmp_path: Path) -> None:
    images, labels = arrays(7)
    chunks = ((images[i : i + 3], labels[i : i + 3]) for i in (0, 3, 6))
    common = {"names": ["a", "b"], "folders": "classes", "size": 4}
    whole = write_pack(tmp_path, "whole", splits={"train": (images, labels)}, **common)
    streamed = write_pack(tmp_path, "streamed", splits={"train": (7, chunks)}, **common)
    assert whole.splits == streamed.splits
    assert np.array_equal(streamed.images("train"), images) and isinstance(streamed.images("train"), np.memmap)
    assert np.array_equal(streamed.labels("train"), labels) and streamed.labels("train").dtype == np.int64
    assert list_packs(tmp_path) == [streamed, whole] and verify_pack(tmp_path, "whole", progress=False) == []
    with pytest.raises(UserError, match="no split 'test'"):
        whole.images("test")


def test_count_must_be_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="announced 9 images, but 6 arrived"):
        write_pack(tmp_path, "s", names=["a", "b"], folders="classes", size=4, splits={"train": (9, iter([arrays()]))})
    assert os.listdir(tmp_path) == []


def test_overwriting_must_be_asked_for(tmp_path: Path) -> None:
    first = np.array(small_pack(tmp_path).images("train"))
    with pytest.raises(UserError, match="--overwrite"):
        small_pack(tmp_path)
    assert np.array_equal(open_pack(tmp_path, "set").images("train"), first)
    second = small_pack(tmp_path, overwrite=True).images("train")
    assert not np.array_equal(second, first)
    assert os.listdir(tmp_path) == ["set"]


def test_a_folder_that_is_no_pack_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="no packed data set"):
        small_pack(tmp_path, overwrite=True)
    assert (tmp_path / "set" / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot name"):
        small_pack(tmp_path, name)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_pack_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def chunks() -> Iterator[packing.Chunk]:
        yield arrays()
        assert any(".partial-" in name for name in os.listdir(tmp_path))
        raise error

    with pytest.raises(error):
        write_pack(tmp_path, "s", names=["a", "b"], folders="classes", size=4, splits={"train": (12, chunks())})
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys, numpy as np
from ptlf.stream.pack import write_pack
def chunks():
    yield np.zeros((6, 4, 4, 3), np.uint8), np.zeros(6, np.int64)
    os.kill(os.getpid(), signal.SIGKILL)
write_pack(sys.argv[1], "set", names=["a"], folders="classes", size=4, splits={"train": (12, chunks())})
"""


def test_killed_pack_is_not_seen_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(packing.__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert any(".partial-" in name for name in os.listdir(tmp_path))
    assert list_packs(tmp_path) == []
    with pytest.raises(UserError, match="no packed data set"):
        open_pack(tmp_path, "set")
    small_pack(tmp_path)
    assert os.listdir(tmp_path) == ["set"]


def test_killed_between_the_two_renames_gives_the_old_set_back(tmp_path: Path) -> None:
    images = np.array(small_pack(tmp_path).images("train"))
    os.rename(tmp_path / "set", tmp_path / ".set.old-1")
    with pytest.raises(UserError, match="already packed"):
        small_pack(tmp_path)
    assert np.array_equal(open_pack(tmp_path, "set").images("train"), images)


def test_two_packs_of_one_name_at_once(tmp_path: Path) -> None:
    def chunks() -> Iterator[packing.Chunk]:
        with pytest.raises(UserError, match="being packed by another process"):
            small_pack(tmp_path)
        small_pack(tmp_path, "other")
        yield arrays()

    write_pack(tmp_path, "set", names=["a", "b"], folders="classes", size=4, splits={"train": (6, chunks())})
    assert sorted(os.listdir(tmp_path)) == ["other", "set"]


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "no space left on"), (errno.EACCES, "no permission for")])
def test_disk_errors_become_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(packing.os, "fsync", fail)
    with pytest.raises(UserError, match=f"{message} {tmp_path}"):
        small_pack(tmp_path)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=6 * 4 * 4 * 3 - 1)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=f"no space left on {tmp_path}"):
        small_pack(tmp_path)


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        small_pack(tmp_path / "file")


@pytest.mark.parametrize("file", ["train.npy", "train_labels.npy"])
def test_cut_short(tmp_path: Path, file: str) -> None:
    path = small_pack(tmp_path, "cifar10").path / file
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    with pytest.raises(UserError, match=f"{file} has {whole - 1} bytes where {whole}.*ptlf data get cifar10 --overw"):
        open_pack(tmp_path, "cifar10")
    assert len(verify_pack(tmp_path, "cifar10", progress=False)) == 1


def test_missing_file_and_missing_set(tmp_path: Path) -> None:
    (small_pack(tmp_path).path / "train_labels.npy").unlink()
    with pytest.raises(UserError, match=r"train_labels.npy is missing"):
        open_pack(tmp_path, "set")
    with pytest.raises(UserError, match=r"'flowers'.*there: set.*ptlf data pack FOLDER --name flowers --size PIXELS`"):
        open_pack(tmp_path, "flowers")
    with pytest.raises(UserError, match=r"there: nothing.*ptlf data get cifar10`"):
        open_pack(tmp_path / "nowhere", "cifar10")


@pytest.mark.parametrize("file", ["train.npy", "train_labels.npy"])
def test_verify_sees_a_flipped_byte(tmp_path: Path, file: str) -> None:
    path = small_pack(tmp_path / "with space").path / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    problems = verify_pack(tmp_path / "with space", "set", progress=False)
    assert len(problems) == 1 and file in problems[0] and "sha256" in problems[0]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"splits": {}},
        {"folders": "things"},
        {"splits": {"train": {"count": 1}}},
        {"size": None},
    ],
)
def test_bad_manifest(tmp_path: Path, change: dict[str, object]) -> None:
    file = small_pack(tmp_path).path / "pack.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=r"pack.json cannot be read"):
        open_pack(tmp_path, "set")


def test_manifest_cannot_point_elsewhere(tmp_path: Path) -> None:
    file = small_pack(tmp_path).path / "pack.json"
    file.write_text(file.read_text().replace('"train.npy"', '"../train.npy"'))
    with pytest.raises(UserError, match=r"beside pack.json"):
        open_pack(tmp_path, "set")


# ------------------------------------------------------------------------------------------------------------ decoding


def test_resize_and_crop_agree_with_doing_both_in_turn() -> None:
    image = picture(60, 40)
    reference = np.asarray(image.resize((30, 20), Image.Resampling.BICUBIC).crop((5, 0, 25, 20)), int)
    assert np.abs(decoded(encoded(image, "PNG"), 20) - reference).max() <= 1


def test_image_of_the_right_size_is_untouched() -> None:
    image = picture(16, 16)
    assert np.array_equal(decoded(encoded(image, "PNG"), 16), np.asarray(image))


def test_small_and_extremely_long_images() -> None:
    assert decoded(encoded(picture(2, 3), "PNG"), 16).shape == (16, 16, 3)
    assert decoded(encoded(picture(1, 20000), "PNG"), 8).shape == (8, 8, 3)


def test_exif_orientation() -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 20:] = 255  # left black, right white; turned clockwise: top black, bottom white
    exif = Image.Exif()
    exif[0x0112] = 6
    result = decoded(encoded(Image.fromarray(pixels), "JPEG", exif=exif), 20)
    assert result[:8].max() < 30 and result[12:].min() > 225


def test_cmyk() -> None:
    result = decoded(encoded(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG"), 16)
    assert np.abs(result[8, 8].astype(int) - [0, 255, 255]).max() < 10


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 128, 129], [257, 32768, 65534], [65535, 400, 1000]], np.uint16)
    expected = (values.astype(int) * 2 + 257) // 514  # values / 257, rounded
    for result in (
        decoded(encoded(Image.fromarray(values), "PNG"), 3),
        decoded(encoded(Image.fromarray(values.astype(np.int32)), "TIFF"), 3),
    ):
        assert np.array_equal(result, np.repeat(expected[..., None], 3, axis=2))


def test_transparency_becomes_white() -> None:
    for image in (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), Image.new("LA", (8, 8), (0, 0))):
        assert decoded(encoded(image, "PNG"), 8).min() == 255
    half = decoded(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "PNG"), 8)
    assert np.all(half == 127)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 10, 20])
    assert np.all(decoded(encoded(palette, "PNG"), 8)[0, 0] == [200, 10, 20])
    assert decoded(encoded(palette, "PNG", transparency=1), 8).min() == 255


def test_grey_and_one_bit() -> None:
    assert np.all(decoded(encoded(Image.new("L", (8, 8), 77), "PNG"), 8) == 77)
    assert np.all(decoded(encoded(Image.new("1", (8, 8), 1), "PNG"), 8) == 255)


def animation() -> bytes:
    return encoded(picture(), "GIF", save_all=True, append_images=[picture(), picture()])


BAD = {
    "empty.png": (b"", "empty file"),
    "cut.jpg": (encoded(picture(64, 64), "JPEG")[:-700], "truncated"),
    "cut.png": (encoded(picture(64, 64), "PNG")[:-700], ""),
    "cut_header.png": (encoded(picture(), "PNG")[:20], ""),
    "moving.gif": (animation(), "3 frames"),
    "pages.tiff": (encoded(picture(), "TIFF", save_all=True, append_images=[picture()]), "2 frames"),
    "notes.txt": (b"these are no pixels", "not an image"),
    "float.tiff": (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "floating-point"),
    "wide.tiff": (encoded(Image.new("I", (8, 8), 70000), "TIFF"), "16 bits"),
}


@pytest.mark.parametrize("file", BAD)
def test_bad_image_is_refused_by_name_or_skipped_by_name(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, why = BAD[file]
    source, root = tree(tmp_path / "source", "a", "b"), tmp_path / "root"
    (source / "a" / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{source / 'a' / file} cannot be packed: .*{why}.*--on-error skip"):
        pack_folder(source, root, "set", size=8, progress=False)
    assert not root.exists() or os.listdir(root) == []
    pack = pack_folder(source, root, "set", size=8, on_error="skip", progress=False)
    assert [entry["file"] for entry in pack.skipped] == [str(source / "a" / file)] and why in pack.skipped[0]["why"]
    assert file in capsys.readouterr().err
    assert pack.labels("train").tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(pack.images("train")[5], np.asarray(Image.open(source / "b" / "2.png")))
    assert verify_pack(root, "set", progress=False) == []


def test_decompression_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(picture(30, 30), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoded(content, 8).shape == (8, 8, 3)  # above the limit: Pillow only warns
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match="DecompressionBomb"):
        decoded(content, 8)


def test_a_class_whose_images_all_fail(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", "a", "b")
    for file in (source / "b").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no readable image is left in 'b'"):
        pack_folder(source, tmp_path / "root", "set", size=8, on_error="skip", progress=False)


# ------------------------------------------------------------------------------------------------------------- folders


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
    with pytest.raises(UserError, match="no test image in 'a', 'b'"):
        pack_folder(source, tmp_path / "root", "few", size=8, test_fraction=0.1, progress=False)
    with pytest.raises(UserError, match="between 0 and 1"):
        pack_folder(source, tmp_path / "root", "few", size=8, test_fraction=1.5, progress=False)


def test_names_restrict_and_order(tmp_path: Path) -> None:
    tree(tmp_path / "s" / "train", "a", "b", "c", files=1)
    tree(tmp_path / "s" / "test", "a", "b", "c", files=1)
    pack = pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, names=["c", "a"], progress=False)
    assert pack.names == ("c", "a")
    assert np.array_equal(pack.images("train")[0], np.asarray(Image.open(tmp_path / "s/train/c/0.png")))
    with pytest.raises(UserError, match="has no folder 'd', 'e'"):
        pack_folder(tmp_path / "s", tmp_path / "root", "other", size=8, names=["a", "d", "e"], progress=False)


def test_what_is_not_packed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test", "val"):
        tree(tmp_path / "s" / split, "a", files=1)
    (tmp_path / "s" / "train" / "words.txt").write_text("")
    pack_folder(tmp_path / "s", tmp_path / "root", "set", size=8, progress=False)
    told = capsys.readouterr().err
    assert "'val'" in told and "'words.txt'" in told


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
    refused(source, "s/b holds no files")
    (tmp_path / "flat" / "train").mkdir(parents=True)
    refused(tmp_path / "flat", "flat/train holds no folders")
    tree(tmp_path / "odd" / "train", "a")
    tree(tmp_path / "odd" / "test", "a", "z")
    refused(tmp_path / "odd", "lacks: 'z'")


def test_worker_processes_give_the_same_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 8 * 8 * 3 * 2)  # two images per batch
    source = tree(tmp_path / "s", "a", "b", files=7)
    (source / "a" / "1.png").write_bytes(b"")
    (source / "b" / "6.png").write_bytes(b"no")
    options = {"size": 8, "on_error": "skip", "progress": False}
    one = pack_folder(source, tmp_path / "one", "set", workers=1, **options)
    two = pack_folder(source, tmp_path / "two", "set", workers=2, **options)
    assert one.splits == two.splits and one.skipped == two.skipped and one.splits["train"].count == 12


def test_natural_order() -> None:
    names = ["b", "task10", "task2", "task", "10", "9", "a2b10", "a2b9", "01", "1"]
    assert sorted(names, key=natural) == ["01", "1", "9", "10", "a2b9", "a2b10", "b", "task", "task2", "task10"]
