"""Released gradients in other units: divided by public numbers, with the same noise, epsilon and statement."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdp.accounting import Grid
from lmdp.app.config import Config
from lmdp.rescaling import LEAST_GAIN
from tests.private.probe import private_probe, step
from tests.tables import with_default_source

BATCH = 5 * torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RISK = [0.5, 0.4, 0.2, 0.1]


def released(steps: int = 3, **options: Any) -> Tensor:
    """The gradients of a few steps, [steps, layers, width], under the same seed."""
    _, model, optimizer = private_probe(BATCH, **options)
    return torch.stack([step(model, optimizer, BATCH) for _ in range(steps)])


@pytest.mark.parametrize("clip_norm", [0.25, 0.3])
@pytest.mark.parametrize("method", with_default_source())
def test_a_gradient_in_units_of_the_clip_norm_is_the_same_divided_by_it(method: str, clip_norm: float) -> None:
    options = {"method": method, "noise_multiplier": 1.1, "max_grad_norm": clip_norm}
    plain, scaled = released(**options), released(**options, unit_clip=True)
    torch.testing.assert_close(scaled, plain / clip_norm, rtol=1e-14, atol=0)


@pytest.mark.parametrize("method", ["dpsgd", "autos", "lm"])
def test_learning_rate_and_clip_norm_come_apart(method: str) -> None:
    """Every example is above both clip norms: in units of them, signal and noise are the same, but for their grids."""
    options: dict[str, Any] = {"method": method, "noise_multiplier": 0.9, "unit_clip": True}
    small, large = released(max_grad_norm=0.1, **options), released(max_grad_norm=1.0, **options)
    grids = sum(Grid.of(0.9 * 1.01 * c).step / c for c in (0.1, 1.0))
    torch.testing.assert_close(small, large, rtol=1e-9, atol=grids)
    apart = [released(max_grad_norm=c, **(options | {"unit_clip": False})) for c in (0.1, 1.0)]
    assert not torch.allclose(*apart, rtol=0.5)


@pytest.mark.parametrize("weights", ["private", "fixed", "public"])
def test_a_gradient_of_unit_gain_is_the_same_divided_by_the_weights_of_its_step(weights: str) -> None:
    options: dict[str, Any] = {"method": "lm", "weights": weights, "risk": RISK, "noise_multiplier": 1.0}
    options |= {"public_data": (BATCH, torch.zeros(7)), "public_every": 1} if weights == "public" else {}
    engine, model, optimizer = private_probe(BATCH, **options)
    w, plain = [], []
    for _ in range(3):
        before = engine.layer_weights
        plain.append(step(model, optimizer, BATCH))
        w.append(torch.tensor(engine.layer_weights if weights == "public" else before, dtype=torch.float64))
    gains = (2 * torch.stack(w)).clamp(min=LEAST_GAIN)
    assert gains.min() < 0.5
    torch.testing.assert_close(released(unit_gain=True, **options), torch.stack(plain) / gains[..., None])


def test_with_unit_gain_risk_moves_the_noise_and_not_the_signal() -> None:
    options: dict[str, Any] = {"method": "lm", "weights": "fixed", "unit_gain": True}
    calm, risky = released(**options), released(**options, risk=RISK)
    torch.testing.assert_close(calm, risky)
    torch.testing.assert_close(calm, released(method="lm", weights="fixed"))
    noisy = released(**options, risk=RISK, noise_multiplier=1.0) - risky
    noise = released(method="lm", weights="fixed", risk=RISK, noise_multiplier=1.0)
    noise = noise - released(method="lm", weights="fixed", risk=RISK)
    w = torch.tensor(RISK, dtype=torch.float64)
    torch.testing.assert_close(noisy, noise / (2 * w / w.norm())[:, None], rtol=1e-6, atol=1e-6)


def test_the_noise_of_no_layer_grows_without_bound() -> None:
    options: dict[str, Any] = {"method": "lm", "weights": "fixed", "risk": [0.5, 0.5, 0.5, 0.01], "emphasis": 5.0}
    plain, scaled = released(**options, noise_multiplier=1.0), released(**options, noise_multiplier=1.0, unit_gain=True)
    torch.testing.assert_close(scaled[:, 3], plain[:, 3] / LEAST_GAIN)
    torch.testing.assert_close(scaled[:, :3], plain[:, :3] / (2 / math.sqrt(3)))


def test_the_statement_is_the_same() -> None:
    stated = []
    for options in ({}, {"unit_clip": True, "unit_gain": True}):
        engine, model, optimizer = private_probe(BATCH, method="lm", noise_multiplier=1.0, max_grad_norm=0.5, **options)
        step(model, optimizer, BATCH)
        stated.append(engine._attached.statement(0.5).to_dict())
    assert stated[0] == stated[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "dpsgd"}, "method 'dpsgd' has none. Use method lm, or leave unit_gain out"),
        ({"method": "lm-optimal", "weights": "batch"}, "method 'lm-optimal' has none"),
        ({"method": "lm", "weights": "batch"}, "private with weights 'batch'. Use weights private, public or fixed"),
    ],
)
def test_unit_gain_without_public_weights_is_refused_with_the_remedy(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        private_probe(BATCH, unit_gain=True, **options)
    with pytest.raises(ValueError, match=said):
        Config(unit_gain=True, **options)  # type: ignore[arg-type]
