"""Weights from files: what is loaded, what may differ, and what is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config, tiny_encoder
from safetensors.torch import save_file
from torch import Tensor, nn

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.encoders import ENCODERS, load_weights, stored_encoder
from ptlf.learner import Learner
from ptlf.run.evaluate import evaluate_run
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config


def other(encoder: nn.Module) -> dict[str, Tensor]:
    """A state that no constructor makes."""
    return {name: torch.full_like(value, 2.0 + i) for i, (name, value) in enumerate(encoder.state_dict().items())}


def same(encoder: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())


def made(name: str) -> nn.Module:
    return ENCODERS[name].make(ENCODERS[name].Config(name=name))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.encoder_q.net."])
def test_files_and_prefixes(tmp_path: Path, name: str, prefix: str) -> None:
    encoder = tiny_encoder()
    state = other(encoder)
    saved = {f"{prefix}{name}": value for name, value in state.items()} | {"head.weight": torch.zeros(3)}
    file = tmp_path / name
    save_file(saved, file) if name == "w.safetensors" else torch.save({"epoch": 3, "state_dict": saved}, file)
    found = load_weights(encoder, file)
    assert same(encoder, state)
    assert (found.prefix, found.matched, found.missing) == (prefix, len(state), [])
    assert found.unexpected == ["head.weight"] and found.other_shape == []
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert any("unexpected" in line and "1  head.weight" in line for line in found.lines())


def test_counters_of_norms_may_be_missing_and_a_final_classifier_may_differ(tmp_path: Path) -> None:
    encoder = tiny_encoder()
    torch.save({k: v for k, v in other(encoder).items() if "num_batches" not in k}, tmp_path / "w.pt")
    assert load_weights(encoder, tmp_path / "w.pt").missing == []
    encoder = nn.Sequential(encoder, nn.Linear(16, 5))
    state = other(encoder)
    for change in ({}, {"1.weight": torch.zeros(9, 16), "1.bias": torch.zeros(9)}):
        torch.save({k: v for k, v in state.items() if not k.startswith("1.")} | change, tmp_path / "w.pt")
        before = encoder[1].weight.clone()
        found = load_weights(encoder, tmp_path / "w.pt")
        assert torch.equal(encoder[1].weight, before) and same(encoder[0], other(encoder[0]))
        assert found.other_shape + found.missing == ["1.weight", "1.bias"]


def torchvision_name(name: str) -> str:
    """Written down from torchvision/models/resnet.py, not from our table."""
    parts = name.split(".")
    if parts[0] == "stem":
        return f"{'conv1' if parts[1] == 'conv' else 'bn1'}.{parts[2]}"
    parts = [f"layer{int(parts[1]) + 1}", *("downsample" if part == "shortcut" else part for part in parts[2:])]
    return ".".join(parts)


@pytest.mark.parametrize("name", ["resnet18-imagenet", "resnet50-imagenet"])
def test_names_of_torchvision_s_residual_networks(tmp_path: Path, name: str) -> None:
    encoder = made(name)
    state = other(encoder)
    theirs = {f"module.{torchvision_name(key)}": value for key, value in state.items()}
    assert {"module.layer1.0.conv1.weight", "module.layer2.0.downsample.0.weight"} < theirs.keys()
    torch.save(theirs | {"module.fc.weight": torch.zeros(2), "module.fc.bias": torch.zeros(2)}, tmp_path / "w.pt")
    found = load_weights(encoder, tmp_path / "w.pt")
    assert same(encoder, state) and found.unexpected == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("resnet34", r"120 of 120 tensors match; it also has stages\.0\.2\.bn1\.bias.* and \d+ more"),
        ("resnet18-imagenet", r"119 of 120 .*of another shape are stem\.conv\.weight \(64, 3, 7, 7\) where \(64, 3, 3"),
        ("resnet50", "97 of 120 .*of another shape are .*it also has"),
        ("resnet18-mini", "it lacks stages"),
    ],
)
def test_other_architectures_are_named(tmp_path: Path, theirs: str, message: str) -> None:
    encoder = made("resnet18")
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    save_file(made(theirs).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="another architecture than this ResNet.*" + message):
        load_weights(encoder, tmp_path / "w.safetensors")
    assert same(encoder, before)


class Marker:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_files_without_tensors_are_refused_and_nothing_in_them_is_executed(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"no")
    (tmp_path / "b.pt").write_bytes(b"no")
    torch.save([1, 2], tmp_path / "c.pt")
    torch.save({"weight": Marker(str(tmp_path / "ran"))}, tmp_path / "d.pt")
    cannot = "cannot be read as plain tensors"
    messages = {"a.safetensors": cannot, "b.pt": cannot, "c.pt": "holds no tensors", "d.pt": cannot, "e.pt": "no file"}
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            load_weights(tiny_encoder(), tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("own", [False, True], ids=["by name", "a module"])
def test_a_run_starts_from_another_s_encoder(tmp_path: Path, own: bool) -> None:
    first = Run(tiny_config(training__epochs=1, evaluation__gallery=False), tmp_path / "first")
    trained = first.train()
    module = tiny_encoder() if own else None
    config = tiny_config(encoder__weights=str(tmp_path / "first"), training__epochs=1, evaluation__gallery=False)
    run = Run(config, tmp_path / "second", encoder=module)
    assert same(run.model.encoder, first.model.encoder.state_dict())
    results = run.train()
    assert results["encoder_weights"]["path"] == str(tmp_path / "first")
    file = tmp_path / "first" / "encoder.safetensors"
    assert results["encoder_weights"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    # What the first run could do at its end is what the second one begins with.
    for probe in ("knn_task", "knn_class"):
        assert results["probes"][probe]["untrained"] == trained["probes"][probe]["matrix"][-1]


def test_the_file_is_needed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on, and is tested, without the file it began with."""
    file = tmp_path / "w.pt"
    torch.save(other(tiny_encoder()), file)
    config = tiny_config(encoder__weights=str(file), training__epochs=1, evaluation__gallery=False)
    whole = Run(config, tmp_path / "whole").train()
    calls = iter(range(10))
    monkeypatch.setattr(Run, "train_task", lambda *_: (next(calls) and 1 / 0) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Run(config, tmp_path / "stopped").train()
    monkeypatch.undo()
    file.unlink()
    results = Run(config, tmp_path / "stopped").train(resume=True)
    assert results["encoder_weights"] == whole["encoder_weights"]
    assert results["probes"] == whole["probes"]
    probes, *_ = evaluate_run(tmp_path / "stopped", config)
    for key in ("accuracy", "untrained"):
        assert probes["knn_class"][key] == results["probes"]["knn_class"][key]
    with pytest.raises(UserError, match="no file"):
        Run(config, tmp_path / "new")


def test_pnn_says_that_it_cannot(tmp_path: Path) -> None:
    config = tiny_config("digits/simsiam/pnn", encoder__name="resnet18-mini", encoder__weights="w.pt")
    with pytest.raises(UserError, match="'pnn' builds an encoder of its own"):
        Run(config)


def test_tables_speak_of_a_given_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--recipe", "digits/simsiam/finetune", "--encoder.name", "resnet18-mini", "--training.epochs=1"]
    words += ["--stream.groups", "[[0, 1], [2, 3]]", "--device", "cpu", "--evaluation.gallery", "false"]
    save_file(made("resnet18-mini").state_dict(), tmp_path / "w.safetensors")
    half = "[0.5, 0.5, 0.5]"
    given = ["--encoder.weights", str(tmp_path / "w.safetensors"), "--encoder.mean", half, "--encoder.std", half]
    assert main([*words, *given, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "nothing (given encoder)" in said and "random encoder" not in said and "knn_class given encoder" in said
    assert "matched" in said and json.loads((tmp_path / "run" / "results.json").read_text())["encoder_weights"]
    assert "given encoder" in (tmp_path / "run" / "report.html").read_text()
    save_file(made("resnet18").state_dict(), tmp_path / "w.safetensors")
    assert main([*words, *given, "--out", str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "another architecture" in said and not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an encoder that no recipe has."""
    folder = tmp_path_factory.mktemp("small") / "run"
    words = ["--recipe", "digits/simsiam/finetune", "--encoder.name", "resnet18-mini", "--encoder.width", "4"]
    words += ["--stream.groups", "[[0, 1]]", "--stream.per_class", "8", "--training.batch", "16"]
    words += ["--training.epochs", "1"]
    assert main(["train", *words, "--evaluation.enabled", "false", "--out", str(folder)]) == 0
    return folder


def encoder_of(config: Any) -> tuple[str, int | None, str | None]:
    return config.encoder.name, config.encoder.width, config.encoder.weights


@pytest.mark.parametrize("what", ["run", "run/encoder.safetensors"])
def test_the_encoder_is_the_one_whose_weights_are_taken(small_run: Path, what: str, tmp_path: Path) -> None:
    path = str(small_run.parent / what)
    found = resolve_config("split-cifar10/simsiam/lump", None, ["--encoder.weights", path])
    assert encoder_of(found) == ("resnet18-mini", 4, path)
    own = resolve_config("split-cifar10/simsiam/lump", None, ["--encoder.weights", path, "--encoder.name", "resnet18"])
    assert encoder_of(own) == ("resnet18", None, path)
    wider = resolve_config("split-cifar10/simsiam/lump", None, ["--encoder.weights", path, "--encoder.width", "8"])
    assert encoder_of(wider) == ("resnet18-mini", 8, path)
    assert encoder_of(Learner(out=tmp_path, **{"encoder.weights": path}).config) == ("resnet18-mini", 4, path)

    with pytest.raises(UserError, match=r"another architecture .*; they are of --encoder\.name resnet18-mini; "):
        load_weights(made("resnet18"), small_run)


def test_cards_that_say_nothing_or_name_code_are_not_followed(tmp_path: Path) -> None:
    for card in ("no JSON", "[1]", '{"encoder": null}', '{"encoder": {"name": 3}}'):
        save_file(tiny_encoder().state_dict(), tmp_path / "w.safetensors", {"ptlf": card})
        assert stored_encoder(tmp_path / "w.safetensors") is None
    card = json.dumps({"encoder": {"name": "conftest:tiny_encoder"}})
    save_file(tiny_encoder().state_dict(), tmp_path / "w.safetensors", {"ptlf": card})
    words = ["--encoder.weights", str(tmp_path / "w.safetensors")]
    assert resolve_config("digits/simsiam/lump", None, words).encoder.name == "resnet18-mini"
