"""Tables in the terminal: costs stand beside their ratio to the baseline's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import made_up
from rich.console import Console

from ptlf.report.tables import show_runs, show_steps


def rows(show: Callable[..., None], *arguments: Any) -> dict[str, list[str]]:
    """The cells of a table by the first one."""
    console = Console(width=160, file=io.StringIO())
    show(console, *arguments)
    lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if "│" in line]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_costs_side_by_side_are_relative_to_the_baseline() -> None:
    lump, ptlf = made_up.pair()
    found = rows(show_runs, {"lump": lump, "ptlf": ptlf}, "lump")
    assert found["training, all in all"] == ["100.0 s", "25.0 s  0.25x"]
    assert found["backward FLOPs"] == ["4 T", "2 T  0.50x"]
    assert found["kept for backward, mean"] == ["80.0 MiB", "64.0 MiB  0.80x"]
    assert found["kept for backward, last epoch"] == ["80.0 MiB", "60.0 MiB  0.75x"]
    assert found["evaluation"] == ["2.0 s", "2.0 s"]
    assert rows(show_runs, {"lump": lump, "ptlf": ptlf}, "ptlf")["training, all in all"] == ["100.0 s  4.00x", "25.0 s"]
    assert rows(show_runs, {"lump": lump, "ptlf": ptlf})["training, all in all"] == ["100.0 s", "25.0 s"]


def test_costs_in_a_list_are_relative_to_the_baseline() -> None:
    lump, ptlf = made_up.pair()
    runs = {"a/lump": lump, "a/ptlf": ptlf, "a/third": ptlf, "a/fourth": lump}
    found = rows(show_runs, runs, "a/lump")
    assert found["lump"][4:] == ["100.0 s", "1.0 s", "4 T", "80.0 MiB"]
    assert found["ptlf"][4:] == ["0.25x", "1.0 s", "0.50x", "0.75x"]


def test_a_list_names_its_runs_in_full(capsys) -> None:
    lump, _ = made_up.pair()
    names = ["simsiam/lump", "simsiam/ptlf", "barlow_twins/ptlf-cost", "byol/ptlf"]
    show_runs(Console(width=80), {f"digits/{name}": lump for name in names}, None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == names
    assert all(line.split("│")[-2].strip() == "80.0 MiB" for line in lines)


def test_steps_are_relative_to_the_first_stage() -> None:
    first = {"frozen": 0, "step_ms": 8.0, "step_ms_spread": 0.1, "device_ms": None, "views_per_second": 64000.0}
    first |= {"kept_bytes": 200 * 2**20, "peak_memory_bytes": 500 * 2**20, "rebuild_seconds": 1.0}
    second = first | {"frozen": 4, "step_ms": 6.0, "kept_bytes": 100 * 2**20, "peak_memory_bytes": 450 * 2**20}
    found = rows(show_steps, "steps", [first, second])
    assert found["0"] == ["8.00", "0.10", "-", "64.0", "200", "500", "1.0 s"]
    assert found["4"] == ["6.00  0.75x", "0.10", "-", "64.0", "100  0.50x", "450  0.90x", "1.0 s"]
