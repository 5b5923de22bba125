"""One sentence on whether learning helped, and a task that is taken back."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import paint, run_cli, tiny_encoder

from ptlf.core.errors import UserError
from ptlf.learner import Learner
from ptlf.run.inference import LoadedEncoder
from ptlf.run.recipes import default_recipe, resolve_config
from ptlf.run.verdict import Verdict, colours, judge, near_copies, neighbours_agree, small_pixels
from ptlf.stream import Images

SMALL = {"training.epochs": 1, "training.batch": 4, "evaluation.gallery": False}


class Colour(torch.nn.Module):
    """The mean colour, or nothing but noise."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), 3, generator=torch.Generator().manual_seed(0)) if self.noise else x.mean((2, 3))


def loaded(noise: bool) -> LoadedEncoder:
    return LoadedEncoder(Colour(noise), {"mean": [0.5] * 3, "std": [1.0] * 3, "view_size": 8, "image_size": 8})


def test_neighbours_against_a_loop() -> None:
    random = np.random.default_rng(0)
    x, labels = random.normal(size=(40, 5)).astype(np.float32), random.integers(0, 3, 40)
    unit, expected = x / np.linalg.norm(x, axis=1, keepdims=True), []
    for row in range(40):
        others = [i for i in range(40) if i != row]
        near = sorted(others, key=lambda i: -unit[row] @ unit[i])[:7]
        votes = [sum(np.exp(unit[row] @ unit[i] / 0.1) for i in near if labels[i] == c) for c in range(3)]
        expected.append(float(np.argmax(votes) == labels[row]))
    assert neighbours_agree(torch.from_numpy(x), torch.from_numpy(labels), 7, torch.arange(40)).tolist() == expected


def test_a_verdict_is_paired_and_can_say_no(tmp_path: Path) -> None:
    random, labels = np.random.default_rng(0), np.arange(120) % 2
    pixels = random.integers(0, 200, (120, 8, 8, 3)) + 55 * labels[:, None, None, None]
    images = Images(pixels.astype(np.uint8), labels)
    better = judge("x", images, loaded(False), loaded(True), "the given encoder")
    worse = judge("x", images, loaded(True), loaded(False), "the given encoder")
    same = judge("x", images, loaded(False), loaded(False), "the given encoder")
    assert better.accuracy > 80 and better.others["the given encoder"] < 65
    gain, sure = better.gains["the given encoder"]
    assert gain == pytest.approx(better.accuracy - better.others["the given encoder"]) and 0 < sure < gain
    assert "Better than the given encoder" in better.sentence(tmp_path)
    assert worse.sentence(tmp_path).endswith(" Worse than the given encoder: do not use it.")
    for task in ("0001-a", "0002-b"):
        (tmp_path / "tasks" / task).mkdir(parents=True)
    assert f"do not use it; `ptlf learn {tmp_path} --undo` takes" in worse.sentence(tmp_path)
    assert "These images cannot tell whether it is better than the given encoder, many more could" in same.sentence(
        tmp_path
    )
    assert same.gains["the given encoder"] == (0.0, 0.0)
    others, gains = {"start": 60.0, "colours": 70.0}, {"start": (2.0, 4.0), "colours": (-8.0, 5.0)}
    told = Verdict("x", 100, 62.0, others, gains, 3, True).sentence(tmp_path)
    for words in (
        "+2.0 ± 4.0 over start (60.0), -8.0 ± 5.0 against colours (70.0)",
        "about 400 could",
        "5 or 50 neighbours",
    ):
        assert words in told
    assert "; worse than colours: not worth using yet; train longer. 3 are near copies" in told
    told = Verdict("x", 100, 62.0, others, {"start": (4.0, 2.0), "colours": (1.0, 5.0)}).sentence(tmp_path)
    assert told.endswith("Better than start; not shown to be better than colours.")


def test_near_copies_do_not_vote_on_each_other_and_widen_the_interval() -> None:
    """Noise: each image would name the label of its copy, and no other."""
    random = np.random.default_rng(0)
    once = random.integers(0, 255, (60, 8, 8, 3)).astype(np.uint8)
    pixels, labels = np.concatenate([once, once, once ^ 1]), np.tile(np.arange(60) % 5, 3)
    groups = near_copies(small_pixels(torch.from_numpy(pixels)))
    assert groups.tolist() == groups[:60].tolist() * 3 and groups.unique().numel() == 60
    found = judge("x", Images(pixels, labels), loaded(False), loaded(True), "the untrained encoder")
    assert found.copies == 180 and found.accuracy < 50 and "180 are near copies of others" in found.sentence(Path())
    x = small_pixels(torch.from_numpy(pixels))
    assert neighbours_agree(x, torch.from_numpy(labels), 1, torch.arange(180)).mean() == 1
    alone = judge("x", Images(once, labels[:60]), loaded(False), loaded(True), "the untrained encoder")
    assert alone.copies == 0 and found.gains["raw pixels"][1] > 0.8 * alone.gains["raw pixels"][1]
    alike = near_copies(torch.ones(9, 4) + 0.001 * torch.rand(9, 4))
    assert alike.tolist() == list(range(9))  # of nearly equal images none is a copy


