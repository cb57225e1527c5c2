"""Parts of sums, each as the whole of it would come out there: for processes that hold one part of each.

Number i of n that are worked on together has pair i mod ⌈n/2⌉ of their words, and its cosine or, in the second half,
its sine. So whoever holds numbers a to b reads the words of their pairs only, wherever these are in the stream, and
drops the other half of each. Of two processes each reads all words; of R, each reads 2/R of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmdp.gradients.compiled.grid import on_grid
from lmdp.gradients.compiled.rounds import ROUND, Rounded


class Places(Protocol):
    """A stream of random words that can be read anywhere, and more bits of each of them."""

    drawn: int

    def read(self, start: int, count: int) -> Tensor: ...
    def skip(self, count: int) -> None: ...
    def more(self, start: int, place: int, count: int) -> int: ...


@dataclass(frozen=True)
class Part:
    """Numbers from `begin` on, of a sum of `whole` numbers."""

    begin: int
    whole: int

    @property
    def words(self) -> int:
        """That the whole takes."""
        return self.whole + self.whole % 2


def on_host(rounded: Rounded, parts: Sequence[Part], stream: Places) -> dict[int, list[Tensor]]:
    """As `Rounded.on_host`, of these parts of the sums. All of the words count as drawn."""
    start, weights = stream.drawn, rounded.weights.tolist()
    results: dict[int, list[Tensor]] = {}
    for number, (sums, dtype), part in zip(rounded.numbers, list(rounded.sums), parts):
        out = torch.empty(len(sums), dtype=dtype, device="cpu")
        work = _Work(rounded, weights[number], stream, sums.cpu(), out, part.begin)
        for first in range(0, part.whole, ROUND):
            work.fill(first, min(ROUND, part.whole - first), start + first)
        start += part.words
        results[number] = [out.to(sums.device)]
    stream.skip(start - stream.drawn)
    return results


@dataclass(frozen=True)
class _Work:
    """One part: its sums, where its results go, and where in the whole it begins."""

    rounded: Rounded
    weight: float
    stream: Places
    sums: Tensor
    out: Tensor
    begin: int

    def fill(self, first: int, count: int, start: int) -> None:
        """What it has of the whole's numbers from `first` on, which are worked on together, from words at `start`."""
        pairs = (count + 1) // 2
        for half in (0, 1):
            low = max(self.begin, first + half * pairs)
            high = min(self.begin + len(self.sums), first + (pairs if half == 0 else count))
            if low < high:
                self._half(slice(low - self.begin, high - self.begin), half, low - first - half * pairs, pairs, start)

    def _half(self, at: slice, half: int, pair: int, pairs: int, start: int) -> None:
        mine = self.sums[at]
        n = len(mine)
        words = torch.cat([self.stream.read(start + pair, n), self.stream.read(start + pairs + pair, n)])
        both, out = mine.new_zeros(2 * n), self.out.new_empty(2 * n)
        both[half * n : half * n + n] = mine
        on_grid(
            words,
            both,
            out,
            weight=self.weight,
            deviation=self.rounded.deviation,
            step=self.rounded.step,
            more=lambda place, bits: self.stream.more(start, 2 * pair + place, bits),
        )
        self.out[at] = out[half * n : half * n + n]
