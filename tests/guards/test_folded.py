"""What looks keep and run again of large models: folded sums, in which nothing hides, and a few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lmdp.guards import replay
from lmdp.guards.replay import FOLD, KEPT, _fold
from tests.private.test_engine import private, train

LENGTH = 9 * FOLD + 17


def differences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    column = torch.zeros(LENGTH)
    column[5::FOLD] = 1.0  # one place of every part: folded without rolling it would be added to itself
    single = torch.zeros(LENGTH)
    single[-3] = 2.0
    return {
        "all over": torch.randn(LENGTH, generator=generator),
        "the same in every part": torch.randn(FOLD, generator=generator).repeat(10)[:LENGTH],
        "constant": torch.ones(LENGTH),
        "one place of every part": column,
        "a single number": single,
    }


@pytest.mark.parametrize("name", differences())
def test_a_difference_is_as_long_folded_as_it_is(name: str) -> None:
    difference = differences()[name]
    assert len(_fold(difference)) == KEPT
    assert float(_fold(difference).norm()) == pytest.approx(float(difference.norm()), rel=0.1)


def test_folding_adds_up() -> None:
    a, b = torch.randn(2, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(_fold(a) - _fold(b), _fold(a - b), rtol=1e-9, atol=1e-9)


class Centred(nn.Module):
    """Lets examples meet by a little."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 3), by

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x - self.by * x.mean(0)))


@pytest.mark.parametrize("by", [1.0, 0.05, 0.0])
def test_a_few_rows_of_a_large_call_show_that_examples_meet(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    monkeypatch.setattr(replay, "MOST_HELD", 1)
    seen: list[int] = []
    original = replay.Replay.meet
    monkeypatch.setattr(replay.Replay, "meet", lambda self, most: (seen.append(self._size), original(self, most))[1])
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(Centred(by), data_loader=vectors())
    if by:
        with pytest.raises(RuntimeError, match="the model lets the examples of a batch meet"):
            train(model, optimizer, loader)
    else:
        train(model, optimizer, loader)
        assert engine.privacy_statement(1e-3).certified
    assert seen
    assert max(seen) <= replay.FEWEST


def vectors() -> DataLoader[Any]:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.arange(60) % 3), batch_size=20)


def sketch(*norms: float, dtype: torch.dtype = torch.float32) -> replay.Sketch:
    """Of one example with these norms in its layers."""
    nothing = {"parameter": torch.zeros(1)}
    tolerance, last_place = replay.TOLERANCE[dtype], torch.finfo(dtype).eps
    return replay.Sketch(torch.tensor([norms], dtype=torch.float64), nothing, nothing, tolerance, last_place)


@pytest.mark.parametrize("dtype", replay.TOLERANCE)
def test_a_layer_that_holds_nothing_but_rounding_is_not_compared_with_itself(dtype: torch.dtype) -> None:
    place = torch.finfo(dtype).eps  # key biases of attention: their gradient is zero, in exact arithmetic
    assert not sketch(100.0, 200 * place, dtype=dtype).differs(sketch(100.0, 700 * place, dtype=dtype))


@pytest.mark.parametrize("dtype", replay.TOLERANCE)
def test_a_layer_that_holds_little_is_compared_with_itself(dtype: torch.dtype) -> None:
    little = 1e5 * torch.finfo(dtype).eps
    assert sketch(100.0, little, dtype=dtype).differs(sketch(100.0, 1.1 * little, dtype=dtype))
