"""Everything that is random in a private training: who is drawn, and Gaussian noise.

    Entropy   a stream cipher under a key from the operating system, drawn on and on          (default)
    Seeded    every step has streams of its own, keyed by (seed, step): a resumed run repeats the uninterrupted one
    Secure    as Entropy, with noise whose last bits do not give it away                      (`secure_mode=True`)

Guarantee. Noise is drawn anew in every step, independent of the data, of the sampling and of all noise before; its
numbers are normal with the standard deviation asked for, in double precision, before they are rounded to the type of
what they are added to. How many bits are drawn does not depend on data.

Assumes independent bits (`keystream.py`). A run under `Seeded` is reproducible, and therefore never certified.

Normal numbers are made by the formula of Box and Muller, which has no branches. The uniform numbers behind them have
64 bits, and small ones 64 more, so that normal numbers go on to 13 deviations. Where draws end (PyTorch's, in single
precision, at 5.77), a value beyond would tell for certain which of two datasets it came from. (And seeding PyTorch's
CPU generator with an integer keeps 32 bits, few enough for an attacker to try them all.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from lmdp.gradients import compiled
from lmdp.private.keystream import KEY_BYTES, SPARE, KeyStream, fresh_key

_SAMPLING, _NOISE = 0, 1
ROUND = 2**21
"""Normal numbers that are made at a time. One thread writes the bits that all read; in smaller rounds, whose memory is
written again while other cores have it in their caches, that took up to four times as long."""

SMALL = 2.0**-32
"""Uniform numbers below this get more bits."""


class GaussianNoise:
    """Independent normal draws, two from every two words of a stream. Each call draws anew; nothing is reused."""

    def __init__(self, stream: KeyStream) -> None:
        self._stream = stream

    @property
    def drawn(self) -> int:
        """How many words of the stream have been used."""
        return self._stream.drawn

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        """Noise of the shapes, types and devices of `tensors`, with this standard deviation."""
        room = Room(min(ROUND, sum(t.numel() for t in tensors)))
        return shaped(tensors, std, lambda part: self._fill(part, std, room))

    def _fill(self, part: Tensor, std: float, room: Room) -> None:
        first, second = part.chunk(2)
        self.pairs(std, first, second, room)

    def pairs(self, std: float, first: Tensor, second: Tensor, room: Room) -> None:
        """Fill both with normal numbers: those of one are independent of those of the other."""
        words = self._stream.words(2 * len(first), room.words)
        if compiled.applies(first, second) and compiled.normal_pairs(words, std, first, second):
            return
        cosine, sine = self._by_torch(words, std, room)
        first.copy_(cosine)
        second.copy_(sine)

    def _by_torch(self, words: Tensor, std: float, room: Room) -> tuple[Tensor, Tensor]:
        """The same, where nothing is compiled and where a small number asks for more bits."""
        radii, angles = words.chunk(2)
        radius, angle, cosine = room.numbers(len(radii))
        self._refined(open_unit(radii, radius)).log_().mul_(-2).sqrt_().mul_(std)
        angle.copy_(angles).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=cosine)
        return cosine.mul_(radius), angle.sin_().mul_(radius)

    def _refined(self, numbers: Tensor) -> Tensor:
        """A small number tells in which cell, 2^-63 wide, it lies; 64 more bits say where in it."""
        if float(numbers.min()) >= SMALL:
            return numbers
        small = (numbers < SMALL).nonzero().squeeze(1)
        cell = numbers[small].mul_(2.0**63).sub_(0.5)
        within = open_unit(self._stream.words(len(small)), torch.empty_like(cell))
        return numbers.index_copy_(0, small, within.add_(cell).mul_(2.0**-63))


class SummedNoise(GaussianNoise):
    """Every number is half the sum of four normal ones, rounded to the parameter's type (arXiv 2107.10138).

    A single normal number in floating point has few enough pre-images that the values it cannot take reveal what it was
    added to; a sum of four has too many to search.
    """

    def _fill(self, part: Tensor, std: float, room: Room) -> None:
        """Both of a pair go into different sums: they share a radius."""
        total = torch.zeros_like(part, dtype=torch.float64)
        cosine, sine = torch.empty(2, part.numel(), dtype=torch.float64, device=part.device)
        for _ in range(2):
            self.pairs(std / 2, cosine, sine, room)
            total.add_(cosine).add_(sine.roll(1))
        part.copy_(total)


class Room:
    """Memory for as many pairs as a round has numbers (an even count), asked for once instead of in every round."""

    def __init__(self, count: int) -> None:
        self._pairs = max(2, count + count % 2)
        self.words = torch.empty(2 * self._pairs + SPARE, dtype=torch.int64, device="cpu")

    def numbers(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        radius, angle, cosine = self._numbers[:, :count].unbind()
        return radius, angle, cosine

    @functools.cached_property
    def _numbers(self) -> Tensor:
        return torch.empty(3, self._pairs, dtype=torch.float64, device="cpu")


def open_unit(words: Tensor, out: Tensor) -> Tensor:
    """From 64 bits each to numbers in (0, 1]: odd multiples of 2^-64, as far as 53 bits go, all equally likely."""
    return out.copy_(words).add_(0.5).abs_().mul_(2.0**-63)


def shaped(tensors: Sequence[Tensor], std: float, fill: Callable[[Tensor], None]) -> list[Tensor]:
    """Noise like `tensors`, in one run for each type: `fill` makes an even number at a time, of deviation `std`."""
    if std == 0:
        return [torch.zeros_like(t) for t in tensors]
    kinds = dict.fromkeys(t.dtype for t in tensors)
    sizes = {kind: [t.numel() for t in tensors if t.dtype == kind] for kind in kinds}
    left = {}
    for kind, counts in sizes.items():
        total = sum(counts)
        flat = torch.empty(total + total % 2, dtype=kind, device="cpu")
        for part in flat.split(ROUND) if total else ():
            fill(part)
        left[kind] = iter(flat[:total].split(counts))
    return [_laid_out(next(left[t.dtype]).view(t.shape), t) for t in tensors]


def _laid_out(noise: Tensor, like: Tensor) -> Tensor:
    """In the memory format of a parameter: fused optimizers read a gradient in the parameter's order."""
    if like.is_contiguous() and like.device == noise.device:
        return noise
    return torch.empty_like(like, requires_grad=False).copy_(noise)


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

    source = "AES-256-CTR keyed by the operating system"
    _kind: type[GaussianNoise] = GaussianNoise

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is for tests only: a run whose key is known is not private."""
        self._begin(fresh_key() if key is None else key)

    def _begin(self, key: bytes) -> None:
        self._sampling, self._noise = KeyStream(key, _SAMPLING), self._kind(KeyStream(key, _NOISE))

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
    """With the countermeasure of `SummedNoise`. One engine, one key: it cannot be copied."""

    source = "AES-256-CTR keyed by the operating system, sum of four Gaussians"
    _kind = SummedNoise

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cryptographic generator cannot be copied or saved: its stream would be used twice")


class Seeded:
    """A draw's uniform numbers and a step's noise follow from the seed and their number, whatever came before."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a whole number, 0 or more")
        self.source = "AES-256-CTR keyed by the seed for every step"
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