def test_colours_count_pixels() -> None:
    pixels = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    pixels[0, 0, 0] = 255
    found = colours(pixels)[0].square()
    assert found[0] == 3 and found[215] == 1 and found.sum() == 4


def test_undo_restores_the_encoder_from_before_the_last_task(tmp_path: Path) -> None:
    for day in (1, 2):
        paint(tmp_path / f"day{day}", 8, seed=day)
    learner = Learner(tiny_encoder(), out=tmp_path / "run", size=8, **SMALL)
    with pytest.raises(UserError, match="has no task that arrived"):
        learner.undo()
    first = learner.learn(tmp_path / "day1")
    before = (tmp_path / "run" / "encoder.safetensors").read_bytes()
    with pytest.raises(UserError, match="has learnt one task"):
        learner.undo()
    second = learner.learn(tmp_path / "day2")
    assert second["encoder_sha256"] != first["encoder_sha256"]
    assert learner.undo()["tasks"] == ["day1"]
    assert (tmp_path / "run" / "encoder.safetensors").read_bytes() == before
    assert learner.tasks == ["day1"] and learner.learn(tmp_path / "day2")["encoder_sha256"] == second["encoder_sha256"]
    assert "leave out" in run_cli("learn", tmp_path / "run", tmp_path / "day1", "--undo", code=2).err


def test_labelled_images_are_judged_after_a_task_and_by_evaluate(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / "known" / name, 6, seed=ord(name))
    paint(tmp_path / "day1", 8)
    words = ["--encoder.name", "conftest:tiny_encoder", "--training.epochs", 1, "--training.batch", 4]
    run = tmp_path / "run"
    first = run_cli("learn", run, tmp_path / "day1", *words, "--size", 8, "--evaluation.gallery", "false")
    assert "without labelled images nothing tells whether that helped" in " ".join(first.out.split())
    assert "begins with random weights" in " ".join(first.err.split())
    shown = run_cli("evaluate", run, "--stream.labelled", tmp_path / "known", "--trust-code").out
    assert re.search(r"On 12 images of known: \S+ %, \S+ ± \S+ \w+ the untrained encoder", " ".join(shown.split()))
    run_cli("learn", run, tmp_path / "known" / "a", "--trust-code")
    shown = run_cli("learn", run, "--undo", "--trust-code").out
    assert "a is taken back; the encoder is the one after day1" in shown
    known = Learner(
        tiny_encoder(), out=tmp_path / "second", size=8, **SMALL, **{"evaluation.reference": str(tmp_path / "known")}
    )
    known.learn(tmp_path / "day1")
    (verdict,) = known.verdicts()
    assert verdict.images == "what it knew" and verdict.count == 12 and "the given encoder" in verdict.gains


def test_an_encoder_that_has_learnt_something_gets_a_recipe_of_its_own() -> None:
    about = " ".join(run_cli("learn", "--help").out.split())
    for encoder, given in (
        ("resnet18", False), ("given", True), ("hf:folder", True), ("onnx:net.onnx", True), ("timm:resnet18", False),
        ({"name": "timm:resnet18", "pretrained": True}, True), ({"weights": "run"}, True), ({}, False),
    ):  # fmt: skip
        expected = "vicreg/continue" if given else "vicreg/ptlf"
        assert f"arriving/{expected}" in about
        assert default_recipe("arriving", {"encoder": encoder}) == f"arriving/{expected}", encoder
    for words, expected in ((["--encoder.weights", "run"], "vicreg/continue"), ([], "simsiam/ptlf")):
        assert resolve_config(None, None, words).recipe == f"digits/{expected}"
    settings = Learner(tiny_encoder(), size=8).config
    assert settings.method.name == "anchor" and settings.freezing.initial == settings.freezing.final == 0.5
    assert Learner(tiny_encoder(), objective="simsiam", method="lump", size=8).config.method.name == "lump"


def test_an_encoder_with_weights_must_say_how_its_inputs_are_normalised(tmp_path: Path) -> None:
    silent = tiny_encoder()
    del silent.normalisation
    paint(tmp_path / "day1", 8)
    with pytest.raises(UserError, match="does not say by which mean and std"):
        Learner(silent, out=tmp_path / "run", size=8, **SMALL).learn(tmp_path / "day1")
    numbers = {"encoder.mean": [0.1, 0.2, 0.3], "encoder.std": [0.4, 0.5, 0.6]}
    learner = Learner(silent, out=tmp_path / "run", size=8, **SMALL, **numbers)
    learner.learn(tmp_path / "day1")
    again = Learner.load(tmp_path / "run", encoder=silent)._loaded().card
    assert (again["mean"], again["std"]) == (numbers["encoder.mean"], numbers["encoder.std"])
    for wrong in (
        {"encoder.mean": [0.5] * 3},
        {"encoder.mean": [0.5], "encoder.std": [0.5]},
        numbers | {"encoder.std": [0, 1, 1]},
    ):
        with pytest.raises(UserError, match=r"encoder\.(mean|std)"):
            Learner(silent, size=8, **wrong)
