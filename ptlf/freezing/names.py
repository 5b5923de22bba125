"""One sentence for a name that nobody knows."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, value: str, known: Iterable[str]) -> str:
    """`unknown_name("unit", "layer5", names)` -> "unknown unit 'layer5'; did you mean 'layer4'? Known: ..."."""
    names, value = list(known), value if len(value) <= 100 else value[:99] + "…"
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    shown = names if len(names) <= 20 else difflib.get_close_matches(value, names, n=5, cutoff=0.0)
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"unknown {kind} {value!r}{hint} Known: {', '.join(shown)}{more}"
