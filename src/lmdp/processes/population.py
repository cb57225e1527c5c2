"""The data of all processes together: how many examples, at which rate each is drawn, and whose a drawn one is.

Guarantee. In every draw each of the N examples of all processes is included with probability exactly q, independently
of all others, and is handled by exactly one process.

    whole    every process has all N examples. The uniform number of example i in draw t follows from (key, t, i), so it
             is the same everywhere. Below q it is drawn, and how far below says for which process it is
    sharded  every process has examples of its own, and draws among them with uniform numbers of its own

In the first case the union of the batches is the same for any number of processes. Which process handles an example
follows from its own number alone, and not from who else was drawn: one example more moves no other one to another
process. So the bound holds whatever differs between processes, were it the loss or the model's forward: an example
contributes one of several bounded terms, by a coin of its own.

Assumes that all have the same examples in the same order, or that no two have one in common. Both are compared by the
content of all examples (`comparison.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lmdp.guards import refuse_repeated
from lmdp.processes.comparison import refuse_other, refuse_overlap
from lmdp.processes.group import Group
from lmdp.units import Unit, drawing

Uniforms = Callable[[int, int], Tensor]
"""(number of the draw, how many) → that many independent uniform numbers in [0, 1)."""


@dataclass(frozen=True)
class Population:
    """`size` units in all (examples, if nothing else was said), of which every draw takes each at `rate`.

    `doubts`: what could not be established, each with the assumption that it is said against.
    """

    rate: float
    size: int
    group: Group
    unit: Unit = Unit()  # noqa: RUF009  (frozen)
    sharded: bool = False
    doubts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, loader: DataLoader[Any], group: Group, *, sharded: bool, unit: Unit | None = None, compare: bool = True
    ) -> Population:
        """Of the data loaders of all processes, each with the batch size of all of them together.

        Without `compare` their examples are not read: for those who only ask how many there are.
        """
        if sharded and not group.several:
            raise ValueError(
                "sharded=True, but this is the only process: the data of others would be missing. Start several "
                "(torchrun --nproc-per-node 2 …), or leave sharded out."
            )
        batch, mine = batch_size_of(loader)
        stated = Unit.of(loader.dataset, unit)
        size = sum(group.gathered(mine)) if sharded else mine
        group.agreed({"batch size": batch, "examples": size})
        doubts = _doubts(loader.dataset, group, sharded=sharded) if compare else ()
        return cls(min(1.0, batch / size), size, group, stated, sharded, doubts)

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
            process = (numbers / self.rate * self.group.size).long()  # of those drawn: 0 to size − 1, equally often
            process = process.clamp(0, self.group.size - 1)  # however the quotient was rounded
            return numbers.masked_fill_((numbers < self.rate) & (process != self.group.rank), 1.0)

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


def _doubts(dataset: Any, group: Group, *, sharded: bool) -> tuple[tuple[str, str], ...]:
    """Refuse data that processes may not have together; what is not known of it, by assumption."""
    compared, units = "", drawing(dataset)
    if group.several:
        compared = refuse_overlap(dataset, group) if sharded else refuse_other(dataset, group)
        if units is not None:
            units.share_key(group.same)
    doubts = (("sampling", compared), ("numbers", "" if units is None else units.doubt))
    return tuple((assumption, why) for assumption, why in doubts if why)
