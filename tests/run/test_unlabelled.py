"""A stream without labels: what can be seen of it, and labels that come later."""

import hashlib
import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_cli, tiny_config
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import ptlf
from ptlf.core.errors import UserError
from ptlf.core.phases import Watcher
from ptlf.evaluation import gallery
from ptlf.evaluation.metrics import effective_rank
from ptlf.report.figures import tasks_of_splits
from ptlf.report.tables import show_results
from ptlf.run.config import from_dict, read_yaml
from ptlf.run.loop import Run
from ptlf.stream.packing import pack_folder
from ptlf.stream.task import digits


def save_digits(folder: Path, labels: list[int], start: int, count: int, *, by_class: bool) -> None:
    data = digits()
    for label in labels:
        place = folder / str(label) if by_class else folder
        place.mkdir(parents=True, exist_ok=True)
        for index in np.flatnonzero(data.train.labels == label)[start : start + count]:
            Image.fromarray(data.train.pixels[index]).save(place / f"{label}-{index:04}.png")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two days of unlabelled digits, packed in `data`, and labelled digits in a folder."""
    root = tmp_path_factory.mktemp("world")
    save_digits(root / "days" / "monday", [0, 1], 0, 40, by_class=False)
    save_digits(root / "days" / "tuesday", [2, 3], 0, 40, by_class=False)
    pack_folder(root / "days", root / "data", "days", size=16, folders="tasks", workers=1, progress=False)
    save_digits(root / "labelled" / "train", [0, 1, 2, 3], 40, 30, by_class=True)
    save_digits(root / "labelled" / "test", [0, 1, 2, 3], 80, 10, by_class=True)
    words = ["train", "--recipe", "folder/simsiam/lump", "--stream.pack", "days", "--data-root", str(root / "data")]
    words += ["--encoder.name", "conftest:tiny_encoder", "--training.epochs", "2", "--training.batch", "40"]
    run_cli(*words, "--training.lr", "0.03", "--device", "cpu", "--out", root / "run")
    return root


def test_features_are_measured_after_each_task(tmp_path: Path) -> None:
    run = Run(tiny_config(training__epochs=1, evaluation__gallery=False), tmp_path / "run")
    results = run.train()
    assert [entry["task"] for entry in results["features"]] == [1, 2]
    last, indices = results["features"][-1], run.stream.tasks[-1].train
    images = torch.from_numpy(run.stream.data.train.pixels[indices])
    assert last["images"] == len(images) <= 512
    run.model.encoder.eval()
    with torch.no_grad():
        features = run.model.encoder(run.components.prepare(images))
    assert last["effective_rank"] == pytest.approx(effective_rank(features), rel=1e-4)
    page = page_of(tmp_path / "run")  # which speaks of classes
    assert 'class="features"' not in page and "accuracy is not known" not in page
    assert Run(tiny_config(training__epochs=1, evaluation__enabled=False)).train()["features"] == []


def test_the_record_and_the_page_of_an_unlabelled_stream(world: Path) -> None:
    results = json.loads((world / "run" / "results.json").read_text())
    assert results["probes"] == {} and len(results["features"]) == 2
    assert all(1 <= entry["effective_rank"] <= 16 and 0 < entry["spread"] < 1 for entry in results["features"])
    pictures = json.loads((world / "run" / "gallery.json").read_text())
    assert pictures["labelled"] is False and pictures["labels"] == ["monday", "tuesday"]
    page = (world / "run" / "report.html").read_text()
    assert "same class" not in page
    header = page[page.index("<header>") : page.index("</header>")]
    assert "no labelled test images: its accuracy is not known" in header
    assert f"<code>ptlf evaluate {world / 'run'} --stream.labelled FOLDER</code>" in page
    assert "better to the right" not in page
    table = page[page.index('<table class="features">') :].split("</table>")[0]
    assert "task 1, monday" in table and "task 2, tuesday" in table
    for entry in (*results["features"], *results["untrained_features"]):
        assert f">{entry['effective_rank']:.3g}<" in table and f">{entry['spread']:.3g}<" in table


def test_the_gallery_takes_a_sample(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "UNLABELLED_POOL", 30)
    recipe = {"stream__groups": None, "stream__pack": "days", "data_root": str(world / "data")}
    recipe |= {"evaluation__gallery": True}
    run = Run(tiny_config("folder/simsiam/finetune", **recipe, training__batch=40), world / "other")
    assert run.components.gallery is not None
    run.components.gallery.read()
    assert len(run.components.gallery.pixels) == 30
    assert np.bincount(run.components.gallery.groups).tolist() == [15, 15]


def accuracy_by_hand(run: Path, labelled: Path, k: int, module: nn.Module | None = None) -> float:
    """With scikit-learn, on what `load_encoder` gives. module: in place of the trained one."""
    encoder = ptlf.load_encoder(run, device="cpu", trust_code=True)
    encoder.module = encoder.module if module is None else module.eval().requires_grad_(False)
    parts = {}
    for split in ("train", "test"):
        files = sorted((labelled / split).rglob("*.png"))
        features = encoder.embed(files)
        parts[split] = features / np.linalg.norm(features, axis=1, keepdims=True), [file.parent.name for file in files]
    judge = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d**2 / 2) / 0.1))
    return 100 * judge.fit(*parts["train"]).score(*parts["test"])


@pytest.mark.parametrize("form", ["folder", "name"])
def test_labels_that_come_later(world: Path, form: str, tmp_path: Path) -> None:
    where, run = world / "labelled", Path(shutil.copytree(world / "run", tmp_path / "run"))
    if form == "name":
        where = pack_folder(where, tmp_path, "later", size=16, workers=1, progress=False).path
    words = ["evaluate", run, "--probe", "knn_class", "--stream.labelled", "later" if form == "name" else where]
    words += ["--data-root", tmp_path, "--device", "cpu", "--trust-code"]  # the run's own images are not there
    words += ["--probes.knn_class.k", "5", "--probes.knn_class.temperature", "0.1"]
    said = run_cli(*words).out
    expected = accuracy_by_hand(run, world / "labelled", 5)
    assert f"{expected:.2f}" in said and expected > 50
    before = Run(from_dict(read_yaml(run / "config.yaml"))).model.encoder
    (line,) = [line for line in said.splitlines() if "nothing (encoder before training)" in line]
    assert f"{accuracy_by_hand(run, world / 'labelled', 5, before):.2f}" in line
    run_cli(*words)
    (kept,) = json.loads((run / "evaluations.json").read_text())  # the second test, the same, replaced the first
    assert kept["probes"]["knn_class"]["accuracy"] == pytest.approx(expected) and kept["tasks"] == 2
    page = page_of(run)
    assert kept["verdict"] in " ".join(said.split()) and kept["verdict"] in html.unescape(page)
    assert "accuracy is not known" not in page
    table = page.partition("<h3>Labels that came later</h3>")[2].partition("</table>")[0]
    assert f">{expected:.2f}</td>" in table and f">40 of {where.name}</td>" in table


def test_images_of_no_task_are_tested_among_all_classes(world: Path, tmp_path: Path) -> None:
    run = shutil.copytree(world / "run", tmp_path / "run")
    words = ["evaluate", run, "--trust-code", "--stream.labelled", world / "labelled"]
    cases = (
        ([], ["knn_class"], "k = 10, 40 test images, bank"),
        (["linear"], ["linear"], ""),
        (["knn_task"], ["knn_task"], "k = 10, 40 test images, bank"),
    )
    for chosen, rows, k in cases:  # k: capped at the smallest class's images
        said = run_cli(*words, *(["--probe", *chosen] if chosen else []))
        assert re.findall(r"^(\w+): accuracy in %", said.out, re.M) == rows
        assert k in said.out


@pytest.mark.parametrize("text", ["[", '[{"date": "", "tasks": 1, "images": "", "sha256": ""}]'])
def test_a_damaged_file_of_later_tests_breaks_no_page(world: Path, tmp_path: Path, text: str) -> None:
    run = Path(shutil.copytree(world / "run", tmp_path / "run"))
    (run / "evaluations.json").write_text(text)
    assert "its accuracy is not known" in page_of(run)


def page_of(run: Path) -> str:
    run_cli("report", run)
    return (run / "report.html").read_text()


def test_columns_are_tested_all_together_on_images_of_no_task(world: Path, tmp_path: Path) -> None:
    """Labelled images of the run's stream, those that say what the encoder knew, and those that come later."""
    where = world / "labelled"
    shutil.copytree(world / "data", tmp_path / "data")
    pack_folder(where, tmp_path / "data", "later", size=16, workers=1, progress=False)
    settings = {"stream__name": "folder", "stream__pack": "days", "stream__groups": None, "stream__labelled": "later"}
    settings |= {"data_root": str(tmp_path / "data"), "method__name": "pnn", "encoder__name": "conftest:tiny_resnet"}
    settings |= {"probes__knn_task": {"k": 5, "temperature": 0.1}, "evaluation__reference": str(where)}
    results = Run(tiny_config(training__batch=40, **settings), tmp_path / "run").train()
    expected = pytest.approx(accuracy_by_hand(tmp_path / "run", where, 5))
    assert results["probes"]["knn_task"]["matrix"][-1] == [expected]
    assert results["reference"]["probes"]["knn_task"]["accuracy"] == expected
    learner = ptlf.Learner.load(tmp_path / "run", trust_code=True)
    assert learner.evaluate(["knn_task"], where)["knn_task"]["accuracy"] == expected


