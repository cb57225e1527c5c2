"""Chance in a private training: the coins that decide who is in a batch, and the Gaussian noise.

    Entropy   one state per stream, filled whole by the operating system, drawn on and on     (default)
    Seeded    every step has streams of its own, made from (seed, step): a resumed run repeats the uninterrupted one
    Secure    a stream cipher, in `secure.py`

By default a generator's whole state (624 words) comes from the operating system. Seeding PyTorch's CPU generator
with an integer keeps 32 bits of it, few enough for an attacker to try them all. No state is ever written to disk.

PyTorch draws normal numbers on one thread. For millions of parameters that takes as long as a layer, so the noise is
cut into slices and drawn from several independent generators at once. Which generator draws which slice is fixed: the
same seed gives the same noise on any number of threads.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_STATE_BYTES = 5056
_WORDS = 624
_FIRST_WORD = 24  # the words follow initial seed (8 bytes), words left (4), seeded flag (4), next word (8)
_COINS, _NOISE = 0, 1

STREAMS = 8
SLICE = 2**16
"""Numbers drawn at a time from one stream."""


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

    source = "Mersenne Twister, its whole state from the operating system"

    def __init__(self) -> None:
        self._fill()

    def _fill(self) -> None:
        self._process = os.getpid()
        self._coins = entropy_generator()
        self._noise = GaussianNoise([entropy_generator() for _ in range(STREAMS)])

    def coins(self, draw: int, size: int) -> Tensor:
        self._refresh()
        return torch.rand(size, generator=self._coins, dtype=torch.float64)

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
        self.source = "Mersenne Twister, made from the seed for every step"
        self._seed = seed

    def coins(self, draw: int, size: int) -> Tensor:
        generator = seeded_generator(self._seed, _COINS, draw)
        return torch.rand(size, generator=generator, dtype=torch.float64)

    def noise(self, step: int) -> Noise:
        return GaussianNoise([seeded_generator(self._seed, _NOISE, step, stream) for stream in range(STREAMS)])


def entropy_generator() -> torch.Generator:
    """A generator that cannot be guessed: its state is filled with the operating system's entropy."""
    return _filled(torch.tensor([secrets.randbits(32) for _ in range(_WORDS)]))


def seeded_generator(seed: int, *path: int) -> torch.Generator:
    """A generator of its own for every seed and path: the whole state follows from them, not 32 bits of it."""
    words = np.random.SeedSequence(seed, spawn_key=path).generate_state(_WORDS, np.uint32)
    return _filled(torch.from_numpy(words.astype(np.int64)))


def _filled(words: Tensor) -> torch.Generator:
    generator = torch.Generator().manual_seed(0)  # a state in which no number has been drawn
    state = generator.get_state()
    if state.numel() != _STATE_BYTES:
        raise RuntimeError(
            f"torch {torch.__version__} stores its generator in {state.numel()} bytes, not {_STATE_BYTES}: "
            "lmdp cannot fill it with entropy. Use a torch version that lmdp supports."
        )
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(torch.int64).copy_(words)
    generator.set_state(state)
    return generator


class GaussianNoise:
    """Normal draws from several generators."""

    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        self.streams = list(streams)

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        return in_slices(tensors, std, [_drawing(stream) for stream in self.streams])


Fill = Callable[[Tensor, float], None]
"""Fills a flat tensor with normal numbers of this standard deviation."""


def in_slices(tensors: Sequence[Tensor], std: float, streams: Sequence[Fill]) -> list[Tensor]:
    """Noise like `tensors`. Every stream fills the same slices on any number of threads."""
    if std == 0:
        return [torch.zeros_like(t) for t in tensors]
    noise = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
    slices = [part for n in noise for part in n.view(-1).split(SLICE)]
    work = [(fill, slices[k :: len(streams)]) for k, fill in enumerate(streams)]
    threads = min(torch.get_num_threads(), len(streams), len(slices))
    if threads <= 1:
        for fill, parts in work:
            _fill_all(fill, parts, std)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda job: _fill_all(job[0], job[1], std), work))
    return [n.to(t.device) for n, t in zip(noise, tensors)]


def _drawing(stream: torch.Generator) -> Fill:
    def fill(part: Tensor, std: float) -> None:
        """In double precision, whatever the part: in single precision PyTorch's draws end at 5.77 deviations, and a
        value beyond that would tell for certain which of two datasets it came from."""
        part.copy_(torch.empty(part.shape, dtype=torch.float64).normal_(0.0, std, generator=stream))

    return fill


def _fill_all(fill: Fill, parts: Sequence[Tensor], std: float) -> None:
    for part in parts:
        fill(part, std)
