"""Standardised filters: what they are invariant to, and the way of a gradient back to the weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vjp

from lmdp.models import MODELS, build
from lmdp.models.registry import LINEAR, WITH_TANH
from lmdp.standardised import StandardisedConv2d, pulled_back, standardised


def conv(**options: int) -> StandardisedConv2d:
    torch.manual_seed(0)
    return StandardisedConv2d(4, 6, 3, padding=1, **options).double()


def test_filters_have_mean_zero_and_length_one() -> None:
    filters = standardised(100 * conv().weight.detach()).flatten(1)
    assert torch.allclose(filters.mean(1), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(filters.norm(dim=1), torch.ones(6, dtype=torch.float64), atol=1e-5)


def test_louder_or_shifted_weights_make_the_same_filters() -> None:
    weight = 1e4 * torch.randn(6, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loud = torch.rand(6, 1, 1, 1, dtype=torch.float64) + 0.5
    assert torch.allclose(standardised(loud * weight + 3), standardised(weight), atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_at_filters_go_back_to_weights_as_autograd_takes_them(groups: int) -> None:
    weight = conv(groups=groups).weight.detach()
    rows = torch.randn(5, *weight.shape, dtype=torch.float64)
    pull = vjp(standardised, weight)[1]
    expected = torch.stack([pull(row)[0] for row in rows])
    assert torch.allclose(pulled_back(weight, rows), expected, rtol=1e-10, atol=1e-12)


def test_weights_that_are_all_alike_give_a_finite_filter() -> None:
    assert torch.equal(standardised(torch.full((2, 3, 3, 3), 0.25)), torch.zeros(2, 3, 3, 3))


@pytest.mark.parametrize("name", sorted({*MODELS} - {*LINEAR}))
def test_every_model_has_either_activation_and_either_convolution(name: str) -> None:
    def kinds(**options: object) -> set[type]:
        return {type(module) for module in build(name, (3, 16, 16), 4, **options).modules()}  # type: ignore[arg-type]

    mine = nn.Tanh if name in WITH_TANH else nn.ReLU
    assert mine in kinds()
    assert kinds(activation="tanh") & {nn.Tanh, nn.ReLU} == {nn.Tanh}
    assert kinds(activation="relu") & {nn.Tanh, nn.ReLU} == {nn.ReLU}
    assert kinds(standardised=True) & {nn.Conv2d, StandardisedConv2d} == {StandardisedConv2d}
    assert kinds() & {nn.Conv2d, StandardisedConv2d} == {nn.Conv2d}
    with pytest.raises(ValueError, match="activation is 'gelu'; it must be one of relu, tanh"):
        build(name, (3, 16, 16), 4, activation="gelu")


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_model_refuses_what_it_has_no_place_for(name: str) -> None:
    for options in ({"activation": "tanh"}, {"standardised": True}):
        with pytest.raises(ValueError, match=f"which is not for model '{name}'; leave it out"):
            build(name, (3, 16, 16), 4, **options)  # type: ignore[arg-type]


def test_in_a_deep_tanh_network_without_norms_signals_do_not_fade() -> None:
    torch.manual_seed(0)
    model, x = build("d-cnn", (3, 32, 32), 10, activation="tanh"), F.interpolate(torch.rand(8, 3, 4, 4) * 2 - 1, 32)
    with torch.no_grad():
        for i, layer in enumerate(model.convs):
            x = torch.tanh(layer(x))
            x = model.pool(x) if i in (1, 3, 5) else x
    assert float(x.std(0).mean()) > 0.05  # from image to image; of the images 0.57, and 0.004 with torch's own weights


def test_the_shallow_tanh_network_is_the_one_of_the_literature() -> None:
    model = build("tanh-cnn", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    black = -torch.ones(1, 1, 28, 28)  # has no part in the first gradient but for the bias
    model(black).sum().backward()
    assert not model.conv1.weight.grad.any()
    deep = build("tanh-cnn-deep", (3, 32, 32), 10)
    assert sum(p.numel() for p in deep.parameters()) == 550_570
