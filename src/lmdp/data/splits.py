"""Splits that are the same for everyone, in which each example's place follows from its own content alone.

Guarantee. Taking one example away leaves every other where it was, but for `at_most`, which lets one other in: there
are then as many examples as `limit` says, whatever the data holds, and this number is public. A share of the data,
cut off at a rate that is a quotient of its size, would let examples in and out whenever that size changes.

`position` is how splits were chosen before: by an example's place in a list, so that one example moves half of the
others. Runs that began with it go on with it, and are not certified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

BY = ("content", "position")
SEED = 0
HELD_OUT = 5  # one in five, where a source has no test set of its own
FEWEST_NON_MEMBERS, MOST_NON_MEMBERS = 150, 10_000
"""Kept out of a training for its audit, about: fewer are too few for one, and more hardly narrow its intervals."""


def places(contents: Iterable[bytes], purpose: str) -> list[int]:
    """A number below 2^64 for each example: as good as random, independent of those for other purposes, and public.

    Equal contents have equal places, so that copies of an example are never parted.
    """
    salt = f"lmdp {purpose}".encode()
    return [int.from_bytes(hashlib.blake2b(content, digest_size=8, key=salt).digest(), "big") for content in contents]


def hold_out(contents: Iterable[bytes], labels: Sequence[int], by: str) -> tuple[list[int], list[int]]:
    """Where the examples for training are, and where those for testing: about one in five."""
    if by == "position":
        return split_per_class(labels)
    return _parted(places(contents, "test"), 2**64 // HELD_OUT)


def halves(contents: Iterable[bytes], labels: Sequence[int], by: str) -> tuple[list[int], list[int]]:
    """Where the examples of either half are. Each has its own toss of a coin, so neither half is exactly a half."""
    if by == "position":
        return split_per_class(labels, 2)
    return _parted(places(contents, "half"), 2**63)


def non_members(contents: Iterable[bytes], chance: float) -> tuple[list[int], list[int]]:
    """Where the examples to train on are, and where those kept out as non-members: each by its own toss of a coin.

    The chance is the same whatever the label, so that both parts have the same mix of classes, up to luck. Exact
    shares of every class would make one example's place depend on who else is in its class.
    """
    return _parted(places(contents, "non-member"), int(chance * 2**64))


def non_member_chance(share: float, size: int) -> float:
    """Of each of `size` examples, a public number, to be kept out: `share`, halved until at most 10,000 are expected.

    0 where fewer than 150 would be: too few for an audit, and training can use them. It changes with the size at
    single numbers only, not with every example.
    """
    if share * size < FEWEST_NON_MEMBERS:
        return 0.0
    while share * size > MOST_NON_MEMBERS:
        share /= 2
    return share


def at_most(limit: int, contents: Iterable[bytes], count: int, by: str) -> list[int]:
    """Where `limit` of `count` examples are: those with the smallest places."""
    return shuffled(count)[:limit].tolist() if by == "position" else smallest(limit, places(contents, "limit"))


def smallest(n: int, places: Sequence[int]) -> list[int]:
    """Where the `n` smallest are, in order of appearance."""
    return sorted(sorted(range(len(places)), key=places.__getitem__)[:n])


def _parted(places: Sequence[int], bound: int) -> tuple[list[int], list[int]]:
    """Those whose place is not below the bound, and those whose place is."""
    keep = [index for index, place in enumerate(places) if place >= bound]
    return keep, [index for index, place in enumerate(places) if place < bound]


# -- by position ------------------------------------------------------------------------------------------------------


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
