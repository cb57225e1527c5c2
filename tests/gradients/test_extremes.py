"""Numbers as long or as short as there are: an example is summed as it was measured, or counts for nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients.rows import gram_squared_norms
from tests.gradients.reference import captured


def released(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms, and the sums of what is left when examples that cannot be measured are removed, scaled to norm 1."""
    gradients, layers = captured(model, lambda model, batch: F.cross_entropy(model(batch), y, reduction="sum"), x)
    norms = gradients.squared_norms(layers).sqrt()
    bad = ~torch.isfinite(norms).all(dim=1)
    scales = (1 / norms.masked_fill(bad[:, None], 1.0).norm(dim=1, keepdim=True)).clamp(max=1.0).expand_as(norms)
    (sums,) = gradients.without(bad).weighted_sums([(16 * scales.masked_fill(bad[:, None], 0)).float()], layers)
    return norms, sums


@pytest.mark.parametrize("size", [1.0, 1e20, 1e30, 2e37, 1e38, 3e38, 1e-30, 1e-38])
def test_a_finite_example_of_any_size_leaves_the_sum_finite(size: float) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
        x, y = torch.randn(6, 2), torch.arange(6) % 3
        x[0] = size
        _, sums = released(model, x, y)
        assert all(bool(torch.isfinite(value).all()) for value in sums.values())


@pytest.mark.parametrize(
    ("of_x", "of_g"), [(1e-37, 1e37), (1e37, 1e-37), (1e-33, 1e30), (1e38, 0.0), (0.0, 1.0), (1.0, 1e-12)]
)
def test_a_product_of_one_position_is_as_long_as_it_was_measured(of_x: float, of_g: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4, bias=False)
    x, weights = torch.randn(3, 5) * of_x, torch.randn(3, 4) * of_g
    gradients, layers = captured(layer, lambda model, batch: (model(batch) * weights).sum(), x)
    norms = gradients.squared_norms(layers).sqrt()
    kept = torch.isfinite(norms[:, 0])
    scales = torch.where(kept & (norms[:, 0] > 0), 1e-6 / norms[:, 0], 0.0)[:, None]
    for i in range(3):
        (sums,) = gradients.without(~kept).weighted_sums([(scales * (torch.arange(3) == i)[:, None]).float()], layers)
        assert float(sums["weight"].double().norm()) <= 1e-6 * (1 + 1e-5)


@pytest.mark.parametrize("features", [2**15, 2**17, 2**18])
@pytest.mark.parametrize("wide_inputs", [True, False])
def test_gram_norms_of_wide_layers_are_never_too_small(features: int, wide_inputs: bool) -> None:
    """Entries of one sign that cancel over positions: rounding in the long products has nowhere to hide."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(10):
        batch, positions = 8, 2 if trial % 2 else 4
        apart = 10 ** (-1.5 - 2.5 * torch.rand(batch, 1, 1, generator=generator))
        level = 0.2 * torch.randint(0, 4, (batch, 1, 1), generator=generator)
        wide = torch.rand(batch, 1, features, generator=generator) + level
        wide = wide + apart * torch.randn(batch, positions, features, generator=generator)
        narrow = torch.randn(batch, positions, 3, generator=generator)
        narrow = narrow - narrow.mean(1, keepdim=True)
        x, g = (wide, narrow) if wide_inputs else (narrow, wide)
        measured = gram_squared_norms(x, g, torch.bmm(x, x.mT), torch.bmm(g, g.mT)).sqrt()
        true = torch.bmm(g.double().mT, x.double()).flatten(1).norm(dim=1)
        assert float((measured / true).min()) >= 1 - 1e-7
