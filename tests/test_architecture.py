"""Imports point one way through the modules; nothing reaches a room behind an untyped parameter."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ptlf

PACKAGE = Path(ptlf.__file__).parent
# Every module, in an order in which each imports only those before it. A room's own name is its __init__.
ORDER = """
freezing: names units kernels products subspace correlation kept select schedule timetable
freezing: estimate following freezer savings
freezing: policy policies progressive freezing
core: core words errors phases reading memory files processes batch randomness registry settings
stream: decode disk archives pack task datasets stream folders rows splits arrays tables shards given packing arrivals
stream: fetch loading
views: view named operations views
encoders: encoder extras norm resnet vit weights encoders
objectives: teacher objective barlow_twins byol mocov2plus simclr simsiam supervised vicreg objectives
model
methods: memory method cassle der finetune lump pnn si methods
integrations: integrations plan lightning huggingface feed trackers
training: training checkpoint weight_gradients triton_bn triton_pool triton_stem fused_heads fused_resnet triton_views
training: fast_parts cost distributed engine
training.optimizers: optimizer adamw sgd lars optimizers
training: process rate crowding trainer ahead
evaluation: accuracy_matrix probe knn linear probes prober gallery evaluation spread
run: run freezing alike config fitting recipes build results folder environment start parts inference embedding export
run: record watcher state looks loop sweep bench cluster evaluate paper reproduce
report: report checks intervals theme drawing runs measures paired pareto tables live
report.figures: figures axes accuracy cost freezing frontier gallery learning paper paper_text
report: parts page watch reproduction
learner
commands
cli
completion
__main__
"""
# Libraries of their own, and what they may not know although it comes before them.
FORBIDDEN = {
    "evaluation": {"training", "methods", "objectives", "freezing", "model"},
}
REPORT_MAY_USE = {"ptlf", "ptlf.run.alike", "ptlf.run.paper", "ptlf.run.results", "ptlf.run.watcher"}
REPORT_MAY_USE |= {f"ptlf.core.{name}" for name in ("errors", "files", "phases", "reading", "words")}


def ordered() -> list[str]:
    names = ["ptlf"]
    for line in ORDER.strip().splitlines():
        room, _, modules = line.partition(":")
        own = room.split(".")[-1]
        names += [f"ptlf.{room}" if name == own else f"ptlf.{room}.{name}" for name in modules.split() or [own]]
    return names


def module_name(path: Path) -> str:
    return ".".join(("ptlf", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
RANK = {name: rank for rank, name in enumerate(ordered())}


def imported(path: Path) -> set[str]:
    """Modules of the package that the file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {member if member in MODULES else node.module for member in members}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "ptlf"} - {module_name(path)}


def test_every_module_has_its_place() -> None:
    assert set(RANK) == set(MODULES)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "ptlf"])
def test_imports_point_to_modules_before(name: str) -> None:
    uses = imported(MODULES[name])
    assert [other for other in uses if RANK[other] >= RANK[name]] == []
    room = name.split(".")[1]
    assert {other.split(".")[1] for other in uses if "." in other} & FORBIDDEN.get(room, set()) == set()
    if room == "report":
        assert {other for other in uses if other.split(".")[1:2] != ["report"]} <= REPORT_MAY_USE


def own_attributes() -> set[str]:
    """Names that objects of this package have and those of Python, numpy and torch have not."""
    known = {name for kind in (dict, list, str, bytes, object, np.ndarray, torch.Tensor) for name in dir(kind)}
    names = set()
    for name in MODULES:
        if name != "ptlf.__main__" and ".triton_" not in name:
            __import__(name)
            for value in vars(sys.modules[name]).values():
                if inspect.isclass(value) and value.__module__.startswith("ptlf."):
                    names |= set(vars(value)) | set(getattr(value, "__annotations__", {}))
    for path in MODULES.values():  # attributes set in methods
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names - known if not name.startswith("__")}


@pytest.fixture(scope="module")
def own() -> set[str]:
    return own_attributes()


def digs(source: str, own: set[str]) -> list[str]:
    """Attributes of this package's objects that are read from parameters typed Any, object or not at all."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            loose = {
                a.arg
                for a in arguments
                if a.arg not in ("self", "cls", "ctx")
                and (a.annotation is None or ast.unparse(a.annotation) in ("Any", "object"))
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in loose:
                    found += [ast.unparse(node)] * (node.attr in own)
    return found


# The objects that other libraries hand to a callback have their types there.
@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("ptlf.integrations.")])
def test_no_room_is_reached_behind_an_untyped_parameter(name: str, own: set[str]) -> None:
    assert digs(MODULES[name].read_text(), own) == []


def test_digging_is_seen(own: set[str]) -> None:
    assert digs("def begin(self, run: Any): return run.trainer.engine_kind", own) == ["run.trainer"]
    assert digs("def begin(self, run: Run): return run.trainer", own) == []
    assert digs("def plain(value: object): return value.items()", own) == []


def test_public_names() -> None:
    names = {"Config", "FreezeSchedule", "Freezer", "Learner", "Run", "correlation_ratios", "find_units"}
    names |= {"load_encoder", "pack_images"}
    assert names == set(ptlf.__all__) - {"__version__"}
    assert names <= set(dir(ptlf))
    for name in ptlf.__all__:
        assert getattr(ptlf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ptlf.nonsense  # noqa: B018
