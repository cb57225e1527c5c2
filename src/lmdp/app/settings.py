"""What one value of a configuration may be: checked by name, and read from text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

TRUTH = {"true": True, "false": False}
METAVARS = {"data": "SPEC", "shadow": "SPEC", "public": "SPEC", "risk": "PATH", "init": "PATH"}
"""What help shows for a value that is no mere name."""


@dataclass(frozen=True)
class Setting:
    """What a value may be, and what it means. `choices` may be a table: what is added to it later is allowed too."""

    kind: type
    help: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    choices: Collection[str] = ()
    optional: bool = False
    listed: bool = False
    unsaid: Any = None  # what files mean that say nothing, and is left out of files

    def check(self, key: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if self.listed and isinstance(value, int | list) and not isinstance(value, bool):
            value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if self.kind is float and isinstance(value, int) and abs(value) < 2**53 and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.kind) or not self._allowed(value):
            raise ValueError(f"{key} is {value!r}; it must be {self.wanted}")
        return value

    def _allowed(self, value: Any) -> bool:
        if isinstance(value, bool):
            return self.kind is bool
        if self.listed and not all(name.strip() for name in value.split(",")):
            return False
        if self.kind is str:
            writable = not any("\ud800" <= letter <= "\udfff" for letter in value)
            return bool(value) and writable and (not self.choices or value in self.choices)
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return bool(above and below and abs(value) < math.inf)

    def parse(self, key: str, text: str) -> Any:
        """A value given on the command line."""
        if self.optional and text in ("", "none"):
            return None
        if self.kind is str:
            return self.check(key, text)
        try:
            value = TRUTH[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise ValueError(f"{key} is {text!r}; it must be {self.wanted}") from None
        return self.check(key, value)

    @property
    def wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.listed:
            return "a number, or names separated by commas"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "text, not empty"
        noun = "a whole number" if self.kind is int else "a finite number"
        low = "" if self.low == -math.inf else f" {'above' if self.open_low else 'of at least'} {self.low:g}"
        high = "" if self.high == math.inf else f" {'below' if self.open_high else 'of at most'} {self.high:g}"
        return noun + low + (" and" if low and high else "") + high


def text(default: Any, help: str, **setting: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(str, help, **setting)})


def number(default: Any, help: str, **setting: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(float, help, **setting)})


def switch(default: bool, help: str, **setting: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(bool, help, **setting)})


def whole(default: Any, help: str, **setting: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(int, help, **setting)})


def meet_pieces(model: Any) -> None:
    """Import the module of a `module:factory`, so that what it adds to tables is known before they are read.

    What is wrong with it is told when the model is asked for.
    """
    module = model.partition(":")[0] if isinstance(model, str) and ":" in model else ""
    if all(word.isidentifier() for word in module.split(".")):
        from lmdp.models import check_name

        with contextlib.suppress(Exception):
            check_name(model)
