"""Chance in a private training: the coins that decide who is in a batch, and the Gaussian noise.

    Entropy   one state per stream, from the operating system, drawn on and on                (default)
    Seeded    every step has streams of its own, made from (seed, step): a resumed run repeats the uninterrupted one
    Secure    a stream cipher, in `secure.py`

By default each generator's state comes from 256 bits of the operating system's entropy. (Seeding PyTorch's CPU
generator with an integer keeps 32 bits, few enough for an attacker to try them all.) No state is ever written to disk.

Normal numbers are made in double precision, whatever they are added to, by the formula of Box and Muller: without
branches it takes half the time of a ziggurat. The uniform numbers behind them have 53 bits, and small ones 53 more, so
that normal numbers go on to 12 deviations. Where draws end (PyTorch's, in single precision, at 5.77), a value beyond
would tell for certain which of two datasets it came from.

For millions of parameters drawing takes as long as a layer, so uniform numbers come from several independent generators
at once. Which generator draws which of them is fixed: the same seed gives the same noise on any number of threads.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COINS, _NOISE = 0, 1
_POOL_WORDS = 8
"""Of 32 bits: what NumPy mixes a seed in. Its default of 4 would keep 128 bits."""

STREAMS = 8
ROUND = 2**19
"""Normal numbers that are made at a time."""


class Noise(Protocol):
    """Independent normal draws. Each call draws anew; nothing is cached or reused."""

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
    """From the operating system; a resumed run draws anew."""

    source = "PCG64DXSM, its state from 256 bits of the operating system's entropy"

    def __init__(self) -> None:
        self._fill()

    def _fill(self) -> None:
        self._process = os.getpid()
        self._coins = entropy_generator()
        self._noise = GaussianNoise([entropy_generator() for _ in range(STREAMS)])

    def coins(self, draw: int, size: int) -> Tensor:
        self._refresh()
        return torch.from_numpy(self._coins.random(size))

    def noise(self, step: int) -> Noise:
        self._refresh()
        return self._noise

    def _refresh(self) -> None:
        """A forked process must not draw what its parent draws: their releases would differ without noise."""
        if os.getpid() != self._process:
            self._fill()

    def __reduce__(self) -> tuple[type[Entropy], tuple[()]]:
        """A copy, or one sent to another process, draws its own entropy."""
        return Entropy, ()


class Seeded:
    """The coins of a draw and the noise of a step follow from the seed and their number, whatever came before."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a whole number, 0 or more")
        self.source = "PCG64DXSM, made from the seed for every step"
        self._seed = seed

    def coins(self, draw: int, size: int) -> Tensor:
        return torch.from_numpy(seeded_generator(self._seed, _COINS, draw).random(size))

    def noise(self, step: int) -> Noise:
        return GaussianNoise([seeded_generator(self._seed, _NOISE, step, stream) for stream in range(STREAMS)])


def entropy_generator() -> np.random.Generator:
    """A generator that cannot be guessed: its state is made of the operating system's entropy."""
    return _generator(np.random.SeedSequence(secrets.randbits(32 * _POOL_WORDS), pool_size=_POOL_WORDS))


def seeded_generator(seed: int, *path: int) -> np.random.Generator:
    """A generator of its own for every seed and path."""
    return _generator(np.random.SeedSequence(seed, spawn_key=path, pool_size=_POOL_WORDS))


def _generator(seeds: np.random.SeedSequence) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64DXSM(seeds))


class GaussianNoise:
    """Normal draws from several generators."""

    def __init__(self, streams: Sequence[np.random.Generator]) -> None:
        self.streams = list(streams)

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        return shaped(tensors, std, self._fill)

    def _fill(self, part: Tensor, std: float) -> None:
        half = (part.numel() + 1) // 2
        numbers, turns = uniform(2 * half, [_drawing(stream) for stream in self.streams]).split(half)
        for some, normal in zip(part.split(half), normal_pairs(self._refined(numbers), turns, std)):
            some.copy_(normal[: len(some)])

    def _refined(self, numbers: Tensor) -> Tensor:
        """From multiples of 2^-53 in [0, 1) to numbers in (0, 1], the small ones of them multiples of 2^-107."""
        small = (numbers < 2.0**-20).nonzero().squeeze(1)
        if len(small) == 0:
            return numbers.add_(2.0**-54)
        more = torch.from_numpy(self.streams[0].random(len(small)))
        refined = numbers[small] + (more + 2.0**-54) * 2.0**-53
        return numbers.add_(2.0**-54).index_copy_(0, small, refined)


def _drawing(stream: np.random.Generator) -> Draw:
    def draw(out: NDArray[np.float64]) -> None:
        stream.random(out=out)

    return draw


Draw = Callable[[NDArray[np.float64]], None]
"""Fills an array with uniform numbers, multiples of 2^-53 in [0, 1)."""


def uniform(count: int, streams: Sequence[Draw]) -> Tensor:
    """Each stream draws a run of its own, several at once where there are cores to spare.

    Of torch's threads one half may still be waiting for more to do, and does not give its cores up while it waits.
    """
    numbers = torch.empty(count, dtype=torch.float64)
    shares = [share.numpy() for share in numbers.split(max(MIN_SHARE, -(-count // len(streams))))]
    threads = min(torch.get_num_threads() // 2, len(shares))
    if threads <= 1:
        for draw, share in zip(streams, shares):
            draw(share)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda draw, share: draw(share), streams, shares))
    return numbers


MIN_SHARE = 2**15
"""Numbers that are worth a thread."""


def normal_pairs(numbers: Tensor, turns: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Two independent normal numbers for each uniform one in (0, 1] and each in [0, 1). Overwrites both.

    By torch: it computes sines on all threads, and in a sixth of the time that NumPy takes.
    """
    radius = numbers.log_().mul_(-2).sqrt_().mul_(std)
    angle = turns.mul_(2 * math.pi)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def shaped(tensors: Sequence[Tensor], std: float, fill: Callable[[Tensor, float], None]) -> list[Tensor]:
    """Noise like `tensors`, in one run for each type: `fill` makes the numbers of a part of it, of deviation `std`."""
    if std == 0:
        return [torch.zeros_like(t) for t in tensors]
    kinds = dict.fromkeys(t.dtype for t in tensors)
    noise = {kind: torch.empty(sum(t.numel() for t in tensors if t.dtype == kind), dtype=kind) for kind in kinds}
    for flat in noise.values():
        for part in flat.split(ROUND) if len(flat) else ():
            fill(part, std)
    left = {kind: iter(flat.split([t.numel() for t in tensors if t.dtype == kind])) for kind, flat in noise.items()}
    return [_laid_out(next(left[t.dtype]).view(t.shape), t) for t in tensors]


def _laid_out(noise: Tensor, like: Tensor) -> Tensor:
    """In the memory format of a parameter: fused optimizers read a gradient in the parameter's order."""
    if like.is_contiguous() and like.device == noise.device:
        return noise
    return torch.empty_like(like, requires_grad=False).copy_(noise)
