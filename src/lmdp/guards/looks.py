"""Who is handed out to be looked at, and when: a batch, in different company.

    1  a batch as it is
    2  the same, with a stranger in half of its places: of the same shape, so that the same randomness is drawn
    3  the same, with another stranger in these places; randomness is held still, and is another for all but those
       of 4 (still)
    4  only some of those that all parts share, so that they are fewer, in other places, and padded to another length

What is shared by 1 and 2, and by 3 and 4, must come out the same. When a look is due, and of how many parts it is,
follows from the number of steps: it takes iterations of the user's loop, and how many of these make a step must not
depend on private data. (Where the same examples were not the same, more looks follow at once. In a training in which
nobody meets that is so only where it follows the number of calls.)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lmdp.gradients import randomness
from lmdp.guards.delivery import Delivery, DeliveryLog
from lmdp.guards.handed import shapes, tensors_of
from lmdp.guards.still import GOLDEN, Held, Shape, Still

PARTS = 4
FIRST, EVERY = (1, 2, 16, 64), 1024
CANDIDATES = 32
"""Among whom strangers are looked for."""
CHOICES = 12
"""Of who is beside whom, of which one is taken."""
FEWEST = 4
"""Rows of a look: a smaller batch has strangers beside it."""


def steps_until_look(steps: int) -> int:
    """How many more steps are made, after so many, before the next look is due. At least one."""
    return next((due for due in FIRST if due > steps), (steps // EVERY + 1) * EVERY) - steps


def is_due(steps: int) -> bool:
    """Whether a look is due after so many steps."""
    return steps in FIRST or (steps > 0 and steps % EVERY == 0)


def steps_left(iterations: int, options: Mapping[str, Any]) -> int:
    """Of so many batches, under these options of `make_private`: looks may be beside them, or not be made."""
    beside = ("looks_besides", "max_physical_batch_size")
    without = ("check_mixing", "poisson_sampling")
    takes = not any(options.get(name) for name in beside) and all(options.get(name, True) for name in without)
    return steps_among(iterations) if takes else iterations


def steps_among(iterations: int) -> int:
    """How many of so many iterations make a step, if looks take the place of steps."""
    steps = 0
    while iterations > 0:
        steps, iterations = steps + 1, iterations - 1
        iterations -= PARTS if is_due(steps) else 0
    return steps


@dataclass(frozen=True)
class Wish:
    """Examples that should be looked at, if there are any.

    again  which part should be the first once more, because an earlier look found a difference; 0 for none
    alone  whether that was found between an example among others and without them
    most   how many of them are enough
    shift, accidents  as `Held` has them
    """

    rows: Tensor | None
    again: int = 0
    alone: bool = False
    most: int | None = None
    shift: float = GOLDEN
    accidents: set[Shape] = field(default_factory=set)

    def held(self, rows: int, stay: Sequence[int]) -> Held:
        return Held(rows, stay, self.shift, self.accidents)


BatchOf = Callable[[Tensor, Held | None], tuple[Any, bool]]
"""(indices, how randomness is held still) → the batch, and whether random numbers were drawn to make it."""


@dataclass(frozen=True)
class Chosen:
    """Who is looked at: a batch, the same with strangers in half of its places, and who stays in it.

    shared  the places of those who stay in the first two parts; in the first of them is one of a rare kind
    few     of those, the ones who are left alone, in that order
    """

    every: Tensor
    beside: tuple[Tensor, Tensor]
    shared: Tensor
    few: Tensor

    @classmethod
    def at_random(cls, rows: Tensor, fewest: int, strangers: Tensor, rare: int, dataset_size: int) -> Chosen:
        """`rare`: which of the two strangers stays as well."""
        every = torch.cat([rows, _strangers(rows, fewest - len(rows), dataset_size)])
        places = torch.randperm(len(every), generator=_FRESH)
        shared, given = places[: len(every) // 2], places[len(every) // 2 :]
        if len(shared) > 1:
            every[shared[0]] = strangers[rare]  # what is counted by its kind may change nobody else
        beside = every.clone(), every.clone()
        for other, stranger in zip(beside, strangers):
            other[given] = stranger
        return cls(every, beside, shared, _moved(shared[: len(shared) // 2 + 1]))

    def with_others_left(self) -> Chosen:
        """The same look, with at most half of those who stay left alone."""
        left = torch.randperm(len(self.shared), generator=_FRESH)[: 2 + secrets.randbelow(len(self.shared) // 2 + 1)]
        return replace(self, few=_moved(self.shared[left]))

    def parts(self, wish: Wish, batch_of: BatchOf) -> list[tuple[Any, Delivery]]:
        """Each with the places of those whom it shares with others."""
        rows, still = [self.every, *self.beside, self.every[self.few]], [False, False, True, True]
        if wish.again:
            first, other = (self.beside[1], self.every[self.few]) if wish.alone else (self.every, self.beside[0])
            rows, still = [first] * PARTS, [wish.alone] * PARTS
            rows[3 - wish.again] = other
        parts = []
        for company, (at, held) in enumerate(zip(rows, still), start=1):
            places = range(len(at)) if len(at) < len(self.every) else (self.few if held else self.shared).tolist()
            alike = wish.held(len(at), places) if held else None
            batch, drawn = batch_of(at, alike)
            kept = () if alike is None else tuple(alike.drawn)
            part = Delivery(len(at), False, False, company, PARTS, tuple(places), held, drawn, kept)
            parts.append((batch, part))
        return parts


def look(
    wish: Wish, dataset_size: int, most: int | None, batch_of: BatchOf, before: Chosen | None = None
) -> tuple[list[tuple[Any, Delivery]], Chosen]:
    """The parts of a look, of at most `most` examples where that leaves two, always so many; and who was chosen.

    Where a look found a difference, those of `before` are looked at again. Else strangers are chosen so that the first
    two parts have one shape, and the last is padded to another length than the third. If the first two never have one
    shape, these share nobody: there is nothing to compare.
    """
    if wish.again and before is not None:
        return before.parts(wish, batch_of), before
    rows = torch.empty(0, dtype=torch.long) if wish.rows is None else wish.rows
    rows = rows[torch.randperm(len(rows), generator=_FRESH)[: wish.most].sort().values] if wish.most else rows
    fewest = max(2, min(FEWEST, most or FEWEST))
    candidates = _strangers(rows, CANDIDATES, dataset_size)
    everybody = Held(0, ())
    order = _most_different_first(batch_of(candidates, everybody)[0], len(candidates))
    for choice in range(CHOICES):
        rare = secrets.randbelow(2)
        pair = candidates[order[[1 + choice, 0] if rare else [0, 1 + choice]]]
        chosen = Chosen.at_random(rows, fewest, pair, rare, dataset_size)
        if shapes(batch_of(chosen.every, None)[0]) == shapes(batch_of(chosen.beside[0], None)[0]):
            break
    among = _lengths(batch_of(chosen.beside[1], everybody)[0])
    for _ in range(CHOICES):
        if _lengths(batch_of(chosen.every[chosen.few], everybody)[0]) != among:
            break
        chosen = chosen.with_others_left()
    parts = chosen.parts(wish, batch_of)
    if shapes(parts[0][0]) != shapes(parts[1][0]):
        parts = [(batch, d if d.still else replace(d, shared=())) for batch, d in parts]
    return parts, chosen


def _moved(places: Tensor) -> Tensor:
    """In such an order that who comes early was late, and as many as possible change between odd and even places."""
    last_first = places.sort(descending=True).values
    at = torch.arange(len(places))
    return max((last_first, last_first.roll(1)), key=lambda order: int(((order - at) % 2).sum()))


def _lengths(batch: Any) -> list[tuple[int, ...]]:
    """Of the examples of a batch, as they are padded."""
    return [shape[1:] for shape in shapes(batch)]


def _most_different_first(batch: Any, size: int) -> Tensor:
    """Places in a batch: first a row that differs from most others in what is no real number, such as a rare label;
    then those that differ from it in most."""
    differ = torch.rand(size, size, generator=_FRESH) * 0.5  # whoever differs alike is chosen by chance
    for tensor in tensors_of(batch):
        if tensor.dim() and len(tensor) and len(tensor) % size == 0 and not tensor.is_floating_point():
            flat = tensor.reshape(size, -1).cpu()
            differ += torch.stack([(flat != row).any(dim=1) for row in flat])
    first = differ.sum(dim=1).argmax()
    others = differ[first].argsort(descending=True)
    return torch.cat([first[None], others[others != first]])


class Wishing(Protocol):
    """Whom a look should be at, if one is due; `now`: if it is of use."""

    @property
    def steps_until_look(self) -> int: ...

    def wish(self, *, now: bool) -> Wish | None: ...

    def try_again(self) -> None: ...


class Looks:
    """What a data loader hands out to be looked at, before a draw. Where a pass ends, the next one goes on with it.

    wishing   says whom to look at, and when
    batch_of  makes what turns indices into a batch
    besides   whether these batches come besides those of a pass, or take their place
    only      whether nothing else is handed out; then looks are made while they are of use
    """

    def __init__(
        self,
        wishing: Wishing | None,
        log: DeliveryLog,
        dataset_size: int,
        most: int | None,
        batch_of: Callable[[], Callable[[Tensor], Any]],
        *,
        besides: bool,
    ) -> None:
        self.only, self._besides = False, besides
        self._wishing, self._log, self._size, self._most, self._batch_of = wishing, log, dataset_size, most, batch_of
        self._parts: list[tuple[Any, Delivery]] = []
        self._chosen: Chosen | None = None
        self._repeat = randomness.remember()

    @property
    def steps_until_due(self) -> int:
        return EVERY if self._wishing is None else self._wishing.steps_until_look

    @property
    def cost(self) -> int:
        """Batches of the pass that one of a look takes the place of."""
        return 0 if self._besides or self.only else 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the data loader hands out nothing else."""
        self.only, self._parts, self._log.looks_used = True, [], 0
        if self._wishing is not None:
            self._wishing.try_again()
        try:
            yield
        finally:
            self.only = False

    def __iter__(self) -> Iterator[tuple[Any, Delivery]]:
        """Until no look is due. None within a draw that is stepped in parts."""
        while not self._log.parts_used:
            if self._log.looks_used >= len(self._parts):
                self._begin()
            for batch, delivery in self._parts[self._log.looks_used :]:
                if delivery.company == 1:
                    self._repeat = randomness.remember()
                else:
                    self._repeat()  # every part sees the same dropout and augmentation
                yield batch, delivery
            if not self._parts:
                return

    def left_by_loop(self) -> bool:
        """Whether the loop does not step what was handed out last: it is a pass for something else."""
        self._parts = [] if self._log.unused else self._parts
        return self._log.unused

    def _begin(self) -> None:
        wish = None if self._wishing is None else self._wishing.wish(now=self.only)
        seed, batch_of = secrets.randbelow(2**31), self._batch_of()

        def alike(at: Tensor, held: Held | None) -> tuple[Any, bool]:
            with randomness.same(seed):  # what collating draws, it draws for each part
                drawn = randomness.draws()
                with nullcontext() if held is None else Still(held):
                    batch = batch_of(at)
                return batch, drawn()

        self._parts = []
        if wish is not None:
            self._parts, self._chosen = look(wish, self._size, self._most, alike, self._chosen)
        self._log.looks_used = 0


def _strangers(drawn: Tensor, count: int, dataset_size: int) -> Tensor:
    """So many examples that were not drawn, if there are any such; else others."""
    every = torch.randint(0, dataset_size, (8 * max(1, count),), generator=_FRESH)
    drawn_as_well = torch.isin(every, drawn)
    return torch.cat([every[~drawn_as_well], every[drawn_as_well]])[: max(0, count)]


_FRESH = torch.Generator().manual_seed(secrets.randbelow(2**63))
"""Which examples are compared with which needs no secrecy, and must not follow the user's seed."""
