"""Everything that is random in a private training: who is drawn, and Gaussian noise.

    Entropy   a stream cipher under a key from the operating system, drawn on and on          (default)
    Seeded    every step has streams of its own, keyed by (seed, step): a resumed run repeats the uninterrupted one
    Secure    as Entropy, and the key cannot be copied                                        (`secure_mode=True`)
    Shared    as Seeded, under a key from the operating system of the first of several processes, which all have

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
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from lmdp.accounting import Grid
from lmdp.gradients.attach import REGISTRY
from lmdp.gradients.compiled import parts
from lmdp.gradients.compiled.far import FarStream, OnDevice
from lmdp.gradients.compiled.parts import Part
from lmdp.gradients.compiled.rounds import Rounded
from lmdp.gradients.rows import joined
from lmdp.private.keystream import KEY_BYTES, KeyStream, fresh_key

PROMISE = (
    "sum and noise are added as real numbers and rounded once, to a public grid that does not depend on data: "
    "post-processing of the Gaussian mechanism"
)
"""How it was established that floating point does not undo the noise."""

_SAMPLING, _NOISE, _SEEDS = 0, 1, 2


@dataclass(frozen=True)
class Noised:
    """Sums that get noise: times their weights [n], on a grid, divided by `size`; of types and devices of `like`.

    The sums are given away: each is freed as soon as its result is there. `parts`: which numbers these are, where other
    processes have the rest of each sum: together they get the noise that the whole would get.
    """

    like: Sequence[Tensor]
    sums: list[Tensor]
    weights: Tensor
    grid: Grid
    size: float = 1.0
    parts: Sequence[Part] = ()

    def on(self, device: torch.device) -> Rounded:
        """Those on one device, in steps of the grid."""
        here = [i for i, t in enumerate(self.like) if t.device == device]
        of_each = [(self.sums[i].detach().contiguous().view(-1), self.like[i].dtype) for i in here]
        for i in here:
            self.sums[i] = torch.empty(0, device="cpu")
        step = self.grid.step
        return Rounded(here, of_each, self.weights / step, deviation=self.grid.std / step, step=step / self.size)


class GaussianNoise:
    """Independent normal draws, two from every two words of a stream. Each call draws anew; nothing is reused."""

    def __init__(self, stream: KeyStream, far: Callable[[torch.device], FarStream] | None = None) -> None:
        """`far`: makes the words for a device that is not the host, there; without, they are copied to it."""
        self._stream, self._far = stream, far

    @property
    def drawn(self) -> int:
        """How many words have been used."""
        return self._stream.drawn

    def added(self, *noised: Noised) -> list[list[Tensor]]:
        """(sum · weight + noise) / size of all. A device that is not the host is waited for once, at the end."""
        works: dict[torch.device, OnDevice] = {}
        results: list[dict[int, list[Tensor]]] = []
        for each in noised:
            results.append({})
            for device in dict.fromkeys(t.device for t in each.like):
                if each.grid.std == 0:
                    scales = (each.weights / each.size).to(device)
                    results[-1] |= {i: [s * scales[i]] for i, s in enumerate(each.sums) if s.device == device}
                elif each.parts:
                    results[-1] |= parts.on_host(each.on(device), each.parts, self._stream)
                elif device.type == "cpu":
                    results[-1] |= each.on(device).on_host(self._stream)
                else:
                    work, words = works.setdefault(device, OnDevice()), functools.partial(self._words_on, device)
                    results[-1] |= each.on(device).on_device(work, self._stream, words)
        for work in works.values():
            work.finish(self._stream.more)
        return [
            [_laid_out(joined(flat[i]).view(t.shape), t) for i, t in enumerate(each.like)]
            for each, flat in zip(noised, results)
        ]

    def _words_on(self, device: torch.device, count: int) -> Callable[[], Tensor]:
        """The next words, the same whenever they are asked for."""
        if self._far is not None:
            self._stream.drawn += count
            return self._far(device).words(count)
        words = self._stream.words(count)
        return lambda: words.to(device)


def _laid_out(released: Tensor, like: Tensor) -> Tensor:
    """In the memory format of a parameter: fused optimizers read a gradient in the parameter's order."""
    if like.is_contiguous() and like.dtype == released.dtype:
        return released
    return torch.empty_like(like, requires_grad=False).copy_(released)


