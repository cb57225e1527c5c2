"""Poisson sampling: every example is in a batch with probability q, independently of all others and of other steps.

Batches vary in size and may be empty; an empty batch is still a step. The accountant's epsilon holds for this sampling
and for no other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate


@dataclass(frozen=True)
class Handout:
    """A batch, or a part of one, that the loader has handed out; which parts begin and end a batch."""

    size: int
    first: bool
    last: bool

    @property
    def empty(self) -> bool:
        """A whole batch without examples: the draw found none."""
        return self.size == 0 and self.first and self.last


@dataclass
class Feed:
    """Tells the private step what the loader handed out last, and remembers empty batches that were never stepped."""

    skipped_empty: int = 0
    _current: Handout | None = None

    def hand_out(self, handout: Handout) -> None:
        if self._current is not None and self._current.empty:
            self.skipped_empty += 1
        self._current = handout

    def take(self) -> Handout | None:
        """The batch that a step is about to use, once; None if it did not come from the loader."""
        handout, self._current = self._current, None
        return handout


class PoissonSampler(Sampler[list[int]]):
    """Index lists of `steps` Poisson draws; a draw above `max_part` is handed out in parts."""

    def __init__(self, size: int, rate: float, steps: int, generator: torch.Generator, max_part: int | None) -> None:
        self.size, self.rate, self.steps = size, rate, steps
        self.generator = generator
        self.max_part = max_part
        self.handouts: deque[Handout] = deque()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.handouts = deque()  # one queue per pass over the loader, so that an abandoned pass leaves nothing behind
        return self._draws(self.handouts)

    def _draws(self, handouts: deque[Handout]) -> Iterator[list[int]]:
        for _ in range(self.steps):
            drawn = self.draw()
            parts = drawn.split(self.max_part) if self.max_part and len(drawn) else (drawn,)
            for i, part in enumerate(parts):
                handouts.append(Handout(len(part), first=i == 0, last=i == len(parts) - 1))
                yield part.tolist()

    def draw(self) -> Tensor:
        """Indices of one Poisson draw, in order."""
        coins = torch.rand(self.size, generator=self.generator, dtype=torch.float64)
        return (coins < self.rate).nonzero().squeeze(1)


class PoissonLoader(DataLoader[Any]):
    """A data loader whose batches are Poisson draws. Its length is the number of draws in one pass."""

    def __init__(self, dataset: Dataset[Any], sampler: PoissonSampler, feed: Feed, **settings: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **settings)
        self.feed = feed

    def __len__(self) -> int:
        return len(self._poisson)

    def __iter__(self) -> Any:
        batches = self._from_tensors() if self._is_plain_tensors else super().__iter__()
        handouts: deque[Handout] | None = None
        for batch in batches:
            handouts = self._poisson.handouts if handouts is None else handouts
            self.feed.hand_out(handouts.popleft())
            yield batch

    @property
    def _poisson(self) -> PoissonSampler:
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    @property
    def _is_plain_tensors(self) -> bool:
        collate = self.collate_fn
        standard = isinstance(collate, CollateWithEmpty) and collate.collate is default_collate
        return type(self.dataset) is TensorDataset and standard and self.num_workers == 0 and not self.pin_memory

    def _from_tensors(self) -> Iterator[list[Tensor]]:
        """Whole batches by indexing: what the general path gives, without touching examples one by one."""
        assert isinstance(self.dataset, TensorDataset)
        for indices in self._poisson:
            at = torch.tensor(indices, dtype=torch.long)
            yield [tensor[at] for tensor in self.dataset.tensors]


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
            one = self.collate([self.dataset[0]])
            self._template = pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, one)
        return self._template


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


def poisson_loader(
    loader: DataLoader[Any], *, generator: torch.Generator, max_physical_batch_size: int | None = None
) -> PoissonLoader:
    """The same dataset, workers and collation under Poisson sampling of the same expected batch size.

    One pass makes ceil(N / batch size) draws.
    """
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size is {max_physical_batch_size}; it must be 1 or more")
    rate, size = sample_rate_of(loader)
    sampler = PoissonSampler(size, rate, math.ceil(1 / rate - 1e-9), generator, max_physical_batch_size)
    several_workers = (
        {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        if loader.num_workers
        else {}
    )
    return PoissonLoader(
        loader.dataset,
        sampler,
        Feed(),
        collate_fn=CollateWithEmpty(loader.collate_fn, loader.dataset),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **several_workers,
    )
