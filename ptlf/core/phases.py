"""How work tells how far it is: a phase has a name and, where that is known, a number of things to do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]  # so many more are done
Phase = Callable[..., AbstractContextManager[Advance]]  # called as `silent` is


@contextmanager
def silent(name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
    """A phase of which nobody is told. of: how many there are to do; None where there is nothing to count."""
    yield lambda amount: None
