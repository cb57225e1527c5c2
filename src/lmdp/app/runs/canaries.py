"""Which canaries were in a run's training: their coins, in a file that is private in name and first line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmdp.app.runs.files import read_private, write_private
from lmdp.app.runs.folder import RunFolder
from lmdp.data import Examples

FILE = "private/canaries.txt"
FIRST_LINE = (
    "PRIVATE: which canaries were in this training, as keyed digests, and the key of their coins. Whoever has this "
    "file knows who was in. Never publish it."
)
_FORM = re.compile(r"key ([0-9a-f]{64})\n((?:(?:in|out) [0-9a-f]{32}\n)+)")


@dataclass(frozen=True)
class Coins:
    """The key that decides the coins, and what it decided: (digest, whether it was in) of every canary."""

    key: bytes
    tossed: tuple[tuple[str, bool], ...]

    @classmethod
    def of(cls, key: bytes, images: Examples, included: Sequence[bool]) -> Coins:
        return cls(key, tuple(zip(images.digests(key), map(bool, included), strict=True)))

    @classmethod
    def read(cls, folder: RunFolder) -> Coins | None:
        damaged = "it is no list of coins. Without it nobody knows which canaries were in."
        match = read_private(folder / FILE, _FORM, damaged)
        if match is None:
            return None
        entries = (line.split() for line in match[2].splitlines())
        return cls(bytes.fromhex(match[1]), tuple((digest, side == "in") for side, digest in entries))

    def save(self, folder: RunFolder) -> None:
        entries = [f"{'in' if inside else 'out'} {digest}" for digest, inside in self.tossed]
        write_private(folder / FILE, [FIRST_LINE, f"key {self.key.hex()}", *entries])
