"""Data sets as people have them: torchvision's, Hugging Face's on disk, WebDataset shards, into packs."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ptlf
from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.stream import packing
from ptlf.stream.images import open_images
from ptlf.stream.pack import Pack, open_pack
from ptlf.stream.rows import Row

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (14, 8, 8, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 10, 2, 0, 10, 2, 0, 10, 2, 0, 10, 2, 0])
KINDS = [f"kind{number}" for number in range(11)]
TEST, TEST_LABELS = PIXELS[::-1][:5], LABELS[::-1][:5]


def png(pixels: np.ndarray) -> bytes:
    """Lossless, so that pixels can be compared."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def check(pack: Pack, names: Sequence[str], test: bool = True) -> None:
    """Pixels, and the class of each image by name."""
    assert (pack.folders, tuple(pack.names)) == ("classes", tuple(names))
    wanted = {"train": (PIXELS, LABELS)} | ({"test": (TEST, TEST_LABELS)} if test else {})
    assert set(pack.splits) == set(wanted)
    for split, (pixels, labels) in wanted.items():
        assert np.array_equal(pack.images(split), pixels)
        found = [pack.names[label] for label in pack.labels(split)]
        assert [name.removeprefix("kind") for name in found] == [str(label) for label in labels]


def pack_by_command(source: Path, tmp_path: Path, *words: str) -> Pack:
    root = ["--data-root", str(tmp_path / "data")]
    assert main(["data", "pack", str(source), "--name", "set", "--size", "8", *root, *words]) == 0
    return open_pack(tmp_path / "data", "set")


class LikeTorchvision:
    """The interface of torchvision.datasets.CIFAR10: data, targets, classes, transform, __getitem__, __len__."""

    def __init__(self, data: np.ndarray, targets: np.ndarray, transform: Any = None) -> None:
        self.data, self.targets, self.transform = data, targets.tolist(), transform
        self.classes = KINDS
        self.class_to_idx = {name: number for number, name in enumerate(KINDS)}

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.data[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def test_a_torchvision_data_set(tmp_path: Path) -> None:
    train, test = LikeTorchvision(PIXELS, LABELS), LikeTorchvision(TEST, TEST_LABELS)
    check(ptlf.pack_images(train, tmp_path / "set", 8, test=test), KINDS)

    def normalised(image: Image.Image) -> Any:
        return (np.asarray(image, np.float32) / 255 - 0.5) / 0.25

    with pytest.raises(UserError, match=r"image 1 cannot be used: .* give them in 0..1 \(not normalised\)"):
        ptlf.pack_images(LikeTorchvision(PIXELS, LABELS, normalised), tmp_path / "bad", 8)


def hugging_face(pixels: np.ndarray, labels: np.ndarray, named: bool = True) -> Any:
    datasets = pytest.importorskip("datasets")
    features = {
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=KINDS) if named else datasets.Value("int64"),
    }
    rows = {"img": [{"bytes": png(image), "path": None} for image in pixels], "label": labels.tolist()}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_a_saved_hugging_face_data_set(tmp_path: Path, named: bool) -> None:
    import datasets

    parts = {"train": hugging_face(PIXELS, LABELS, named), "test": hugging_face(TEST, TEST_LABELS, named)}
    names = KINDS if named else ("0", "2", "10")
    both = datasets.DatasetDict(parts)
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    check(pack_by_command(tmp_path / "both", tmp_path), names)
    parts["train"].save_to_disk(tmp_path / "one")
    check(pack_by_command(tmp_path / "one", tmp_path, "--overwrite"), names, test=False)
    held = pack_by_command(tmp_path / "one", tmp_path, "--overwrite", "--test-fraction", "0.5")
    assert (held.splits["train"].count, held.splits["test"].count) == (8, 6)
    check(ptlf.pack_images(both, tmp_path / "python", 8), names)


def test_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "clone" / "data"
    folder.mkdir(parents=True)
    train = hugging_face(PIXELS, LABELS)
    for number, part in enumerate((train.select(range(9)), train.select(range(9, 14)))):
        part.to_parquet(folder / f"train-0000{number}-of-00002.parquet")
    hugging_face(TEST, TEST_LABELS).to_parquet(folder / "test-00000-of-00001.parquet")
    (tmp_path / "clone" / "README.md").write_text("a card")
    check(pack_by_command(tmp_path / "clone", tmp_path), KINDS)
    train.to_parquet(tmp_path / "one.parquet")
    check(pack_by_command(tmp_path / "one.parquet", tmp_path, "--overwrite"), KINDS, test=False)


