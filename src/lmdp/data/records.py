"""Reads fields of a JSON object, and names the field that is missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(path: str | Path, what: str) -> Mapping[str, Any]:
    """The JSON object in a file; `what` says what it should have been."""
    try:
        content = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {what}: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not {what}: it is a {type(content).__name__}; it must be an object with fields")
    return content


LARGEST = 1e300
"""No number in these files is larger; Python's whole numbers may be, and would not fit a float."""


class Fields:
    """One JSON object. `where` says what it is a part of."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ValueError(f"{where} is a {type(content).__name__}; it must be an object with fields")
        self._content, self.where = content, where

    @classmethod
    def load(cls, path: str | Path, what: str) -> Fields:
        return cls(read_object(path, what), str(path))

    def get(self, name: str) -> Any:
        if name not in self._content:
            raise ValueError(f"{self.where} lacks the field '{name}'")
        return self._content[name]

    def wrong(self, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {str(value)[:60]!r}; it must be {wanted}")

    def format(self, known: int) -> None:
        """Refuse a file of another version."""
        if (found := self.integer("format")) != known:
            raise ValueError(f"{self.where}: format is {found}; this version of lmdp reads format {known}")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        return value

    def integer(self, name: str, low: int | None = None) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
            raise self.wrong(name, value, "a whole number" if low is None else f"a whole number of at least {low}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        return self._number(name, self.get(name), low, high)

    def _number(self, name: str, value: Any, low: float, high: float) -> float:
        usual = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        if not usual or not low <= value <= high:
            raise self.wrong(name, value, f"a number between {low:g} and {high:g}")
        return float(value)

    def seconds(self, name: str) -> float:
        return self.number(name, 0, LARGEST)

    def share(self, name: str) -> float:
        return self.number(name, 0, 1)

    def optional_share(self, name: str) -> float | None:
        return None if self._content.get(name) is None else self.share(name)

    def points(self, name: str, axis: int) -> list[float]:
        """One coordinate of a curve that is stored as two lists of shares, of the same length."""
        both = self.items(name)
        if len(both) != 2 or not all(isinstance(part, list) for part in both) or len(both[0]) != len(both[1]):
            raise self.wrong(name, both, "two lists of the same length")
        return [self._number(name, value, 0, 1) for value in both[axis]]

    def interval(self, name: str) -> tuple[float, float]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) != 2:
            raise self.wrong(name, value, "two numbers")
        return self._number(name, value[0], 0, 1), self._number(name, value[1], 0, 1)

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def inner(self, name: str) -> Fields:
        return Fields(self.get(name), f"{self.where}: {name}")

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self.inner(name)._content

    def optional(self, name: str) -> Fields | None:
        return None if self._content.get(name) is None else self.inner(name)

    def each(self, name: str) -> list[Fields]:
        return [Fields(item, f"{self.where}: {name}[{i}]") for i, item in enumerate(self.items(name))]
