"""Rooms import only rooms before them, no name means two things, no file is too long to read."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
import torch

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
REPORT_READS = {"ptlf.run." + name for name in ("compat", "results", "watcher")}
MAX_LINES = 400

TWICE = {"FreezingCallback"}  # users import it from the module of their library


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


def wrong_imports() -> Iterator[str]:
    rank = {name: place for place, name in enumerate(["", *ROOMS])}
    for name, modules in IMPORTS.items():
        own = room(name)
        for other in sorted(module for module in modules if module.split(".")[0] == "ptlf"):
            its = room(other)
            later = rank[its] > rank[own] and own
            inside = its == "kernels" != own and (own != "training" or other != "ptlf.kernels")
            unread = own == "report" and its == "run" and other not in REPORT_READS
            if later or inside or unread or its in FORBIDDEN.get(own, set()):
                yield f"{name} imports {other}"


def test_rooms_import_only_rooms_before_them() -> None:
    assert {room(name) for name in PATHS} - {""} <= set(ROOMS)
    assert list(wrong_imports()) == []


def test_no_module_imports_itself_through_others() -> None:
    TopologicalSorter({name: modules & PATHS.keys() for name, modules in IMPORTS.items()}).prepare()


def test_freezing_stands_alone() -> None:
    allowed = {"torch", "ptlf", *sys.stdlib_module_names}  # of `ptlf` no room comes before it
    for name in (name for name in PATHS if room(name) == "freezing"):
        assert {module.split(".")[0] for module in IMPORTS[name]} <= allowed, name


def test_no_name_is_defined_in_two_modules() -> None:
    places = defaultdict(set)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places[node.name].add(name)
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in TWICE}
    assert twice == {}


def test_files_are_short_and_only_commands_print() -> None:
    for name, path in PATHS.items():
        assert len(path.read_text().splitlines()) <= MAX_LINES, f"{name} is too long"
        for node in ast.walk(TREES[name]):
            prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            assert not prints or room(name) in ("cli", "commands"), f"{name} prints; the library logs"


def own_attributes() -> set[str]:
    """Names that objects of this package have and those of Python, numpy and torch have not."""
    known = {name for kind in (dict, list, str, bytes, object, np.ndarray, torch.Tensor) for name in dir(kind)}
    names = set()
    for name, tree in TREES.items():
        if name != "ptlf.__main__" and ".triton_" not in name and room(name) != "kernels":
            __import__(name)
            for value in vars(sys.modules[name]).values():
                if inspect.isclass(value) and value.__module__.startswith("ptlf."):
                    names |= set(vars(value)) | set(getattr(value, "__annotations__", {}))
        for node in ast.walk(tree):  # attributes set in methods
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names - known if not name.startswith("__")}


def untyped_reads(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Attributes of this package's objects that are read from parameters typed Any, object or not at all."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        loose = {a.arg for a in arguments if a.annotation is None or ast.unparse(a.annotation) in ("Any", "object")}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield from [ast.unparse(node)] * (node.attr in own and node.value.id in loose - {"self", "cls", "ctx"})


def test_no_room_is_reached_behind_an_untyped_parameter() -> None:
    own = own_attributes()
    for name, tree in TREES.items():  # the objects that other libraries hand to a callback have their types there
        assert room(name) == "integrations" or list(untyped_reads(tree, own)) == [], name
    bad, good = "def begin(self, run: Any): return run.trainer", "def begin(self, run: Run): return run.trainer"
    assert list(untyped_reads(ast.parse(bad), own)) == ["run.trainer"] and not [*untyped_reads(ast.parse(good), own)]


def test_public_names() -> None:
    names = {"Config", "FreezeSchedule", "Freezer", "Learner", "Run", "correlation_ratios", "find_units"}
    names |= {"load_encoder", "pack_images"}
    assert names == set(ptlf.__all__) - {"__version__"}
    assert names <= set(dir(ptlf))
    for name in ptlf.__all__:
        assert getattr(ptlf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ptlf.nonsense  # noqa: B018
