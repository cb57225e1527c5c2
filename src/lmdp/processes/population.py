"""The data of all processes together: how many examples, at which rate each is drawn, and whose a drawn one is.

Guarantee. In every draw each of the N examples of all processes is included with probability exactly q, independently
of all others, and is handled by exactly one process.

    whole    every process has all N examples. The uniform number of example i in draw t follows from (key, t, i), so it
             is the same everywhere; of those drawn, in order, the first is for process 0, the next for process 1 …
    sharded  every process has examples of its own, and draws among them with uniform numbers of its own

In the first case the union of the batches is the same for any number of processes. Which process handles an example
follows from who else was drawn; that is no matter, because no sum depends on it (`sums.py`).

Assumes that all have the same examples in the same order, or that no two have one in common. Both are compared: sizes,
and the content of examples spread over the data; of parts of it, of all examples.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lmdp.gradients import randomness
from lmdp.guards import refuse_repeated
from lmdp.processes.group import Group
from lmdp.units import Unit

Uniforms = Callable[[int, int], Tensor]
"""(number of the draw, how many) → that many independent uniform numbers in [0, 1)."""

COMPARED = 64
"""Examples of which the content is compared, where every process has all of them."""
UNSTEADY = (
    "examples are read differently each time (augmented at random), so nobody could compare whether the processes have "
    "the same ones"
)
TWICE = "some examples are in the parts of several processes, by their content: somebody may be counted more than once"


@dataclass(frozen=True)
class Population:
    """`size` units in all (examples, if nothing else was said), of which every draw takes each at `rate`.

    `doubt`: what could not be established.
    """

    rate: float
    size: int
    group: Group
    unit: Unit = Unit()  # noqa: RUF009  (frozen)
    sharded: bool = False
    doubt: str = ""

    @classmethod
    def of(cls, loader: DataLoader[Any], group: Group, *, sharded: bool, unit: Unit | None = None) -> Population:
        """Of the data loaders of all processes, each with the batch size of all of them together."""
        if sharded and not group.several:
            raise ValueError(
                "sharded=True, but this is the only process: the data of others would be missing. Start several "
                "(torchrun --nproc-per-node 2 …), or leave sharded out."
            )
        batch, mine = batch_size_of(loader)
        size = sum(group.gathered(mine)) if sharded else mine
        group.agreed({"batch size": batch, "examples": size})
        doubt, share_key = "", getattr(loader.dataset, "share_key", None)
        if group.several:
            if share_key is not None:
                share_key(group.same)
            doubt = _refuse_overlap(loader.dataset, group) if sharded else _refuse_other(loader.dataset, group)
        return cls(min(1.0, batch / size), size, group, Unit.of(loader.dataset, unit), sharded, doubt)

    @property
    def stated(self) -> dict[str, Any]:
        """What a mechanism says of it."""
        expected, unit = self.rate * self.size, self.unit
        return {
            "sample_rate": self.rate,
            "expected_batch_size": expected,
            "unit": unit.name,
            "rows_per_unit": unit.rows,
        }

    def uniforms(self, uniforms: Uniforms) -> Uniforms:
        """The same numbers, but for those drawn whom another process handles: 1, which no rate is above."""
        if self.sharded or not self.group.several:
            return uniforms

        def of_this_process(draw: int, size: int) -> Tensor:
            numbers = uniforms(draw, size)
            drawn = (numbers < self.rate).nonzero().squeeze(1)
            others = torch.arange(len(drawn)) % self.group.size != self.group.rank
            return numbers.index_fill_(0, drawn[others], 1.0)

        return of_this_process


def sample_rate_of(loader: DataLoader[Any]) -> tuple[float, int]:
    """(q, N): the rate at which a loader of fixed-size batches uses each example, and how many there are."""
    batch, size = batch_size_of(loader)
    return min(1.0, batch / size), size


def batch_size_of(loader: DataLoader[Any]) -> tuple[int, int]:
    """How many examples a batch has, and how many there are."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "the data loader reads an IterableDataset, whose examples cannot be drawn independently. "
            "Use a dataset with __len__ and __getitem__."
        )
    refuse_repeated(loader.dataset)
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size == 0:
        raise ValueError("the data loader's dataset is empty; private training needs at least 1 example")
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(
            "the data loader has no batch_size, so the sampling rate is unknown. Construct it with one. (One that "
            "make_private returned has none: pass the loader that you gave it.)"
        )
    return batch, size


def steps_per_pass(rate: float) -> int:
    """Draws in one pass over a loader: so many that each example is expected once."""
    return math.ceil(1 / rate - 1e-9)


def _refuse_other(dataset: Any, group: Group) -> str:
    """Where all have the whole data: raise if it is not the same, in the same order. What cannot be told is said."""
    at = np.linspace(0, len(dataset) - 1, min(COMPARED, len(dataset))).astype(int).tolist()
    digests, again = list(_contents(dataset, at)), list(_contents(dataset, at))
    steady = all(group.gathered(digests == again))
    if not steady:
        return UNSTEADY
    every = group.gathered(digests)
    other = [i for i, contents in zip(at, zip(*every)) if len(set(contents)) > 1]
    if other:
        raise ValueError(
            f"the processes have different data: of {len(at)} examples that were compared, {len(other)} differ, the "
            f"first at index {other[0]}. An example would be drawn by several of them. Give every process the same "
            "examples in the same order (seed what shuffles or splits them), or pass sharded=True where each has a "
            "part of its own."
        )
    return ""


def _refuse_overlap(dataset: Any, group: Group) -> str:
    """Where each has a part: raise if parts are the same data, say so if they have examples in common."""
    mine = set(_contents(dataset, range(len(dataset))))
    every = group.gathered(mine)
    times = Counter(digest for part in every for digest in part)
    shared = sum(times[digest] > 1 for digest in mine)
    if any(group.gathered(2 * shared > len(mine))):
        raise ValueError(
            "sharded=True, but the processes have the same examples: each would be drawn by several of them. Give each "
            "process a part of its own (for example torch.utils.data.Subset(data, range(rank, len(data), processes))), "
            "or leave sharded out."
        )
    return TWICE if any(group.gathered(bool(shared))) else ""


def _contents(dataset: Any, at: Any) -> Iterator[bytes]:
    """Digests of these examples, read with the same random numbers."""
    for i in at:
        with randomness.same(0):
            yield hashlib.blake2b(pickle.dumps(_plain(dataset[i])), digest_size=16).digest()


def _plain(example: Any) -> Any:
    """Tensors as types, shapes and bytes: pickled, they would tell where they are in memory."""
    leaves, spec = torch.utils._pytree.tree_flatten(example)
    return str(spec), [_bytes(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _bytes(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()
