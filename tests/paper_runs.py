"""The kept runs that fill the paper's tables, read once per process: for tests that only read them."""

from functools import cache
from pathlib import Path
from typing import Any

from reproduction.page import document
from reproduction.runs import KEPT, full_runs, make_plan, remarks
from reproduction.tables import TABLES


@cache
def paper_results() -> dict[Any, list[dict[str, Any]]]:
    return make_plan(TABLES.values(), "paper", [0], Path("none"), [], [KEPT]).results()


@cache
def kept_document() -> str:
    return document(paper_results(), remarks(KEPT), full_runs(KEPT))
