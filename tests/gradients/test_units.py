"""Several rows, one unit: every rule gives the gradient of the sum over a unit's rows, as a plain loop does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmdp.gradients.contract import Example, Rule
from tests.gradients.reference import compare, quadratic
from tests.gradients.test_rule_table import records

UNITS = 4
pytestmark = pytest.mark.usefixtures("widest_loops")


def units_of(batch: Tensor, rows_each: int) -> list[Tensor]:
    return list(batch.split(rows_each))


def rows(example: Example, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if example.indices is not None:
        return torch.randint(0, example.indices, (count, *example.shape), generator=generator)
    return torch.randn(count, *example.shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "bound", "rows_each"), [(torch.float64, 1e-8, 3), (torch.float32, 1e-4, 2)], ids=["double", "single"]
)
@pytest.mark.parametrize(("rule", "example"), records())
def test_every_rule_gives_the_gradient_of_a_unit_as_one_unit_at_a_time_does(
    rule: Rule, example: Example, dtype: torch.dtype, bound: float, rows_each: int
) -> None:
    torch.manual_seed(0)
    module, batch = example.make().to(dtype), rows(example, UNITS * rows_each, dtype)
    assert compare(module, quadratic, batch, units_of(batch, rows_each), rows_each=rows_each).worst <= bound


class Twice(nn.Module):
    """Weights that are used twice, by one module and by a table that shares them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight, self.mix, self.norm = self.table.weight, nn.Linear(5, 5), nn.GroupNorm(1, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.mix(self.norm(self.mix(self.table(index)).tanh())))  # type: ignore[no-any-return]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 2, 3, padding=1), nn.PReLU(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.gate(self.conv(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", [None, 4096], ids=["free", "lean"])
@pytest.mark.parametrize("rows_each", [1, 2, 4])
def test_units_and_weights_that_are_used_again_go_together(rows_each: int, budget: int | None) -> None:
    torch.manual_seed(0)
    for model, batch in (
        (Twice().double(), torch.randint(0, 7, (UNITS * rows_each, 3))),
        (Images().double(), torch.randn(UNITS * rows_each, 2, 5, 5, dtype=torch.float64)),
    ):
        told = compare(model, quadratic, batch, units_of(batch, rows_each), rows_each=rows_each, memory_budget=budget)
        assert told.worst <= 1e-8


def test_a_batch_that_is_no_whole_number_of_units_is_refused() -> None:
    model, batch = nn.Linear(3, 2), torch.randn(5, 3)
    with pytest.raises(ValueError, match="no multiple of 2, the rows of one unit"):
        compare(model, quadratic, batch, units_of(batch, 2), rows_each=2)
