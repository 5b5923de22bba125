"""Rooms import only rooms before them, no name means two things, no file is too long to read."""

import ast
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ptlf

PACKAGE = Path(ptlf.__file__).parent
# Each room may import those before it, and every room the version in `ptlf`.
ORDER = """
freezing core stream views encoders objectives model methods kernels training evaluation integrations run report
learner commands cli __main__
"""
ROOMS = ORDER.split()
# Rooms that may not import these, although they come before.
FORBIDDEN = {
    "evaluation": {"training", "methods", "objectives", "freezing", "model", "kernels"},
    "run": {"kernels"},
    "report": set(ROOMS) - {"core", "run", "report"},
}
FORBIDDEN |= {name: {"kernels"} for name in ("integrations", "learner", "commands", "cli")}
REPORT_READS = {"ptlf.run." + name for name in ("compat", "results")}
MAX_LINES = 400


def module_name(path: Path) -> str:
    return ".".join(("ptlf", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported(name: str) -> set[str]:
    """Modules that the module imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: a relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in PATHS else node.module for member in members}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found - {name}


IMPORTS = {name: imported(name) for name in PATHS}


def test_rooms_import_only_rooms_before_them() -> None:
    rank = {name: place for place, name in enumerate(["", *ROOMS])}
    assert {room(name) for name in PATHS} <= rank.keys()
    for name, modules in IMPORTS.items():
        own = room(name)
        for other in (module for module in modules if module.split(".")[0] == "ptlf"):
            its = room(other)
            assert rank[its] <= rank[own] or not own, f"{name} imports {other}"
            assert its not in FORBIDDEN.get(own, ()), f"{name} imports {other}"
            # Inside kernels only they themselves look; a page is drawn from records.
            assert its in ("", own) or its != "kernels" or (own, other) == ("training", "ptlf.kernels"), name
            assert (own, its) != ("report", "run") or other in REPORT_READS, f"{name} imports {other}"
    TopologicalSorter({name: modules & PATHS.keys() for name, modules in IMPORTS.items()}).prepare()
    allowed = {"torch", "ptlf", *sys.stdlib_module_names}  # of `ptlf` no room comes before it
    for name in (name for name in PATHS if room(name) == "freezing"):
        assert {module.split(".")[0] for module in IMPORTS[name]} <= allowed, name


def test_names_are_unique_files_short_and_only_commands_print() -> None:
    places = defaultdict(set)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places[node.name].add(name)
    # Users import FreezingCallback from the module of their library.
    assert {name for name, where in places.items() if len(where) > 1} == {"FreezingCallback"}
    for name, path in PATHS.items():
        assert len(path.read_text().splitlines()) <= MAX_LINES, f"{name} is too long"
        for node in ast.walk(TREES[name]):
            prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            assert not prints or room(name) in ("cli", "commands"), f"{name} prints; the library logs"


def test_public_names() -> None:
    names = {"Config", "FreezeSchedule", "Freezer", "Learner", "Run", "correlation_ratios", "find_units"}
    assert set(ptlf.__all__) == names | {"load_encoder", "pack_images", "search", "__version__"}
    assert set(ptlf.__all__) <= set(dir(ptlf)) and all(getattr(ptlf, name) is not None for name in ptlf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ptlf.nonsense  # noqa: B018
