"""Poisson sampling: who is in a batch.

Guarantee. In every draw each of the N examples is included with probability exactly q, independently of all other
examples and draws, of their content, and of everything released before. Adding or removing one example changes no
other example's uniform number, so under the relation "add or remove one example" a step is a Poisson-subsampled
mechanism. Batches vary in size and may be empty; an empty batch is still a step.

Assumes that the uniform numbers are independent, secret, and those of the draw's number (`noise.py`); that the loop
steps what it is handed, which `delivery.py` checks; and that N, and with it q, is public.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from lmdp.private.delivery import Delivery, DeliveryLog

Uniforms = Callable[[int, int], Tensor]
"""(number of the draw, how many) → that many independent uniform numbers in [0, 1)."""


WHOLE_BATCHES = "__lmdp_examples_at__"
"""A dataset whose class has a method of this name gives whole batches by it: indices → what collating gives."""


class PoissonSampler(Sampler[list[int]]):
    """Index lists of `steps` Poisson draws; a draw above `max_part` is handed out in parts.

    Draws are numbered. A pass begins with the draw that `position` names, so that a draw made ahead and never used
    (by workers, or in a pass broken off) leaves no gap; without `position` the numbers go on from pass to pass.
    """

    def __init__(self, size: int, rate: float, steps: int, uniforms: Uniforms, max_part: int | None) -> None:
        self.size, self.rate, self.steps = size, rate, steps
        self.uniforms = uniforms
        self.max_part = max_part
        self.position: Callable[[], int] | None = None
        self.deliveries: deque[Delivery] = deque()
        self._drawn = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("size", "rate", "uniforms") and name in vars(self):
            raise AttributeError(
                f"{name} is fixed: the epsilon was computed for {name} = {getattr(self, name)}. Start a new training."
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.deliveries = deque()  # one queue per pass over the loader, so that an abandoned pass leaves nothing behind
        return self._draws(self.deliveries, self._drawn if self.position is None else self.position())

    def _draws(self, deliveries: deque[Delivery], first: int) -> Iterator[list[int]]:
        for number in range(first, first + self.steps):
            self._drawn = number + 1
            drawn = self.draw(number)
            parts = drawn.split(self.max_part) if self.max_part and len(drawn) else (drawn,)
            for i, part in enumerate(parts):
                deliveries.append(Delivery(len(part), first=i == 0, last=i == len(parts) - 1))
                yield part.tolist()

    def draw(self, number: int) -> Tensor:
        """Indices of one Poisson draw, in order."""
        return (self.uniforms(number, self.size) < self.rate).nonzero().squeeze(1)


class PoissonLoader(DataLoader[Any]):
    """A data loader whose batches are Poisson draws. Its length is the number of draws in one pass."""

    def __init__(self, dataset: Dataset[Any], sampler: PoissonSampler, log: DeliveryLog, **settings: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **settings)
        self.log = log

    def __len__(self) -> int:
        return len(self._poisson)

    def follow(self, steps: Callable[[], int]) -> None:
        """Number the draws after the steps that use them: a pass begins with the draw of the next step."""
        self._poisson.position = lambda: steps() + self.log.skipped

    def __iter__(self) -> Any:
        batches = self._from_memory() if self._in_memory else super().__iter__()
        deliveries: deque[Delivery] | None = None
        self.log.begin_pass()
        for batch in batches:
            deliveries = self._poisson.deliveries if deliveries is None else deliveries
            self.log.deliver(deliveries.popleft())
            yield batch
        self.log.end_pass()

    @property
    def _poisson(self) -> PoissonSampler:
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    @property
    def _in_memory(self) -> bool:
        collate = self.collate_fn
        standard = isinstance(collate, CollateWithEmpty) and collate.collate is default_collate
        whole = type(self.dataset) is TensorDataset or WHOLE_BATCHES in vars(type(self.dataset))
        return whole and standard and self.num_workers == 0 and not self.pin_memory

    def _from_memory(self) -> Iterator[list[Tensor]]:
        """Whole batches by indexing: what the general path gives, without touching examples one by one."""
        for indices in self._poisson:
            at = torch.tensor(indices, dtype=torch.long)
            if type(self.dataset) is TensorDataset:
                yield [tensor[at] for tensor in self.dataset.tensors]
            else:
                yield getattr(self.dataset, WHOLE_BATCHES)(at)


@dataclass
class CollateWithEmpty:
    """The user's collate function, and tensors of length 0 for an empty batch."""

    collate: Callable[[list[Any]], Any]
    dataset: Dataset[Any]
    _template: Any = field(default=None, repr=False)

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self.collate(examples)
        if self._template is None:
            self._template = _emptied(self.collate([self.dataset[0]]))
        return self._template


def _emptied(batch: Any) -> Any:
    """The same structure without examples: nothing of the one it was made from remains but shapes."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        columns = [_emptied(part) for part in batch if isinstance(part, Tensor | Mapping | tuple | list)]
        return columns if len(columns) == len(batch) else []
    return None


def sample_rate_of(loader: DataLoader[Any]) -> tuple[float, int]:
    """(q, N): the rate at which a loader of fixed-size batches uses each example, and how many there are."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "the data loader reads an IterableDataset, whose examples cannot be drawn independently. "
            "Use a dataset with __len__ and __getitem__."
        )
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size == 0:
        raise ValueError("the data loader's dataset is empty; private training needs at least 1 example")
    if not isinstance(batch, int) or batch < 1:
        raise ValueError("the data loader has no batch_size, so the sampling rate is unknown. Construct it with one.")
    return min(1.0, batch / size), size


def steps_per_pass(rate: float) -> int:
    """Draws in one pass over a loader: so many that each example is expected once."""
    return math.ceil(1 / rate - 1e-9)


def poisson_loader(
    loader: DataLoader[Any], uniforms: Uniforms, max_physical_batch_size: int | None = None
) -> PoissonLoader:
    """The same dataset, workers and collation under Poisson sampling of the same expected batch size.

    One pass makes ceil(N / batch size) draws.
    """
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size is {max_physical_batch_size}; it must be 1 or more")
    rate, size = sample_rate_of(loader)
    drawn_by = [type(loader.batch_sampler), type(loader.sampler)]
    if drawn_by[0] is not BatchSampler or drawn_by[1] not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"the data loader draws with {', '.join(kind.__name__ for kind in drawn_by)}, which Poisson sampling would "
            "replace by the whole dataset. To train on a part of it, pass a loader over torch.utils.data.Subset."
        )
    sampler = PoissonSampler(size, rate, steps_per_pass(rate), uniforms, max_physical_batch_size)
    several_workers = (
        {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        if loader.num_workers
        else {}
    )
    return PoissonLoader(
        loader.dataset,
        sampler,
        DeliveryLog(),
        collate_fn=CollateWithEmpty(loader.collate_fn, loader.dataset),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **several_workers,
    )
