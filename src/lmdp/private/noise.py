"""Chance in a private training: the coins that decide who is in a batch, and the Gaussian noise.

    Entropy   a stream cipher under a key from the operating system, drawn on and on          (default)
    Seeded    every step has streams of its own, keyed by (seed, step): a resumed run repeats the uninterrupted one
    Secure    as Entropy, with noise whose last bits do not give it away, in `secure.py`

All bits are those of `keystream.py`. (Seeding PyTorch's CPU generator with an integer keeps 32 bits, few enough for an
attacker to try them all.)

Normal numbers are made in double precision, whatever they are added to, by the formula of Box and Muller: without
branches it takes half the time of a ziggurat. The uniform numbers behind them have 64 bits, and small ones 64 more, so
that normal numbers go on to 13 deviations. Where draws end (PyTorch's, in single precision, at 5.77), a value beyond
would tell for certain which of two datasets it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lmdp.private.keystream import KEY_BYTES, SPARE, KeyStream, fresh_key

_COINS, _NOISE = 0, 1
ROUND = 2**21
"""Normal numbers that are made at a time. One thread writes the bits that all read; in smaller rounds, whose memory is
written again while other cores have it in their caches, that took up to four times as long."""

SMALL = 2.0**-32
"""Uniform numbers below this get more bits."""


class Noise(Protocol):
    """Independent normal draws. Each call draws anew; nothing is cached or reused."""

    @property
    def drawn(self) -> int:
        """How many words of the stream have been used."""
        ...

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        """Noise of the shapes, types and devices of `tensors`, with this standard deviation."""
        ...


class Chance(Protocol):
    """Everything that is random in a private training. `source` says in a statement where it comes from."""

    source: str

    def coins(self, draw: int, size: int) -> Tensor:
        """Uniform numbers in [0, 1), float64, for the draw of this number."""
        ...

    def noise(self, step: int) -> Noise:
        """The noise of this step."""
        ...


class Entropy:
    """Keyed by the operating system; a resumed run has a new key, and so has a copy or a forked process."""

    source = "AES-256-CTR keyed by the operating system"

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is for tests only: a run whose key is known is not private."""
        self._begin(fresh_key() if key is None else key)

    def _begin(self, key: bytes) -> None:
        self._coins, self._noise = KeyStream(key, _COINS), self._made(KeyStream(key, _NOISE))

    def _made(self, stream: KeyStream) -> GaussianNoise:
        return GaussianNoise(stream)

    def coins(self, draw: int, size: int) -> Tensor:
        self._after_fork()
        return self._coins.uniform(size)

    def noise(self, step: int) -> Noise:
        self._after_fork()
        return self._noise

    def _after_fork(self) -> None:
        """A forked process must not draw what its parent draws: their releases would differ without noise."""
        if self._coins.forked:
            self._begin(fresh_key())

    def __reduce__(self) -> tuple[type[Entropy], tuple[()]]:
        """A copy, or one sent to another process, has a key of its own."""
        return Entropy, ()


class Seeded:
    """The coins of a draw and the noise of a step follow from the seed and their number, whatever came before."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a whole number, 0 or more")
        self.source = "AES-256-CTR keyed by the seed for every step"
        self._seed = seed

    def coins(self, draw: int, size: int) -> Tensor:
        return self._stream(_COINS, draw).uniform(size)

    def noise(self, step: int) -> Noise:
        return GaussianNoise(self._stream(_NOISE, step))

    def _stream(self, *path: int) -> KeyStream:
        """A key of its own for every seed and path."""
        words = KEY_BYTES // 4
        seeds = np.random.SeedSequence(self._seed, spawn_key=path, pool_size=words)
        return KeyStream(seeds.generate_state(words).astype("<u4").tobytes())


class GaussianNoise:
    """Normal draws, two from every two words of a stream."""

    def __init__(self, stream: KeyStream) -> None:
        self._stream = stream

    @property
    def drawn(self) -> int:
        return self._stream.drawn

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        room = Room(min(ROUND, sum(t.numel() for t in tensors)))
        return shaped(tensors, std, lambda part: self._fill(part, std, room))

    def _fill(self, part: Tensor, std: float, room: Room) -> None:
        half = (part.numel() + 1) // 2
        for some, normal in zip(part.split(half), self.pairs(half, std, room)):
            some.copy_(normal[: len(some)])

    def pairs(self, count: int, std: float, room: Room) -> tuple[Tensor, Tensor]:
        """`count` pairs of independent normal numbers, until the room is used again.

        By torch: it computes sines on all threads, and in a sixth of the time that NumPy takes.
        """
        first, second = self._stream.words(2 * count, room.words).split(count)
        radius = self._refined(open_unit(first, room.radius[:count])).log_().mul_(-2).sqrt_().mul_(std)
        angle = room.angle[:count].copy_(second).mul_(math.pi * 2.0**-63)
        cosine = torch.cos(angle, out=room.cosine[:count])
        return cosine.mul_(radius), angle.sin_().mul_(radius)

    def _refined(self, numbers: Tensor) -> Tensor:
        """A small number tells in which cell, 2^-63 wide, it lies; 64 more bits say where in it."""
        if float(numbers.min()) >= SMALL:
            return numbers
        small = (numbers < SMALL).nonzero().squeeze(1)
        cell = numbers[small].mul_(2.0**63).sub_(0.5)
        within = open_unit(self._stream.words(len(small)), torch.empty_like(cell))
        return numbers.index_copy_(0, small, within.add_(cell).mul_(2.0**-63))


class Room:
    """Memory for as many pairs as there may be numbers in a round, so that it is asked for once, not in every round."""

    def __init__(self, count: int) -> None:
        pairs = max(2, count)
        self.words = torch.empty(2 * pairs + SPARE, dtype=torch.int64)
        self.radius, self.angle, self.cosine = torch.empty(3, pairs, dtype=torch.float64)


def open_unit(words: Tensor, out: Tensor) -> Tensor:
    """From 64 bits each to numbers in (0, 1]: odd multiples of 2^-64, as far as 53 bits go, all equally likely."""
    return out.copy_(words).add_(0.5).abs_().mul_(2.0**-63)


def shaped(tensors: Sequence[Tensor], std: float, fill: Callable[[Tensor], None]) -> list[Tensor]:
    """Noise like `tensors`, in one run for each type: `fill` makes the numbers of a part of it, of deviation `std`."""
    if std == 0:
        return [torch.zeros_like(t) for t in tensors]
    kinds = dict.fromkeys(t.dtype for t in tensors)
    noise = {kind: torch.empty(sum(t.numel() for t in tensors if t.dtype == kind), dtype=kind) for kind in kinds}
    for flat in noise.values():
        for part in flat.split(ROUND) if len(flat) else ():
            fill(part)
    left = {kind: iter(flat.split([t.numel() for t in tensors if t.dtype == kind])) for kind, flat in noise.items()}
    return [_laid_out(next(left[t.dtype]).view(t.shape), t) for t in tensors]


def _laid_out(noise: Tensor, like: Tensor) -> Tensor:
    """In the memory format of a parameter: fused optimizers read a gradient in the parameter's order."""
    if like.is_contiguous() and like.device == noise.device:
        return noise
    return torch.empty_like(like, requires_grad=False).copy_(noise)
