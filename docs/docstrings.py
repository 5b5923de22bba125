"""Docstrings explain an argument in a line "name: what it is", with further lines indented. Here they become a list."""

import re
from typing import Any

import griffe

NAMED = re.compile(r"([a-z_]\w*): (.*)")


class ListArguments(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    lines: list[str] = []
    inside = False  # a line of the list
    for line in text.splitlines():
        found = NAMED.match(line)
        if found:
            lines += [] if inside else [""]
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line and not line.startswith(" "):
            lines.append(f"    {line}")
        else:
            lines.append(line)
        inside = bool(found) or (inside and bool(line))
    return "\n".join(lines)
