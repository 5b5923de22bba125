"""Images in every form people have them come to the same packed set."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture, tree
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream import packing as squares
from ptlf.stream.images import find_images, open_images
from ptlf.stream.pack import Pack, open_pack
from ptlf.stream.packing import decode_squares, labelled_dataset, pack_images, sample_images

RNG = np.random.default_rng(1)
PIXELS = RNG.integers(0, 256, (7, 10, 12, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 2, 5, 0, 5, 2])


def packed(images: Any, tmp_path: Path, name: str = "set", size: int = 8, **options: Any) -> Pack:
    return pack_images(images, tmp_path / "packs" / name, size, progress=False, workers=1, **options)


def by_hand(pixels: np.ndarray, size: int = 8) -> np.ndarray:
    """Short side to `size`, centre cropped: of 10 x 12 pixels the middle 10 x 10."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    left, top = (width - short) / 2, (height - short) / 2
    box = (left, top, left + short, top + short)
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC, box=box))


EXPECTED = np.stack([by_hand(image) for image in PIXELS])


class Pairs(torch.utils.data.Dataset):
    def __init__(self, convert: Any, labels: Any = LABELS) -> None:
        self.convert, self.labels = convert, labels

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        image = self.convert(PIXELS[index])
        return image if self.labels is None else (image, self.labels[index])


class HuggingFace:
    """What a `datasets.Dataset` looks like from outside."""

    def __init__(self) -> None:
        self.features = {"image": object(), "label": SimpleNamespace(names=list("abcdef"))}

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Image.fromarray(PIXELS[index]), "label": int(LABELS[index])}


def as_tensor(image: np.ndarray) -> torch.Tensor:
    """(3, H, W) in [0, 1], as torchvision's ToTensor makes it."""
    return torch.from_numpy(image).permute(2, 0, 1).float() / 255


