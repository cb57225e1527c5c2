"""Everything that is random in a private training: who is drawn, and Gaussian noise.

    Entropy   a stream cipher under a key from the operating system, drawn on and on          (default)
    Seeded    every step has streams of its own, keyed by (seed, step): a resumed run repeats the uninterrupted one
    Secure    as Entropy, and the key cannot be copied                                        (`secure_mode=True`)

Guarantee. What is released is the multiple of a public grid that is nearest to sum + noise, divided by a public number.
The noise is independent of the data, of the sampling and of all noise before, and normal with the deviation asked for:
real numbers, not floating-point ones. So is their sum with the noise, and it is rounded once (`compiled/grid.py`).

Why the epsilon of real numbers holds. Grid and divisor follow from public numbers (`Mechanism`). Rounding sum + noise
to the grid, dividing and converting to a parameter's type are then one fixed function of sum + noise, the output of
the Gaussian mechanism that the accountant knows: post-processing. No bit of the result depends on anything else:
neither on the floating-point numbers that a sum can be (noise that is rounded before a sum is added leaves their grid,
which tells who is present), nor on the values that floating-point noise cannot take (beyond its end, and in its holes).
Double precision only finds the nearest multiple; where it cannot, more random bits and digits decide (interval
refining, arXiv 2207.13793). That costs no noise and no epsilon; it happens to about one number in a million.

Assumes independent bits (`keystream.py`), and a sum that one example moves by no more than the sensitivity. (What
rounding *within* a sum adds to that is not counted: of B examples in single precision, about √B · 2^-24 of its length.)
Bits that decide are read at places of their own: how many are drawn from the stream does not depend on data. A run
under `Seeded` is reproducible, and therefore never certified.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from lmdp.accounting import Grid
from lmdp.gradients.compiled.grid import on_grid
from lmdp.private.keystream import KEY_BYTES, SPARE, KeyStream, fresh_key

PROMISE = (
    "sum and noise are added as real numbers and rounded once, to a public grid that does not depend on data: "
    "post-processing of the Gaussian mechanism"
)
"""How it was established that floating point does not undo the noise."""

_SAMPLING, _NOISE = 0, 1
ROUND = 2**21
"""Numbers that are on_grid at a time. One thread writes the bits that all read; in smaller rounds, whose memory is
written again while other cores have it in their caches, that took up to four times as long."""


class GaussianNoise:
    """Independent normal draws, two from every two words of a stream. Each call draws anew; nothing is reused."""

    def __init__(self, stream: KeyStream) -> None:
        self._stream = stream

    @property
    def drawn(self) -> int:
        """How many words of the stream have been used."""
        return self._stream.drawn

    def added(
        self, like: Sequence[Tensor], sums: Sequence[Tensor], weights: Sequence[float], grid: Grid, size: float = 1.0
    ) -> list[Tensor]:
        """(sum · weight + noise) / size of each, of the types, devices and memory formats of `like`."""
        if grid.std == 0:
            pairs = zip(like, sums, weights)
            return [torch.zeros_like(t, requires_grad=False).add_(s, alpha=w / size) for t, s, w in pairs]
        results = [torch.empty(t.numel(), dtype=t.dtype, device="cpu") for t in like]
        flat = [s.detach().cpu().contiguous().view(-1) for s in sums]
        pieces = [piece for out, s, w in zip(results, flat, weights) for piece in _pieces(out, s, w / grid.step)]
        room = torch.empty(min(ROUND, sum(map(len, results))) + len(pieces) + SPARE, dtype=torch.int64, device="cpu")
        for part in _rounds(pieces):
            self._fill(part, grid.std / grid.step, grid.step / size, room)
        return [_laid_out(result.view(t.shape), t) for result, t in zip(results, like)]

    def _fill(self, part: list[_Piece], deviation: float, step: float, room: Tensor) -> None:
        start, counts = self.drawn, [out.numel() + out.numel() % 2 for out, _, _ in part]
        words = self._stream.words(sum(counts), room).split(counts)
        for (out, sums, weight), count, bits in zip(part, counts, words):
            more = functools.partial(self._stream.more, start)
            on_grid(bits, sums, out, weight=weight, deviation=deviation, step=step, more=more)
            start += count


_Piece = tuple[Tensor, Tensor, float]
"""Results [n], sums [n], and what the sums are multiplied by."""


def _pieces(out: Tensor, sums: Tensor, weight: float) -> list[_Piece]:
    return [(a, b, weight) for a, b in zip(out.split(ROUND), sums.split(ROUND))]


def _rounds(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """One after the other, as many pieces together as are not more than ROUND numbers."""
    part: list[_Piece] = []
    total = 0
    for piece in pieces:
        if part and total + len(piece[0]) > ROUND:
            yield part
            part, total = [], 0
        part.append(piece)
        total += len(piece[0])
    yield part


def _laid_out(released: Tensor, like: Tensor) -> Tensor:
    """In the memory format of a parameter: fused optimizers read a gradient in the parameter's order."""
    if like.is_contiguous() and like.device == released.device:
        return released
    return torch.empty_like(like, requires_grad=False).copy_(released)


class Randomness(Protocol):
    """Everything that is random in a private training. `source` says in a statement where it comes from."""

    source: str

    def uniforms(self, draw: int, size: int) -> Tensor:
        """Uniform numbers in [0, 1), float64, for the draw of this number."""
        ...

    def noise(self, step: int) -> GaussianNoise:
        """The noise of this step."""
        ...


class Entropy:
    """Keyed by the operating system; a resumed run has a new key, and so has a copy or a forked process."""

    source = "AES-256-CTR keyed by the operating system, rounded exactly to a public grid"

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is for tests only: a run whose key is known is not private."""
        self._begin(fresh_key() if key is None else key)

    def _begin(self, key: bytes) -> None:
        self._sampling, self._noise = KeyStream(key, _SAMPLING), GaussianNoise(KeyStream(key, _NOISE))

    def uniforms(self, draw: int, size: int) -> Tensor:
        self._after_fork()
        return self._sampling.uniform(size)

    def noise(self, step: int) -> GaussianNoise:
        self._after_fork()
        return self._noise

    def _after_fork(self) -> None:
        """A forked process must not draw what its parent draws: their releases would differ without noise."""
        if self._sampling.forked:
            self._begin(fresh_key())

    def __reduce__(self) -> tuple[type[Entropy], tuple[()]]:
        """A copy, or one sent to another process, has a key of its own."""
        return Entropy, ()


class Secure(Entropy):
    """One engine, one key: it cannot be copied."""

    source = f"{Entropy.source}, under a key that cannot be copied"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cryptographic generator cannot be copied or saved: its stream would be used twice")


class Seeded:
    """A draw's uniform numbers and a step's noise follow from the seed and their number, whatever came before."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a whole number, 0 or more")
        self.source = "AES-256-CTR keyed by the seed for every step, rounded exactly to a public grid"
        self._seed = seed

    def uniforms(self, draw: int, size: int) -> Tensor:
        return self._stream(_SAMPLING, draw).uniform(size)

    def noise(self, step: int) -> GaussianNoise:
        return GaussianNoise(self._stream(_NOISE, step))

    def _stream(self, *path: int) -> KeyStream:
        """A key of its own for every seed and path."""
        words = KEY_BYTES // 4
        seeds = np.random.SeedSequence(self._seed, spawn_key=path, pool_size=words)
        return KeyStream(seeds.generate_state(words).astype("<u4").tobytes())
