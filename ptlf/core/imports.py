"""Where modules that a user names, as PACKAGE.MODULE:ATTRIBUTE, are imported from."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working_folder_on_path() -> Iterator[None]:
    """Inside, modules are also found in the working folder; installed packages come first. Afterwards the path is as
    it was."""
    here, before = os.getcwd(), sys.path.copy()
    if here not in sys.path:
        sys.path.append(here)
    try:
        yield
    finally:
        sys.path[:] = before
