"""Where modules that a user names, as PACKAGE.MODULE:ATTRIBUTE, are imported from."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_owns_process = False  # see `own_process`


@contextmanager
def own_process() -> Iterator[None]:
    """For a program that has the process to itself, such as the command line: inside, what `Registry.find` imported
    from the working folder may import more from there later, and so may the processes it starts. Installed packages
    come first. Afterwards the path of imports is as it was."""
    global _owns_process
    before, _owns_process = (sys.path.copy(), _owns_process), True
    try:
        yield
    finally:
        sys.path[:], _owns_process = before


@contextmanager
def imports_from_here() -> Iterator[None]:
    """Inside, modules are looked for in the working folder first, as `python -m` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)
        if _owns_process and here not in sys.path:
            sys.path.append(here)
