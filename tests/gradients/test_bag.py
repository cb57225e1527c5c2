"""EmbeddingBag: each example has the gradient that it has alone, from a table of indices or from a row with offsets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmdp.gradients.plan import RULES, rule_for
from tests.gradients.reference import captured, compare

ROWS, WIDTH, TIMES = 7, 3, 5
LENGTHS = [3, 0, 5, 1]
"""One bag is empty."""


class Bags(nn.Module):
    """Makes bags of a padded table: as it is, or its words in one row with offsets. A linear layer makes weights."""

    def __init__(self, *, offsets: bool, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.weigh = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(1, 1) if weighted else None
        self.offsets = offsets

    def forward(self, index: Tensor, lengths: Tensor) -> Tensor:
        weights = None if self.weigh is None else self.weigh(index[..., None].to(self.weigh.weight)).squeeze(-1)
        if not self.offsets:
            bags: Tensor = self.bag(index) if weights is None else self.bag(index, per_sample_weights=weights)
            return bags
        inside = torch.arange(index.shape[1]) < lengths[:, None]
        ends = lengths.cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])[: None if self.bag.include_last_offset else -1]
        return self.bag(index[inside], starts, None if weights is None else weights[inside])  # type: ignore[no-any-return]


Batch = tuple[Tensor, Tensor]


def batch_of(lengths: list[int]) -> Batch:
    index = torch.randint(0, ROWS, (len(lengths), TIMES), generator=torch.Generator().manual_seed(2))
    return index, torch.tensor(lengths)


def each(batch: Batch) -> list[Batch]:
    return [(index[None], length[None]) for index, length in zip(*batch)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    total: Tensor = ((model(*batch) - 1).square() * torch.tensor([0.5, 1.0, 2.0])).sum()
    return total


CASES = [
    (mode, offsets, weighted, last, padding)
    for mode, offsets, weighted, last, padding in itertools.product(
        ("sum", "mean", "max"), (False, True), (False, True), (False, True), (None, 2)
    )
    if (not weighted or mode == "sum") and (offsets or not last)
]


@pytest.mark.parametrize(("mode", "offsets", "weighted", "last", "padding"), CASES)
def test_every_bag_has_the_gradient_that_it_has_alone(
    mode: str, offsets: bool, weighted: bool, last: bool, padding: int | None
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    model = Bags(offsets=offsets, weighted=weighted, **options).double()
    assert rule_for(model.bag) is RULES["bag"]
    batch = batch_of(LENGTHS if offsets else [TIMES] * 4)
    assert compare(model, loss, batch, each(batch)).worst <= 1e-8


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_nothing_but_padding_and_bags_that_are_all_empty_have_no_gradient(mode: str) -> None:
    torch.manual_seed(0)
    padded = Bags(offsets=False, mode=mode, padding_idx=2)
    gradients, layers = captured(padded, loss, (torch.full((3, TIMES), 2), torch.tensor([TIMES] * 3)))
    assert not gradients.squared_norms(layers).any()
    gradients, layers = captured(Bags(offsets=True, mode=mode), loss, batch_of([0, 0, 0]))
    assert not gradients.squared_norms(layers).any()


def test_a_bag_that_is_used_twice_adds_both_uses_up() -> None:
    class Twice(Bags):
        def forward(self, index: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(index, lengths) * super().forward(index.flip(1), lengths)

    torch.manual_seed(0)
    batch = batch_of(LENGTHS)
    assert compare(Twice(offsets=True).double(), loss, batch, each(batch)).worst <= 1e-8


def test_words_of_all_examples_in_one_row_are_refused_and_the_remedy_works() -> None:
    def squares(model: nn.Module, batch: Any) -> Tensor:
        total: Tensor = model(*batch).square().sum()
        return total

    torch.manual_seed(0)
    words, offsets = torch.arange(9) % 3 + 1, torch.tensor([0, 1, 2, 3])
    bag = nn.EmbeddingBag(ROWS, WIDTH, padding_idx=0).double()
    with pytest.raises(ValueError, match="a table of indices with a row for every example, filled up with the bag's"):
        captured(bag, squares, (words, offsets))
    table = torch.zeros(4, 9, dtype=torch.long)
    for i, row in enumerate(words.tensor_split(offsets[1:])):
        table[i, : len(row)] = row
    assert torch.equal(bag(table), bag(words, offsets))
    assert compare(bag, squares, (table,), [(row,) for row in table.split(1)]).worst <= 1e-8
