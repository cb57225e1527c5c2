"""Ways of making a step, and what is known of each.

A way of the loss is the shape of its graph, and whether the model was given what the loader handed out; a way of the
model is the shape of the whole graph, and which modules were in training mode. What was looked at in one way says
nothing of another: a step made in a new way is looked at again, and until then the assumption is not established.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmdp.guards.words import UNSIZED

TRIES = 3
MOST = 16


@dataclass
class Way:
    """What is known of the steps that were made in one way.

    why       what is not known of it
    needed    how often its examples must have been the same beside others; 0 where that is known otherwise
    rows      the examples of the newest step that was made so
    alone     whether each of these steps was about a single example, which meets nobody
    doubted   whether a look saw the same examples differ, and the next one could not tell why
    sized     whether it is known that neither the number of examples matters, nor their places
    """

    why: str
    needed: int = 1
    passed: int = 0
    tries: int = TRIES
    tries_in_company: int = 2 * TRIES
    looked_at: int = 0
    rows: Any = None
    alone: bool = True
    doubted: bool = False
    sized: bool = False

    @property
    def open(self) -> bool:
        """Whether steps were made so and it is not known yet that nobody meets."""
        if self.rows is None or self.alone:
            return False
        return self.passed < self.needed or self.doubted or not self.sized

    @property
    def unknown(self) -> str:
        """What is not known of it, if it is open."""
        return self.why if self.passed < self.needed or self.doubted else UNSIZED

    def see(self, rows: Any, *, alone: bool) -> None:
        """A step is made in this way."""
        if rows is not None:
            self.rows, self.alone = rows, self.alone and alone


class Ways:
    """Of the loss, or of the model, by what tells them apart."""

    def __init__(self) -> None:
        self._ways: dict[Hashable, Way] = {}

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways.values())

    def at(self, key: Hashable, new: Way) -> Way | None:
        """The way of this key, `new` if there was none; None if there are too many."""
        if key not in self._ways and len(self._ways) >= MOST:
            return None
        return self._ways.setdefault(key, new)

    def open(self) -> dict[str, str]:
        """Name, the same in another process → what is not known of it."""
        return {_name(key): way.unknown for key, way in self._ways.items() if way.open}

    def names(self) -> set[str]:
        return {_name(key) for key in self._ways}


def next_to_look_at(ways: Iterable[Way]) -> Way | None:
    """One that is open if there is any, else the one that was not looked at for longest."""
    seen = [way for way in ways if way.rows is not None]
    wanting = [way for way in seen if way.open and way.tries_in_company > 0]
    return min(wanting or seen, key=lambda way: way.looked_at, default=None)


def _name(key: Any) -> str:
    parts = [sorted(part) if isinstance(part, frozenset) else part for part in key]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
