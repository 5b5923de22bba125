"""A family's members by name: those of this package, of installed packages, and of any module on the path."""

import importlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from ptlf.core.errors import UserError, short_repr, unknown, warn

T = TypeVar("T")

# The file whose settings are being read, and the words of the user, which alone may name code; None: any name may.
_reading: ContextVar[tuple[Path, str] | None] = ContextVar("reading", default=None)


@contextmanager
def settings_from(file: Path, words: Iterable[str] = ()) -> Iterator[None]:
    """Inside, "package.module:attribute" in that file, which runs code, is followed only if one of `words` holds it."""
    token = _reading.set((file, "\n".join(words)))
    try:
        yield
    finally:
        _reading.reset(token)


def check_trusted(noun: str, name: str) -> None:
    file, words = _reading.get() or (None, "")
    if file and not re.search(rf"(?:(?<![\w.:])|(?<=--probes\.)){re.escape(name)}(?![\w:])", words):
        code = f"{noun} {short_repr(name)} in {file} names code, which would run here"
        raise UserError(f"{code}; if you trust whoever wrote that file, add --trust-code")


@contextmanager
def working_folder_on_path() -> Iterator[None]:
    """Inside, modules are also found in the working folder, after installed packages."""
    before = sys.path.copy()
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


class Registry(MutableMapping[str, T], Generic[T]):
    """Members by name. A member is a subclass of `kind`; with `wrap`, an instance of it.

    Other packages add theirs with `registry["name"] = member` or through the entry-point group `group`, which is loaded
    when a name is not among the members or when all are listed. `find` also takes "package.module:attribute".

    noun: what one member is called in messages. wrap: makes a member of a function.
    prefixes: for names such as "timm:vit_tiny", what makes a member of the text behind the colon.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        kind: type,
        members: dict[str, T],
        wrap: Callable[[Any], T] | None = None,
        prefixes: Mapping[str, Callable[[str], T]] | None = None,
    ) -> None:
        self.noun, self.group, self.kind, self.wrap, self.prefixes = noun, group, kind, wrap, prefixes or {}
        self._members = members
        self._complete = False  # entry points are loaded

    def find(self, name: object) -> T:
        """The member called `name`, or the one that "package.module:attribute" names. Raises a UserError."""
        if isinstance(name, str) and name in self:
            return self[name]
        if not isinstance(name, str) or ":" not in name:
            raise unknown(self.noun, name, self)
        module, _, attribute = name.partition(":")
        if module in self.prefixes:
            return self.prefixes[module](attribute)
        check_trusted(self.noun, name)
        try:
            with working_folder_on_path():
                found = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # the user's module may raise anything; --debug shows where
            raise UserError(f"{self.noun} {short_repr(name)} cannot be imported: {error}") from error
        return self._checked(found, name)

    def names_code(self, name: str) -> bool:
        """Whether the name is "package.module:attribute", and not one of a prefix."""
        return ":" in name and name.partition(":")[0] not in self.prefixes

    def __getitem__(self, name: str) -> T:
        return self._members[name] if name in self._members else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __setitem__(self, name: str, member: Any) -> None:
        self._members[name] = self._checked(member, name)

    def __delitem__(self, name: str) -> None:
        del self._members[name]

    def _all(self) -> dict[str, T]:
        if not self._complete:
            self._complete = True  # first: a plugin may look into the registry while it is imported
            for point in entry_points(group=self.group):
                package = point.dist.name if point.dist else point.value
                named = f"{self.noun} {point.name!r} of package {package} is left out"
                if point.name in self._members:
                    warn(f"{named}: there is another {self.noun} of that name")
                    continue
                try:
                    self[point.name] = point.load()
                except Exception as error:  # a broken plugin must not stop runs that do not use it
                    why = f"{type(error).__name__}: {error}".removeprefix("UserError: ")
                    warn(f"{named}: {' '.join(why.split())}")
        return self._members

    def _checked(self, found: Any, name: str) -> T:
        if isinstance(found, self.kind) if self.wrap else isinstance(found, type) and issubclass(found, self.kind):
            return found
        if self.wrap and isinstance(found, types.FunctionType | type):
            return self.wrap(found)
        wanted = "an instance of {} or a function in Python" if self.wrap else "a subclass of {}"
        raise UserError(f"{self.noun} {name!r} must be {wanted.format(self.kind.__name__)}, not {found!r}")
