"""An example that a dataset holds several times is found, in whatever way it was repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lmdp.guards import refuse_repeated

ROWS = 30
PLAIN = TensorDataset(torch.arange(ROWS))
REPEATED_TORCH: dict[str, Callable[[], Any]] = {
    "a subset that names one twice": lambda: Subset(PLAIN, [0, 1, 1]),
    "a subset of such a subset": lambda: Subset(Subset(PLAIN, [0, 1, 1]), [1, 2]),
    "a subset drawn with replacement, as a tensor": lambda: Subset(PLAIN, torch.tensor([4, 2, 4])),
    "a subset that counts from both ends": lambda: Subset(PLAIN, [-1, ROWS - 1]),
    "the same dataset twice": lambda: ConcatDataset([PLAIN, PLAIN]),
    "subsets that overlap": lambda: ConcatDataset([Subset(PLAIN, range(20)), Subset(PLAIN, range(10, 30))]),
    "the same tensors twice": lambda: ConcatDataset([PLAIN, TensorDataset(*PLAIN.tensors)]),
    "views that overlap": lambda: ConcatDataset([TensorDataset(PLAIN.tensors[0][at:]) for at in (0, 20)]),
    "a list with an item twice": lambda: [(torch.zeros(2), 1), *[(torch.ones(2), 0)] * 2],
    "one row, expanded": lambda: TensorDataset(torch.zeros(1, 3).expand(ROWS, 3)),
}
ONCE_TORCH: dict[str, Callable[[], Any]] = {
    "a dataset": lambda: PLAIN,
    "a subset": lambda: Subset(PLAIN, [3, 1]),
    "a subset that takes one of two": lambda: Subset(Subset(PLAIN, [0, 1, 1]), [0, 2]),
    "subsets of one dataset": lambda: ConcatDataset([Subset(PLAIN, range(10)), Subset(PLAIN, range(10, 30))]),
    "views of one tensor": lambda: ConcatDataset([TensorDataset(part) for part in PLAIN.tensors[0].split(10)]),
    "rows with a constant beside them": lambda: TensorDataset(torch.zeros(1).expand(ROWS), *PLAIN.tensors),
    "a list of equal words and numbers": lambda: [("word", 1), ("word", 1), "word", "word", 7, 7],
    "a list with a label in common": lambda: [(torch.zeros(2), label) for label in [torch.zeros(())] * 3],
    "sparse rows": lambda: TensorDataset(torch.eye(ROWS).to_sparse()),
    "two datasets": lambda: ConcatDataset([PLAIN, TensorDataset(torch.arange(ROWS))]),
}


def hub(rows: int = ROWS) -> Any:
    datasets = pytest.importorskip("datasets", reason="an optional extra")
    return datasets.Dataset.from_dict({"x": list(range(rows)), "y": [0] * rows})


def joined(*parts: Any) -> Any:
    import datasets

    return datasets.concatenate_datasets(list(parts))


def by_turns(*parts: Any) -> Any:
    import datasets

    return datasets.interleave_datasets(list(parts), stopping_strategy="all_exhausted")


def tagged(table: Any, tag: int) -> Any:
    return table.add_column("tag", [tag] * len(table)).select_columns(["tag", "x", "y"])


def halves() -> tuple[Any, Any]:
    whole = hub()
    return whole.select(range(ROWS // 2)), whole.select(range(ROWS // 2, ROWS))


def joined_to_itself() -> Any:
    rare = hub(3)
    return joined(hub(), *[rare] * 4)


REPEATED_HUB: dict[str, Callable[[], Any]] = {
    "select, one twice": lambda: hub().select([0, 1, 1, 2]),
    "select of what was selected twice": lambda: hub().select([0, 1, 1, 2]).select([1, 2]),
    "joined to itself": joined_to_itself,
    "by turns until all are exhausted": lambda: by_turns(hub(), hub(3)),
    "overlapping parts": lambda: (lambda whole: joined(whole.select(range(20)), whole.select(range(10, 30))))(hub()),
    "with a format": lambda: hub().select([0, 1, 1]).with_format("torch"),
    "with another first column": lambda: (lambda whole: joined(tagged(whole, 0), tagged(whole, 1)))(hub()),
    "beside itself, joined by torch": lambda: (lambda whole: ConcatDataset([whole, whole.shuffle(seed=0)]))(hub()),
}
ONCE_HUB: dict[str, Callable[[], Any]] = {
    "a table": hub,
    "shuffled": lambda: hub().shuffle(seed=0),
    "select": lambda: hub().select([5, 3, 9]),
    "two parts": lambda: joined(*halves()),
    "two tables": lambda: joined(hub(), hub()),
    "filtered, mapped": lambda: hub().filter(lambda row: row["x"] % 2).map(lambda row: {"z": row["x"]}),
    "one copy of a table that holds two": lambda: (lambda whole: joined(whole, whole).select(range(ROWS)))(hub()),
    "nothing in a column": lambda: joined(*(hub().add_column("none", [None] * ROWS) for _ in range(2))),
    "no rows": lambda: hub().select([]),
}


@pytest.mark.parametrize("name", REPEATED_TORCH | REPEATED_HUB)
def test_repeated_examples_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="removing"):
        refuse_repeated((REPEATED_TORCH | REPEATED_HUB)[name]())


@pytest.mark.parametrize("name", ONCE_TORCH | ONCE_HUB)
def test_examples_that_are_there_once_are_not(name: str) -> None:
    refuse_repeated((ONCE_TORCH | ONCE_HUB)[name]())
