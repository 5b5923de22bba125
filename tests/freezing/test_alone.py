"""The library stands alone: it imports torch and the standard library, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from ptlf import freezing

SOURCES = sorted(Path(freezing.__file__).parent.glob("*.py"))


def imported(path: Path) -> set[str]:
    """The packages and modules that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_freezing_imports_only_torch_and_the_standard_library() -> None:
    own = {"ptlf.freezing", *(f"ptlf.freezing.{path.stem}" for path in SOURCES)}
    for path in SOURCES:
        others = {name for name in imported(path) - own if name.partition(".")[0] not in sys.stdlib_module_names}
        assert {name.partition(".")[0] for name in others} <= {"torch"}, path.name
