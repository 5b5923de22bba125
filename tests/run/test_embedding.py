"""`ptlf embed`: features of files, against those of the encoder called by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config
from PIL import Image

import ptlf
from ptlf.cli import main
from ptlf.run.loop import Run
from ptlf.stream.folders import pack_folder

RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    Run(tiny_config(training__epochs=1), folder).train()
    return folder


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name / "deep").mkdir(parents=True)
        for index in range(4):
            pixels = RNG.integers(0, 256, (20 + index, 30, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "in" / name / ("deep" if index % 2 else ".") / f"{index}.png")
    return tmp_path / "in"


def embed(run: Path, out: Path, *words: object) -> int:
    return main(
        ["embed", str(run), *map(str, words), "--out", str(out), "--device", "cpu", "--batch", "3", "--trust-code"]
    )


def by_hand(run: Path, folder: Path, names: list[str]) -> np.ndarray:
    encoder = ptlf.load_encoder(run, device="cpu", trust_code=True)
    return np.stack([encoder.embed(Image.open(folder / name))[0] for name in names])


def test_npz(run: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(run, tmp_path / "f.npz", photographs) == 0
    assert "features of 8 images, 16 numbers each" in capsys.readouterr().out
    found = np.load(tmp_path / "f.npz", allow_pickle=False)
    assert sorted(found["names"]) == sorted(str(f.relative_to(photographs)) for f in photographs.rglob("*.png"))
    assert [name.split("/")[0] for name in found["names"]] == found["labels"].tolist()
    assert found["features"].dtype == np.float32 and found["features"].shape == (8, 16)
    assert np.allclose(found["features"], by_hand(run, photographs, found["names"].tolist()), atol=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["f.npz", "in"]


def test_parquet(run: Path, photographs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert embed(run, tmp_path / "f.parquet", photographs) == embed(run, tmp_path / "f.npz", photographs) == 0
    table, arrays = parquet.read_table(tmp_path / "f.parquet").to_pydict(), np.load(tmp_path / "f.npz")
    assert table["name"] == arrays["names"].tolist() and table["label"] == arrays["labels"].tolist()
    assert np.array_equal(np.array(table["features"], np.float32), arrays["features"])


def test_other_forms(run: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    pack = pack_folder(photographs, root, "pets", size=16, test_fraction=0.25, workers=1, progress=False)
    monkeypatch.setenv("PTLF_DATA", str(root))
    assert embed(run, tmp_path / "pack.npz", "pets") == 0
    found = np.load(tmp_path / "pack.npz")
    stored = np.concatenate([pack.images("train"), pack.images("test")])
    expected = ptlf.load_encoder(run, device="cpu", trust_code=True).embed(stored)
    assert np.allclose(found["features"], expected, atol=1e-6) and set(found["labels"]) == {"cat", "dog"}
    assert found["names"][0] == "train 0" and found["names"][-1] == "test 1"
    np.save(tmp_path / "a.npy", stored)
    assert embed(run, tmp_path / "npy.npz", tmp_path / "a.npy", photographs / "cat") == 0
    both = np.load(tmp_path / "npy.npz")
    assert np.allclose(both["features"][:8], expected, atol=1e-6) and len(both["names"]) == 12
    assert both["names"][8].startswith(f"{photographs}/cat/") and "labels" not in both


def test_broken_images(run: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photographs / "cat" / "1.png").write_bytes(b"broken")
    assert embed(run, tmp_path / "f.npz", photographs) == 2
    assert "cat/1.png cannot be used: not an image" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]
    assert embed(run, tmp_path / "f.npz", photographs, "--on-error", "skip") == 0
    said = capsys.readouterr()
    assert "features of 8 images" in said.out and "1 skipped" in said.out and "skipped cat/1.png" in said.err
    assert "cat/1.png" not in np.load(tmp_path / "f.npz")["names"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--out", "f.npz"], "there is no folder or file nowhere, and no packed set"),
        (["in", "--out", "f.csv"], "must end with .npz or .parquet"),
        (["in", "--out", "none/f.npz"], "there is no folder none"),
        (["empty", "--out", "f.npz"], "empty holds no images"),
    ],
)
def test_bad_input(
    run: Path, photographs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(photographs.parent)
    Path("empty").mkdir()
    try:
        code = main(["embed", str(run), *words, "--trust-code"])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err
    assert sorted(os.listdir()) == ["empty", "in"]


def test_parquet_without_pyarrow(
    run: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert embed(run, tmp_path / "f.parquet", photographs) == 2
    assert ".parquet needs pyarrow" in capsys.readouterr().err
