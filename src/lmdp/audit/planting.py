"""Canaries planted in a training: examples that it can only learn by heart, each in or out by a secret fair coin.

Guarantee. Whether an example becomes a canary and what it is then called follow from its own content alone, and its
coin from its content and a secret key: whoever else is in the data, and in which order, changes nothing. Copies of a
canary are left out of the training, so that coins are independent and one canary is one example.

Canaries that are in are trained on like all others: they count in N, and epsilon covers them. They cost accuracy, by
what they teach and by those that are left out.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lmdp.data.splits import places
from lmdp.membership.examples import count, gather, take
from lmdp.models import Inputs

NOISE, MISLABELLED, OWN = "noise", "mislabelled", "own"
KINDS = (NOISE, MISLABELLED)
"""The first unless asked: it leaks most (docs/audit.md), costs nobody a place in the training, and is nobody's data."""
FEWEST_CANARIES = 300
"""With fewer, luck can leave less than the 100 in, and the 100 out, that an attack on them needs."""
MOST = 0.5
"""Of the examples, at most, that may become canaries."""
FINENESS = 3
"""Binary digits of the chance to become a canary: a rough one is the same for many sizes of the data."""


@dataclass(frozen=True)
class Canaries:
    """Canaries with the labels they were planted with, and which of them were in the training (`included`)."""

    kind: str
    inputs: Inputs = field(repr=False)
    labels: Tensor = field(repr=False)
    included: NDArray[np.bool_] = field(repr=False)

    def __post_init__(self) -> None:
        sizes = count(self.inputs), len(self.labels), len(self.included)
        if len(set(sizes)) > 1 or not sizes[0]:
            raise ValueError(f"there are {sizes[0]} canaries, {sizes[1]} labels and {sizes[2]} coins; one each")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def inside(self) -> tuple[Inputs, Tensor]:
        """Those that were trained on, with their labels."""
        return self._at(self.included)

    @property
    def outside(self) -> tuple[Inputs, Tensor]:
        return self._at(~self.included)

    def _at(self, which: NDArray[np.bool_]) -> tuple[Inputs, Tensor]:
        at = torch.from_numpy(np.flatnonzero(which))
        return take(self.inputs, at), self.labels[at]


@dataclass(frozen=True)
class Planted:
    """A dataset to train on (`dataset`), its part without canaries (`ordinary`), and the canaries to audit it with."""

    dataset: Dataset[Any]
    ordinary: Dataset[Any]
    canaries: Canaries


def plant_canaries(
    dataset: Any, number: int = 500, *, classes: int, kind: str | Any = NOISE, seed: int | None = None
) -> Planted:
    """Plant canaries in a dataset of (input, label): `number` of them, of examples of the dataset about so many.

    classes   how many classes there are: wrong labels are drawn from the others
    kind      "noise": random inputs with random labels; "mislabelled": examples of the dataset with a wrong label,
              which are taken out of it, so that half of them are in no training; or a dataset of canaries of your own
    seed      makes the coins reproducible, and known to whoever knows it; without one they come from the system

    Train on `planted.dataset`, audit with `lmdp.audit(model, ..., canaries=planted.canaries)`, and keep the coins
    secret: they tell who was in.
    """
    key = new_key(seed)
    inputs, labels = gather(dataset)
    if not isinstance(inputs, Tensor) or labels is None:
        raise TypeError("canaries are planted among pairs of a tensor and a label; the dataset has others")
    contents = _contents(inputs)
    ordinary: Dataset[Any] = dataset if isinstance(dataset, Dataset) else TensorDataset(inputs, labels)
    if kind == MISLABELLED:
        keep, taken = chosen(contents, labels.tolist(), number)
        planted, called = inputs[taken], wrong_labels([contents[i] for i in taken], labels[taken].tolist(), classes)
        ordinary = Subset(ordinary, keep)
    elif kind == NOISE:
        planted, called = noise_like(inputs[0], number, key), noise_labels(number, classes, key)
    elif isinstance(kind, str):
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}, or a dataset of your own")
    else:
        planted, given = gather(kind)  # type: ignore[assignment]
        called = [] if given is None else given.tolist()
        kind = OWN
    if kind != MISLABELLED:
        refuse_unfit(_contents(planted), called, contents, classes)
    coins = tossed(_contents(planted), key)
    canaries = Canaries(kind, planted, torch.tensor(called, dtype=torch.int64), coins)
    inside: Dataset[Any] = TensorDataset(*canaries.inside)  # type: ignore[arg-type]
    return Planted(ConcatDataset([ordinary, inside]), ordinary, canaries)


