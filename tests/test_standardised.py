"""Standardised filters: what they are invariant to, and the way of a gradient back to the weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vjp

from lmdp.gradients.contract import Use
from lmdp.gradients.standardised import piece
from lmdp.models import MODELS, build
from lmdp.models.registry import LINEAR, WITH_TANH
from lmdp.standardised import StandardisedConv2d, brought_back, scales_and_filters, standardised


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
    scale, filters = scales_and_filters(weight)
    given = brought_back(filters, rows * scale.view(-1, 1, 1, 1))
    assert torch.allclose(given, expected, rtol=1e-10, atol=1e-12)


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
    plain = {nn.Conv2d} if name == "d-cnn" else set()  # the last of all, which gives the scores
    assert kinds(standardised=True) & {nn.Conv2d, StandardisedConv2d} == {StandardisedConv2d} | plain
    assert kinds() & {nn.Conv2d, StandardisedConv2d} == {nn.Conv2d}
    with pytest.raises(ValueError, match="activation is 'gelu'; it must be one of relu, tanh"):
        build(name, (3, 16, 16), 4, activation="gelu")


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_model_refuses_what_it_has_no_place_for(name: str) -> None:
    for options in ({"activation": "tanh"}, {"standardised": True}):
        with pytest.raises(ValueError, match=f"which is not for model '{name}'; leave it out"):
            build(name, (3, 16, 16), 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("standardised", [False, True])
def test_in_a_deep_tanh_network_without_norms_signals_do_not_fade(standardised: bool) -> None:
    torch.manual_seed(0)
    model = build("d-cnn", (3, 32, 32), 10, activation="tanh", standardised=standardised)
    heard: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    with torch.no_grad():
        model(F.interpolate(torch.rand(8, 3, 4, 4) * 2 - 1, 32))
    assert float(heard[0].std(0).mean()) > 0.05  # of the images 0.57; 0.004 with torch's own weights


def test_the_shallow_tanh_network_is_the_one_of_the_literature() -> None:
    model = build("tanh-cnn", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    black = -torch.ones(1, 1, 28, 28)  # has no part in the first gradient but for the bias
    model(black).sum().backward()
    assert not model.conv1.weight.grad.any()
    deep = build("tanh-cnn-deep", (3, 32, 32), 10)
    assert sum(p.numel() for p in deep.parameters()) == 550_570


@pytest.mark.parametrize("faint", [0.0, 1e-6, 1e-3, 1.0])
def test_a_gradient_that_goes_along_its_filter_is_never_measured_too_small(faint: float) -> None:
    """In single precision nearly all of it is taken away again: what is left is measured, or too much, and bounded."""
    torch.manual_seed(0)
    module, n = StandardisedConv2d(16, 3, 3, bias=False), 64
    filters = standardised(module.weight.detach()).repeat_interleave(n // 2, 0)[:n]
    x = 1e3 * (filters + torch.rand(n, 1, 1, 1) + faint * torch.randn(n, 16, 3, 3))
    g = torch.zeros(n, 3, 1, 1)
    g[range(n), torch.arange(n) // (n // 2)] = 1
    use = Use(module, frozenset({"weight"}), x, g, n, (x,), {}, (), (g,))
    held = piece(use)
    scale, exactly = scales_and_filters(module.weight.detach().double())
    rows = (g.double() * scale.view(-1, 1, 1))[..., None] * x.double()[:, None]  # [n, 3, 16, 3, 3]
    exact = brought_back(exactly, rows).flatten(1).norm(dim=1)
    norms = held.squared_norms["weight"].sqrt()
    assert (norms >= exact * (1 - 1e-6)).all()
    for i in range(0, n, 8):
        alone = torch.zeros(1, n)
        alone[0, i] = 1 / norms[i]
        assert float(held.weighted_sums({"weight": alone})[0]["weight"].norm()) <= 1 + 1e-3
