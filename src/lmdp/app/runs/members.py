"""Which examples a run was trained on: keyed digests, in a file that is private in name and first line.

With the key, which is in the same file, one can ask of any example whether it was in the data. Nothing else of a run
folder says so, and nothing that is made to be published does.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lmdp.app.runs.files import read_private, write_private
from lmdp.app.runs.folder import RunFolder
from lmdp.data import Examples, Source

FILE = "private/members.txt"
FIRST_LINE = (
    "PRIVATE: keyed digests of the examples of this run, with their key. Whoever has this file can ask of anybody "
    "whether they are in the data. Never publish it."
)
_FORM = re.compile(r"key ([0-9a-f]{64})\nrun ([0-9a-f]{32})\n((?:(?:train|test|holdout) [0-9a-f]{32}\n)+)")
PARTS = ("train", "test", "holdout")
MOST_LISTED = 10


@dataclass(frozen=True)
class Changes:
    """How one list of examples differs from an older one: positions of what is gone, in that, and of what is new."""

    gone: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    moved: bool = False

    def __bool__(self) -> bool:
        return bool(self.gone or self.added or self.moved)

    def __str__(self) -> str:
        parts = [_listed(self.gone, "gone"), _listed(self.added, "new")]
        return " and ".join(filter(None, parts)) or ("the same, in another order" if self.moved else "the same")


@dataclass(frozen=True)
class Members:
    """Digests of a run's examples, in their order; and `run`, which names the training."""

    key: bytes
    run: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    held_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Source, run: str) -> Members:
        key = secrets.token_bytes(32)
        parts = (source.train, source.test, source.held_out)
        return cls(key, run, *(() if part is None else tuple(part.digests(key)) for part in parts))

    @classmethod
    def read(cls, folder: RunFolder) -> Members | None:
        """None of a run that kept none, as earlier versions did."""
        damaged = "it is no list of digests. Without it nobody knows who is in this run."
        match = read_private(folder / FILE, _FORM, damaged)
        if match is None:
            return None
        entries = [line.split() for line in match[3].splitlines()]
        parts = (tuple(digest for part, digest in entries if part == name) for name in PARTS)
        return cls(bytes.fromhex(match[1]), match[2], *parts)

    def save(self, folder: RunFolder) -> None:
        parts = zip(PARTS, (self.train, self.test, self.held_out), strict=True)
        entries = [f"{name} {digest}" for name, digests in parts for digest in digests]
        write_private(folder / FILE, [FIRST_LINE, f"key {self.key.hex()}", f"run {self.run}", *entries])

    def train_changes(self, images: Examples) -> Changes:
        return _changes(self.train, images.digests(self.key))

    def test_changes(self, images: Examples | None) -> Changes:
        return _changes(self.test, [] if images is None else images.digests(self.key))

    def held_out_changes(self, images: Examples | None) -> Changes:
        return _changes(self.held_out, [] if images is None else images.digests(self.key))

    def kept_out(self, images: Examples) -> list[bool]:
        """Of each of these examples, whether it is among those that were kept out of the training for audits."""
        held_out = set(self.held_out)
        return [digest in held_out for digest in images.digests(self.key)]

    def trained_on(self, images: Examples) -> list[bool]:
        """Of each of these examples, whether it is among those of the training."""
        trained = set(self.train)
        return [digest in trained for digest in images.digests(self.key)]


def _changes(before: Sequence[str], now: Sequence[str]) -> Changes:
    gone, added = _beyond(before, now), _beyond(now, before)
    return Changes(gone, added, moved=not gone and not added and list(before) != list(now))


def _beyond(these: Sequence[str], those: Sequence[str]) -> tuple[int, ...]:
    """Positions of what is in these more often than in those."""
    left, positions = Counter(those), []
    for position, digest in enumerate(these):
        if left[digest]:
            left[digest] -= 1
        else:
            positions.append(position)
    return tuple(positions)


def _listed(positions: Sequence[int], what: str) -> str:
    if not positions:
        return ""
    shown = ", ".join(map(str, positions[:MOST_LISTED])) + (", …" if len(positions) > MOST_LISTED else "")
    return f"{len(positions)} {'is' if len(positions) == 1 else 'are'} {what} (at {shown})"