def new_key(seed: int | None) -> bytes:
    """Of the coins: from the operating system, or from a seed."""
    return secrets.token_bytes(32) if seed is None else hashlib.blake2b(f"lmdp coins {seed}".encode()).digest()[:32]


def chosen(contents: Sequence[bytes], labels: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    """Where the ordinary examples are, and where those are that become canaries: about `number`, by their contents.

    Copies of a canary are in neither, and none of them is a canary where their labels differ: whoever comes or goes
    then takes one canary away or leaves one behind, and never exchanges one for another.
    """
    _refuse_number(number, len(contents))
    bound = int(_rough(number / len(contents)) * 2**64)
    drawn = places(contents, "canary")
    first: dict[bytes, int] = {}
    alike = [labels[first.setdefault(content, i)] == labels[i] for i, content in enumerate(contents)]
    differ = {content for content, same in zip(contents, alike) if not same}
    taken = sorted(i for content, i in first.items() if drawn[i] < bound and content not in differ)
    return [i for i, place in enumerate(drawn) if place >= bound], taken


def wrong_labels(contents: Iterable[bytes], labels: Sequence[int], classes: int) -> list[int]:
    """Another label for each, any of the others alike."""
    if classes < 2:
        raise ValueError(f"there is {classes} class; an example can only be mislabelled where there are at least 2")
    away = places(contents, "wrong label")
    return [(label + 1 + far % (classes - 1)) % classes for label, far in zip(labels, away, strict=True)]


def tossed(contents: Iterable[bytes], key: bytes) -> NDArray[np.bool_]:
    """A fair coin for each content: nobody without the key knows it, and no coin tells of another."""
    return np.array([hashlib.blake2b(content, digest_size=1, key=key).digest()[0] & 1 for content in contents], bool)


def noise_like(example: Tensor, number: int, key: bytes) -> Tensor:
    """Random inputs of an example's shape: bytes of all values, or normal numbers."""
    shape, generator = (number, *example.shape), generator_for(key, "noise")
    if example.dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, dtype=example.dtype, generator=generator)


def noise_labels(number: int, classes: int, key: bytes) -> list[int]:
    return torch.randint(0, classes, (number,), generator=generator_for(key, "labels")).tolist()


def _contents(inputs: Any) -> list[bytes]:
    return [row.contiguous().numpy().tobytes() for row in inputs] if isinstance(inputs, Tensor) else []


def refuse_unfit(planted: Sequence[bytes], labels: Sequence[int], contents: Sequence[bytes], classes: int) -> None:
    """Refuse canaries, not of the data, that are too few, alike, among the data, or of no class of the model.

    `planted` are their contents, `contents` those of the data.
    """
    size, copies, shared = len(planted), len(planted) - len(set(planted)), len(set(planted) & set(contents))
    _refuse_number(size, len(contents))
    if len(labels) != size:
        raise ValueError(f"there are {size} canaries with {len(labels)} labels; they need one each")
    if copies or shared:
        raise ValueError(
            f"of {size} canaries {copies} are copies of others, and {shared} are among the data too. Each must be "
            "there once: whether it was in the training must be up to its coin."
        )
    if not 0 <= min(labels) <= max(labels) < classes:
        raise ValueError(
            f"canaries have labels {min(labels)} to {max(labels)}; with {classes} classes, 0 to {classes - 1}"
        )


def _refuse_number(number: int, examples: int) -> None:
    if MOST * examples < FEWEST_CANARIES:
        raise ValueError(
            f"there would be {number} canaries for {examples} examples, of which there must be at least "
            f"{int(FEWEST_CANARIES / MOST)}: canaries are {FEWEST_CANARIES} or more, and at most half as many as "
            "examples. Train on more examples, or without canaries (canaries = 0)"
        )
    if not FEWEST_CANARIES <= number <= MOST * examples:
        raise ValueError(
            f"there would be {number} canaries for {examples} examples; there must be at least {FEWEST_CANARIES}, so "
            f"that enough are in and out, and at most half as many as examples ({int(MOST * examples)})"
        )


def _rough(chance: float) -> float:
    """To a few binary digits: it then changes at single sizes of the data only, not with every example."""
    unit: float = 2.0 ** (math.floor(math.log2(chance)) - FINENESS)
    return round(chance / unit) * unit


def generator_for(key: bytes, purpose: str) -> torch.Generator:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8, key=key).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
