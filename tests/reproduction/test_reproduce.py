"""The paper's tables: what they ask for, which kept runs answer, and the command that makes the rest."""

import itertools
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from conftest import tiny_config

import reproduction.__main__ as command
from ptlf.core.settings import as_dict
from ptlf.report.live import Live
from ptlf.run.compat import identity_key
from ptlf.run.recipes import resolve_config
from ptlf.run.results import write_json
from reproduction import runs as found_runs
from reproduction.__main__ import main
from reproduction.runs import KEPT, SCALES, kept_runs, make_plan, scale_settings, wanted
from reproduction.tables import FIGURES, TABLES, Cell, Table

QUICK = [
    "--stream.groups=[[0, 1], [2, 3]]", "--encoder.name=conftest:tiny_encoder", "--training.epochs=1",
    "--training.batch=128", "--device=cpu",
]  # fmt: skip
LUMP, PTLF = Cell("LUMP", "digits", "digits/simsiam/lump", {"accuracy": 50.0}), "digits/simsiam/ptlf"
TINY = Table(
    "Tiny",
    ("accuracy", "forgetting", "flops"),
    (LUMP, Cell("PTLF", "digits", PTLF, {"flops": 0.5}, ("--freezing.final=0.7",), baseline=LUMP.recipe)),
)


def test_the_main_table_is_the_paper_s_and_every_cell_a_run() -> None:
    """48 cells with accuracies; forgetting for all but the rows that have none."""
    printed = [cell.paper for cell in TABLES["main"].cells if cell.paper]
    assert len(printed) == 48
    assert sum("forgetting" in paper for paper in printed) == 36
    # Sums over the table as printed.
    assert sum(paper["accuracy"] for paper in printed) == pytest.approx(3816.99)
    assert sum(paper.get("forgetting", 0.0) for paper in printed) == pytest.approx(178.94)
    cells = TABLES["main"].cells
    assert all(cell.spread.keys() == cell.paper.keys() for cell in cells)
    assert sum(sum(cell.spread.values()) for cell in cells) == pytest.approx(63.64)
    for scale, table in itertools.product(SCALES, [*TABLES.values(), FIGURES]):
        places = [(cell.row, cell.column) for cell in table.cells]
        assert len(set(places)) == len(places), table.title
        for cell in table.cells:
            config = resolve_config(cell.recipe, None, [*scale_settings(scale, cell.recipe), *cell.settings])
            assert (config.training.epochs in (200, 400)) == (scale == "paper"), (scale, cell)
            if cell.baseline:
                resolve_config(cell.baseline, None, scale_settings(scale, cell.baseline))


RECORD = json.loads((KEPT / "digits" / "lump" / "results.json").read_text())


def keep(folder: Path, config: dict, status: str = "finished") -> Path:
    """A complete record of a run with these settings."""
    folder.mkdir(parents=True)
    record = RECORD | {"status": status, "seed": config["seed"], "config": config}
    record["cost"] = RECORD["cost"] | {"per_epoch": {}}
    write_json(folder / "results.json", record)
    return folder


def kept_like(**dotted: object) -> dict:
    return as_dict(tiny_config("digits/simsiam/lump", **dotted))


