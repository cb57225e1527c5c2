"""Poisson sampling: who is in a batch.

Guarantee. In every draw each of the N examples is included with probability exactly q, independently of all other
examples and draws, of their content, and of everything released before. Adding or removing one example changes no
other example's uniform number, so under the relation "add or remove one example" a step is a Poisson-subsampled
mechanism. Batches vary in size and may be empty; an empty batch is still a step.

Assumes that the uniform numbers are independent, secret, and those of the draw's number (`noise.py`); that the loop
steps what it is handed, which `guards/delivery.py` checks; and that N, and with it q, is public. Of several processes
each hands out its share of a draw (`processes/population.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from lmdp.guards import Read, Watch, refuse_repeated
from lmdp.guards.delivery import Delivery, DeliveryLog, NotBegun
from lmdp.guards.handed import CollateWithEmpty
from lmdp.guards.looks import Looks
from lmdp.processes import Population, Uniforms, sample_rate_of, steps_per_pass

WHOLE_BATCHES = "__lmdp_examples_at__"
"""A dataset whose class has a method of this name gives whole batches by it: indices → what collating gives."""


class PoissonSampler(Sampler[list[int]]):
    """Index lists of Poisson draws; a draw above `max_part` is handed out in parts.

    Draws are numbered, and the draw of a number stays the same until a step has used it: nobody can draw until a batch
    suits. A pass begins with the draw that `position` names, so that one made ahead and never used (by workers, or in a
    pass broken off) leaves no gap; without `position` the numbers go on from pass to pass.
    """

    def __init__(self, size: int, rate: float, steps: int, uniforms: Uniforms, max_part: int | None) -> None:
        self.size, self.rate, self.steps = size, rate, steps
        self.uniforms = uniforms
        self.max_part = max_part
        self.position: Callable[[], int] | None = None
        self.deliveries: deque[tuple[Tensor, Delivery]] = deque()
        self.numbers: Iterable[int] = NotBegun()
        self._drawn = 0
        self._fetching: dict[int, Tensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("size", "rate", "uniforms") and name in vars(self):
            raise AttributeError(
                f"{name} is fixed: the epsilon was computed for {name} = {getattr(self, name)}. Start a new training."
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return self.steps

    def begin_pass(self) -> int:
        """The number of its first draw. Draws that steps have used are forgotten."""
        first = self._drawn if self.position is None else self.position()
        self._fetching = {number: drawn for number, drawn in self._fetching.items() if number >= first}
        return first

    def __iter__(self) -> Iterator[list[int]]:
        """The draws of `numbers`."""
        self.deliveries = deque()  # one queue per run over the draws, so that an abandoned one leaves nothing behind
        return self._parts_of(self.deliveries, self.numbers)

    def _parts_of(self, deliveries: deque[tuple[Tensor, Delivery]], numbers: Iterable[int]) -> Iterator[list[int]]:
        for number in numbers:
            drawn = self.draw(number)
            parts = drawn.split(self.max_part) if self.max_part and len(drawn) else (drawn,)
            for i, part in enumerate(parts):
                delivery = Delivery(len(part), first=i == 0, last=i == len(parts) - 1, number=number, part=i)
                deliveries.append((part, delivery))
                yield part.tolist()

    def draw(self, number: int) -> Tensor:
        """Indices of one Poisson draw, in order."""
        if number not in self._fetching:
            self._fetching[number] = (self.uniforms(number, self.size) < self.rate).nonzero().squeeze(1)
        self._drawn = max(self._drawn, number + 1)
        return self._fetching[number]


class PoissonLoader(DataLoader[Any]):
    """A data loader whose batches are Poisson draws. Its length is the number of batches that one pass hands out.

    Where the draw found nobody, the first example is handed out, so that any model can run; it counts for nothing.
    """

    def __init__(self, dataset: Dataset[Any], sampler: PoissonSampler, log: DeliveryLog, **settings: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **settings)
        self.log = log
        self._watch: Watch | None = None
        self.looks = self._looks(None, besides=True)

    def __len__(self) -> int:
        return len(self._poisson)

    def follow(self, steps: Callable[[], int], watch: Watch | None = None, *, besides: bool = False) -> None:
        """Number the draws after the steps that use them, and show the batches to the guards.

        A pass begins with the draw of the next step. Batches that are only looked at take the place of others of the
        pass; `besides`: they are added.
        """
        self._poisson.position = self.log.position = lambda: steps() + self.log.skipped
        self._watch = watch
        self.looks = self._looks(watch, besides=besides or self._poisson.max_part is not None)

    def _looks(self, watch: Watch | None, *, besides: bool) -> Looks:
        independence, sampler = None if watch is None else watch.independence, self._poisson
        return Looks(independence, self.log, sampler.size, sampler.max_part, self._batches_of, besides=besides)

    def __iter__(self) -> Any:
        return self.log.over(self._pass())

    def _pass(self) -> Iterator[Any]:
        refuse_repeated(self.dataset)  # its indices may have been chosen anew since the last pass
        left, number, looks = len(self), self._poisson.begin_pass(), self.looks
        self.log.between_passes(number)
        if self._watch is not None:
            self._watch.look_at_collation(self.dataset, getattr(self.collate_fn, "collate", self.collate_fn))
        while left > 0:
            for batch, delivery in looks:
                self._hand_out(batch, delivery, None)
                yield batch
                left -= looks.cost
                if left == 0 or looks.left_by_loop():
                    break  # the rest of it comes in the next pass
            if looks.only:
                break
            until = looks.steps_until_due if not self.log.unused else left
            draws = self._draws(number, min(left, until))
            for batch, rows, delivery in islice(draws, self.log.parts_used_of(number), None):
                self._hand_out(batch, delivery, rows)
                used = self.log.uses
                yield batch
                number, left = number + delivery.last, left - delivery.last
                if self.log.uses - used > (self.log.last_used is delivery):
                    number = self._poisson.begin_pass()  # steps were made in another pass meanwhile
                    break
        self.log.between_passes(number)

    def _hand_out(self, batch: Any, delivery: Delivery, rows: Tensor | None) -> None:
        self.log.deliver(delivery)
        if self._watch is not None:
            self._watch.hand_out(batch, delivery, rows)

    def _draws(self, number: int, count: int) -> Iterator[tuple[Any, Tensor, Delivery]]:
        self._poisson.numbers = range(number, number + count)
        deliveries: deque[tuple[Tensor, Delivery]] | None = None
        for batch in self._from_memory() if self._in_memory else super().__iter__():
            deliveries = self._poisson.deliveries if deliveries is None else deliveries
            yield batch, *deliveries.popleft()

    def _batches_of(self) -> Callable[[Tensor], Any]:
        """What makes batches of examples, each of which is read once."""
        if self._in_memory:
            return self._whole
        read = Read(self.dataset)
        return lambda at: self.collate_fn(read(at.tolist()))

    @property
    def _poisson(self) -> PoissonSampler:
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    @property
    def _in_memory(self) -> bool:
        collate = getattr(self.collate_fn, "collate", None)  # that of CollateWithEmpty
        standard = collate in (default_collate, getattr(self.dataset, "collate", default_collate))
        whole = type(self.dataset) is TensorDataset or WHOLE_BATCHES in vars(type(self.dataset))
        return whole and standard and self.num_workers == 0 and not self.pin_memory

    def _from_memory(self) -> Iterator[Any]:
        for indices in self._poisson:
            yield self._whole(torch.tensor(indices or [0], dtype=torch.long))

    def _whole(self, at: Tensor) -> Any:
        """A batch by indexing: what the general path gives, without touching examples one by one."""
        if type(self.dataset) is TensorDataset:
            return [tensor[at] for tensor in self.dataset.tensors]
        return getattr(self.dataset, WHOLE_BATCHES)(at)


def poisson_loader(
    loader: DataLoader[Any],
    uniforms: Uniforms,
    max_physical_batch_size: int | None = None,
    whole: Population | None = None,
) -> PoissonLoader:
    """The same dataset, workers and collation under Poisson sampling of the same expected batch size.

    One pass makes ceil(N / batch size) draws. `whole`: the data of several processes together.
    """
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size is {max_physical_batch_size}; it must be 1 or more")
    rate, size = sample_rate_of(loader)
    rate, uniforms = (rate, uniforms) if whole is None else (whole.rate, whole.uniforms(uniforms))
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
