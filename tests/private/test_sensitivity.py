"""Two batches that differ in one example, however extreme, differ before noise by at most the stated sensitivity.

The same measurement is made of the paper's weights, which must fail it: that is how we know that it can fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import SCNN
from lmdp.private.weights import Private
from tests.private.probe import private_probe, step
from tests.tables import certified, with_default_source

pytestmark = pytest.mark.usefixtures("widest_loops")

RISK = [0.4, 0.35, 0.3, 0.27]


def aligned(size: int, generator: torch.Generator) -> Tensor:
    """Examples whose gradients point the same way: the case in which a change of weights adds up."""
    direction = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    return direction * (1 + 0.01 * torch.randn(size, 4, 1, generator=generator, dtype=torch.float64))


def outlier(batch: Tensor, size: float, layer: int) -> Tensor:
    extra = batch[:1].clone()
    extra[0, layer] *= size / extra[0, layer].norm()
    return extra


def moved(batch: Tensor, neighbour: Tensor, warm_up: Tensor, **options: Any) -> tuple[float, float, float]:
    """How far the released gradient and the released statistic move, and the stated sensitivity. No noise."""
    released, statistics = [], []
    for last in (batch, neighbour):
        engine, model, optimizer = private_probe(batch, risk=RISK, emphasis=2.0, **options)
        source = engine._attached.step.source
        seen: list[Tensor] = []
        if isinstance(source, Private):
            observe = source.observe
            source.observe = lambda value, observe=observe, seen=seen: (seen.append(value), observe(value))  # type: ignore[method-assign]
        step(model, optimizer, warm_up)
        step(model, optimizer, warm_up)
        released.append(step(model, optimizer, last))
        statistics.append(seen[-1] if seen else torch.zeros(1))
    sensitivity = engine.privacy_statement(1e-5).sensitivity
    return (
        float((released[0] - released[1]).norm()),
        float((statistics[0] - statistics[1]).norm()),
        sensitivity,
    )


@pytest.mark.parametrize(("method", "weights"), certified())
@pytest.mark.parametrize("size", [10.0, 1e3, 1e6])
def test_an_outlier_moves_what_is_released_by_at_most_the_sensitivity(method: str, weights: str, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = aligned(200, generator)
    public = (aligned(20, generator), torch.zeros(20))
    for layer in range(4):
        neighbour = torch.cat([batch, outlier(batch, size, layer)])
        gradient, statistic, sensitivity = moved(
            batch, neighbour, batch, method=method, weights=weights, public_data=public
        )
        assert gradient <= sensitivity * (1 + 1e-9)
        assert statistic <= 1 + 1e-9


def violation(size: float) -> float:
    generator = torch.Generator().manual_seed(0)
    batch = aligned(600, generator)
    neighbour = torch.cat([batch, outlier(batch, size, 0)])
    gradient, _, sensitivity = moved(batch, neighbour, batch, method="lm", weights="batch")
    return gradient / sensitivity


def test_the_same_measurement_shows_that_weights_from_the_batch_are_not_private() -> None:
    assert violation(1e6) > 10
    assert violation(1e3) > 10


@pytest.mark.parametrize(("method", "weights"), certified())
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(-6, 6), removed=st.integers(0, 9))
def test_removing_any_example_moves_what_is_released_by_at_most_the_sensitivity(
    method: str, weights: str, seed: int, scale: float, removed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(10, 4, 3, generator=generator, dtype=torch.float64)
    batch[removed] *= 10.0**scale
    neighbour = torch.cat([batch[:removed], batch[removed + 1 :]])
    public = (torch.randn(8, 4, 3, generator=generator, dtype=torch.float64), torch.zeros(8))
    gradient, statistic, sensitivity = moved(
        batch, neighbour, batch, method=method, weights=weights, public_data=public
    )
    assert gradient <= sensitivity * (1 + 1e-9)
    assert statistic <= 1 + 1e-9


class Attentive(nn.Module):
    """Bare parameters, attention, norms and a tied head in one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 12)
        self.position = nn.Parameter(torch.zeros(1, 28, 12))
        self.block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.squeeze(1)) + self.position).mean(1))


@pytest.mark.parametrize("make", [SCNN, Attentive])
@pytest.mark.parametrize("method", with_default_source())
def test_an_outlier_image_moves_a_real_networks_release_by_at_most_the_sensitivity(
    make: type[nn.Module], method: str
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(24, 1, 28, 28, dtype=torch.float64), torch.randint(0, 10, (24,))
    x[-1] *= 1e6
    initial = make().double()
    released = []
    for size in (24, 23):
        model = make().double()
        model.load_state_dict(initial.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = lmdp.PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x[:1], y[:1]), batch_size=1),
            noise_multiplier=0,
            max_grad_norm=0.7,
            method=method,
            poisson_sampling=False,
        )
        F.cross_entropy(model(x[:size]), y[:size]).backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = float((released[0] - released[1]).norm())
    assert 0.1 < difference <= engine.privacy_statement(1e-5).sensitivity * (1 + 1e-9)