FORMS: dict[str, Any] = {
    "array": PIXELS,
    "tensor": torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
    "arrays": list(PIXELS),
    "pictures": [Image.fromarray(image) for image in PIXELS],
    "data set of pictures": Pairs(Image.fromarray, None),
    "data set of float tensors": Pairs(as_tensor, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_unlabelled_forms_are_one_task(tmp_path: Path, form: str) -> None:
    pack = packed(FORMS[form], tmp_path, "day1")
    assert np.array_equal(pack.images("train"), EXPECTED)
    assert (pack.folders, pack.names, list(pack.splits)) == ("tasks", ("day1",), ["train"])
    assert set(pack.labels("train")) == {0}


@pytest.mark.parametrize(
    ("images", "names"),
    [
        ((PIXELS, LABELS), ("0", "2", "5")),
        ((list(PIXELS), LABELS.tolist()), ("0", "2", "5")),
        ((PIXELS, [f"kind {label}" for label in LABELS]), ("kind 0", "kind 2", "kind 5")),
        (Pairs(Image.fromarray), ("0", "2", "5")),
        (Pairs(as_tensor, torch.from_numpy(LABELS)), ("0", "2", "5")),
        ([*zip(PIXELS, LABELS.tolist(), strict=True)], ("0", "2", "5")),
        (HuggingFace(), tuple("abcdef")),
    ],
    ids=["arrays", "lists", "text", "pictures", "tensors", "pairs", "hugging face"],
)
def test_labelled_forms(tmp_path: Path, images: Any, names: tuple[str, ...]) -> None:
    pack = packed(images, tmp_path)
    assert pack.folders == "classes" and pack.names == names
    assert np.array_equal(pack.images("train"), EXPECTED)
    found = [pack.names[label] for label in pack.labels("train")]
    assert [name[-1] for name in found] == ["abcdef"[n] if "a" in names else str(n) for n in LABELS]
    without = packed(images, tmp_path, "without", labelled=False)
    assert without.folders == "tasks" and np.array_equal(without.images("train"), EXPECTED)


def test_grey_transparent_and_deep_arrays(tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (8, 8), dtype=np.uint8)
    clear = np.zeros((8, 8, 4), np.uint8)  # wholly transparent: white
    deep = grey.astype(np.uint16) * 257
    stored = packed([grey, grey[..., None], clear, deep], tmp_path).images("train")
    for index in (0, 1, 3):
        assert np.array_equal(stored[index], np.repeat(grey[..., None], 3, axis=2))
    assert (stored[2] == 255).all()
    stack = packed(np.stack([grey, grey]), tmp_path, "stack").images("train")
    assert np.array_equal(stack[1], stored[0])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", images=PIXELS, labels=LABELS[:, None])
    save(tmp_path / "b.npz", x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:3], y_test=np.array([0, 5, 2]))
    save(tmp_path / "c.npz", PIXELS)
    pack = packed(tmp_path / "a.npz", tmp_path, "a")
    assert pack.names == ("0", "2", "5") and np.array_equal(pack.images("train"), EXPECTED)
    assert pack.labels("train").tolist() == [1, 0, 1, 2, 0, 2, 1]
    pack = packed(tmp_path / "b.npz", tmp_path, "b")
    assert np.array_equal(pack.images("test"), EXPECTED[:3]) and pack.labels("test").tolist() == [0, 2, 1]
    assert packed(tmp_path / "c.npz", tmp_path, "c").folders == "tasks"
    np.save(tmp_path / "d.npy", PIXELS)
    assert np.array_equal(packed(tmp_path / "d.npy", tmp_path, "d").images("train"), EXPECTED)


def test_a_packed_set_at_another_size(tmp_path: Path) -> None:
    first = packed((PIXELS, LABELS), tmp_path, "first", size=6, test_fraction=0.5)
    again = packed(first.path, tmp_path, "again", size=6)
    assert again.names == first.names and again.splits == first.splits  # checksums too
    small = packed(first.path, tmp_path, "small", size=4)
    assert np.array_equal(small.images("train")[0], by_hand(np.array(first.images("train")[0]), 4))


def test_folders_and_what_is_held_out_of_each_class(tmp_path: Path) -> None:
    classes = packed(tree(tmp_path / "classes", "cat", "dog"), tmp_path, "c")
    assert (classes.folders, classes.names, classes.splits["train"].count) == ("classes", ("cat", "dog"), 6)
    day = tree(tmp_path / "day", "morning")
    picture().save(day / "noon.png")
    pack = packed(day, tmp_path, "d", names=["monday"])
    assert (pack.folders, pack.names, pack.splits["train"].count) == ("tasks", ("monday",), 4)
    assert packed(tmp_path / "classes", tmp_path, "e", labelled=False).splits["train"].count == 6
    held = packed(tmp_path / "classes", tmp_path, "f", test_fraction=1 / 3)
    assert (held.splits["train"].count, held.splits["test"].count) == (4, 2)
    pack = packed(HuggingFace(), tmp_path, test_fraction=0.5)
    assert [pack.names[label] for label in pack.labels("test")] == ["c", "a", "f"]
    assert np.array_equal(pack.images("test"), EXPECTED[[2, 4, 5]])
    pack = packed((PIXELS, LABELS), tmp_path, "own", test=(PIXELS[:3], LABELS[:3]), names=None)
    assert pack.splits["test"].count == 3
    both = packed({"train": Pairs(Image.fromarray), "test": Pairs(Image.fromarray)}, tmp_path, "both")
    assert np.array_equal(both.labels("train"), both.labels("test"))


def pair(labels: Any) -> tuple[np.ndarray, Any]:
    return PIXELS[: len(labels)], labels


def pairs(labels: Any) -> list[tuple[np.ndarray, Any]]:
    return [*zip(PIXELS, labels, strict=False)]


def npz_of(labels: Any, tmp_path: Path, name: str) -> Path:
    np.savez(tmp_path / f"{name}.npz", images=PIXELS[: len(labels)], labels=np.array(labels))
    return tmp_path / f"{name}.npz"


@pytest.mark.parametrize(("form", "test_form", "text"), [(pair, pairs, False), (pairs, pair, True)])
def test_test_labels_are_numbered_as_the_training_labels(tmp_path: Path, form: Any, test_form: Any, text: bool) -> None:
    """Where the test set lacks a class, or has them in another order."""
    train, test = [2, 0, 1, 2, 0], [2, 1, 1]
    if text:
        train, test = [["cat", "dog", "fish"][n] for n in train], [["cat", "dog", "fish"][n] for n in test]
    pack = packed(form(train), tmp_path, test=test_form(test))
    assert [pack.names[n] for n in pack.labels("train")] == [str(label) for label in train]
    assert [pack.names[n] for n in pack.labels("test")] == [str(label) for label in test]
    with pytest.raises(UserError, match=r"has test images of '.*', of which there are no training images"):
        packed(form(test), tmp_path, "other", test=test_form(train))
    both = packed({"train": form(train), "test": test_form(test)}, tmp_path, "both")
    assert both.splits == pack.splits


def test_names_are_those_that_numbers_count(tmp_path: Path) -> None:
    """In every form: a number is a place in `names`, and text is one of them."""
    names, labels = ["dog", "cat", "fish"], [2, 0, 2]
    stored = packed(pair([0, 1, 2]), tmp_path, "stored")
    forms = [pair(labels), pairs(labels), npz_of(labels, tmp_path, "in"), pair([names[n] for n in labels])]
    for number, form in enumerate(forms):
        pack = packed(form, tmp_path, f"set{number}", names=names, test=pair([2, 2]))
        assert pack.names == tuple(names) and pack.labels("train").tolist() == labels
        assert pack.labels("test").tolist() == [2, 2]
    assert packed(stored.path, tmp_path, "renamed", names=names).labels("train").tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"image 2 .*is of 3, which is none of: 'dog', 'cat', 'fish'"):
        packed(pair([0, 3]), tmp_path, "more", names=names)
    with pytest.raises(UserError, match=r"is of 'bird', which is none of"):
        packed(pair(["dog", "bird"]), tmp_path, "text", names=names)
    tests = packed((PIXELS[:3], ["dog", "fish", "dog"]), tmp_path, "tests")
    pack = packed(pair(["cat", "fish", "dog"]), tmp_path, test=tests.path)
    assert [pack.names[n] for n in pack.labels("test")] == ["dog", "fish", "dog"]
    numbers = packed(pair([1, 2, 3]), tmp_path, "numbers")  # its classes are called "1", "2", "3"
    again = packed(numbers.path, tmp_path, "again", test=pair([3, 1]))
    assert [again.names[n] for n in again.labels("test")] == ["3", "1"]


