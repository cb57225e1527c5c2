"""Splits that are the same for everyone: they depend on the count, the labels and a seed, not on a library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEED = 0
HELD_OUT = 5  # one in five, where a source has no test set of its own


def shuffled(n: int, seed: int = SEED) -> Tensor:
    """0 … n − 1 in a fixed random order. The raw PCG64 stream is stable across NumPy versions; `permutation` is not."""
    keys = np.random.PCG64(seed).random_raw(n)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def split(n: int, test: int, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """Indices of n − test examples for training and of `test` others."""
    order = shuffled(n, seed)
    return order[: n - test], order[n - test :]


def split_per_class(labels: Sequence[int], one_in: int = HELD_OUT, seed: int = SEED) -> tuple[list[int], list[int]]:
    """One in `one_in` of every class (rounded down) is held out, at random: both parts have the same mix of classes."""
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    train: list[int] = []
    test: list[int] = []
    for label in sorted(members):
        of_class = members[label]
        keep, hold = split(len(of_class), len(of_class) // one_in, seed)
        train += [of_class[i] for i in keep.tolist()]
        test += [of_class[i] for i in hold.tolist()]
    return sorted(train), sorted(test)
