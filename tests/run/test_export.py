"""Exported encoders, run by their own runtimes, against the encoder called in PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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
    used, asked = values["used_by_task"][-1]["k"], values["settings"]["k"]
    assert f"k {used} ({asked} was set)" in section and used == len(results["tasks"])
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
    hub = exported(run, tmp_path / "hub")
    (hub / "README.md").write_text("notes")
    assert main(["export", str(run), "--to", str(hub)]) == 2
    assert "--overwrite" in capsys.readouterr().err and (hub / "README.md").read_text() == "notes"
    exported(run, hub, "--overwrite")
    assert (hub / "README.md").read_text() != "notes"
    (tmp_path / "link").symlink_to(hub)
    (hub / "README.md").write_text("notes")
    exported(run, tmp_path / "link", "--overwrite")
    assert (tmp_path / "link").is_symlink() and (hub / "README.md").read_text() != "notes"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"0001.jpg": "a photograph"}, "'0001.jpg'"),
        ({"README.md": "mine"}, "'README.md'"),
        ({"config.json": '{"model_type": "vit"}', "model.safetensors": "of another program"}, "'config.json'"),
        ({"config.json": "[1]"}, "'config.json'"),
        ({"photographs/0001.jpg": "a photograph"}, "'photographs'"),
    ],
)
def test_only_an_earlier_export_is_replaced(
    run: Path, tmp_path: Path, capsys, files: dict[str, str], named: str
) -> None:
    precious = tmp_path / "precious"
    for name, text in files.items():
        (precious / name).parent.mkdir(parents=True, exist_ok=True)
        (precious / name).write_text(text)
    for words in ([], ["--overwrite"]):
        assert main(["export", str(run), "--to", str(precious), *words]) == 2
        told = capsys.readouterr().err
        assert f"precious holds {named}, which is of no earlier export, and stays; choose another --to" in told
        assert "overwrite" not in told and "remove" not in told
    assert {name: (precious / name).read_text() for name in files} == files


def test_a_folder_of_an_export_with_files_of_ones_own_is_kept(run: Path, tmp_path: Path, capsys) -> None:
    hub = exported(run, tmp_path / "hub")
    (hub / "mine.txt").write_text("notes")
    assert main(["export", str(run), "--to", str(hub), "--overwrite"]) == 2
    assert "holds 'mine.txt'" in capsys.readouterr().err
    assert (hub / "mine.txt").read_text() == "notes"


def test_the_run_is_never_replaced(run: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(str(path) for path in run.rglob("*"))
    monkeypatch.chdir(run)
    places = {
        str(run): "is the run itself",
        ".": "is the run itself",
        "..": "holds the run",
        f"../{run.name}/checkpoints": "lies in the run",
        "export": "lies in the run",
    }
    for to, why in places.items():
        for words in ([], ["--overwrite"]):
            assert main(["export", str(run), "--to", to, *words]) == 2
            assert capsys.readouterr().err == f"ptlf: {to} {why}; choose a --to outside it\n"
    assert sorted(str(path) for path in run.rglob("*")) == before
    exported(run, Path("mine.pt2"))  # a file in it harms nothing
    (run / "mine.pt2").unlink()
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(run), "--to", str(tmp_path / "file"), "--overwrite"]) == 2
    assert "is a file" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--to", ".", "--overwrite"]) == 2
    assert ". holds 'file', which is of no earlier export" in capsys.readouterr().err


@pytest.mark.parametrize("end", [".pt2", ""])
def test_a_full_disk_gives_one_sentence(run: Path, tmp_path: Path, end: str) -> None:
    """A bound on the size of files fails as a full disk does, in the middle of the write."""
    code = (
        "import resource, sys\nfrom ptlf.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["export", str(run), "--to", str(tmp_path / f"model{end}")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ptlf: cannot write ")
    assert os.listdir(tmp_path) == []


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