def test_broken_images(tmp_path: Path) -> None:
    folder = tree(tmp_path / "in", "a")
    (folder / "a" / "broken.png").write_bytes(b"no")
    files = sorted((folder / "a").iterdir())
    for images in (files, folder / "a"):
        with pytest.raises(UserError, match=r"broken.png cannot be used: not an image.*--on-error skip"):
            packed(images, tmp_path)
    pack = packed(files, tmp_path, on_error="skip")
    assert pack.splits["train"].count == 3 and pack.skipped[0]["file"].endswith("broken.png")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "holds no images"),
        (iter([]), "cannot be read from a list_iterator"),
        (PIXELS[0], r"must be \(N, H, W, 3\), not \(10, 12, 3\)"),
        (PIXELS.astype(np.int32), "image 1 cannot be used: pixels are int32"),
        (PIXELS.astype(np.float32), r"floating-point pixels lie in .*\.\.25"),
        ([PIXELS[..., 0]], r"an array of shape \(7, 10, 12\) is no image"),
        ([3], "a int is no image"),
        ([{"picture": 1}], "row without image or img or .*; it has: picture"),
        ((PIXELS, LABELS[:3]), "7 images and 3 labels"),
        ([(PIXELS[0], 1), (PIXELS[1], None)], "image 2 has no label, but others have"),
        ("nowhere", "no folder or file nowhere"),
    ],
)
def test_what_is_no_set_of_images(tmp_path: Path, images: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        packed(images, tmp_path)
    assert not (tmp_path / "packs" / "set").exists()
    for wish, why in {"labelled": "has no labels", "test_fraction": "test images need labels"}.items():
        with pytest.raises(UserError, match=why):
            packed(PIXELS, tmp_path, **{wish: True})


def test_bad_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pixels=PIXELS)
    np.savez(tmp_path / "b.npz", images=np.array([object()], dtype=object))
    np.savez(tmp_path / "g.npz", images=PIXELS, labels=LABELS, names=["cat", "dog"])
    (tmp_path / "c.npz").write_bytes(b"PK no zip")
    (tmp_path / "d.npy").write_bytes(b"no array")
    (tmp_path / "e.txt").write_text("words")
    (tmp_path / "f").mkdir()
    messages = {
        "a.npz": "no array called 'images'.*it has: 'pixels'",
        "b.npz": "no readable .npz file: Object arrays cannot be loaded",
        "c.npz": "no readable .npz",
        "d.npy": "no readable .npy",
        "e.txt": "no images that can be read",
        "f": "holds no images",
        "g.npz": "image 1 has the label 2, but labels number its 2 classes, from 0 to 1",
    }
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            packed(tmp_path / name, tmp_path)


