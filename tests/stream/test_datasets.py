"""Data sets as people have them: torchvision's, Hugging Face's on disk, into packs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pictures import encoded
from PIL import Image
from pyarrow import parquet

import ptlf
from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.stream.images import open_images
from ptlf.stream.pack import Pack, open_pack

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (14, 8, 8, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 10, 2, 0, 10, 2, 0, 10, 2, 0, 10, 2, 0])
KINDS = [f"kind{number}" for number in range(11)]
TEST, TEST_LABELS = PIXELS[::-1][:5], LABELS[::-1][:5]


def png(pixels: np.ndarray) -> bytes:
    """Lossless, so that pixels can be compared."""
    return encoded(Image.fromarray(pixels), "PNG")


def check(pack: Pack, names: Sequence[str], test: bool = True) -> None:
    """Pixels, and the class of each image by name."""
    assert (pack.folders, tuple(pack.names)) == ("classes", tuple(names))
    wanted = {"train": (PIXELS, LABELS)} | ({"test": (TEST, TEST_LABELS)} if test else {})
    assert set(pack.splits) == set(wanted)
    for split, (pixels, labels) in wanted.items():
        assert np.array_equal(pack.images(split), pixels)
        found = [pack.names[label] for label in pack.labels(split)]
        assert [name.removeprefix("kind") for name in found] == [str(label) for label in labels]


def pack_by_command(source: Path, tmp_path: Path, *words: str, code: int = 0) -> Pack | None:
    root = ["--data-root", str(tmp_path / "data"), "--overwrite"]
    assert main(["data", "pack", str(source), "--name", "set", "--size", "8", *root, *words]) == code
    return open_pack(tmp_path / "data", "set") if code == 0 else None


def refused(source: Any, tmp_path: Path) -> str:
    with pytest.raises(UserError) as caught:
        ptlf.pack_images(source, tmp_path / "set", 8, progress=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "set").exists()
    return str(caught.value)


class LikeTorchvision:
    """The interface of torchvision.datasets.CIFAR10: data, targets, classes, transform, __getitem__, __len__."""

    def __init__(self, data: np.ndarray, targets: np.ndarray, transform: Any = None) -> None:
        self.data, self.targets, self.transform = data, targets.tolist(), transform
        self.classes = KINDS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.data[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]

    def __len__(self) -> int:
        return len(self.data)


def test_a_torchvision_data_set(tmp_path: Path) -> None:
    train, test = LikeTorchvision(PIXELS, LABELS), LikeTorchvision(TEST, TEST_LABELS)
    check(ptlf.pack_images(train, tmp_path / "good", 8, test=test), KINDS)
    bad = LikeTorchvision(PIXELS, LABELS, lambda image: (np.asarray(image, np.float32) / 255 - 0.5) / 0.25)
    assert "image 1 cannot be used: " in (said := refused(bad, tmp_path)) and "0..1 (not normalised)" in said


def hugging_face(pixels: np.ndarray, labels: np.ndarray, named: bool = True) -> datasets.Dataset:
    """Its column of images is known by its type, whatever it is called."""
    label = datasets.ClassLabel(names=KINDS) if named else datasets.Value("int64")
    rows = {"photo": [{"bytes": png(image), "path": None} for image in pixels], "label": labels.tolist()}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(photo=datasets.Image(), label=label))


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_a_saved_hugging_face_data_set(tmp_path: Path, named: bool) -> None:
    parts = {"train": hugging_face(PIXELS, LABELS, named), "test": hugging_face(TEST, TEST_LABELS, named)}
    names = KINDS if named else ("0", "2", "10")
    both = datasets.DatasetDict(parts)
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    check(pack_by_command(tmp_path / "both", tmp_path), names)
    row = next(iter(open_images(tmp_path / "both")["train"].read()))
    assert row.image["bytes"] == png(PIXELS[0])  # not decoded yet
    parts["train"].save_to_disk(tmp_path / "one")
    check(pack_by_command(tmp_path / "one", tmp_path), names, test=False)
    held = pack_by_command(tmp_path / "one", tmp_path, "--test-fraction", "0.5")
    assert (held.splits["train"].count, held.splits["test"].count) == (8, 6)
    check(ptlf.pack_images(both, tmp_path / "python", 8), names)
    (tmp_path / "one" / "state.json").write_text("no JSON")
    assert "one is no readable `save_to_disk` file" in refused(tmp_path / "one", tmp_path)


def test_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "cl[o]ne *" / "data"  # no pattern
    folder.mkdir(parents=True)
    train = hugging_face(PIXELS, LABELS)
    for number, part in enumerate((train.select(range(9)), train.select(range(9, 14)))):
        part.to_parquet(folder / f"train-0000{number}-of-00002.parquet")
    for split in ("test", "validation"):  # of which the first is taken
        hugging_face(TEST, TEST_LABELS).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    (folder.parent / "README.md").write_text("a card")
    check(pack_by_command(folder.parent, tmp_path), KINDS)
    train.to_parquet(tmp_path / "one.parquet")
    check(pack_by_command(tmp_path / "one.parquet", tmp_path), KINDS, test=False)
    names = [row.name for row in open_images(tmp_path / "one.parquet")["train"].read()]
    assert names[::13] == ["one.parquet, row 1", "one.parquet, row 14"]


def test_tables(tmp_path: Path) -> None:
    images = [png(image) for image in PIXELS[:4]]

    def table(**columns: Any) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "some.parquet")
        return tmp_path / "some.parquet"

    words = [f"kind{label}" for label in LABELS]
    made = ptlf.pack_images(table(image=[png(image) for image in PIXELS], label=words), tmp_path / "text", 8)
    check(made, ("kind0", "kind2", "kind10"), test=False)
    unlabelled = open_images(table(image=images, label=[float("nan")] * 4))["train"]
    assert {row.label for row in unlabelled.read()} == {None}
    named = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"])).arrow_schema
    numbers = pyarrow.table({"image": [{"bytes": image, "path": None} for image in images], "label": [0, 1, 2, 3]})
    columns = {
        "some.parquet, row 3 has no label, but others have": {"image": images, "label": [0.0, 1.0, float("nan"), 0.0]},
        "holds no images: it has no rows": {"image": pyarrow.array([], pyarrow.binary())},
        "row 1 cannot be used: a list is no image": {"image": [[[1, 2], [3]]] * 4},
        "row 1 cannot be used: ValueError: embedded null": {"image": ["a\0b"]},
        "row 1 is a row without image or img or jpg or png; it has: price": {"price": [1, 2]},
    }
    for why, given in columns.items():
        assert why in refused(table(**given), tmp_path), why
    parquet.write_table(numbers.cast(named), tmp_path / "some.parquet")
    why = "row 3 has the label 2, but labels number its 2 classes, from 0 to 1"
    assert why in refused(tmp_path / "some.parquet", tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    assert "broken.parquet is no readable Parquet file: " in refused(tmp_path / "broken.parquet", tmp_path)


def test_what_is_not_recognised_or_lacks_the_library_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("no images")
    pack_by_command(tmp_path / "notes.txt", tmp_path, code=2)
    said = capsys.readouterr().err
    assert "holds no images that can be read; give a folder of images, a packed set, an .npz" in said
    assert said.count("\n") == 1
    hugging_face(PIXELS, LABELS).to_parquet(tmp_path / "one.parquet")
    pack_by_command(tmp_path / "one.parquet", tmp_path, "--folders", "tasks", code=2)
    assert "--folders tasks is for a folder of image folders" in capsys.readouterr().err
    (tmp_path / "some.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"reading some.parquet needs datasets, .*pip install 'ptlf\[datasets\]'"):
        open_images(tmp_path / "some.parquet")


def test_an_archive_beside_images_leaves_them_what_they_are(tmp_path: Path) -> None:
    for folder in ("pets/cat", "pets/dog", "flat"):
        os.makedirs(tmp_path / folder)
        (tmp_path / folder / "0.png").write_bytes(png(PIXELS[0]))
    for folder in ("pets", "flat"):
        hugging_face(PIXELS, LABELS).to_parquet(tmp_path / folder / "backup.parquet")
    assert tuple(pack_by_command(tmp_path / "pets", tmp_path).names) == ("cat", "dog")
    assert [row.name for row in open_images(tmp_path / "flat")["train"].read()] == ["0.png", "backup.parquet"]