def test_features_of_the_untrained_encoder_stand_beside_those_of_each_task(world: Path, tmp_path: Path) -> None:
    """Whether the days are known from the start or arrive one by one."""
    results = json.loads((world / "run" / "results.json").read_text())
    untrained = results["untrained_features"]
    assert [entry["task"] for entry in untrained] == [1, 2]
    run = Run(from_dict(read_yaml(world / "run" / "config.yaml")))  # as it was before training
    run.model.encoder.eval()
    for entry, task in zip(untrained, run.stream.tasks, strict=True):
        images = torch.from_numpy(np.array(task.images.pixels[task.train]))
        with torch.no_grad():
            features = run.model.encoder(run.components.prepare(images))
        assert entry["images"] == len(features) == 80
        assert entry["effective_rank"] == pytest.approx(effective_rank(features), rel=1e-4)
    words = ["--size", "16", "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "2", "--device", "cpu"]
    for day, chosen in {"monday": [*words, "--training.batch", "40"], "tuesday": []}.items():
        run_cli("learn", tmp_path / "days", world / "days" / day, *chosen, "--trust-code")
    assert json.loads((tmp_path / "days" / "results.json").read_text())["untrained_features"] == untrained


def test_the_learner_refuses_the_same_settings(world: Path, tmp_path: Path) -> None:
    learner = ptlf.Learner.load(world / "run", trust_code=True)
    for given in ({"seed": 7}, {"training": {"lr": 1}}, {"encoder.name": "resnet18"}, {"stream": {"tasks": 1}}):
        with pytest.raises(UserError, match=r"changes the probes only; leave out (seed|training.lr|enc|stream.tasks)"):
            learner.evaluate(labelled=world / "labelled", **given)
    pack_folder(world / "labelled", tmp_path, "later", size=16, workers=1, progress=False)
    settings = {"probes.knn_class.k": 5, "device": "cpu", "evaluation.batch": 7}
    one = learner.evaluate(["knn_class"], world / "labelled", **settings)
    other = learner.evaluate(["knn_class"], **settings, data_root=str(tmp_path), stream={"labelled": "later"})
    assert one["knn_class"]["matrix"] == other["knn_class"]["matrix"]


def test_an_encoder_that_training_made_worse_is_named(world: Path, tmp_path: Path) -> None:
    """Here one whose features are all the same."""
    shutil.copytree(world / "run", tmp_path / "run")
    file = tmp_path / "run" / "encoder.safetensors"
    with safe_open(file, "pt") as stored:
        about = stored.metadata()
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file, about)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    results["encoder_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    words = ["--trust-code", "--stream.labelled", world / "labelled", "--probe", "knn_class"]
    points = r"worse by [\d.]+ ± [\d.]+ points"
    pattern = rf"training made knn_class {points}: ([\d.]+) % before \(encoder before training\), 25\.00 % after"
    (before,) = re.findall(pattern, run_cli("evaluate", tmp_path / "run", *words).out)
    assert float(before) > 50


def test_broken_images_of_a_labelled_folder_are_skipped_on_request(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "labelled", tmp_path / "labelled")
    for split in ("train", "test"):
        (tmp_path / "labelled" / split / "1" / "broken.png").write_bytes(b"no pixels")
    words = ["evaluate", world / "run", "--trust-code", "--probe", "knn_class", "--device", "cpu", "--stream.labelled"]
    whole = [line for line in run_cli(*words, world / "labelled").out.splitlines() if "tasks" in line]
    told = run_cli(*words, tmp_path / "labelled", code=2).err
    assert "broken.png cannot be used: not an image in a known format; repair or remove it, or give --on-error" in told
    said = run_cli(*words, tmp_path / "labelled", "--on-error", "skip")
    assert [line for line in said.out.splitlines() if "tasks" in line] == whole
    assert "labelled: skipped 2, of 162 images:" in said.err and "train/1/broken.png: not an image" in said.err


@pytest.mark.parametrize("missing", [0, 1])
def test_a_task_without_test_images_is_learnt_and_not_tested(missing: int, tmp_path: Path, capsys) -> None:
    """As test images the first six of each class but those of one task. Views are larger than the images."""
    data, groups = digits(), [[0, 1], [2, 3], [4, 5]]
    rows = [index for label in range(6) for index in np.flatnonzero(data.train.labels == label)[:20]]
    tests = [index for label in range(6) for index in np.flatnonzero(data.test.labels == label)[:6]]
    tests = [index for index in tests if data.test.labels[index] not in groups[missing]]
    parts = ((data.train, rows), (data.test, tests))
    train, test = ([(split.pixels[i], int(split.labels[i])) for i in part] for split, part in parts)
    ptlf.pack_images(train, tmp_path / "data" / "six", 16, test=test, progress=False)
    settings = {"stream__name": "folder", "stream__pack": "six", "stream__groups": groups, "views__size": 20}
    settings |= {"data_root": str(tmp_path / "data"), "training__batch": 40, "training__epochs": 1}
    results = Run(tiny_config(**settings), tmp_path / "run").train()
    told = capsys.readouterr().err
    names = ["0, 1", "2, 3", "4, 5"]
    tested = [number for number in range(3) if number != missing]
    assert results["eval_splits"] == [names[number] for number in tested]
    for values in results["probes"].values():
        expected = [[after >= number for number in tested] for after in range(3)]
        assert [[value is not None for value in row] for row in values["matrix"]] == expected
        assert values["accuracy"] is not None and values["forgetting"] is not None
    assert told.count(f"no test images of ['{names[missing]}']: these tasks are learnt, but not tested") == 1
    run_cli("evaluate", "--trust-code", tmp_path / "run")
    run_cli("report", tmp_path / "run")
    assert tasks_of_splits(json.loads((tmp_path / "run/results.json").read_text())) == [n + 1 for n in tested]


def test_rows_are_of_the_tasks_that_were_learnt(tmp_path: Path) -> None:
    """Of which the first had no labels: the table begins with the second."""
    for task in (1, 3):
        save_digits(tmp_path / f"t{task}", [task], 0, 12, by_class=False)
    for task, labels in ((2, [4, 5]), (4, [6, 7])):
        save_digits(tmp_path / f"l{task}" / "train", labels, 0, 12, by_class=True)
        save_digits(tmp_path / f"l{task}" / "test", labels, 20, 5, by_class=True)
    learner = ptlf.Learner.new(tiny_config(training__epochs=1, training__batch=10), tmp_path / "run", 16)
    for name in ("t1", "l2", "t3", "l4"):
        results = learner.learn(tmp_path / name, watcher=Watcher())
    for values in results["probes"].values():
        tested = [[value is not None for value in row] for row in values["matrix"]]
        assert tested == [[False, False], [True, False], [True, False], [True, True]]
    show_results(console := Console(width=120, record=True), results, "run")
    table = console.export_text()
    assert "task 1, t1" not in table and all(words in table for words in ("task 2, l2", "task 3, t3", "task 4, l4"))