def test_read_lazily(tmp_path: Path) -> None:
    """A batch of images is read at a time, not the whole set."""
    reads = []

    class Counted(list):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return PIXELS[index % 7]

    images = open_images(Counted(range(3000)))["train"]
    reads.clear()
    first = next(iter(decode_squares(images, 8)))
    assert len(first.images) == len(reads) == squares.BATCH


def test_files_are_found_and_named(tmp_path: Path) -> None:
    source = tmp_path / "s"
    for split in ("train", "test"):
        tree(source / split, "cat", files=1)
    for split, part in open_images(source).items():
        assert [(row.name, row.label) for row in part.read()] == [(f"{split}/cat/0.png", "cat")]
    assert list(open_images(source)) == ["train", "test"]
    pack = packed(PIXELS, tmp_path, "day")
    assert find_images("day", pack.path.parent) == pack.path == open_pack(pack.path.parent, "day").path
    assert find_images(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(UserError, match="no packed set of that name in"):
        find_images("days", pack.path.parent)


def test_a_sample_of_images(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", PIXELS)
    some, count = sample_images(tmp_path / "a.npy", 8, 5, np.random.default_rng(0))
    assert count == 7 and len(some) == 5
    found = [next(i for i, image in enumerate(EXPECTED) if np.array_equal(image, one)) for one in some]
    assert len(set(found)) == 5
    many, _ = sample_images(tmp_path / "a.npy", 8, 16, np.random.default_rng(0))
    counts = [sum(np.array_equal(image, one) for one in many) for image in EXPECTED]
    assert sum(counts) == 16 and set(counts) == {2, 3}


def test_a_labelled_set_in_memory(tmp_path: Path) -> None:
    source = tmp_path / "s"
    for split, files in (("train", 3), ("test", 2)):
        tree(source / split, "cat", "dog", files=files)
    data = labelled_dataset(source, 8, 0.2)
    assert data.names == ("cat", "dog") and data.test is not None
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1] and data.test.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(data.test.pixels[2], np.asarray(Image.open(source / "test" / "dog" / "0.png")))
    held = labelled_dataset(source / "train", 8, 1 / 3)
    assert held.test is not None and (len(held.train), len(held.test)) == (4, 2)
    pack = packed(source, tmp_path, "pets")
    assert isinstance(labelled_dataset(pack.path, 8, 0.2).train.pixels, np.memmap)
    assert labelled_dataset(pack.path, 4, 0.2).size == 4
    with pytest.raises(UserError, match="has no labels"):
        labelled_dataset(source / "train" / "cat", 8, 0.2)
    tree(source / "test", "cow")
    with pytest.raises(UserError, match="test images of 'cow', of which there are no training images"):
        labelled_dataset(source, 8, 0.2)
