"""What is drawn while randomness is held still depends neither on how much is drawn, nor on what was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients.randomness import draws
from lmdp.guards.still import COINS, NORMAL, ONE_NUMBER, UNIFORM, Held, Shape, Still, drew_alike, shift_of

DRAWN: dict[str, Callable[[int], Tensor]] = {
    "bernoulli": lambda n: torch.bernoulli(torch.tensor([0.0, 0.5, 1.0]).expand(n, 3)),
    "bernoulli_": lambda n: torch.zeros(n, 3).bernoulli_(0.3) + torch.zeros(n, 3).bernoulli_(),
    "randn": lambda n: torch.randn(n, 3),
    "randn_like": lambda n: torch.randn_like(torch.empty(n, 3)),
    "normal_": lambda n: torch.empty(n, 3).normal_(2.0, std=0.5),
    "rand": lambda n: torch.rand(n, 3),
    "rand_like": lambda n: torch.rand_like(torch.empty(n, 3)),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(-1, 1),
    "randint": lambda n: torch.randint(0, 100, (n, 3)),
    "randint_like": lambda n: torch.randint_like(torch.empty(n, 3), 100),
    "random_": lambda n: torch.empty(n, 3).random_(0, 100),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(),
}


def test_every_draw_that_is_held_still_has_a_test() -> None:
    assert DRAWN.keys() == COINS | NORMAL | UNIFORM | ONE_NUMBER


@pytest.mark.parametrize("name", DRAWN)
def test_a_row_is_the_same_whatever_the_number_of_rows(name: str) -> None:
    torch.manual_seed(3)
    moved = draws()
    with Still():
        few, many = DRAWN[name](2), DRAWN[name](50)
    assert not moved()
    assert torch.equal(few[:1].expand_as(many), many)
    assert not torch.equal(DRAWN[name](50), many)


@pytest.mark.parametrize("name", DRAWN)
def test_only_those_who_stay_have_the_numbers_that_they_have_alone(name: str) -> None:
    torch.manual_seed(3)
    with Still(held := Held(50, [4, 7, 20], shift_of(1))):
        among = DRAWN[name](50)
    with Still(Held(3, range(3), shift_of(1))):
        alone = DRAWN[name](3)
    assert torch.equal(among[[4, 7, 20]], alone)
    others = among[[row for row in range(50) if row not in (4, 7, 20)]]
    assert not torch.equal(others, among[4].expand_as(others))
    assert all(by_rows for _, by_rows in held.drawn)


def test_what_has_as_many_rows_by_accident_is_found_out_and_the_same_for_all_from_then_on() -> None:
    accidents: set[Shape] = set()
    for tried in range(2):
        with Still(among := Held(8, [1, 2], accidents=accidents)):
            features, own = torch.rand(8), torch.rand(8, 1)
        with Still(alone := Held(2, range(2), accidents=accidents)):
            assert torch.equal(torch.rand(8)[:1], features[1:2])
            assert torch.equal(torch.rand(2, 1), own[1:3])
        assert drew_alike(among.drawn, alone.drawn, accidents) is bool(tried)
        assert bool((features == features[1]).all()) is bool(tried)
    assert accidents == {("rand", (8,))}


def test_rows_of_one_example_stay_together() -> None:
    with Still(Held(4, [1, 3]).of_units(3)):
        drawn = torch.rand(12)
    assert torch.equal(drawn == drawn[3], torch.tensor([False, True, False, True]).repeat_interleave(3))


def test_a_coin_is_its_chance() -> None:
    """So that a chance that follows from who else is there shows, and dropout that divides by it keeps everything."""
    with Still():
        assert torch.equal(torch.bernoulli(torch.tensor([0.0, 0.2])), torch.tensor([0.0, 0.2]))
        assert torch.equal(torch.empty(3).bernoulli_(0.8).div_(0.8), torch.ones(3))
        assert torch.equal(torch.empty(2, dtype=torch.bool).bernoulli_(0.3), torch.tensor([True, True]))


def test_single_numbers_are_held_still_too() -> None:
    """As those that leave a layer out by chance."""
    with Still():
        assert torch.equal(torch.rand([]), torch.rand([]))
        assert torch.randn([]).shape == torch.randint(5, []).shape == torch.empty([]).uniform_().shape == ()


@pytest.mark.parametrize("name", sorted(NORMAL | UNIFORM))
def test_noise_in_three_dimensions_survives_a_norm_and_is_the_same_for_every_row_and_length(name: str) -> None:
    """A constant would vanish in the layer norm behind it, and with it whatever scales the noise by the batch."""
    draw = {
        "randn": torch.randn,
        "rand": torch.rand,
        "randn_like": lambda *size: torch.randn_like(torch.empty(size)),
        "rand_like": lambda *size: torch.rand_like(torch.empty(size)),
        "normal_": lambda *size: torch.empty(size).normal_(1.0, 2.0),
        "uniform_": lambda *size: torch.empty(size).uniform_(-2, 2),
    }[name]
    with Still():
        few, many = draw(2, 3, 8), draw(9, 5, 8)
    assert torch.equal(few[:1, :1].expand_as(many), many)
    assert many.std(dim=-1).min() > 0.1
    if name == "uniform_":
        assert many.min() >= -2
        assert many.max() <= 2


def test_a_generator_of_its_own_is_left_alone() -> None:
    """One that is seeded in every call draws by place; held still, that would not show."""
    torch.manual_seed(0)
    expected = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    with Still():
        assert torch.equal(torch.randn(4, 3, generator=torch.Generator().manual_seed(5)), expected)
        assert torch.equal(torch.empty(4, 3).normal_(generator=torch.Generator().manual_seed(5)), expected)
        assert not torch.equal(torch.randn(4, 3, generator=torch.default_generator), expected)


@pytest.mark.parametrize("name", ["dropout", "attention", "lstm"])
def test_dropout_of_any_kind_is_held_still(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8)
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
    run = {
        "dropout": lambda x: F.dropout(x, 0.5),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "lstm": lambda x: lstm(x)[0],
    }[name]
    moved = draws()
    with Still():
        assert torch.allclose(run(x)[2:4], run(x[2:4]), atol=1e-6)
    assert not moved()


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.rand(), random.random])  # noqa: NPY002
def test_draws_are_noticed(draw: Callable[[], object]) -> None:
    moved = draws()
    assert not moved()
    draw()
    assert moved()


def test_what_cannot_be_held_still_moves_the_generator() -> None:
    moved = draws()
    with Still():
        torch.randperm(10)
    assert moved()
