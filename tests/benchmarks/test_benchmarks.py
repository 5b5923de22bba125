"""The benchmarks: figures by hand, and the scripts on runs of seconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import QUICK
from PIL import Image

from benchmarks import cpu, freezing, frontier, methods, step
from benchmarks import run as side_by_side
from benchmarks.run import compare
from ptlf.core.errors import UserError
from ptlf.run.build import make_stream
from ptlf.run.loop import Run
from ptlf.run.results import SCHEMA, epoch_lines, to_columns

pytestmark = pytest.mark.slow

PAIR = ["digits/simsiam/lump", "digits/simsiam/ptlf"]


def epoch(task: int, frozen: int, steps: int, seconds: float, kept: int, peak: int | None) -> dict[str, Any]:
    cost = {"seconds": seconds, "views_per_second": 20 * steps / seconds, "kept_bytes": kept}
    place = {"task": task, "epoch": 1, "frozen": frozen, "steps": steps, "backward_flops": 1}
    return {**place, "peak_memory_bytes": peak, **cost}


def made(recipe: str, epochs: list[dict[str, Any]], per_task: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {name: {"name": "x"} for name in ("stream", "objective", "encoder", "method")}
    config |= {"freezing": {"policy": {"name": "none"}}, "training": {"epochs": 4}}
    seconds = dict.fromkeys(("train_seconds", "correlation_seconds", "rebuild_seconds", "eval_seconds"), 1.5)
    return {
        "schema": SCHEMA, "name": recipe, "config": {"recipe": recipe, **config},
        **{name: [] for name in ("class_order", "eval_splits", "units", "freezing")},
        "environment": {"device_name": "GPU"}, "commit": None, "status": "finished", "tasks": ["a", "b"],
        "probes": {"knn_task": {"settings": {}, "matrix": [], "accuracy": 90.0, "forgetting": 1.0}},
        "cost": {**seconds, "backward_flops": 1, "per_epoch": to_columns(epochs), "per_task": per_task}, **more,
    }  # fmt: skip


def spent(*tasks: tuple[float, float, float]) -> list[dict[str, Any]]:
    names = ("train_seconds", "correlation_seconds", "rebuild_seconds")
    return [{"task": n, **dict(zip(names, seconds, strict=True))} for n, seconds in enumerate(tasks, start=1)]


def first() -> dict[str, Any]:
    lines = [epoch(1, 0, 10, 1.0, 100, 200), epoch(2, 0, 10, 2.0, 100, 200), epoch(2, 0, 10, 4.0, 100, 240)]
    return made("s/o/lump", lines, spent((1.0, 0.0, 3.0), (6.0, 0.0, 2.0)), wall_seconds=20.0, host_share=0.1)


def second() -> dict[str, Any]:
    frozen = [epoch(2, 3, 10, 1.0, 40, 100), epoch(2, 3, 10, 1.2, 60, 120), epoch(2, 3, 20, 3.8, 80, 110)]
    lines = [epoch(1, 0, 10, 1.1, 100, 200), epoch(2, 0, 10, 3.0, 100, 240), *frozen]
    return made("s/o/ptlf", lines, spent((1.1, 0.0, 3.0), (9.0, 2.0, 1.0)), wall_seconds=25.0, host_share=None)


def refused(capsys, script, *words: str) -> str:
    assert script.main(words) == 2
    return capsys.readouterr().err


def test_stages_and_overheads_by_hand() -> None:
    lump, ptlf = (run["stages"] for run in compare([first(), second()])["runs"])
    assert [row["stage"] for row in lump] == ["first task", "0 frozen"]
    assert [row["stage"] for row in ptlf] == ["first task", "0 frozen", "3 frozen"]
    assert [row["step_ms_ratio"] for row in lump] == [1, 1]
    assert [row["step_ms_ratio"] for row in ptlf] == pytest.approx([1.1, 1.0, 0.5])
    assert ptlf[2] == {
        "stage": "3 frozen",
        "epochs": 3,
        "steps": 40,
        "step_ms": pytest.approx(150),  # 6 s in 40 steps; LUMP's second task took 300
        "step_ms_ratio": pytest.approx(0.5),
        "median_step_ms": pytest.approx(120),  # of 100, 120, 190; LUMP's of 200, 400
        "median_step_ms_ratio": pytest.approx(0.4),
        "views_per_second": pytest.approx(800 / 6),
        "kept_bytes": 60,
        "kept_bytes_ratio": 0.6,
        "peak_memory_bytes": 120,
        "peak_memory_bytes_ratio": 0.5,
    }
    lump, ptlf = (run["overheads"] for run in compare([first(), second()])["runs"])
    wanted = {"later_learning_seconds": 8, "later_correlation_share": 0, "host_share": 0.1}
    assert {key: lump[key] for key in wanted} == wanted
    wanted = {"later_learning_seconds": 12, "later_correlation_share": pytest.approx(1 / 6), "host_share": None}
    wanted |= {"later_learning_seconds_ratio": 1.5, "wall_seconds_ratio": 1.25, "knn_task_accuracy": 90}
    wanted |= {"knn_class_forgetting": None, "train_seconds": 1.5, "checkpoint_seconds": None}
    assert {key: ptlf[key] for key in wanted} == wanted


def test_waiting_for_the_compiler_changes_no_ratio() -> None:
    """LUMP's first epoch takes 7 s longer than the like one after it; the stage's own step and the whole run tell."""
    lump, ptlf = first(), second()
    for run, wait in ((lump, 7.0), (ptlf, 0.0)):
        lines = epoch_lines(run)
        again = lines[0] | {"epoch": 2}
        run["cost"]["per_epoch"] = to_columns([lines[0] | {"seconds": lines[0]["seconds"] + wait}, again, *lines[1:]])
        run["wall_seconds"] += wait
    found = compare([lump, ptlf])["runs"]
    assert found[0]["stages"][0]["step_ms"] == pytest.approx(450)  # 8 s and 1 s, 10 steps each
    assert [run["stages"][0]["step_ms_ratio"] for run in found] == pytest.approx([1.0, 1.1])
    assert [run["stages"][0]["median_step_ms_ratio"] for run in found] == pytest.approx([1.0, 1.1])
    assert found[0]["overheads"]["wall_seconds"] == 27
    assert found[1]["overheads"]["wall_seconds_ratio"] == 1.25


def test_runs_side_by_side_and_again_from_their_folders(capsys, tmp_path) -> None:
    out, file = tmp_path / "runs", tmp_path / "new.json"
    words = ["--recipes", *PAIR, *QUICK, "--training.epochs", "2", "--out", str(out), "--json", str(file)]
    assert side_by_side.main(words) == 0
    shown = capsys.readouterr().out
    for text in ("warming up", f"{PAIR[1]}: 2 tasks", "first task", "0 frozen", "1 frozen", "of it correlation"):
        assert text in shown, text
    found = json.loads(file.read_text())["runs"]
    assert [one["run"] for one in found] == PAIR
    for one in found:
        assert one["overheads"]["wall_seconds"] > one["overheads"]["later_learning_seconds"] > 0
        assert sum(row["steps"] for row in one["stages"]) == 12
    assert found[1]["stages"][-1]["kept_bytes_ratio"] < 1
    folders = [str(out / f"{number}-{recipe.replace('/', '-')}") for number, recipe in enumerate(PAIR, start=1)]
    assert side_by_side.main(["--from", *folders, "--json", str(file)]) == 0
    again = json.loads(file.read_text())["runs"]
    assert [one["stages"] for one in again] == [one["stages"] for one in found]
    assert again[0]["overheads"]["wall_seconds"] is None
    assert "already holds runs" in refused(capsys, side_by_side, *words)


def test_noise_needs_no_data(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PTLF_DATA", str(tmp_path))
    recipe = "split-cifar10/simsiam/lump"
    small = [*QUICK[2:6], *QUICK[8:], "--size", "8", "--training.batch", "4", "--objective.projection", "8"]
    assert side_by_side.main(["--recipes", recipe, "--noise", "20", *small, "--memory.size", "4"]) == 0
    assert f"{recipe}: 5 tasks, 20 images of 8 px" in capsys.readouterr().out


def test_runs_that_cannot_be_compared(capsys, tmp_path) -> None:
    for words, told in (
        (["--recipes", "digits/simsiam/lumpy"], "unknown recipe 'digits/simsiam/lumpy'"),
        (["--recipes", PAIR[0], "digits/simsiam/multitask", *QUICK], "the runs have 2, 1 tasks; only runs with"),
        (["--recipes", PAIR[0], "split-cifar10/simsiam/ptlf", *QUICK], "different streams (name: digits and split-c"),
        (["--from", str(tmp_path)], "holds no results.json"),
        (["--from", str(tmp_path), "--seed", "1"], "leave out --seed"),
        (["--recipes", *PAIR, "--from", str(tmp_path)], "leave out --recipes"),
        (["--size", "16"], "--size is of --noise images"),
    ):
        assert told in refused(capsys, side_by_side, *words), words
    (tmp_path / "results.json").write_text(json.dumps({**second(), "seed": 0, "status": "stopped"}))
    assert "has not finished" in refused(capsys, side_by_side, "--from", str(tmp_path))
    runs = [first(), second()]
    runs[1]["config"] |= {"training": {"epochs": 8}}
    with pytest.raises(UserError, match=r"different epochs \(training.epochs: 4 and 8\)"):
        compare(runs)


STEP = ["--recipe", PAIR[0], *QUICK[2:4], "--size", "8", "--steps", "1", "--training.batch", "16", "--device", "cpu"]


def test_steps_by_stage(tmp_path: Path, capsys) -> None:
    figures = tmp_path / "step.json"
    for way in ("resident", "streamed", "first"):
        words = [*STEP, *[f"--{way}"] * (way != "resident")]
        assert step.main([*words, "--stages", "0", "1", "--json", str(figures)]) == 0
        record = json.loads(figures.read_text())
        plain, frozen = record["rows"]
        assert frozen["units"] == (["0"] if way == "first" else ["3"]), way
        assert (record["first"], record["streamed"], record["plain"]) == (way == "first", way == "streamed", False)
        assert plain["kept_bytes"] > frozen["kept_bytes"] and plain["backward_flops"] > frozen["backward_flops"], way
    assert step.main([*STEP, "--stages", "2", "--profile", str(tmp_path / "traces"), "--json", str(figures)]) == 0
    assert [file.name for file in (tmp_path / "traces").iterdir()] == ["frozen-2.json.gz"]
    (row,) = json.loads(figures.read_text())["rows"]
    assert [kernel["ms"] for kernel in row["kernels"]] == sorted((k["ms"] for k in row["kernels"]), reverse=True)
    assert row["kernels"][0]["name"][:20] in capsys.readouterr().out
    error = refused(capsys, step, "--recipe", PAIR[0], "--size", "8", "--stages", "0", "20")
    assert "--stages names 20 frozen units, but resnet18-mini has 9" in error


def test_methods_side_by_side(capsys, tmp_path) -> None:
    """In the second task, where CaSSLe has a previous model to encode with; multitask has only one task."""
    recipes = [f"digits/simsiam/{method}" for method in ("lump", "cassle", "multitask")]
    words = [*QUICK[2:4], "--training.batch", "8", "--steps", "2", "--size", "8", "--device", "cpu"]
    assert methods.main([*recipes, *words, "--json", str(tmp_path / "m.json")]) == 0
    assert "A step in task 2" in capsys.readouterr().out
    rows = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == recipes
    lump, cassle, multitask = (row["backward_flops"] for row in rows)
    assert cassle > lump == multitask  # the predictor's backward


def test_a_step_on_a_cpu_beside_plain_pytorch(capsys, tmp_path) -> None:
    """The plain loop trains the same network on views of the same kind; shares are of ours in float32."""
    assert cpu.main(["--encoders", "resnet18-mini", "--rounds", "1", "--json", str(tmp_path / "cpu.json")]) == 0
    assert "plain PyTorch, float32" in capsys.readouterr().out
    rows = {row["step"]: row for row in json.loads((tmp_path / "cpu.json").read_text())["rows"]}
    base = rows["ours, float32"]["step_ms"]
    assert all(row["share"] == pytest.approx(row["step_ms"] / base) for row in rows.values())
    draws, image = np.random.default_rng(0), Image.new("RGB", (32, 32), (255, 128, 0))
    view = cpu.crop_and_flip(image, draws, 0.08)
    assert view.shape == (32, 32, 3) and view.dtype == np.float32
    assert np.allclose(view, (np.float32([1, 128 / 255, 0]) - cpu.MEAN) / cpu.STD, atol=1e-5)
    assert len({cpu.augment(image, draws).tobytes() for _ in range(8)}) > 4  # colours differ from draw to draw


def test_a_warm_up_meets_all_that_the_run_will(tiny, monkeypatch) -> None:
    """Both batch sizes, with nothing frozen and with everything that will be."""
    runs = []

    class Kept(Run):
        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named)
            engine = self.trainer.engine
            plain, self.seen = engine.body, set()
            engine.body = lambda batch: self.seen.add((len(batch), len(self.freezing.freezer.frozen))) or plain(batch)
            runs.append(self)

    monkeypatch.setattr(side_by_side, "Run", Kept)
    config = tiny("digits/simsiam/ptlf", freezing__final=0.67, training__epochs=5, training__batch=16)
    stream = make_stream(config)
    side_by_side.warm_up(config, stream, batches=2)
    rests = [len(task.train) % 16 for task in stream.tasks]
    assert all(rests)
    assert runs[0].seen == {(16, 0), (rests[0], 0), (16, 2), (rests[1], 2)}


def test_what_cannot_work_is_refused_before_the_work(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("0001.jpg").write_text("a photograph")
    share = [PAIR[0], "--out", str(tmp_path), "--plan", "--initial"]
    wrong = [
        (step, ["--json", "none/x.json"], "argument --json: there is no folder"),
        (side_by_side, ["--json", "0001.jpg"], "argument --json: must name a file that ends with .json"),
        *((frontier, [*share, value], "argument --initial: must be a number") for value in ("nan", "1.5", "much")),
        (freezing, ["--size", "100000"], "argument --size: must be "),
        (side_by_side, ["--noise", "1" + "0" * 20], "argument --noise: must be "),
    ]
    for script, words, told in wrong:
        with pytest.raises(SystemExit):
            script.main(words)
        assert told in capsys.readouterr().err, (script, words)
    for script, words in (
        (freezing, ["--batch", "1000000", "--size", "1000"]),
        (freezing, ["--encoder", "torch.nn:Identity"]),
        (step, ["--training.batch", "4000000000"]),
        (side_by_side, ["--noise", "1000000000"]),
    ):
        error = refused(capsys, script, *words)
        assert error.startswith("ptlf: ") and error.count("\n") == 1, (script, words)
