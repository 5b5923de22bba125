"""UserError, warnings, and words of others: short, on one line, without characters that act on a terminal or page."""

import difflib
import importlib
import logging
import os
import reprlib
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("ptlf")
warn, info = logger.warning, logger.info

# Control characters, line separators, and halves of a surrogate pair (bytes of a file's name that are not UTF-8).
HIDDEN = ("Cc", "Cs", "Zl", "Zp")
DIRECTIONS = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # turn the text around them

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 4
_short.maxlevel = 3


class UserError(Exception):
    """Bad input. The command line prints the message, without a traceback, and exits with code 2."""

    problems: Sequence[str] = ()  # one by one, where it tells several


class Refusals:
    """Several checks told together: `with refused: ...` for each, then `refused.end()`."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError):
            self.problems += error.problems or [str(error)]
        return isinstance(error, UserError)

    def end(self) -> None:
        """Raise one error for all, if there is any."""
        if self.problems:
            several = [f"({number}) {problem}" for number, problem in enumerate(self.problems, start=1)]
            error = UserError("; ".join(several) if len(several) > 1 else self.problems[0])
            error.problems = self.problems
            raise error


def import_optional(module: str, user: str, extra: str) -> Any:
    """The module, imported. user: what needs it; extra: the extra of ptlf that installs it."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that is broken, or built for another torch, raises anything
        lacking = f"{user} needs {module}, which cannot be imported ({' '.join(str(error).split())})"
        raise UserError(f"{lacking}: pip install 'ptlf[{extra}]'") from None


def unknown(kind: str, value: object, known: Iterable[object], *close: str) -> UserError:
    """`unknown("method", "fintune", METHODS)` -> "unknown method 'fintune'; did you mean 'finetune'? Known: ...".

    close: the name that is meant, where that is clear."""
    names, value = [str(name) for name in known], clipped(str(value))
    close = close or tuple(difflib.get_close_matches(value, names, n=1, cutoff=0.5))
    hint = f"; did you mean {close[0]!r}?" if close else "."
    shown = names if len(names) <= 20 else [*difflib.get_close_matches(value, names, n=5, cutoff=0.0), "..."]
    return UserError(f"unknown {kind} {value!r}{hint} Known: {', '.join(shown)}")


def printable(text: str) -> str:
    r"""`text` with hidden characters as escapes, such as \x1b."""
    if text.isascii() and text.isprintable():
        return text
    hidden = {c for c in text if c in DIRECTIONS or unicodedata.category(c) in HIDDEN}
    return "".join(c.encode("unicode_escape", "backslashreplace").decode() if c in hidden else c for c in text)


def quoted(word: Path | str) -> str:
    """For a command that works as it is printed: in a shell's quotes; hidden characters, runs of spaces as $'...'."""
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if text == " ".join(printable(text).split()):
        return shlex.quote(text)
    plain = set(range(33, 127)) - set(b"\\'")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(text)) + "'"


def printable_from_one(record: logging.LogRecord) -> bool:
    """Messages name files of strangers. Only one of the processes that torchrun started gives them."""
    record.msg, record.args = "\n".join(map(printable, record.getMessage().splitlines())), None
    return os.environ.get("RANK", "0") == "0"


logger.addFilter(printable_from_one)


def clipped(words: str, most: int = 100) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def short_repr(value: Any) -> str:
    """`repr(value)` in at most about 80 characters, however large the value is."""
    return printable(_short.repr(value))