def test_columns_of_paths_bytes_and_arrays(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "files").mkdir()
    for index, image in enumerate(PIXELS):
        (tmp_path / "files" / f"{index}.png").write_bytes(png(image))
    columns = {
        "paths": ("image", [f"files/{index}.png" for index in range(len(PIXELS))]),
        "bytes": ("picture", [png(image) for image in PIXELS]),
        "arrays": ("image", PIXELS.tolist()),
    }
    for name, (column, values) in columns.items():
        words = [f"kind{label}" for label in LABELS]
        parquet.write_table(pyarrow.table({column: values, "label": words}), tmp_path / f"{name}.parquet")
        made = ptlf.pack_images(tmp_path / f"{name}.parquet", tmp_path / name, 8)
        check(made, ("kind0", "kind10", "kind2"), test=False)  # text is sorted as text
    parquet.write_table(pyarrow.table({"price": [1, 2]}), tmp_path / "prices.parquet")
    with pytest.raises(UserError, match=r"prices.parquet has no column of images.*; it has: price"):
        open_images(tmp_path / "prices.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"broken.parquet cannot be read as a table"):
        open_images(tmp_path / "broken.parquet")


def test_a_table_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.parquet").write_bytes(b"")
    for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="needs pyarrow to be read: pip install pyarrow"):
        open_images(tmp_path / "some.parquet")


def write_shard(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as shard:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))


