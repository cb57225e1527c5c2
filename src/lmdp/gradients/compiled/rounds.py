"""Many sums, of any length, in rounds: pieces of large ones, several small ones together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmdp.gradients.compiled.far import OnDevice, Piece
from lmdp.gradients.compiled.grid import on_grid

ROUND = 2**21
"""Numbers that are on_grid at a time. One thread writes the bits that all read; in smaller rounds, whose memory is
written again while other cores have it in their caches, that took up to four times as long."""

SPARE = 2
"""Words beyond the last one asked for: a block cipher may demand room for one more block."""


class Words(Protocol):
    """A stream of random words, of which `drawn` were used; and more bits of each of them."""

    drawn: int

    def words(self, count: int, room: Tensor | None = None) -> Tensor: ...
    def more(self, start: int, place: int, count: int) -> int: ...


_Cut = tuple[int, int, Tensor]
"""Of which sum, from which of its numbers on, and these numbers [n]."""


@dataclass(frozen=True)
class Rounded:
    """Sums [n] on one device, with the type of their results and the number by which results are asked for.

    sums       given away: on the host each is freed once its result is there
    weights    what each sum is multiplied by, by its number
    deviation  of the normal numbers that are added; both in steps of the grid, of which one is worth `step`
    """

    numbers: Sequence[int]
    sums: list[tuple[Tensor, torch.dtype]]
    weights: Tensor
    deviation: float
    step: float

    def on_host(self, stream: Words) -> dict[int, list[Tensor]]:
        sizes, weights = [len(sums) for sums, _ in self.sums], self.weights.tolist()
        results: list[Tensor] = []
        longest = min(ROUND, sum(sizes)) + len(sizes) + SPARE  # a word more for each of odd length
        room = torch.empty(longest, dtype=torch.int64, device="cpu")
        for cuts in self._rounds():
            start, words = stream.drawn, stream.words(_count(cuts), room)
            for at, begin, sums in cuts:
                n = len(sums)
                if begin == 0:
                    results.append(torch.empty(sizes[at], dtype=self.sums[at][1], device="cpu"))
                bits, words = words[: n + n % 2], words[n + n % 2 :]
                on_grid(
                    bits,
                    sums,
                    results[at][begin : begin + n],
                    weight=weights[self.numbers[at]],
                    deviation=self.deviation,
                    step=self.step,
                    more=functools.partial(stream.more, start),
                )
                start += n + n % 2
        return {number: [result] for number, result in zip(self.numbers, results)}

    def on_device(
        self, work: OnDevice, stream: Words, words: Callable[[int], Callable[[], Tensor]]
    ) -> dict[int, list[Tensor]]:
        """The same from the same words. Some numbers of the results are open until `work` is finished."""
        results: dict[int, list[Tensor]] = {number: [] for number in self.numbers}
        weights = self.weights.to(self.sums[0][0].device).unbind()  # before any is given away
        for cuts in self._rounds():
            start, pieces = stream.drawn, []
            for at, _, sums in cuts:
                pieces.append(Piece(sums, weights[self.numbers[at]], start, self.sums[at][1]))
                start += len(sums) + len(sums) % 2
            for (at, _, _), out in zip(cuts, work.add(pieces, words(_count(cuts)), self.deviation, self.step)):
                results[self.numbers[at]].append(out)
        return results

    def _rounds(self) -> Iterator[list[_Cut]]:
        """One after the other, as many pieces together as are not more than ROUND numbers."""
        cuts: list[_Cut] = []
        total = 0
        for at, (sums, dtype) in enumerate(self.sums):
            self.sums[at] = sums[:0].clone(), dtype
            for k, cut in enumerate(sums.split(ROUND)):
                if cuts and total + len(cut) > ROUND:
                    yield cuts
                    cuts, total = [], 0
                cuts.append((at, ROUND * k, cut))
                total += len(cut)
        yield cuts


def _count(cuts: Sequence[_Cut]) -> int:
    """Words for pieces of a round: each has a pair more where its numbers are odd."""
    return sum(len(sums) + len(sums) % 2 for _, _, sums in cuts)
