"""Exported encoders, run by their own runtimes, against the encoder called in PyTorch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_config, tiny_encoder
from PIL import Image

import ptlf
from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.run import export
from ptlf.run.loop import Run

RNG = np.random.default_rng(5)
PHOTOGRAPHS = [Image.fromarray(RNG.integers(0, 256, (30, 21 + index, 3), np.uint8)) for index in range(3)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    config = tiny_config("digits/simsiam/ptlf", encoder__name="resnet18-mini", training__epochs=1)
    Run(config, folder).train()
    return folder


def exported(run: Path, to: Path, *words: str) -> Path:
    assert main(["export", str(run), "--to", str(to), *words]) == 0
    return to


def in_pytorch(run: Path) -> tuple[torch.Tensor, np.ndarray]:
    encoder = ptlf.load_encoder(run, device="cpu")
    return encoder.preprocess(PHOTOGRAPHS), encoder.embed(PHOTOGRAPHS)


def test_onnx(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    path = exported(run, tmp_path / "model.onnx")
    assert "checked on random images; differs from PyTorch by" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images, expected = in_pytorch(run)
    found = session.run(["features"], {"images": images.numpy()})[0]
    assert found.shape == (3, 64) and np.allclose(found, expected, atol=1e-5)
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(metadata["ptlf"])["mean"] == [0.5, 0.5, 0.5]
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_torch_export(run: Path, tmp_path: Path) -> None:
    path = exported(run, tmp_path / "model.pt2")
    files = {"ptlf.json": ""}
    module = torch.export.load(path, extra_files=files).module()
    images, expected = in_pytorch(run)
    assert np.allclose(module(images).detach().numpy(), expected, atol=1e-5)
    assert json.loads(files["ptlf.json"])["feature_dim"] == 64


def test_a_folder_as_on_the_hub(run: Path, tmp_path: Path) -> None:
    folder = exported(run, tmp_path / "hub", "--license", "cc-by-4.0")
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert np.array_equal(ptlf.load_encoder(folder, device="cpu").embed(PHOTOGRAPHS), in_pytorch(run)[1])
    config = json.loads((folder / "config.json").read_text())
    assert config["encoder"]["name"] == "resnet18-mini" and config["architectures"] == ["ResNet"]
    text, results = (folder / "README.md").read_text(), json.loads((run / "results.json").read_text())
    _, front, card = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "cc-by-4.0"
    for probe in ("knn_task", "knn_class"):
        assert f"| {probe} | {results['probes'][probe]['accuracy']:.2f} | " in card
    for words in ("digits/simsiam/ptlf", "of training on", "T FLOPs backward", 'ptlf.load_encoder("hub")', "cc-by-4.0"):
        assert words in card


def test_a_later_test_is_added_to_the_card(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = exported(run, tmp_path / "hub")
    before = (hub / "README.md").read_text()
    words = ["evaluate", str(run), "--card", str(hub), "--probe", "knn_task"]
    assert main(words) == 0
    assert f"added to {hub / 'README.md'}" in capsys.readouterr().out
    text = (hub / "README.md").read_text()
    results = json.loads((run / "results.json").read_text())
    names, values = ", ".join(results["eval_splits"]), results["probes"]["knn_task"]
    rest, title, section = text.partition(f"\n\n## Scores of a later test: {names}\n")
    section, loading, end = section.partition("\n\n## How to load it")
    assert rest + loading + end == before
    figures = [f"{values[key]:.2f}" for key in ("accuracy", "untrained_accuracy")] + [str(sum(results["test_images"]))]
    assert [cell.strip() for cell in section.splitlines()[-1].split("|")][1:5] == ["knn_task", *figures]
    assert f"k {values['settings']['k']}" in section
    assert text.count(title) == 1
    assert "enabled" not in section


def test_only_the_same_test_is_replaced_in_the_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = exported(run, tmp_path / "hub")
    card = hub / "README.md"

    def tested(*words: str) -> str:
        assert main(["evaluate", str(run), "--card", str(hub), *words]) == 0
        (said,) = re.findall(r"(added to|replaced in) ", capsys.readouterr().out)
        return said

    def rows() -> list[list[str]]:
        sections = card.read_text().split("\n\n## Scores of a later test: ")[1:]
        lines = [section.partition("\n\n## ")[0].splitlines()[-1] for section in sections]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    knn, ridge = ("--probe", "knn_task"), ("--probe", "ridge")
    capsys.readouterr()
    assert [tested(*knn), tested(*knn, "--probes.knn_task.k", "3"), tested(*ridge)] == ["added to"] * 3
    first, other, last = rows()
    assert [row[0] for row in rows()] == ["knn_task", "knn_task", "ridge"]
    assert "k 3" in other[-1]
    card.write_text(card.read_text().replace(f"| {first[1]} |", "| 0.12 |").replace(f"| {other[1]} |", "| 0.12 |"))
    assert [tested(*knn), tested(*ridge)] == ["replaced in"] * 2
    other[1] = "0.12"
    assert sorted(rows()) == sorted([first, other, last])


def test_the_card_of_another_encoder_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("digits/simsiam/lump", encoder__name="resnet18-mini", training__epochs=1, seed=1)
    Run(config, tmp_path / "other").train()
    hub = exported(tmp_path / "other", tmp_path / "hub")
    before = (hub / "README.md").read_bytes()
    assert main(["evaluate", str(run), "--card", str(hub)]) == 2
    assert "is not of the encoder in" in capsys.readouterr().err
    assert (hub / "README.md").read_bytes() == before
    assert main(["evaluate", str(run), "--card", str(tmp_path)]) == 2
    assert f"holds no README.md; `ptlf export {run} --to DIR`" in capsys.readouterr().err
    assert main(["evaluate", str(hub), "--card", str(hub)]) == 2
    assert "the run there has not finished" in capsys.readouterr().err
    (hub / "model.safetensors").write_bytes(b"none")
    assert main(["evaluate", str(run), "--card", str(hub)]) == 2
    assert "--overwrite` writes it anew" in capsys.readouterr().err


def test_hugging_face_s_processor_does_nearly_the_same(run: Path, tmp_path: Path) -> None:
    """It crops after resizing to whole pixels; ours in one step: sides that divide evenly agree."""
    transformers = pytest.importorskip("transformers")
    folder = exported(run, tmp_path / "hub")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    image = Image.fromarray(RNG.integers(0, 256, (32, 32, 3), np.uint8))
    theirs = torch.as_tensor(np.asarray(processor(image, return_tensors="np")["pixel_values"]))
    ours = ptlf.load_encoder(run, device="cpu").preprocess(image)
    assert theirs.shape == ours.shape and (theirs - ours).abs().max() < 0.02


def test_columns_of_pnn(tmp_path: Path) -> None:
    config = tiny_config("digits/simsiam/pnn", encoder__name="conftest:tiny_resnet", training__epochs=1)
    Run(config, tmp_path / "run").train()
    trusted = {"device": "cpu", "trust_code": True}
    expected = ptlf.load_encoder(tmp_path / "run", **trusted).embed(PHOTOGRAPHS)
    folder = exported(tmp_path / "run", tmp_path / "hub", "--trust-code")
    assert np.array_equal(ptlf.load_encoder(folder, **trusted).embed(PHOTOGRAPHS), expected)
    exported(tmp_path / "run", tmp_path / "m.pt2", "--trust-code")


class Wrong:
    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, images: torch.Tensor) -> np.ndarray:
        return self.result(images)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda images: np.full((len(images), 64), np.nan, np.float32), "differs from PyTorch by nan"),
        (lambda images: np.ones((len(images), 64), np.float32), "differs from PyTorch by"),
        (lambda images: np.ones((len(images), 3), np.float32), "features of shape"),
    ],
)
def test_what_differs_is_not_kept(
    run: Path, tmp_path: Path, model: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "folder_model", lambda path: Wrong(model))
    with pytest.raises(UserError, match=message):
        export.export_run(run, tmp_path / "hub")
    assert os.listdir(tmp_path) == []


def test_what_is_there_is_replaced_only_if_asked(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(run, tmp_path / "hub")
    (tmp_path / "hub" / "mine.txt").write_text("notes")
    assert main(["export", str(run), "--to", str(tmp_path / "hub")]) == 2
    assert "--overwrite" in capsys.readouterr().err and (tmp_path / "hub" / "mine.txt").exists()
    exported(run, tmp_path / "hub", "--overwrite")
    assert not (tmp_path / "hub" / "mine.txt").exists()


def test_bad_input(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"must be FILE\.onnx"):
        export.export_run(run, tmp_path / "model.h5")
    with pytest.raises(UserError, match=r"holds no encoder.safetensors"):
        export.export_run(tmp_path, tmp_path / "m.pt2")
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ptlf\[export\]'"):
        export.export_run(run, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_an_encoder_that_cannot_be_traced(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images * float(images.sum().item() > 0)

    loaded = export.LoadedEncoder(torch.nn.Sequential(Counting(), tiny_encoder()).eval(), {"view_size": 16})
    with pytest.raises(UserError, match=r"cannot be traced by torch.export"):
        export.write_program(loaded, tmp_path / "m.pt2")
