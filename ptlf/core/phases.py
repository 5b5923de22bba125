"""How work tells how far it is: a phase has a name and, where that is known, a number of things to do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

Advance = Callable[[int], None]  # called with how many more are done
Phase = Callable[..., AbstractContextManager[Advance]]  # called as `silent` is


@contextmanager
def silent(name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
    """A phase of which nobody is told. of: how many there are to do; None where there is nothing to count."""
    yield lambda amount: None


def cannot_move(console: Any) -> bool:
    """Whether a bar of rich would not move there: in a notebook it needs ipywidgets."""
    return bool(console.is_jupyter and find_spec("ipywidgets") is None)
