"""The same as `grid` on a device that is not the host: few kernels, and one transfer at the end.

    FarStream  random words that the device makes itself
    add      results of some pieces from random words, laid one behind the other and worked on together
    finish   one transfer tells which places double precision cannot decide; the host decides them, by intervals

Guarantee. As in `grid`, with one difference: a sum is multiplied by its weight in double precision before anything
else, and what is rounded is (that product) + Z · deviation, exactly. Assumes that the device adds and multiplies double
precision as IEEE 754 says, and that its log, root, sine and cosine are off by 4 units in the last place at most.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.gradients.compiled.grid import by_torch, of_place

MoreOf = Callable[[int, int, int], int]
"""(words before a piece, place, count) → bits, as `grid.More` has them."""

OF_ROUND, SPARE = 16, 4
"""Unsure places of a round of about two million numbers that are kept at most, where 3 are expected; of all together,
besides twice as many as are expected."""
EXPECTED = 2.0**-19
"""Of all places, those that are not sure, at most: see `grid`."""


@dataclass(frozen=True)
class Piece:
    """Sums [n], what they are multiplied by, how many words were drawn before those of this piece; type of results."""

    sums: Tensor
    weight: float | Tensor
    start: int
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        return (self.sums.numel() + 1) // 2


@dataclass(frozen=True)
class _Round:
    """Pieces that were worked on together; their results; and their random words, once more.

    count  of places that are not sure; `kept`: a few, each with its words and product
    """

    pieces: Sequence[Piece]
    results: Sequence[Tensor]
    words: Callable[[], Tensor]
    deviation: float
    step: float
    count: Tensor
    kept: Tensor

    @property
    def ends(self) -> list[int]:
        return list(itertools.accumulate(piece.pairs for piece in self.pieces))


class OnDevice:
    """Of one release on one device."""

    def __init__(self) -> None:
        self._rounds: list[_Round] = []

    def add(self, pieces: Sequence[Piece], words: Callable[[], Tensor], deviation: float, step: float) -> list[Tensor]:
        """Results [n] of each piece. `words` gives those of the first piece (radii, then angles), of the second …"""
        totals, drawn = _totals(pieces), _by_kind(pieces, words())
        out = torch.empty_like(totals)
        unsure = by_torch(drawn, totals, out, 1.0, deviation, step)
        flags, places = torch.topk(unsure.to(torch.int32), min(OF_ROUND, len(unsure)), sorted=False)
        kept = _records(places, flags * (places + 1), drawn, totals)
        pairs = [piece.pairs for piece in pieces]
        halves = zip(*(half.split(pairs) for half in out.chunk(2)))
        results = [torch.cat(both)[: piece.sums.numel()].to(piece.dtype) for piece, both in zip(pieces, halves)]
        self._rounds.append(_Round(pieces, results, words, deviation, step, unsure.sum(), kept))
        return results

    def finish(self, more: MoreOf) -> None:
        """Decide what is not sure, and write it into the results."""
        if not self._rounds:
            return
        numbers = sum(2 * each.ends[-1] for each in self._rounds)
        every = torch.cat([each.kept for each in self._rounds])  # [rounds · OF_ROUND, 4]
        of_round = torch.cat([each.kept.new_full((len(each.kept),), i) for i, each in enumerate(self._rounds)])
        most = min(len(every), SPARE + int(2 * numbers * EXPECTED))
        chosen = torch.topk((every[:, 0] > 0).to(torch.int32), most, sorted=False).indices
        counts = torch.stack([each.count for each in self._rounds])
        fetched = torch.cat([counts, of_round[chosen], every[chosen].flatten()]).tolist()
        expected, rounds, records = fetched[: len(counts)], fetched[len(counts) :][:most], fetched[len(counts) + most :]
        by_round: list[list[list[int]]] = [[] for _ in self._rounds]
        for at, number in enumerate(rounds):
            record = records[4 * at : 4 * at + 4]
            by_round[number] += [record] if record[0] else []
        for each, count, few in zip(self._rounds, expected, by_round):
            for place, radius, angle, total in few if len(few) == count else _every_unsure(each):
                _decide(each, place - 1, (radius, angle), _double(total), more)
        self._rounds = []


def _every_unsure(each: _Round) -> list[list[int]]:
    """More places than were kept: all of them, from the same words."""
    totals, drawn = _totals(each.pieces), _by_kind(each.pieces, each.words())
    places = by_torch(drawn, totals, torch.empty_like(totals), 1.0, each.deviation, each.step).nonzero().squeeze(1)
    records: list[list[int]] = _records(places, places + 1, drawn, totals).tolist()
    return records


def _records(places: Tensor, numbers: Tensor, drawn: Tensor, totals: Tensor) -> Tensor:
    """int64 [n, 4]: of each place a number, its radius, its angle, and the bits of its product."""
    radii, angles = drawn.chunk(2)
    pair = places % len(radii)
    return torch.stack([numbers, radii[pair], angles[pair], totals.view(torch.int64)[places]], dim=1)


def _decide(each: _Round, place: int, bits: tuple[int, int], total: float, more: MoreOf) -> None:
    ends = each.ends
    pair, sine = place % ends[-1], place >= ends[-1]
    number = bisect.bisect_right(ends, pair)
    piece = each.pieces[number]
    at = pair - (ends[number] - piece.pairs) + sine * piece.pairs
    if at < piece.sums.numel():  # of an odd number of results, the last sine is nobody's
        more_of_piece = functools.partial(more, piece.start)
        each.results[number][at] = each.step * of_place(
            at, piece.pairs, bits, total, 1.0, each.deviation, more_of_piece
        )


def _totals(pieces: Sequence[Piece]) -> Tensor:
    """Products [2 · pairs]: of the places that get cosines, piece by piece, then of those that get sines."""
    firsts: list[Tensor] = []
    seconds: list[Tensor] = []
    for piece in pieces:
        total = piece.sums.double() * piece.weight
        total = torch.cat([total, total.new_zeros(1)]) if len(total) % 2 else total
        for halves, half in zip((firsts, seconds), total.chunk(2)):
            halves.append(half)
    return torch.cat([*firsts, *seconds])


def _by_kind(pieces: Sequence[Piece], words: Tensor) -> Tensor:
    """The radii of all pieces, then their angles."""
    split = [part.chunk(2) for part in words.split([2 * piece.pairs for piece in pieces])]
    return torch.cat([*(radii for radii, _ in split), *(angles for _, angles in split)])


def _double(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64))


class FarStream:
    """Bits that a device other than the host makes itself, by torch's generator there, seeded with 64 secret bits.

    That generator (Philox, on GPUs) is made for simulations: it is fast and independent of data, and nobody without the
    seed is known to tell its bits, but it is no cipher. With `secure_mode=True` bits come from the host's instead.
    """

    description = "noise from bits of the device's own generator, seeded with 64 bits of that stream"

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, torch.Generator(device=device).manual_seed(seed)

    def words(self, count: int) -> Callable[[], Tensor]:
        """int64 [count], of the next bits: the same at each call of what is returned."""
        before, ready = self._generator.get_state(), [self._drawn(count)]

        def words() -> Tensor:
            if ready:  # a second call is rare, so nothing is kept for it
                return ready.pop()
            now = self._generator.get_state()  # others have drawn since: no bit may be drawn twice
            self._generator.set_state(before)
            once_more = self._drawn(count)
            self._generator.set_state(now)
            return once_more

        return words

    def _drawn(self, count: int) -> Tensor:
        words = torch.empty(count, dtype=torch.int64, device=self._device)
        return words.random_(-(2**63), None, generator=self._generator)  # of all 64 bits