def test_runs_are_found_by_their_settings(tmp_path: Path) -> None:
    """The machine and what is written beside the results do not matter; keys that a record lacks have their default."""
    wanted = identity_key(kept_like())
    old = kept_like(device="cuda", data_root="/elsewhere", stream__resident=False, evaluation__gallery=False, seed=3)
    del old["freezing"]["save_memory"], old["distributed"], old["checkpoint"]
    same = keep(tmp_path / "same" / "deeper", old | {"recipe": "another/recipe/name"})
    keep(tmp_path / "rate", kept_like(training__lr=0.01))
    keep(tmp_path / "views", kept_like(views__size=24))
    keep(tmp_path / "unknown", kept_like() | {"gone": 1})
    keep(tmp_path / "running", kept_like(), status="running")
    keep(tmp_path / "code", kept_like(encoder__name="conftest:tiny_resnet"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    found = kept_runs([tmp_path], ["--encoder.name=conftest:tiny_encoder"])
    assert len(found) == 3, "no code is followed that the user has not named"
    assert {seed: [one.folder for one in some] for seed, some in found[wanted].items()} == {3: [same]}
    lacking = kept_like()
    lacking["freezing"] = {key: value for key, value in lacking["freezing"].items() if key != "final"}
    assert identity_key(kept_like(freezing__final=0.5)) not in kept_runs(
        [keep(tmp_path / "final", lacking)], ["conftest:tiny_encoder"]
    )


def test_a_plan_takes_the_recipe_s_own_runs_each_seed_once_and_the_cheapest_first(tmp_path: Path) -> None:
    plan = make_plan([TINY], "paper", [0, 0], tmp_path / "runs", QUICK, [tmp_path])
    assert sorted(run.name for run in plan.missing) == sorted(cell.name for cell in wanted([TINY]).values())
    words = [*scale_settings("paper", LUMP.recipe), *QUICK]
    config = as_dict(resolve_config(LUMP.recipe, None, words))
    for folder, change in (("a", {"recipe": "other"}), ("b", {}), ("c", {}), ("d", {"seed": 5})):
        keep(tmp_path / folder, config | change)
    plan = make_plan([TINY], "paper", [0, 1], tmp_path / "runs", QUICK, [tmp_path])
    assert {seed: found.folder.name for seed, found in plan.found[LUMP.key].items()} == {0: "b", 5: "d"}
    assert len(plan.missing) == 3
    cells = [Cell(str(n), "digits", LUMP.recipe, settings=(f"--training.epochs={n}",)) for n in (3, 1, 2)]
    plan = make_plan([Table("", (), tuple(cells))], "paper", [0], tmp_path / "none", QUICK, [])
    assert [run.config.training.epochs for run in plan.missing] == [1, 2, 3]


class Interrupted(Live):
    """Asked to stop at the second step of the second run."""

    runs = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        Interrupted.runs += 1
        self.taken = 0

    def step(self, views: int) -> None:
        super().step(views)
        self.taken += 1
        if (Interrupted.runs, self.taken) == (2, 2):
            os.kill(os.getpid(), signal.SIGTERM)


TIME = r"(?:some seconds|at least \d+ \w+)"


def tables(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    """There is only this one, and no run that is kept."""
    monkeypatch.setattr(command, "TABLES", {"main": table})
    monkeypatch.setattr(found_runs, "KEPT", Path("none"))


def trained(shown: str) -> int:
    return shown.count("task 2 of 2 learnt")


def test_a_table_is_made_stopped_resumed_and_kept(monkeypatch, capsys, tmp_path: Path) -> None:
    tables(monkeypatch, TINY)
    monkeypatch.setattr(Interrupted, "runs", 0)
    words = ["main", "--runs", str(tmp_path / "runs"), *QUICK]
    with monkeypatch.context() as patched:
        patched.setattr("reproduction.__main__.Live", Interrupted)
        assert main(words) == 128 + signal.SIGTERM
    shown = capsys.readouterr()
    assert trained(shown.out) == 1
    runs = [f"run 1 of 2: {LUMP.recipe}, seed 0\n", f"run 2 of 2: {PTLF} 0.7, seed 0\n"]
    hint = "--plan says how long that takes on this machine; --show prints what is there\n"
    assert shown.out.startswith(f"2 runs: 2 pending\n{hint}{runs[0]}")
    assert runs[1] in shown.out
    assert f"stopped; `python -m reproduction {shlex.join(words)}` continues from here" in shown.err
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"2 runs: 1 done, 1 to resume\n{hint}{runs[1]}")
    assert "continuing with task 1" in shown.out
    assert trained(shown.out) == 1
    accuracies = {}
    for folder in (tmp_path / "runs").iterdir():
        results = json.loads((folder / "results.json").read_text())
        accuracies[results["name"]] = results["probes"]["knn_task"]["accuracy"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if "│" in line]
    ours, paper, difference = rows[:3]
    assert ours[:3] == ["LUMP", "ours", f"{accuracies['digits/simsiam/lump']:.2f}"]
    assert paper == ["", "paper", "50.00", "", ""]
    assert difference[2] == f"{accuracies['digits/simsiam/lump'] - 50:+.2f}"
    assert rows[3][2] == f"{accuracies['digits/simsiam/ptlf']:.2f}"
    assert float(rows[3][4].removesuffix("x")) < 1
    table = shown.out[shown.out.index("Tiny") :]
    for more, first in (([], "2 runs: 2 done\n"), (["--show", "--seeds", "0", "1"], "4 runs: 2 done, 2 pending\n")):
        assert main([*words, *more]) == 0
        assert capsys.readouterr().out == first + table
    assert main([*words, "--plan", "--seeds", "1"]) == 0
    plan = capsys.readouterr().out
    assert len(re.findall("done, of another seed: .*-seed0\n", plan)) == 2
    assert re.search(f"\n2 runs: 2 pending, {TIME}\n", plan)
    assert main([*words, "--plan", "--seeds", "0", "1"]) == 0
    plan = capsys.readouterr().out
    assert re.search(f"4 runs: 2 done, 2 pending, {TIME}\n", plan)
    assert len(re.findall(f"pending: digits/simsiam/.*, {TIME}, in ", plan)) == 2
    assert plan.count("timing") == 1
    assert "timing a step of digits/simsiam/lump, 16 px\n" in plan.partition("pending")[0]
    assert "from a step of LUMP (with labels: Finetune) timed now on this machine" in plan
    assert main([*words, "--training.lr", "0.01"]) == 2
    rate = results["config"]["training"]["lr"]
    told = f"holds a run with other settings (training.lr was {rate} and is 0.01); choose another --runs"
    assert told in capsys.readouterr().err


def test_cells_without_data_are_left_out_and_others_go_on(monkeypatch, capsys, tmp_path: Path) -> None:
    lacking = Cell("LUMP", "Split CIFAR-100", "split-cifar100/simsiam/lump", {"accuracy": 82.3})
    tables(monkeypatch, Table("Two", ("accuracy",), (lacking, LUMP)))
    words = [*QUICK[1:], "--probes.knn_class.k=20", "--data-root", str(tmp_path / "none")]
    assert main(["main", "--runs", str(tmp_path / "runs"), *words, "--plan", "--seeds", "0", "1"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert re.search(f"2 runs: 2 pending, {TIME}", plan)
    assert "2 cannot be made without the data: cifar100 (`ptlf data get NAME`)" in plan
    assert main(["main", "--runs", str(tmp_path / "runs"), *words]) == 0
    shown = capsys.readouterr().out
    assert f"cifar100 is not in {tmp_path / 'none'}: `ptlf data get cifar100` brings it" in " ".join(shown.split())
    cells = next(line for line in shown.splitlines() if "ours" in line).split("│")
    assert cells[3].strip() == ""
    assert float(cells[4].split()[0]) > 10


def test_a_run_that_fails_does_not_stop_the_others(monkeypatch, capsys, tmp_path: Path) -> None:
    broken = Cell("broken", "digits", "digits/simsiam/lump", settings=("--training.batch=100000",))
    tables(monkeypatch, Table("Two", ("accuracy",), (broken, LUMP)))
    assert main(["main", "--runs", str(tmp_path), *QUICK]) == 2
    shown = capsys.readouterr()
    assert "training.batch is 100000" in shown.out
    assert re.findall("run . of 2: .*/(.*)", shown.out) == ["lump 100000, seed 0", "lump, seed 0"]
    assert trained(shown.out) == 1
    assert "1 runs failed" in shown.err


def test_what_is_refused(capsys, tmp_path: Path) -> None:
    for words, told in (
        (["--seed", "1"], "give --seeds"),
        (["--write", str(tmp_path / "page.md")], "`python -m reproduction all --write FILE`"),
    ):
        assert main(["main", *words]) == 2
        assert told in capsys.readouterr().err, words
