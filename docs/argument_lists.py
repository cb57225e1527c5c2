"""For the API reference: arguments that docstrings list in aligned columns become lists of Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"(?P<name>[\w*.\"]+(?:, [\w*.\"]+)*) {2,}(?P<words>\S.*)")


def listed(docstring: str) -> str:
    """`name    what it is`, continued by indented lines, as an item; all other lines as they are."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        item = ITEM.fullmatch(line)
        if inside and line.startswith("    "):
            lines[-1] += f" {line.strip()}"
            continue
        lines += [""] if bool(item) != inside else []  # Markdown parts a list from the rest by an empty line
        lines.append(f"- `{item['name']}`: {item['words']}" if item else line)
        inside = item is not None
    return "\n".join(lines)


class ArgumentLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
