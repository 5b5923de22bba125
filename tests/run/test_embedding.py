"""`ptlf embed`: features of files, against those of the encoder called by hand."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Done, run_cli
from PIL import Image

import ptlf
from ptlf.run.loop import Run
from ptlf.stream.packing import pack_folder

RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def run(finished_run: Run) -> Path:
    assert finished_run.folder is not None
    return finished_run.folder


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name / "deep").mkdir(parents=True)
        for index in range(4):
            pixels = RNG.integers(0, 256, (20 + index, 30, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "in" / name / ("deep" if index % 2 else ".") / f"{index}.png")
    return tmp_path / "in"


def embed(run: Path, out: Path | str, *words: object, code: int = 0) -> Done:
    return run_cli("embed", run, *words, "--out", out, "--device", "cpu", "--batch", 3, code=code)


def test_npz_and_parquet(run: Path, photographs: Path, tmp_path: Path) -> None:
    assert "features of 8 images, 16 numbers each" in embed(run, tmp_path / "f.npz", photographs).out
    found = np.load(tmp_path / "f.npz", allow_pickle=False)
    names, encoder = found["names"].tolist(), ptlf.load_encoder(run, device="cpu")
    assert sorted(names) == sorted(str(file.relative_to(photographs)) for file in photographs.rglob("*.png"))
    assert [name.split("/")[0] for name in names] == found["labels"].tolist()
    assert found["features"].dtype == np.float32 and found["features"].shape == (8, 16)
    by_hand = np.stack([encoder.embed(Image.open(photographs / name))[0] for name in names])
    assert np.allclose(found["features"], by_hand, atol=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["f.npz", "in"]
    parquet = pytest.importorskip("pyarrow.parquet")
    embed(run, tmp_path / "f.parquet", photographs)
    table = parquet.read_table(tmp_path / "f.parquet").to_pydict()
    assert (table["name"], table["label"]) == (names, found["labels"].tolist())
    assert np.array_equal(np.array(table["features"], np.float32), found["features"])


def test_other_forms(run: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    pack = pack_folder(photographs, root, "pets", size=16, test_fraction=0.25, workers=1, progress=False)
    monkeypatch.setenv("PTLF_DATA", str(root))
    embed(run, tmp_path / "pack.npz", "pets")
    found = np.load(tmp_path / "pack.npz")
    stored = np.concatenate([pack.images("train"), pack.images("test")])
    expected = ptlf.load_encoder(run, device="cpu").embed(stored)
    assert np.allclose(found["features"], expected, atol=1e-6) and set(found["labels"]) == {"cat", "dog"}
    assert found["names"][0] == "train 0" and found["names"][-1] == "test 1"
    np.save(tmp_path / "a.npy", stored)
    embed(run, tmp_path / "npy.npz", tmp_path / "a.npy", photographs / "cat")
    both = np.load(tmp_path / "npy.npz")
    assert np.allclose(both["features"][:8], expected, atol=1e-6) and len(both["names"]) == 12
    assert both["names"][8].startswith(f"{photographs}/cat/") and "labels" not in both


def test_broken_images(run: Path, photographs: Path, tmp_path: Path) -> None:
    (photographs / "cat" / "1.png").write_bytes(b"broken")
    error = embed(run, tmp_path / "f.npz", photographs, code=2).err
    assert "cat/1.png cannot be used: not an image" in error
    assert os.listdir(tmp_path) == ["in"]
    said = embed(run, tmp_path / "f.npz", photographs, "--on-error", "skip")
    assert "features of 8 images" in said.out and "1 skipped" in said.out and "skipped cat/1.png" in said.err
    assert "cat/1.png" not in np.load(tmp_path / "f.npz")["names"]


def test_bad_input(run: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photographs.parent)
    Path("empty").mkdir()
    for images, out, message in (
        ("nowhere", "f.npz", "there is no folder or file nowhere"),
        ("in", "f.csv", "must end with .npz or .parquet"),
        ("in", "none/f.npz", "there is no folder none"),
        ("empty", "f.npz", "empty holds no images"),
    ):
        assert message in embed(run, out, images, code=2).err, (images, out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert ".parquet needs pyarrow" in embed(run, "f.parquet", "in", code=2).err
    assert sorted(os.listdir()) == ["empty", "in"]
