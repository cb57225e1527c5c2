"""What a trainer iterates over: one batch for every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from lmdp.guards import common_examples
from lmdp.integrations.account import TrainerAccount
from lmdp.processes import sample_rate_of, steps_per_pass

_END = object()


class TrainerLoader:
    """The Poisson loader of an account, which there is once the trainer has an optimizer; until then, its length.

    Batches that make no step (those of a look, and all parts of a batch but the last) go to `pass_over`, which runs
    the trainer's own training step on them: a trainer that counts batches then counts steps. Without `pass_over` they
    are handed out like others. A pass ends early where the account allows no further step. `place` puts a batch
    onto its device, if the trainer does not.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        account: TrainerAccount,
        pass_over: Callable[[Any], None] | None = None,
        *,
        place: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.plain, self.dataset, self.batch_size = loader, loader.dataset, loader.batch_size
        self._account, self._pass_over, self._place = account, pass_over, place
        self._length = steps_per_pass(sample_rate_of(loader)[0])

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: draws go on where the account is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        loader, account = self._account.loader, self._account
        batches = iter(loader)
        while not account.exhausted and (batch := next(batches, _END)) is not _END:
            if self._pass_over is not None and not loader.log.completes:
                self._pass_over(batch)
            else:
                yield self._place(batch)


def refuse_members(setting: str, evaluated: Iterable[Any], train: Any) -> None:
    """Raise where one of the datasets that are evaluated has training data in it."""
    if any(data is not None and share_rows(data, train) for data in evaluated):
        raise ValueError(
            f"{setting} has training data in it: what is measured on it is private, and would be logged. Pass other "
            "people's data, or none."
        )


def refuse_stream(data: Any) -> None:
    """Raise where examples come one after the other, instead of by their places."""
    if data is None or not (isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")):
        return
    raise ValueError(
        f"train_dataset is a {type(data).__name__}, whose examples come one after the other and cannot be drawn "
        "independently. Pass a dataset with __len__ and __getitem__: list(data), for instance, or of the datasets "
        "library one that is loaded without streaming=True."
    )


def drawn_by(loader: Any, trainer: Any) -> DataLoader[Any]:
    """What a trainer's loader draws from; refused where a class of one's own has put another loader in its place."""
    if isinstance(loader, TrainerLoader):
        return loader.plain
    raise ValueError(
        f"{type(trainer).__name__}.get_train_dataloader returns a {type(loader).__name__} of its own, whose batches "
        "are not drawn as the account needs them. Leave that method out, and pass train_dataset= and data_collator= to "
        "the trainer; sampling weights and orders of one's own have no place in a private training."
    )


def rows_of(data: Any) -> tuple[Any, set[int] | None]:
    """What a dataset is a part of, and which of its rows it has; None for all."""
    if not isinstance(data, Subset):
        return data, None
    places = [int(place) for place in data.indices]
    while isinstance(data := data.dataset, Subset):
        places = [int(data.indices[place]) for place in places]
    return data, set(places)


def share_rows(one: Any, other: Any) -> bool:
    """Whether both are the same dataset, or parts of one that have rows in common."""
    (whole, rows), (another, others) = rows_of(one), rows_of(other)
    if common_examples(one, other):
        return True
    return whole is another and (rows is None or others is None or not rows.isdisjoint(others))


def refuse_collation(loader: DataLoader[Any]) -> None:
    """Raise where a collator that takes rows is given units (of `PerUser`, `Views`), which are lists of rows."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "unit"):
        return
    try:
        loader.collate_fn([dataset[0]])
    except Exception as error:
        raise TypeError(
            f"the data collator takes rows, but {type(dataset).__name__} hands out units, each a list of rows "
            f"({type(error).__name__}: {error}). Pass data_collator=dataset.collate, or one that joins them first: "
            "lambda units: collator([row for unit in units for row in unit])."
        ) from error
