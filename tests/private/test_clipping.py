"""Every method keeps one example's contribution within the sensitivity it states, whatever its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmdp.gradients.rows import norm_floor
from lmdp.methods import METHODS
from lmdp.private.clipping import Clipping, usable
from lmdp.private.weights import unit
from tests.private.probe import private_probe, step
from tests.tables import with_default_source

ROUNDING = 1e-9
PRIVATE = [method.name for method in METHODS.values() if method.private]
SIZES = st.one_of(st.just(0.0), st.floats(-30, 30).map(lambda exponent: 10.0**exponent))


def matrices(layers: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(SIZES, min_size=layers, max_size=layers), min_size=1, max_size=6)


def unit_weights(layers: int) -> st.SearchStrategy[Tensor]:
    entries = st.lists(st.floats(-1, 1), min_size=layers, max_size=layers)
    return entries.map(lambda values: unit(torch.tensor(values, dtype=torch.float64)))


@pytest.mark.parametrize("method", PRIVATE)
@settings(max_examples=200, deadline=None)
@given(rows=matrices(4), clip_norm=st.floats(1e-3, 1e3), weights=unit_weights(4))
@example(rows=[[1e-30, 1e30, 0.0, 1.0]], clip_norm=1.0, weights=torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
def test_one_example_contributes_at_most_the_stated_sensitivity(
    method: str, rows: list[list[float]], clip_norm: float, weights: Tensor
) -> None:
    norms = torch.tensor(rows, dtype=torch.float64)
    rule = Clipping.of(method, clip_norm=clip_norm, layers=4)
    scales = rule.scales(norms, weights=weights if rule.method.reweighted else None)
    assert torch.isfinite(scales * norms).all()
    contribution = torch.linalg.vector_norm(scales * norms, dim=1)
    assert (contribution <= rule.sensitivity * (1 + ROUNDING)).all()


@pytest.mark.parametrize("method", with_default_source())
@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.floats(-30, 30), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(exponents=[-30.0, 30.0, 0.0, -30.0], dtype=torch.float32)
@example(exponents=[-22.6, 0.0, -22.4, 19.5], dtype=torch.float32)
def test_the_engine_releases_at_most_the_sensitivity_for_one_example_of_any_size(
    method: str, exponents: list[float], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = (
        torch.randn(1, 4, 50, dtype=torch.float64) * torch.tensor([10.0**e for e in exponents]).double()[:, None]
    ).to(dtype)
    engine, model, optimizer = private_probe(batch, method=method, risk=[0.1, 0.5, 0.3, 0.2])
    released = step(model, optimizer, batch).double()
    assert torch.isfinite(released).all()
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    assert released.norm() <= engine.privacy_statement(1e-5).sensitivity * (1 + rounding)


def test_a_sum_of_squares_that_underflows_cannot_hide_a_gradient() -> None:
    """In float32 squares below 1e-45 vanish. A thousand entries just below that, and one above, would be normalised
    by the one that shows: the layer would be scaled up far beyond its share."""
    row = torch.full((1, 2, 4096), 2.6e-23)
    row[0, 0, 0] = 4e-23
    row[0, 1] = 1.0
    assert row[0, 0].double().norm() > 20 * row[0, 0].square().sum().sqrt()
    _, model, optimizer = private_probe(row, method="lm", weights="fixed")
    released = step(model, optimizer, row).double()
    assert released.norm() <= 1.0 + 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", with_default_source())
def test_a_nan_or_infinite_example_contributes_nothing_and_is_counted(method: str, bad: float) -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, 4, 3)
    poisoned = torch.cat([batch, torch.randn(1, 4, 3)])
    poisoned[5, 2, 1] = bad
    results = []
    for data in (batch, poisoned):
        engine, model, optimizer = private_probe(data, method=method, diagnostics=True)
        results.append(step(model, optimizer, data))
    torch.testing.assert_close(results[0], results[1])
    assert engine.diagnostics is not None
    assert engine.diagnostics.steps[0].nonfinite_examples == 1
    assert engine.diagnostics.steps[0].examples == 6


EXTREMES = [
    (torch.float32, 1e-26, 1e18),  # the scale is subnormal: it would be rounded to a small multiple of 1.4e-45
    (torch.float32, 7e-27, 5e18),
    (torch.float32, 1e-44, 1.0),  # the product is
    (torch.float32, 1e-20, 1e-16),  # a norm that counts as zero is above the bound
    (torch.float32, 1e-7, 1e19),
    (torch.float64, 1e-160, 1e153),
    (torch.float64, 1e-320, 1.0),
    (torch.float64, 1e-155, 1e-151),
    (torch.float64, 1e-140, 1e153),
]


@pytest.mark.parametrize(("dtype", "clip_norm", "size"), EXTREMES)
@pytest.mark.parametrize("method", with_default_source())
def test_an_example_whose_scale_leaves_the_normal_range_contributes_nothing_and_is_counted(
    method: str, dtype: torch.dtype, clip_norm: float, size: float
) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(1, 4, 50, dtype=torch.float64) * size / 14).to(dtype)
    engine, model, optimizer = private_probe(batch, method=method, max_grad_norm=clip_norm, diagnostics=True)
    released = step(model, optimizer, batch).double()
    assert released.norm() <= engine.mechanism.sensitivity * (1 + 1e-5)
    assert engine.diagnostics is not None
    floor = norm_floor(dtype)
    assert engine.diagnostics.steps[0].nonfinite_examples == (clip_norm < floor < size)


def test_scales_fit_if_and_only_if_they_are_normal_numbers_or_nothing() -> None:
    rule = Clipping.of("perlayer", clip_norm=math.sqrt(2), layers=2)
    tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    norms = torch.tensor([[1 / tiny, 0], [1.01 / tiny, 1], [1, 2], [0, 0], [1, 1.01 / tiny]], dtype=torch.float64)
    scales, bad = rule.fitting(norms, 1.0, torch.float32)
    assert bad.tolist() == [False, True, False, False, True]
    assert scales.tolist() == [[pytest.approx(tiny), 0], [0, 0], [1, pytest.approx(0.5)], [0, 0], [0, 0]]
    assert rule.fitting(norms, 4.0, torch.float32)[1].tolist() == [False] * 5
    assert rule.fitting(norms[2:3], most, torch.float32)[1].tolist() == [False]
    assert rule.fitting(norms[2:3], 1.1 * most, torch.float32)[1].tolist() == [True]


def test_lm_on_a_model_of_one_layer_equals_dpsgd() -> None:
    torch.manual_seed(0)
    batch = torch.randn(20, 1, 5, dtype=torch.float64) * torch.logspace(-2, 2, 20, dtype=torch.float64)[:, None, None]
    released = []
    for method in ("dpsgd", "lm"):
        _, model, optimizer = private_probe(batch, method=method, risk=[0.2], emphasis=3.0)
        released.append(step(model, optimizer, batch))
    torch.testing.assert_close(released[0], released[1], rtol=1e-12, atol=0)


def test_the_methods_are_the_formulas_of_their_papers() -> None:
    n = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    C, g = 1.0, 0.01
    scales = {m: Clipping.of(m, clip_norm=C, layers=2).scales(n) for m in PRIVATE}
    assert scales["dpsgd"].tolist() == [[0.2, 0.2], [1.0, 1.0], [1.0, 1.0]]
    assert scales["autos"][0, 0] == C / (5 + g)
    assert scales["psac"][1, 0] == C / (0.5 + g / (0.5 + g))
    assert scales["perlayer"][0].tolist() == pytest.approx([1 / math.sqrt(2) / 3, 1 / math.sqrt(2) / 4])
    assert scales["naive-perlayer"][0].tolist() == pytest.approx([1 / 3, 1 / 4])
    assert scales["lm"].tolist() == [pytest.approx([1 / 3, 1 / 4]), pytest.approx([5 / 3, 5 / 4]), [0.0, 0.0]]
    assert Clipping.of("naive-perlayer", clip_norm=2.0, layers=9).sensitivity == 6.0


def test_usable_drops_whole_examples_and_keeps_the_others() -> None:
    norms, bad = usable(torch.tensor([[1.0, math.nan], [2.0, 3.0], [math.inf, 1.0], [1e-20, 1.0]]), torch.float32)
    assert bad.tolist() == [True, False, True, False]
    assert norms.tolist() == [[0, 0], [2, 3], [0, 0], [0, 1]]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_clip_norm_is_refused_with_its_value(value: float) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm is .*above 0"):
        Clipping.of("lm", clip_norm=value, layers=2)


def test_an_unknown_method_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="'lmm'; it must be one of dpsgd, autos"):
        Clipping.of("lmm", clip_norm=1.0, layers=2)