class Randomness(Protocol):
    """Everything that is random in a private training. `source` says in a statement where it comes from."""

    @property
    def source(self) -> str: ...

    def uniforms(self, draw: int, size: int) -> Tensor:
        """Uniform numbers in [0, 1), float64, for the draw of this number."""
        ...

    def noise(self, step: int) -> GaussianNoise:
        """The noise of this step."""
        ...


class Entropy:
    """Keyed by the operating system; a resumed run has a new key, and so has a copy or a forked process."""

    made_there = True
    """Whether a device other than the host makes the bits of its noise itself, or they are copied to it."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is for tests only: a run whose key is known is not private."""
        self._kinds: set[str] = set()
        self._begin(fresh_key() if key is None else key)

    def _begin(self, key: bytes) -> None:
        seeds, streams = KeyStream(key, _SEEDS), dict[torch.device, FarStream]()

        def far(device: torch.device) -> FarStream:
            if device not in streams:
                self._kinds.add(device.type)
                streams[device] = FarStream(device, int(seeds.words(1)))
            return streams[device]

        self._sampling = KeyStream(key, _SAMPLING)
        self._noise = GaussianNoise(KeyStream(key, _NOISE), far if self.made_there else None)

    @property
    def source(self) -> str:
        there = f"; on {', '.join(sorted(self._kinds))} {FarStream.description}" if self._kinds else ""
        return f"AES-256-CTR keyed by the operating system, rounded exactly to a public grid{there}"

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

    made_there = False

    @property
    def source(self) -> str:
        return f"{super().source}, under a key that cannot be copied"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cryptographic generator cannot be copied or saved: its stream would be used twice")


class Seeded:
    """A draw's uniform numbers and a step's noise follow from the seed and their number, whatever came before.

    `rank`: of a process that draws among examples of its own.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a whole number, 0 or more")
        self._seed, self._rank = seed, () if rank is None else (rank,)

    @property
    def source(self) -> str:
        return "AES-256-CTR keyed by the seed for every step, rounded exactly to a public grid"

    def uniforms(self, draw: int, size: int) -> Tensor:
        return self._stream(_SAMPLING, draw, *self._rank).uniform(size)

    def noise(self, step: int) -> GaussianNoise:
        return GaussianNoise(self._stream(_NOISE, step))

    def _stream(self, *path: int) -> KeyStream:
        """A key of its own for every seed and path."""
        words = KEY_BYTES // 4
        seeds = np.random.SeedSequence(self._seed, spawn_key=path, pool_size=words)
        return KeyStream(seeds.generate_state(words).astype("<u4").tobytes())


class Shared(Seeded):
    """The same under a secret key. Bits are the host's on every device: generators of two devices may differ."""

    def __init__(self, key: bytes, rank: int | None = None) -> None:
        super().__init__(0, rank)
        self._key, self._process = key, REGISTRY.process

    @property
    def source(self) -> str:
        return (
            "AES-256-CTR keyed for every step by the operating system of the first process, which sent the key to the "
            "others; rounded exactly to a public grid"
        )

    def _stream(self, *path: int) -> KeyStream:
        if self._process != REGISTRY.process:
            raise RuntimeError("this key belongs to the process that forked: its noise would be used twice")
        return KeyStream(hashlib.blake2b(repr(path).encode(), key=self._key, digest_size=KEY_BYTES).digest())

    def __reduce__(self) -> NoReturn:
        raise TypeError("the key of several processes cannot be copied or saved: its noise would be used twice")
