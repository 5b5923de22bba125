"""Text that others wrote, as it is shown: short, on one line, without characters that act on a terminal or a page."""

import reprlib
import unicodedata
from typing import Any

# Control characters, line separators, and halves of a surrogate pair (bytes of a file's name that are not UTF-8).
HIDDEN = ("Cc", "Cs", "Zl", "Zp")
DIRECTIONS = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # turn the text around them

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 4
_short.maxlevel = 3


def printable(text: str) -> str:
    r"""`text` with hidden characters as escapes, such as \x1b."""
    if text.isascii() and text.isprintable():
        return text
    hidden = {c for c in text if c in DIRECTIONS or unicodedata.category(c) in HIDDEN}
    return "".join(c.encode("unicode_escape", "backslashreplace").decode() if c in hidden else c for c in text)


def clipped(words: str, most: int = 100) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def short_repr(value: Any) -> str:
    """`repr(value)` in at most about 80 characters, however large the value is."""
    return printable(_short.repr(value))
