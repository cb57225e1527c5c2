"""The whole number nearest to a sum with noise is the same however it is computed, and that of real numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmdp.accounting import Grid
from lmdp.gradients.compiled import grid
from lmdp.private.keystream import KeyStream

pytestmark = pytest.mark.usefixtures("loops")

DEVIATION = 1.3 * 2.0**18
EDGES = [*(s * 2**k + d for s in (1, -1) for k in (40, 41, 61, 62) for d in (-1, 0, 1)), 0, -1, 2**63 - 1, -(2**63)]
"""Of radii: about the least uniform number that is believed, and the greatest."""


def stream_of(count: int) -> tuple[Tensor, Callable[[int, int], int]]:
    """Words for as many numbers, edges among them, and the bits after them."""
    stream = KeyStream(bytes(range(32)))
    words = stream.words(count)
    words[: len(EDGES)] = torch.tensor(EDGES)
    words[len(EDGES) : 2 * len(EDGES)] = torch.tensor([2**63 - 1 - (e & (2**42 - 1)) for e in EDGES])
    words[count // 2 : count // 2 + 6] = torch.tensor([0, 1, -1, 2**61, 2**62, -(2**63)])
    return words, lambda place, n: stream.more(0, place, n)


def normal(words: Tensor, more: Callable[[int, int], int]) -> list[mpmath.mpf]:
    """Both numbers of each pair, in 60 digits: the formula of Box and Muller, by another library function."""
    radii, angles = (t.tolist() for t in words.chunk(2))
    cosines, sines = [], []
    with mpmath.workdps(60):
        for pair, (radius, angle) in enumerate(zip(radii, angles)):
            first = radius if radius >= 0 else -radius - 1
            u = mpmath.mpf((first << 128) + more(2 * pair, 2)) / mpmath.mpf(2) ** 191
            turn = 2 * mpmath.pi * mpmath.mpf((angle << 128) + more(2 * pair + 1, 2)) / mpmath.mpf(2) ** 192
            length = mpmath.sqrt(-2 * mpmath.log(u))
            cosines.append(length * mpmath.cos(turn))
            sines.append(length * mpmath.sin(turn))
    return cosines + sines


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_with_noise_are_rounded_as_real_numbers_are_even_next_to_a_half(dtype: torch.dtype) -> None:
    """Sums are chosen so that the result is a half, and less and less beside it: where double precision cannot tell."""
    words, more = stream_of(800)
    numbers = normal(words, more)
    beside = [s * 2.0**-k for k in range(10, 60) for s in (1, -1)]
    with mpmath.workdps(60):
        sums = [mpmath.mpf(k - 400) + 0.5 - DEVIATION * z + beside[k % 100] for k, z in enumerate(numbers)]
        held = torch.tensor([float(s) for s in sums], dtype=dtype)
        exact = [int(mpmath.floor(mpmath.mpf(float(s)) + DEVIATION * z + 0.5)) for s, z in zip(held, numbers)]
    out = torch.empty_like(held)
    grid.on_grid(words, held, out, weight=1.0, deviation=DEVIATION, step=2.0**-18, more=more)
    assert torch.equal(out, (torch.tensor(exact, dtype=torch.float64) * 2.0**-18).to(dtype))


def test_few_numbers_of_many_ask_for_more_than_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    nearest = grid.nearest
    monkeypatch.setattr(grid, "nearest", lambda total, *rest: asked.append(total) or nearest(total, *rest))
    stream, count = KeyStream(bytes(32)), 2**21
    sums = torch.randn(count, generator=torch.Generator().manual_seed(0))
    deviation = 2.0**18
    grid.on_grid(
        stream.words(count),
        sums,
        torch.empty(count),
        weight=deviation,
        deviation=deviation,
        step=1.0,
        more=lambda place, n: stream.more(0, place, n),
    )
    expected = count * (2 * (grid.ERROR * deviation + 1.2 * deviation * 2.0**-47) + 2 * grid.LEAST)
    assert len(asked) < expected + 5 * math.sqrt(expected)


@pytest.mark.parametrize("total", [math.inf, -math.inf, math.nan, 1e300, -1e300, 2.0**47, -(2.0**48)])
def test_whatever_a_sum_is_a_finite_number_is_released(total: float) -> None:
    words, more = stream_of(200)
    out = torch.empty(200, dtype=torch.float64)
    sums = torch.full((200,), total, dtype=torch.float64)
    grid.on_grid(words, sums, out, weight=1.0, deviation=DEVIATION, step=1.0, more=more)
    assert (out.abs() - grid.MOST).abs().max() < 14 * DEVIATION
    assert (out < 0).all() if total < 0 else (out > 0).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-12, 1e12), st.floats(0, 1e15))
def test_a_grid_is_a_power_of_two_below_the_noise_and_above_what_is_exact(std: float, largest: float) -> None:
    public = Grid.of(std, largest)
    assert math.frexp(public.step)[0] == 0.5
    assert public.std / public.step < 2**19
    assert largest / public.step <= 2**41
    assert public.std / public.step >= 2**18 or largest / public.step > 2**39


def test_released_numbers_lie_on_the_grid_whatever_the_sums() -> None:
    words, more = stream_of(200)
    public = Grid.of(0.7)
    for sums in (torch.zeros(200), torch.full((200,), 1 / 3), torch.logspace(-30, 3, 200)):
        out = torch.empty(200, dtype=torch.float64)
        settings = {"weight": 1 / public.step, "deviation": public.std / public.step, "step": public.step}
        grid.on_grid(words, sums, out, **settings, more=more)
        assert all(Fraction(x) % Fraction(public.step) == 0 for x in out.tolist())
