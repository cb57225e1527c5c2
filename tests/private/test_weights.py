"""Layer weights: unit vectors, from what they may depend on, and bias-optimal where they claim to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from lmdp.private.weights import (
    BatchView,
    Fixed,
    Private,
    Public,
    bias_optimal,
    mean_ratio,
    optimal_base,
    risk_factors,
    shares,
    unit,
)


def unseen() -> BatchView:
    raise AssertionError("the private batch was looked at")


def bias(A: Tensor, B: Tensor, w: Tensor) -> Tensor:
    """||w·u − mean gradient||² up to a constant, for every row of w."""
    return (A * w.square() - 2 * B * w).sum(-1)


def random_units(count: int, layers: int, seed: int) -> Tensor:
    w = torch.randn(count, layers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return w / w.norm(dim=1, keepdim=True)


PROBLEMS = st.tuples(
    st.lists(st.floats(0, 100), min_size=2, max_size=7),
    st.lists(st.floats(-100, 100), min_size=7, max_size=7),
    st.floats(-6, 6),
)


@settings(max_examples=100, deadline=None)
@given(PROBLEMS)
def test_optimal_weights_beat_ten_thousand_random_unit_vectors(problem: tuple[list[float], list[float], float]) -> None:
    a, b, exponent = problem
    A = torch.tensor(a, dtype=torch.float64) * 10.0**exponent
    B = torch.tensor(b[: len(a)], dtype=torch.float64) * 10.0**exponent
    w = bias_optimal(A, B)
    assert float(w.norm()) == pytest.approx(1, abs=1e-12)
    slack = 1e-12 * float(A.abs().max() + B.abs().max())
    assert bias(A, B, w) <= bias(A, B, random_units(10_000, len(a), 0)).min() + slack


@pytest.mark.parametrize("seed", range(20))
def test_optimal_weights_are_no_worse_than_a_constrained_minimiser(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.rand(5, generator=generator, dtype=torch.float64) * 3
    B = torch.randn(5, generator=generator, dtype=torch.float64)
    best = min(
        minimize(
            lambda w: float((A.numpy() * w**2 - 2 * B.numpy() * w).sum()),
            start.numpy(),
            constraints={"type": "eq", "fun": lambda w: float((w**2).sum() - 1)},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        ).fun
        for start in random_units(6, 5, seed)
    )
    assert float(bias(A, B, bias_optimal(A, B))) <= best + 1e-9


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, 2.0, 3.0], [0.0, 0.1, 0.1]),
        ([1.0, 2.0, 3.0], [1e-14, 0.1, 0.1]),
        ([0.0, 1.0], [0.0, 0.5]),
        ([1.0, 1.0, 5.0], [0.0, 0.0, 0.3]),
        ([2.0, 3.0], [0.0, 0.0]),
        ([2.0, 1e-18, 0.0], [1.0, 2e-18, 0.0]),
    ],
)
def test_the_hard_case_where_the_smallest_coefficient_has_no_pull(a: list[float], b: list[float]) -> None:
    A, B = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    w = bias_optimal(A, B)
    angles = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)
    candidates = random_units(200_000, len(a), 1) if len(a) > 2 else torch.stack([angles.cos(), angles.sin()], 1)
    assert float(w.norm()) == pytest.approx(1, abs=1e-12)
    assert bias(A, B, w) <= bias(A, B, candidates).min() + 1e-9


def test_optimal_weights_without_gradients_are_uniform() -> None:
    assert bias_optimal(torch.zeros(4).double(), torch.zeros(4).double()).tolist() == [0.5] * 4
    with pytest.raises(ValueError, match="need"):
        optimal_base(BatchView(torch.ones(2, 2), 1.0))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), min_size=1, max_size=8))
def test_unit_gives_a_unit_vector_for_anything(values: list[float]) -> None:
    assert float(unit(torch.tensor(values, dtype=torch.float64)).norm()) == pytest.approx(1, abs=1e-9)


def test_error_rates_are_clamped_and_leakier_layers_get_less() -> None:
    factors = risk_factors([0.0, 0.2, 0.5, 0.9], emphasis=2.0)
    assert factors.tolist() == pytest.approx([1e-4, 0.04, 0.25, 0.25])
    for wrong in ([-0.1], [1.1], [math.nan]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            risk_factors(wrong, 1.0)
    with pytest.raises(ValueError, match="emphasis is -1"):
        risk_factors([0.2], -1)


def test_fixed_weights_depend_on_the_risk_only() -> None:
    assert Fixed(risk_factors([0.3, 0.4], 1.0)).weights(unseen).tolist() == pytest.approx([0.6, 0.8])


def test_private_weights_start_fixed_then_follow_the_released_statistic() -> None:
    source = Private(risk_factors([0.5, 0.5], 1.0), share=0.01)
    assert source.weights(unseen).tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    source.observe(torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert source.weights(unseen).tolist() == pytest.approx([0.6, 0.8])
    source.observe(torch.tensor([-1e9, 1.0], dtype=torch.float64))
    floor = 0.01 * source._mean.abs().max()
    expected = torch.stack([floor, floor])
    assert source.weights(unseen).tolist() == pytest.approx((expected / expected.norm()).tolist())


def test_private_weights_resume_from_their_state() -> None:
    source, other = (Private(risk_factors([0.5, 0.2], 1.0), share=0.1) for _ in range(2))
    source.observe(torch.tensor([3.0, 4.0], dtype=torch.float64))
    other.restore(source.state())
    assert torch.equal(source.weights(unseen), other.weights(unseen))


def test_public_weights_are_measured_every_k_steps() -> None:
    calls = []

    def measure(number: int) -> BatchView:
        calls.append(number)
        return BatchView(torch.tensor([[3.0, 4.0]], dtype=torch.float64), 1.0)

    source = Public(torch.ones(2, dtype=torch.float64), base=mean_ratio, measure=measure, every=3)
    weights = [source.weights(unseen).tolist() for _ in range(7)]
    assert calls == [0, 1, 2]
    assert all(w == pytest.approx([0.6, 0.8]) for w in weights)


def test_shares_have_norm_one_or_zero_and_the_papers_ratio_is_a_mean() -> None:
    norms = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e30]], dtype=torch.float64)
    assert shares(norms).norm(dim=1).tolist() == pytest.approx([1, 0, 1])
    ratio = mean_ratio(BatchView(norms[:2], 1.0))
    assert ratio.tolist() == pytest.approx([1.5, 2.0])
    assert mean_ratio(BatchView(norms[:0], 1.0)).tolist() == [0, 0]
    assert np.isfinite(ratio.numpy()).all()
