"""What is protected as one: an example in several views, or a user with several rows.

    Unit      its name, and how many rows of a batch it has
    Views     a dataset, each of whose examples is handed out in K random views
    PerUser   a dataset, whose rows are handed out user by user

The gradients of a unit's rows are averaged first; then the norm is taken, and the mean is clipped. So one unit moves
the sum by at most C, whatever its rows are, and everything that is drawn, counted and stated is drawn, counted and
stated in units. What a dataset here draws at random for a unit follows from that unit alone.
"""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lmdp.guards import refuse_repeated

Augment = Callable[[Tensor, Tensor], Tensor]
"""(rows [R, …], uniform numbers [R, COLUMNS]) → the rows, each changed by its own numbers and by nothing else."""
COLUMNS = 4
"""Uniform numbers for each view."""


@dataclass(frozen=True)
class Unit:
    """Whose privacy is kept: `rows` rows of a batch, following each other, count as one `name`."""

    name: str = "example"
    rows: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"rows is {self.rows!r}; a unit has 1 row or more, always as many: a public number")
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name is {self.name!r}; say in a word whose privacy is kept, such as 'user'")

    @classmethod
    def of(cls, dataset: Any, given: Unit | None) -> Unit:
        """The unit that was given, that of a dataset which hands out units, or one row."""
        refuse_joined(dataset)
        mine = getattr(_whole(dataset), "unit", None)
        handed_out = mine if isinstance(mine, Unit) else None
        if given is not None and not isinstance(given, Unit):
            raise TypeError(f"unit is {given!r}; it must be lmdp.Unit(name, rows), such as lmdp.Unit('example', 4)")
        if given is not None and handed_out is not None and given != handed_out:
            raise ValueError(f"unit is {given}, but the dataset hands out {handed_out}; leave unit out")
        if given is not None and handed_out is None and given.name != cls().name:
            raise ValueError(
                f"unit is {given}, but the dataset hands out examples, and nobody knows whose each is: a statement "
                f"about one {given.name} would rest on nothing. Pass lmdp.PerUser(dataset, users, rows={given.rows}, "
                f"name={given.name!r}), which is told whose each row is (range(len(dataset)) where each is another's); "
                "a dataset of your own that groups them has the unit as its attribute `unit`."
            )
        return given or handed_out or cls()

    def relation(self, of_examples: str) -> str:
        """A neighbouring relation of examples, said of units."""
        return of_examples.replace("example", self.name)


class _Units(Dataset[Any]):
    """Items are units: lists of `unit.rows` rows.

    What is drawn for a unit follows from a secret key (`seed`, where one is given), from a number that changes from
    batch to batch, and from the unit: never from who else is drawn.
    """

    unit: Unit

    def __init__(self, seed: int | None) -> None:
        self.moment: Callable[[], int] | None = None
        self._key, self._seed = secrets.randbits(64) if seed is None else seed, seed

    @property
    def doubt(self) -> str:
        """Why what is drawn here might tell of others; "" where it cannot."""
        if self._seed is None:
            return ""
        return (
            f"what is drawn for each {self.unit.name} follows from a seed ({self._seed}) and its place in the data: to "
            f"whoever knows the seed, one {self.unit.name} less changes what is drawn for others. Leave seed out"
        )

    def share_key(self, same: Callable[[int], int]) -> None:
        """Several processes draw the same for a unit: by the key of the first, which `same` gives to all."""
        self._key = same(self._key)

    def _drawn_for(self, *index: int) -> np.random.SeedSequence:
        """`moment` where it is set, or a number of torch's generator, which looks repeat."""
        number = int(torch.randint(2**62, ())) if self.moment is None else self.moment()
        return np.random.SeedSequence([self._key, number, *index])

    def collate(self, units: Iterable[Iterable[Any]]) -> Any:
        """One batch of all rows, those of a unit after each other."""
        return default_collate([row for unit in units for row in unit])

    def loader(self, batch_size: int, **settings: Any) -> DataLoader[Any]:
        """For `make_private`: `batch_size` units are expected in a batch."""
        return DataLoader(self, batch_size=batch_size, **{"collate_fn": self.collate, **settings})


