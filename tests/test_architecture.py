"""Imports point one way through the rooms; the names people may use are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ptlf

PACKAGE = Path(ptlf.__file__).parent
# A module may import from its own room and from those above it in this list.
ROOMS = [
    {"errors", "files", "settings", "randomness", "ranks", "batch"},
    {"stream"},
    {"views"},
    {"encoders"},
    {"objectives"},
    {"model"},
    {"methods"},
    {"freezing"},
    {"training"},
    {"evaluation"},
    {"report"},
    {
        "config",
        "recipes",
        "assembly",
        "notes",
        "checks",
        "run_folder",
        "pipeline",
        "cluster",
        "cli",
        "bench",
        "__main__",
    },
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
# Freezing and reports are libraries of their own; evaluation tests an encoder, whoever trained it.
FORBIDDEN = {
    "freezing": {"objectives", "model", "methods", "views", "stream"},
    "evaluation": {"training", "methods", "objectives", "freezing", "model"},
    "report": set(RANK) - {"errors", "files", "report"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "ptlf" else [f"ptlf.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("ptlf.")}
    return rooms & set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in RANK, f"{path} is in no room; add it to ROOMS"
    imported = imported_rooms(path) - {room}
    assert {other for other in imported if RANK[other] > RANK[room]} == set()
    assert imported & FORBIDDEN.get(room, set()) == set()


def test_public_names() -> None:
    names = {"Config", "FreezeSchedule", "Freezer", "Run", "correlation_ratios", "find_units"}
    assert names == set(ptlf.__all__) - {"__version__"}
    assert names <= set(dir(ptlf))
    for name in ptlf.__all__:
        assert getattr(ptlf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ptlf.nonsense  # noqa: B018
