"""A run that begins with an encoder that knows something: its memory is filled, it freezes at once, and what it knew
is tested all along."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import StopsAt, run_cli, tiny_config, tiny_encoder
from sklearn.neighbors import KNeighborsClassifier

from ptlf.core.errors import UserError
from ptlf.run.build import fill_memory
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.stream.task import digits
from ptlf.training.process import Stopped

KNOWN = [7, 8, 9]  # digits that the stream does not have


def known_images(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    data = digits()
    chosen = np.flatnonzero(np.isin(data.train.labels, KNOWN))[:count]
    return data.train.pixels[chosen], data.train.labels[chosen]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    images, labels = known_images()
    np.savez(tmp_path / "known.npz", images=images, labels=labels)
    return tmp_path / "known.npz"


def config(method: str, known: Path, **more: Any) -> Config:
    settings = {"memory__images": str(known), "memory__size": 32, "evaluation__gallery": False, **more}
    return tiny_config(f"digits/simsiam/{method}", probes__knn_class__k=5, freezing__final=0.67, **settings)


def filled(run: Run) -> Run:
    fill_memory(run.components)
    return run


def test_the_memory_holds_a_sample(known: Path) -> None:
    run = filled(Run(config("lump", known)))
    memory, (images, _) = run.method.memory, known_images()
    assert memory is not None and len(memory) == 32
    stored = {image.tobytes() for image in memory.images[:32].numpy()}
    assert len(stored) == 32 and stored <= {image.tobytes() for image in images}
    # Each view is an augmentation of its image: nearer to it, in mean and place, than to the others.
    views, plain = memory.views[:32].mean((2, 3)), run.components.prepare(memory.images[:32]).mean((2, 3))
    assert torch.corrcoef(torch.stack((views[:, 0], plain[:, 0])))[0, 1] > 0.3
    assert memory.count == int(memory.seen) == 90 * run.config.training.epochs
    again = filled(Run(config("lump", known))).method.memory
    assert again is not None and torch.equal(again.images, memory.images) and torch.equal(again.views, memory.views)
    other = filled(Run(config("lump", known, seed=1))).method.memory
    assert other is not None and not torch.equal(other.images, memory.images)


def test_der_stores_the_encoder_s_vectors(known: Path) -> None:
    run = Run(config("der", known))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    filled(run)
    memory = run.method.memory
    assert memory is not None and all(
        torch.equal(value, before[name]) for name, value in run.model.state_dict().items()
    )
    assert run.model.encoder.training
    stored = memory.outputs[:32]
    assert stored.std(0).gt(0).any() and stored.isfinite().all()
    with torch.no_grad():  # of first views, which are others than the stored ones, but of the same images
        unaugmented = run.model.encoder(run.components.prepare(memory.images[:32]))
    assert torch.corrcoef(torch.stack((stored.mean(1), unaugmented.mean(1))))[0, 1] > 0


def test_freezing_begins_with_the_first_task_whose_past_is_what_was_given(known: Path) -> None:
    run = Run(config("ptlf", known))
    seen: list[torch.Tensor] = []
    correlate = run.evaluator.correlate

    def spy(*words: Any) -> Any:
        assert run.method.memory is not None
        seen.append(run.method.memory.past().clone())
        return correlate(*words)

    run.evaluator.correlate = spy  # type: ignore[method-assign]
    results = run.train()
    first, second = results["freezing"]
    assert (first["task"], second["task"]) == (1, 2)
    assert first["ratios"] and first["events"] and first["directions"]
    assert results["memory_images"] == {"path": str(known), "images": 90, "taken": 32}
    given = {image.tobytes() for image in known_images()[0]}
    assert len(seen[0]) == 32 and {image.tobytes() for image in seen[0].numpy()} <= given
    assert not {image.tobytes() for image in seen[1].numpy()} <= given
    empty = Run(config("ptlf", known, memory__images=None)).train()
    assert [entry["task"] for entry in empty["freezing"]] == [2] and empty["memory_images"] is None


def test_a_policy_without_ratios_freezes_where_weights_are_given(tmp_path: Path) -> None:
    torch.save(tiny_encoder().state_dict(), tmp_path / "w.pt")
    settings = {"freezing__policy": "ascending", "freezing__final": 0.67, "evaluation__gallery": False}
    given = Run(tiny_config(encoder__weights=str(tmp_path / "w.pt"), **settings)).train()
    assert [entry["task"] for entry in given["freezing"]] == [1, 2]
    plain = Run(tiny_config(**settings)).train()
    assert [entry["task"] for entry in plain["freezing"]] == [2]
    # Ratios need images of the past: without them the first task has none.
    settings["freezing__policy"] = "correlation"
    alone = Run(tiny_config(encoder__weights=str(tmp_path / "w.pt"), **settings)).train()
    assert [entry["task"] for entry in alone["freezing"]] == [2]


def test_what_methods_make_of_images_that_are_given(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = filled(Run(config("lump", known, method__mix_first_task=False)))
    assert run.method.memory is not None
    run.method.memory.begin_task()
    assert all(float(run.method.draw(8)["lam"]) < 1 for _ in range(5))
    Run(config("finetune", known)).train()
    assert "method 'finetune' keeps no memory; memory.images is not used" in capsys.readouterr().err


def test_a_stopped_run_needs_the_images_no_more(known: Path, tmp_path: Path) -> None:
    whole = Run(config("ptlf", known), tmp_path / "whole")
    whole.train()
    settings = config("ptlf", known, checkpoint__every_steps=1)
    with pytest.raises(Stopped):
        Run(settings, tmp_path / "stopped").train(StopsAt(2))
    known.unlink()
    resumed = Run(settings, tmp_path / "stopped")
    results = resumed.train(resume=True)
    assert results["memory_images"]["images"] == 90
    for mine, theirs in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_images_that_are_not_there(tmp_path: Path) -> None:
    words = ["train", "--recipe", "digits/simsiam/lump", "--device", "cpu", "--out", tmp_path / "run"]
    for key in ("memory.images", "evaluation.reference"):
        assert "no packed set of that name in" in run_cli(*words, f"--{key}", tmp_path / "none", code=2).err
        assert not (tmp_path / "run").exists()


def test_what_it_knew_is_tested_before_and_after_every_task(known: Path, tmp_path: Path) -> None:
    settings = config("finetune", known, memory__images=None, evaluation__reference=str(known))
    run = Run(settings, tmp_path / "run")
    results = run.train()
    reference = results["reference"]
    assert reference["classes"] == ["7", "8", "9"] and (reference["bank"], reference["test"]) == (73, 17)
    found = reference["probes"]["knn_class"]
    assert len(found["after"]) == 2 and found["accuracy"] == found["after"][-1]
    assert found["lost"] == pytest.approx(found["before"] - found["after"][-1])
    # An independent kNN on the features of the trained encoder: every fifth image of a class is a test image.
    images, labels = known_images()
    run.model.encoder.eval()
    with torch.no_grad():
        features = run.model.encoder(run.components.prepare(torch.from_numpy(images))).numpy()
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    place = np.array([(labels[: i + 1] == label).sum() for i, label in enumerate(labels)])
    test = place % 5 == 0
    temperature = settings.probes["knn_class"].temperature  # type: ignore[attr-defined]
    judge = KNeighborsClassifier(5, weights=lambda d: np.exp((1 - d**2 / 2) / temperature), metric="euclidean")
    judge.fit(features[~test], labels[~test])
    assert found["accuracy"] == pytest.approx(100 * judge.score(features[test], labels[test]))


def test_the_reference_changes_nothing_that_is_trained(known: Path) -> None:
    with_it, without = (
        Run(config("lump", known, memory__images=None, evaluation__reference=path)) for path in (str(known), None)
    )
    assert with_it.train()["probes"] == without.train()["probes"]
    for mine, theirs in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_encoder_that_forgets_is_warned_of_in_the_first_epoch(
    known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"memory__images": None, "evaluation__reference": str(known), "training__epochs": 2}
    run = Run(config("finetune", known, **settings))
    rows = iter([{"knn_class": [90.0]}, {"knn_class": [75.0]}, {"knn_class": [20.0]}])  # of 17 images: not sure, sure
    assert run.components.reference is not None
    last: dict[str, list[float]] = {}
    run.components.reference.rows = lambda *_: last.update(next(rows, {})) or dict(last)  # type: ignore[method-assign]
    run.train()
    printed = capsys.readouterr().err
    place = "in task 2, epoch 1: knn_class on 17 images of what it knew fell from 90.0 to 20.0 %"
    assert printed.count("the encoder is worse than before training") == printed.count(place) == 1


def test_a_reference_without_labels(known: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", known_images(6)[0])
    with pytest.raises(UserError, match=r"plain\.npy has no labels"):
        Run(config("finetune", known, evaluation__reference=str(tmp_path / "plain.npy")))


def test_tables_and_page_show_it(known: Path, tmp_path: Path) -> None:
    words = ["train", "--recipe", "digits/simsiam/finetune", "--stream.groups", "[[0, 1], [2, 3]]", "--device", "cpu"]
    words += ["--training.epochs", "1", "--probes.knn_class.k", "5", "--evaluation.reference", str(known)]
    said = run_cli(*words, "--encoder.name", "conftest:tiny_encoder", "--out", tmp_path / "run").out.splitlines()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    found = results["reference"]["probes"]["knn_class"]
    for moment, value in (("start", found["before"]), ("end", found["accuracy"])):
        assert any(f"knew before, at the {moment}" in line and f"{value:.2f}" in line for line in said), moment
    assert any(f"{found['after'][1]:.2f}" in line for line in said if "│ task 2" in line)
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="known-knn_class"' in page and "What it knew before" in page
    assert f'data-measure="reference.probes.knn_class.accuracy" data-value="{found["accuracy"]}"' in page
