"""Gaussian noise, and the generators it is drawn from.

By default a generator's whole state (624 words) comes from the operating system. Seeding PyTorch's CPU generator
with an integer keeps 32 bits of it, few enough for an attacker to try them all.

PyTorch draws normal numbers on one thread. For millions of parameters that takes as long as a layer, so the noise is
cut into slices and drawn from several independent generators at once. Which generator draws which slice is fixed: the
same seed gives the same noise on any number of threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_STATE_BYTES = 5056
_WORDS = 624
_FIRST_WORD = 24  # the words follow initial seed (8 bytes), words left (4), seeded flag (4), next word (8)


STREAMS = 8
SLICE = 2**16
"""Numbers drawn at a time from one stream."""


def entropy_generator() -> torch.Generator:
    """A generator that cannot be guessed: its state is filled with the operating system's entropy."""
    return _filled(lambda: torch.tensor([secrets.randbits(32) for _ in range(_WORDS)]))


def make_generator(seed: int | None) -> torch.Generator:
    """From entropy by default; reproducible, and therefore not certified, from a seed."""
    if seed is None:
        return entropy_generator()
    return torch.Generator().manual_seed(seed)


def make_streams(seed: int | None) -> list[torch.Generator]:
    """Independent generators, each with a whole state of its own."""
    if seed is None:
        return [entropy_generator() for _ in range(STREAMS)]
    parent = make_generator(seed)
    return [_filled(lambda: torch.randint(0, 2**32, (_WORDS,), generator=parent)) for _ in range(STREAMS)]


def _filled(words: Callable[[], Tensor]) -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    state = generator.get_state()
    if state.numel() != _STATE_BYTES:
        raise RuntimeError(
            f"torch {torch.__version__} stores its generator in {state.numel()} bytes, not {_STATE_BYTES}: "
            "lmdp cannot fill it with entropy. Use a torch version that lmdp supports."
        )
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(torch.int64).copy_(words())
    generator.set_state(state)
    return generator


class GaussianNoise:
    """Independent normal draws. Each call draws anew; nothing is cached or reused."""

    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        self._streams = list(streams)

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        """Noise of the shapes, types and devices of `tensors`, with this standard deviation."""
        if std == 0:
            return [torch.zeros_like(t) for t in tensors]
        noise = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        slices = [part for n in noise for part in n.view(-1).split(SLICE)]
        work = [(stream, slices[k :: len(self._streams)]) for k, stream in enumerate(self._streams)]
        threads = min(torch.get_num_threads(), len(self._streams), len(slices))
        if threads <= 1:
            for stream, parts in work:
                _draw(stream, parts, std)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda job: _draw(job[0], job[1], std), work))
        return [n.to(t.device) for n, t in zip(noise, tensors)]


def _draw(stream: torch.Generator, parts: list[Tensor], std: float) -> None:
    for part in parts:
        part.normal_(0.0, std, generator=stream)
