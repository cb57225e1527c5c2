"""Whether all processes have the same examples in the same order, or none in common: by what is stored of each.

Views of an example and rows of a user are compared as they are stored, before anything is drawn for them. Examples are
read with the same random numbers; those that still differ from one reading to the next can be compared by nobody, which
is said. So is how far reading came, where it takes too long.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lmdp.gradients import randomness
from lmdp.guards.handed import tensors_of
from lmdp.processes.group import Group
from lmdp.units import PerUser, drawing

PATIENCE = 600.0
"""Seconds for one reading of all examples; others wait meanwhile."""
AT_ONCE = 4096
"""Examples in memory that are read together."""
AGAIN = 64
"""Examples that are read a second time, where all processes have all of them."""
UNSTEADY = (
    "examples are read differently each time (augmented at random), so nobody could compare which ones the processes "
    "have. Augment in lmdp.Views, or with the global generators of torch, numpy or Python, which are held still here"
)
TWICE = (
    "some examples are in the parts of several processes, by their content: somebody may be counted more than once. "
    "Where equal rows are of different people, give every process the whole data, and leave sharded out"
)
SLOW = (
    f"to read all examples takes longer than {PATIENCE / 60:.0f} minutes, and not all were compared between the "
    "processes. Keep them in memory, or in files that are read faster"
)


def refuse_other(dataset: Any, group: Group) -> str:
    """Where all have the whole data: raise if it is not the same, in the same order. What cannot be told is said."""
    in_memory = group.gathered(_of_memory(dataset))
    if None not in in_memory and len(set(in_memory)) == 1:
        return ""
    digests = _contents(dataset, range(len(dataset)), _exactly)
    differing = []
    if len(set(group.gathered(_hashed(digests)))) > 1:
        differing = [i for i, contents in enumerate(zip(*group.gathered(digests))) if len(set(contents)) > 1]
    at = differing[:AGAIN] or list(range(0, len(digests), math.ceil(len(digests) / AGAIN)))
    again = _contents(dataset, at, _exactly)
    if not all(group.gathered(again == [digests[i] for i in at[: len(again)]])):
        return UNSTEADY
    if differing:
        raise ValueError(
            f"the processes have different data: of {len(dataset)} examples {len(differing)} differ, the first at "
            f"index {at[0]}. An example would be drawn by several of them. Give every process the same examples in the "
            "same order (seed what shuffles or splits them), or pass sharded=True where each has a part of its own."
        )
    return "" if all(group.gathered(len(digests) == len(dataset))) else SLOW


def refuse_overlap(dataset: Any, group: Group) -> str:
    """Where each has a part: raise if parts are the same data, or of the same users; say what may be in several."""
    _refuse_common_users(dataset, group)
    digests, again = (_contents(dataset, range(len(dataset)), _content) for _ in range(2))
    if not all(group.gathered(digests[: len(again)] == again[: len(digests)])):
        return UNSTEADY
    mine = set(digests)
    times = Counter(digest for part in group.gathered(mine) for digest in part)
    shared = sum(times[digest] > 1 for digest in mine)
    if any(group.gathered(2 * shared > len(mine))):
        raise ValueError(
            "sharded=True, but the processes have the same examples: each would be drawn by several of them. Give each "
            "process a part of its own (for example torch.utils.data.Subset(data, range(rank, len(data), processes))), "
            "or leave sharded out."
        )
    if any(group.gathered(bool(shared))):
        return TWICE
    return "" if all(group.gathered(len(again) == len(dataset))) else SLOW


def _refuse_common_users(dataset: Any, group: Group) -> None:
    key, units = group.same(secrets.token_bytes(16)), drawing(dataset)
    names = []
    if isinstance(units, PerUser):
        names = [repr(units.user(place)).encode() for place in _places(dataset)]
    mine = {hashlib.blake2b(name, digest_size=16, key=key).digest() for name in names}
    times = Counter(digest for part in group.gathered(mine) for digest in part)
    shared = sum(count > 1 for count in times.values())
    if shared:
        raise ValueError(
            f"sharded=True, but {shared} of {len(times)} users are in the parts of several processes: each would be "
            "drawn, and count, as often. Give all rows of a user to one process (for example to number "
            "zlib.crc32(str(user).encode()) % processes), by names that are the same for all processes, or leave "
            "sharded out."
        )


def _places(dataset: Any) -> Iterable[int]:
    """Where its items are in the innermost dataset that Subsets take them from."""
    if not isinstance(dataset, Subset):
        return range(len(dataset))
    inner = list(_places(dataset.dataset))
    return [inner[int(i)] for i in dataset.indices]


def _of_memory(dataset: Any) -> bytes | None:
    """A digest of all examples in order, if they are tensors in memory; None if they are not."""
    units = drawing(dataset)
    if units is not None and units is dataset and not isinstance(units, PerUser):
        return _of_memory(units.dataset)
    whole = getattr(dataset, "__lmdp_examples_at__", None) if units is None else None
    if type(dataset) is not TensorDataset and whole is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(dataset), AT_ONCE):
        at = torch.arange(start, min(start + AT_ONCE, len(dataset)))
        columns = whole(at) if whole is not None else [tensor[at] for tensor in dataset.tensors]
        for tensor in tensors_of(columns):
            digest.update(_bytes_of(tensor))
    return digest.digest()


Pieces = Callable[[Any], Iterable[bytes]]


def _contents(dataset: Any, at: Iterable[int], pieces: Pieces) -> list[bytes]:
    """Digests of these examples, read with the same random numbers, as far as patience goes."""
    end, digests = time.monotonic() + PATIENCE, []
    with randomness.same(0):
        begin = randomness.remember()
        for i in at:
            begin()
            digests.append(_hashed(sorted(_hashed(pieces(row)) for row in _stored(dataset, i))))
            if time.monotonic() > end:
                break
    return digests


def _stored(dataset: Any, i: int) -> list[Any]:
    """Of one example or unit, what was there before anything was drawn for it."""
    units = drawing(dataset)
    if units is None:
        return [dataset[i]]
    while isinstance(dataset, Subset):
        i, dataset = int(dataset.indices[i]), dataset.dataset
    return units.stored(i)


def _exactly(row: Any) -> Iterator[bytes]:
    leaves, spec = torch.utils._pytree.tree_flatten(row)
    yield str(spec).encode()
    yield from map(_bytes_of, leaves)


def _content(row: Any) -> Iterator[bytes]:
    """Without single numbers, such as a label or the place of the example, unless there is nothing else."""
    leaves, _ = torch.utils._pytree.tree_flatten(row)
    yield from map(_bytes_of, [leaf for leaf in leaves if not _is_number(leaf)] or leaves)


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | np.ndarray):
        return int(np.prod(leaf.shape)) == 1
    return leaf is None or isinstance(leaf, int | float | complex | np.number | np.bool_)


def _bytes_of(leaf: Any) -> bytes:
    """Tensors as types, shapes and bytes: pickled, they would tell where they are in memory."""
    if not isinstance(leaf, Tensor):
        return pickle.dumps(leaf)
    flat = leaf.detach().cpu().contiguous().view(-1)
    return f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()


def _hashed(pieces: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "big"))
        digest.update(piece)
    return digest.digest()