class Views(_Units):
    """Every example of `dataset` in `views` random views; what follows its first tensor is the same in all of them.

    augment  makes a view of a row, from uniform numbers that are drawn for this row alone
    seed     makes views repeatable, and the run not certified: with `moment` (how many steps have been made) they
             follow from these two and the place of the example, so that a run that is interrupted, or makes its
             batches in other parts, sees the same ones
    """

    def __init__(self, dataset: Dataset[Any], views: int, augment: Augment, *, seed: int | None = None) -> None:
        super().__init__(seed)
        refuse_repeated(dataset)
        self.dataset, self.unit, self._augment = dataset, Unit("example", views), augment

    @property
    def __lmdp_examples_of__(self) -> Dataset[Any]:
        """Example by example, what they are made of."""
        return self.dataset

    def stored(self, index: int) -> list[Any]:
        """Of an example, before anything is drawn."""
        return [self.dataset[index]]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> list[tuple[Any, ...]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[list[tuple[Any, ...]]]:
        columns = self.__lmdp_examples_at__(torch.as_tensor(list(indices), dtype=torch.long))
        rows = list(zip(*columns))
        return [rows[at : at + self.unit.rows] for at in range(0, len(rows), self.unit.rows)]

    def __lmdp_examples_at__(self, indices: Tensor) -> list[Any]:
        """What a data loader would collate of the views of these examples."""
        first, *rest = (_repeated(column, self.unit.rows) for column in _columns(self.dataset, indices))
        return [self._augment(first, self._uniforms(indices)), *rest]

    def _uniforms(self, indices: Tensor) -> Tensor:
        """[R, COLUMNS]: of each example its own, whoever else is there."""
        base, numbers = int(self._drawn_for().generate_state(1, np.uint64)[0]), np.arange(self.unit.rows * COLUMNS)
        each = _scrambled(np.asarray(indices, np.uint64) + _scrambled(np.array([base], np.uint64)))
        every = _scrambled(each[:, None] + numbers.astype(np.uint64))  # [B, K · COLUMNS]
        uniform = (every >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(uniform.reshape(-1, COLUMNS)).float()


class PerUser(_Units):
    """The rows of `dataset`, user by user: `rows` of each, always as many, which is a public number.

    users  of every row, whose it is: text, bytes or whole numbers (or tuples of these), equal for all rows of one user
    rows   of a user who has more, as many are chosen at random each time, and the rest is left out; of one who has
           fewer, rows come again. Their mean is what counts, so every user counts alike
    name   what a user is called in the privacy statement
    seed   makes the choice of rows repeatable, and the run not certified
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        users: Sequence[Hashable],
        rows: int,
        *,
        name: str = "user",
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        named, size = _names(users), len(dataset)  # type: ignore[arg-type]
        if len(named) != size:
            raise ValueError(f"users names {len(named)} rows, but the dataset has {size}; one user for each row")
        refuse_repeated(dataset)
        self.dataset, self.unit = dataset, Unit(name, rows)
        places: dict[Hashable, list[int]] = {}
        for row, user in enumerate(named):
            places.setdefault(user, []).append(row)
        self._users, self._places = list(places), list(places.values())

    def user(self, index: int) -> Hashable:
        """Who this is, by the name that `users` has."""
        return self._users[index]

    def stored(self, index: int) -> list[Any]:
        """All rows of a user, before any are chosen."""
        return [self.dataset[place] for place in self._places[index]]

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._places)

    def __getitem__(self, index: int) -> list[Any]:
        places = self._places[index]
        order = np.random.default_rng(self._drawn_for(index)).permutation(len(places))
        return [self.dataset[places[order[k % len(places)]]] for k in range(self.unit.rows)]


def _whole(dataset: Any) -> Any:
    """What a Subset, of a Subset, takes its items from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def drawing(dataset: Any) -> Views | PerUser | None:
    """What draws for units here, whole or in part."""
    whole = _whole(dataset)
    return whole if isinstance(whole, Views | PerUser) else None


def refuse_joined(dataset: Any) -> None:
    """Raise where datasets of units are joined: nobody would see that one unit is in several of them."""
    joined = _whole(dataset)
    if not isinstance(joined, ConcatDataset):
        return
    for part in joined.datasets:
        refuse_joined(part)
        if (units := drawing(part)) is not None:
            remedy = (
                "lmdp.PerUser(ConcatDataset([a, b]), [*users_of_a, *users_of_b], rows)"
                if isinstance(units, PerUser)
                else "lmdp.Views(ConcatDataset([a, b]), views, augment)"
            )
            raise ValueError(
                f"a ConcatDataset joins datasets of {units.unit.name}s ({type(units).__name__}): one who is in several "
                f"would be drawn, and count, as often. Join the rows first: {remedy}."
            )


NAMED = (str, bytes, int, bool)
"""What names a user: equal where it looks equal."""


def _names(users: Any) -> list[Hashable]:
    """Of every row, whose it is, as values of Python; raise where rows of one user could have names that differ."""
    tabular = isinstance(users, Mapping) or hasattr(users, "columns") or hasattr(users, "column_names")
    if tabular or isinstance(users, str | bytes | Set) or not hasattr(users, "__len__"):
        raise TypeError(
            f"users is a {type(users).__name__}; it must be a list, or one column, with the user of every row in the "
            "order of the rows, such as frame['user'].tolist() or [user_of[row] for row in range(len(dataset))]"
        )
    listed = next((getattr(users, name)() for name in ("tolist", "to_pylist") if hasattr(users, name)), users)
    names = [_name(row, user) for row, user in enumerate(listed)]
    first = sorted({_kind(name): row for row, name in reversed(list(enumerate(names)))}.values())
    if len(first) > 1:
        told = ", ".join(f"row {row} has {names[row]!r}" for row in first)
        raise TypeError(
            f"users are named by several kinds of values: {told}. One user could have two names, as 7 and '7'. Name "
            "all alike, such as [str(user) for user in users]."
        )
    return names


def _name(row: int, user: Any) -> Hashable:
    if isinstance(user, Tensor | np.ndarray | np.generic) and np.prod(user.shape) == 1:
        user = user.item()
    parts = user if type(user) is tuple and user else (user,)
    if all(type(part) in NAMED for part in parts):
        alike = tuple(spelt_alike(part) if isinstance(part, str) else part for part in parts)
        return alike if type(user) is tuple else alike[0]
    raise TypeError(
        f"row {row} has the user {user!r} ({type(user).__name__}); a user is named by text, bytes or a whole number "
        "(or a tuple of these), the same for all rows of one person. Rows of nobody known (None, NaN) may be one "
        "person's: leave them out, or name whose they are. Write names of other kinds as text or whole numbers."
    )


def spelt_alike(name: str) -> str:
    """Without space around it, and letters with marks in one of the ways in which Unicode can write them."""
    return unicodedata.normalize("NFC", name).strip()


def _kind(name: Any) -> Any:
    return tuple(map(type, name)) if isinstance(name, tuple) else type(name)


def _columns(dataset: Any, indices: Tensor) -> Sequence[Any]:
    """Inputs, labels and so on of these examples, each as a batch."""
    if type(dataset) is TensorDataset:
        return [tensor[indices] for tensor in dataset.tensors]
    if hasattr(dataset, "__lmdp_examples_at__"):
        return list(dataset.__lmdp_examples_at__(indices))
    columns = default_collate([dataset[i] for i in indices.tolist()])
    if not isinstance(columns, list | tuple) or not isinstance(columns[0], Tensor):
        raise TypeError("Views needs a dataset whose items are tuples that begin with a tensor, such as (image, label)")
    return columns


def _repeated(column: Any, times: int) -> Any:
    if isinstance(column, Tensor):
        return column.repeat_interleave(times, dim=0)
    return [value for value in column for _ in range(times)]


def _scrambled(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A fixed permutation of 64 bits that leaves no pattern: multiply, fold, twice."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(factor)
        numbers = numbers ^ (numbers >> np.uint64(shift))
    return numbers ^ (numbers >> np.uint64(31))
