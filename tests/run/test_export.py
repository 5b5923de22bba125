"""Exported encoders, run by their own runtimes, against the encoder called in PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_cli, tiny_encoder
from PIL import Image

import ptlf
from ptlf.core.errors import UserError
from ptlf.run import export
from ptlf.run.loop import Run

RNG = np.random.default_rng(5)
PHOTOGRAPHS = [Image.fromarray(RNG.integers(0, 256, (30, 21 + index, 3), np.uint8)) for index in range(3)]


@pytest.fixture(scope="module")
def run(finished_run: Run) -> Path:
    assert finished_run.folder is not None
    return finished_run.folder


def in_pytorch(run: Path) -> tuple[torch.Tensor, np.ndarray]:
    encoder = ptlf.load_encoder(run, device="cpu")
    return encoder.preprocess(PHOTOGRAPHS), encoder.embed(PHOTOGRAPHS)


def test_onnx(run: Path, tmp_path: Path) -> None:
    onnxruntime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    path = tmp_path / "model.onnx"
    done = run_cli("export", run, "--to", path, "--license", "cc-by-4.0")
    assert "checked on random images; differs from PyTorch by" in done.out
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images, expected = in_pytorch(run)
    (features,) = session.run(["features"], {"images": images.numpy()})
    assert features.shape == (3, 16) and np.allclose(features, expected, atol=1e-5)
    metadata = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}["ptlf"])
    assert (metadata["mean"], metadata["license"]) == ([0.5, 0.5, 0.5], "cc-by-4.0")
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_torch_export(run: Path, tmp_path: Path) -> None:
    run_cli("export", run, "--to", tmp_path / "model.pt2")
    files = {"ptlf.json": ""}
    module = torch.export.load(tmp_path / "model.pt2", extra_files=files).module()
    images, expected = in_pytorch(run)
    assert np.allclose(module(images).detach().numpy(), expected, atol=1e-5)
    assert json.loads(files["ptlf.json"]) == ptlf.load_encoder(run).card


def test_what_differs_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for made, message in (
        (lambda images: np.full((len(images), 16), np.nan, np.float32), "differs from PyTorch by nan"),
        (lambda images: np.ones((len(images), 16), np.float32), "differs from PyTorch by"),
        (lambda images: np.ones((len(images), 3), np.float32), "features of shape"),
    ):
        writer: Any = (lambda encoder, path, metadata: path.write_text(""), lambda path, made=made: made)
        monkeypatch.setitem(export.EXPORTERS, ".pt2", writer)
        with pytest.raises(UserError, match=f"{message}.*nothing is kept"):
            export.export_run(run, tmp_path / "model.pt2")
        assert os.listdir(tmp_path) == []


def test_what_is_there_is_replaced_only_if_asked(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("notes")
    (tmp_path / "link.pt2").symlink_to(path)
    assert "exists; give --overwrite" in run_cli("export", run, "--to", path, code=2).err
    assert path.read_text() == "notes"
    run_cli("export", run, "--to", tmp_path / "link.pt2", "--overwrite")
    assert (tmp_path / "link.pt2").is_symlink() and path.stat().st_size > 1000
    (tmp_path / "folder.pt2").mkdir()
    assert "Is a directory" in run_cli("export", run, "--to", tmp_path / "folder.pt2", "--overwrite", code=2).err


def test_a_full_disk_gives_one_sentence(run: Path, tmp_path: Path) -> None:
    """A bound on the size of files fails as a full disk does, in the middle of the write."""
    code = (
        "import resource, sys\nfrom ptlf.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["export", str(run), "--to", str(tmp_path / "model.pt2")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ptlf: cannot write ")
    assert os.listdir(tmp_path) == []


def test_bad_input(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.h5", "hub"):
        with pytest.raises(UserError, match=r"must end with \.onnx or \.pt2; .*copy .*/encoder.safetensors"):
            export.export_run(run, tmp_path / name)
    with pytest.raises(UserError, match=r"holds no encoder.safetensors"):
        export.export_run(tmp_path, tmp_path / "m.pt2")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"ONNX needs onnxruntime.*pip install 'ptlf\[export\]'"):
        export.export_run(run, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_an_encoder_that_cannot_be_traced(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images * float(images.sum().item() > 0)

    loaded = export.LoadedEncoder(torch.nn.Sequential(Counting(), tiny_encoder()).eval(), {"view_size": 16})
    with pytest.raises(UserError, match=r"cannot be traced by torch.export"):
        export.write_program(loaded, tmp_path / "m.pt2", "{}")