def members(pixels: np.ndarray, labels: np.ndarray, kind: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        key = f"./some.folder/{index:04}"
        if kind == "cls":
            found |= {f"{key}.png": png(image), f"{key}.cls": f"{label}\n".encode(), f"{key}.txt": b"a caption"}
        else:
            found |= {f"{key}.json": json.dumps({"label": int(label)}).encode(), f"{key}.input.png": png(image)}
    return {"./some.folder/._0000.png": b"of another system", **found}


@pytest.mark.parametrize(("kind", "ending", "mode"), [("cls", "tar", "w"), ("json", "tar.gz", "w:gz")])
def test_webdataset_shards(tmp_path: Path, kind: str, ending: str, mode: str) -> None:
    folder = tmp_path / "shards"
    write_shard(folder / f"set-train-000000.{ending}", members(PIXELS[:9], LABELS[:9], kind), mode)
    write_shard(folder / f"set-train-000001.{ending}", members(PIXELS[9:], LABELS[9:], kind), mode)
    write_shard(folder / f"set-val-000000.{ending}", members(TEST, TEST_LABELS, kind), mode)
    check(pack_by_command(folder, tmp_path), ("0", "2", "10"))
    one = tmp_path / f"one.{ending}"
    write_shard(one, members(PIXELS, LABELS, kind), mode)
    check(pack_by_command(one, tmp_path, "--overwrite"), ("0", "2", "10"), test=False)


def test_shards_without_labels_are_a_task_and_can_be_learnt(tmp_path: Path) -> None:
    write_shard(tmp_path / "day.tar", {f"{index}.png": png(image) for index, image in enumerate(PIXELS)})
    made = ptlf.pack_images(tmp_path / "day.tar", tmp_path / "day", 8)
    assert (made.folders, tuple(made.names)) == ("tasks", ("day",))
    assert np.array_equal(made.images("train"), PIXELS)
    learner = ptlf.Learner(
        "resnet18-mini", out=tmp_path / "run", size=8, training={"epochs": 1, "batch": 7}, device="cpu"
    )
    assert learner.learn(tmp_path / "day.tar")["tasks"] == ["day"]


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_hard_links_are_the_members_they_link_to(tmp_path: Path, ending: str) -> None:
    """Images and labels; a link to a link, too. tar writes a file with several names as a member and links to it."""
    (tmp_path / "set").mkdir()
    for name, pixels, label in (("a", PIXELS[0], b"3"), ("b", PIXELS[1], b"5")):
        (tmp_path / "set" / f"{name}.png").write_bytes(png(pixels))
        (tmp_path / "set" / f"{name}.cls").write_bytes(label)
    for name in ("x", "y"):
        os.link(tmp_path / "set" / "a.png", tmp_path / "set" / f"{name}.png")
        os.link(tmp_path / "set" / "b.cls", tmp_path / "set" / f"{name}.cls")
    with tarfile.open(tmp_path / f"links.{ending}", f"w:{ending[4:]}") as shard:
        for file in sorted((tmp_path / "set").iterdir()):
            shard.add(file, f"./{file.name}")
        assert sum(member.islnk() for member in shard.getmembers()) == 4
        again = tarfile.TarInfo("z.png")
        again.type, again.linkname = tarfile.LNKTYPE, "y.png"
        shard.addfile(again)
        plain = tarfile.TarInfo("z.cls")
        plain.size = 1
        shard.addfile(plain, io.BytesIO(b"7"))
    part = open_images(tmp_path / f"links.{ending}")["train"]
    first, second = png(PIXELS[0]), png(PIXELS[1])
    expected = {"a": (first, 3), "b": (second, 5), "x": (first, 5), "y": (first, 5), "z": (first, 7)}
    assert part.count == len(expected)
    for row, (name, (image, label)) in zip(part.read(), expected.items(), strict=True):
        assert row.name.endswith(f"{name}.png") and row.image == image and row.label == label


def test_a_hard_link_to_nothing_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as shard:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.LNKTYPE, "nowhere.png"
        shard.addfile(link)
    with pytest.raises(UserError, match=r"no readable shard: a\.png is a hard link to nowhere\.png, which"):
        open_images(tmp_path / "link.tar")


def test_a_hard_link_that_is_of_no_sample_is_skipped(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as shard:
        link = tarfile.TarInfo("docs/README")
        link.type, link.linkname = tarfile.LNKTYPE, "elsewhere"
        shard.addfile(link)
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, "PNG")
        image = tarfile.TarInfo("a.png")
        image.size = len(file.getvalue())
        shard.addfile(image, io.BytesIO(file.getvalue()))
    (part,) = open_images(tmp_path / "link.tar").values()
    assert part.count == 1


def test_bad_shards(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(UserError) as caught:
            ptlf.pack_images(tmp_path / name, tmp_path / "set", 8)
        return str(caught.value)

    (tmp_path / "no.tar").write_bytes(b"no archive" * 100)
    assert "no.tar is no readable shard" in refused("no.tar")
    write_shard(tmp_path / "text.tar", {"a.txt": b"only text"})
    assert "holds no images; a shard has KEY.jpg or KEY.png" in refused("text.tar")
    write_shard(tmp_path / "bad.tar", {"a.png": png(PIXELS[0]), "a.json": b"{"})
    assert "the label of a.png cannot be read" in refused("bad.tar")
    write_shard(tmp_path / "half.tar", {"a.png": png(PIXELS[0]), "a.cls": b"1", "b.png": png(PIXELS[1])})
    assert "half.tar/b.png has no label, but others have" in refused("half.tar")
    whole = (tmp_path / "half.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:600])
    assert "cut.tar is no readable shard" in refused("cut.tar")
    write_shard(tmp_path / "broken.tar", {"a.png": b"no picture", "a.cls": b"1"})
    assert "broken.tar/a.png cannot be used: not an image in a known format" in refused("broken.tar")


def test_sizes_that_no_member_has_are_refused(tmp_path: Path) -> None:
    """Below 0 the archive would be read again and again; others are more than memory or a file offset holds."""
    write_shard(tmp_path / "plain.tar", {"a.png": png(PIXELS[0]), "a.cls": b"1"})
    whole = (tmp_path / "plain.tar").read_bytes()
    for number, (size, kind) in enumerate(itertools.product((-512, -1, 1 << 40, 1 << 70), b"0xL")):
        header = bytearray(whole[:512])
        header[124:136], header[156] = tarfile.itn(size, 12, tarfile.GNU_FORMAT), kind
        header[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(header))[0]
        file = tmp_path / f"{number}.tar"
        file.write_bytes(bytes(header) + whole[512:])
        with pytest.raises(UserError, match=rf"{number}.tar is no readable shard: [^\n]+$"):
            open_images(file)


def test_image_files_are_held_in_memory_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_HELD", 100)
    rows = [Row(str(size), b"x" * size) for size in (40, 60, 1, 200, 1, 1, 1, 1)]
    found = [[len(row.image) for row in batch] for batch in packing.batches(rows, 3)]
    assert found == [[40, 60], [1, 200], [1, 1, 1], [1]]


def test_bad_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    images = [png(image) for image in PIXELS[:4]]

    def table(features: Any = None, **columns: Any) -> Path:
        made = pyarrow.table(columns)
        if features is not None:
            made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        parquet.write_table(made, tmp_path / "some.parquet")
        return tmp_path / "some.parquet"

    def refused(file: Path) -> str:
        with pytest.raises(UserError) as caught:
            ptlf.pack_images(file, tmp_path / "set", 8)
        return str(caught.value)

    gap = table(image=images, label=[0.0, 1.0, float("nan"), 0.0])
    assert "some.parquet, row 3 has no label, but others have" in refused(gap)
    assert {row.label for row in open_images(table(image=images, label=[float("nan")] * 4))["train"].read()} == {None}
    assert "holds no images: it has no rows" in refused(table(image=pyarrow.array([], pyarrow.binary())))
    assert "row 1 cannot be used: a list is no image" in refused(table(image=[[[1, 2], [3]]] * 4))
    assert "row 1 cannot be used: embedded null" in refused(table(image=["a\0b"]))
    named = {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    for labels, first in (([0, 1, 2, 3], "2"), (["x", "y"] * 2, "'x'"), ([0.5, 1, 0, 1], "0.5")):
        said = refused(table(named, image=images, label=labels))
        assert f"has the label {first}, but labels number its 2 classes, from 0 to 1" in said
    for number, features in enumerate(
        (["image"], None, {"other": {"_type": "Image"}}, {"label": {"names": 5}}, {"label": {"names": []}})
    ):
        made = ptlf.pack_images(table(features, image=images, label=[0, 1, 0, 1]), tmp_path / f"set{number}", 8)
        assert made.names == ("0", "1")
    offsets, text = pyarrow.py_buffer(np.arange(5, dtype=np.int32)), pyarrow.py_buffer(b"\xff" * 4)
    no_text = pyarrow.StringArray.from_buffers(4, offsets, text)
    assert "cannot be read as a table: In column 0: Invalid: Invalid UTF8" in refused(
        table(image=images, label=no_text)
    )
    good = np.arange(5, dtype=np.int32)
    outside = np.array([0, -(2**30), 2**30, 5, -7], np.int32)  # offsets into other memory
    letters = pyarrow.table({"image": pyarrow.array([b"a", b"b", b"c", b"d"])})
    with ipc.new_stream(tmp_path / "wild.arrow", letters.schema) as stream:
        stream.write_table(letters)
    written = (tmp_path / "wild.arrow").read_bytes()
    assert written.count(good.tobytes()) == 1
    (tmp_path / "wild.arrow").write_bytes(written.replace(good.tobytes(), outside.tobytes()))
    assert "wild.arrow cannot be read as a table" in refused(tmp_path / "wild.arrow")


def test_what_is_not_recognised_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no images")
    words = ["--name", "set", "--size", "8", "--data-root", str(tmp_path / "data")]
    assert main(["data", "pack", str(tmp_path / "notes.txt"), *words]) == 2
    said = capsys.readouterr().err
    assert "holds no images that can be read; give a folder of images, a packed set, an .npz" in said
    assert said.count("\n") == 1
    write_shard(tmp_path / "one.tar", members(PIXELS, LABELS, "cls"))
    assert main(["data", "pack", str(tmp_path / "one.tar"), *words, "--folders", "tasks"]) == 2
    assert "--folders tasks is for a folder of image folders" in capsys.readouterr().err


def test_an_archive_beside_image_folders_leaves_them_what_they_are(tmp_path: Path) -> None:
    for index in range(4):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / kind).mkdir(parents=True, exist_ok=True)
            (tmp_path / "pets" / kind / f"{index}.png").write_bytes(png(PIXELS[index]))
    write_shard(tmp_path / "pets" / "backup.tar", members(PIXELS, LABELS, "cls"))
    assert tuple(pack_by_command(tmp_path / "pets", tmp_path).names) == ("cat", "dog")
