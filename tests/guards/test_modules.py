"""`make_compatible` keeps all that a norm layer does besides normalising, or refuses it by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

import lmdp


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: the norm, written out, then `drop`, then `act`."""

    def __init__(self, channels: int, act: Callable[[], nn.Module] = nn.ReLU, drop: float = 0.0) -> None:
        super().__init__(channels, eps=1e-3)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        by_batch = self.training or self.running_mean is None
        momentum, statistics = self.momentum or 0.0, (self.running_mean, self.running_var)
        x = F.batch_norm(x, *statistics, self.weight, self.bias, by_batch, momentum, self.eps)
        return self.act(self.drop(x))  # type: ignore[no-any-return]


class SyncBatchNormAct(nn.SyncBatchNorm):
    """As timm's: `drop` and `act` are set from outside, where there are any."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.act(self.drop(x)) if hasattr(self, "act") else x  # type: ignore[no-any-return, operator]


class FrozenBatchNorm(nn.Module):
    """As torchvision's FrozenBatchNorm2d and timm's FrozenBatchNormAct2d: buffers, and no statistics of a batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.1), ("running_mean", 0.2), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((channels,), value))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        return self.act(F.batch_norm(x, *statistics, self.weight, self.bias))  # type: ignore[no-any-return, arg-type]


class EvoNormB(nn.Module):
    """As timm's EvoNorm2dB: no BatchNorm of torch's, and a variance over the batch all the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_var.copy_(0.9 * self.running_var + 0.1 * x.detach().var(dim=(0, 2, 3)))  # type: ignore[operator, union-attr]
        return x / self.running_var.sqrt().view(1, -1, 1, 1) * self.weight.view(1, -1, 1, 1)  # type: ignore[operator, union-attr]


class FilterResponseNorm(nn.Module):
    """As timm's: each example for itself, with an activation of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.tau = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.square().mean((2, 3), keepdim=True).add(1e-5).rsqrt() * self.weight.view(1, -1, 1, 1)
        return torch.maximum(x, self.tau.view(1, -1, 1, 1))


def dense(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Norms with activations inside, between convolutions, as in a DenseNet."""
    layers = [nn.Sequential(norm(6), nn.Conv2d(6, 6, 3, padding=1)) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(1, 6, 3), *layers, nn.Flatten(), nn.Linear(96, 3))


def sync(channels: int) -> nn.Module:
    layer = SyncBatchNormAct(channels)
    layer.drop, layer.act = nn.Identity(), nn.SiLU()
    return layer


def calls(model: nn.Module, kind: type[nn.Module], x: Tensor) -> tuple[int, Tensor]:
    """How often modules of a kind run in one pass, and what comes out."""
    counted: list[nn.Module] = []
    hooks = [m.register_forward_hook(lambda m, *_: counted.append(m)) for m in model.modules() if isinstance(m, kind)]
    with torch.no_grad():
        output = model(x)
    for hook in hooks:
        hook.remove()
    return len(counted), output


def without_groups(model: nn.Module) -> nn.Module:
    """The model with the identity in place of every GroupNorm, scale and shift applied."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            shape = (1, -1, 1, 1)
            module.forward = lambda x, m=module: x * m.weight.view(shape) + m.bias.view(shape)  # type: ignore[misc, method-assign]
    return model


def with_plain_statistics(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, where its BatchNorms do no more than scale and shift."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            assert module.running_var is not None
            module.running_var.fill_(1 - module.eps)
            module.weight.data = 1 + torch.rand(module.num_features, generator=generator, dtype=module.weight.dtype)
            module.bias.data = torch.rand(module.num_features, generator=generator, dtype=module.weight.dtype) - 0.5
    return model.eval()


@pytest.mark.parametrize(("norm", "act"), [(BatchNormAct2d, nn.ReLU), (sync, nn.SiLU)], ids=["batch", "sync"])
def test_an_activation_inside_a_norm_layer_is_kept(norm: Callable[[int], nn.Module], act: type[nn.Module]) -> None:
    model = with_plain_statistics(dense(norm))
    compatible = lmdp.make_compatible(model)
    assert not [m for m in compatible.modules() if isinstance(m, _BatchNorm)]
    x = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    before, output = calls(model, act, x)
    after, again = calls(without_groups(compatible), act, x)
    assert before == after == 4
    torch.testing.assert_close(again, output)


def test_scale_shift_eps_dropout_and_mode_are_kept() -> None:
    layer = BatchNormAct2d(8, nn.SiLU, drop=0.3)
    layer.weight.data.fill_(0.0)  # as timm begins the last norm of a block
    layer.bias.data.fill_(0.5)
    compatible: Any = lmdp.make_compatible(layer.eval())
    assert [name for name, _ in compatible.named_children()] == ["norm", "drop", "act"]
    assert compatible.norm.eps == 1e-3
    assert torch.equal(compatible.norm.weight, layer.weight)
    assert torch.equal(compatible.norm.bias, layer.bias)
    assert compatible.drop.p == 0.3
    assert isinstance(compatible.act, nn.SiLU)
    assert not any(m.training for m in compatible.modules())


def test_a_model_with_activations_in_its_norms_trains_privately() -> None:
    model = lmdp.make_compatible(dense(BatchNormAct2d))
    engine, data = lmdp.PrivacyEngine(), TensorDataset(torch.randn(20, 1, 6, 6), torch.zeros(20, dtype=torch.long))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        looks_besides=True,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.steps == 2


@pytest.mark.parametrize("kind", [FrozenBatchNorm, FilterResponseNorm], ids=lambda kind: kind.__name__)
def test_layers_that_keep_examples_apart_stay_as_they_are(kind: type[nn.Module]) -> None:
    assert type(lmdp.make_compatible(nn.Sequential(kind(4)))[0]) is kind  # type: ignore[index]


def test_a_frozen_batch_norm_in_evaluation_mode_stays_as_it_is() -> None:
    model = nn.Sequential(BatchNormAct2d(4), nn.BatchNorm2d(4)).eval().requires_grad_(False)
    assert [type(m) for m in lmdp.make_compatible(model).children()] == [BatchNormAct2d, nn.BatchNorm2d]
    thawed = lmdp.make_compatible(model.requires_grad_(True))
    assert not [m for m in thawed.modules() if isinstance(m, _BatchNorm)]


class Clamped(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(min=0)


class Noisy(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Gained(nn.BatchNorm2d):
    gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


class Split(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.aux_bn = nn.ModuleList([nn.BatchNorm2d(channels)])


class Shifted(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.offset = nn.Parameter(torch.zeros(channels))


class Unasked(nn.BatchNorm2d):
    """Has an activation that it does not run."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.Tanh()


class Reversed(BatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.act(x))


def zeroed(channels: int) -> nn.Module:
    """A scale and shift of zero hide what else the layer does."""
    layer = Clamped(channels)
    layer.weight.data.zero_()
    return layer


def hooked(channels: int) -> nn.Module:
    layer = nn.BatchNorm2d(channels)
    layer.register_forward_hook(lambda module, args, output: output.relu())
    return layer


def patched(channels: int) -> nn.Module:
    layer = nn.BatchNorm2d(channels)
    layer.forward = lambda x: x.relu()  # type: ignore[method-assign, assignment]
    return layer


def parametrized(channels: int) -> nn.Module:
    layer = nn.BatchNorm2d(channels)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Clamped, "does something else"),
        (zeroed, "does something else"),
        (Noisy, "does something else"),
        (Gained, "does something else"),
        (Unasked, "does something else"),
        (Reversed, "does something else"),
        (patched, "does something else"),
        (Split, r"children \['aux_bn'\]"),
        (parametrized, r"children \['parametrizations'\]"),
        (Shifted, r"stores \['offset'\]"),
        (hooked, "hooks are registered"),
        (EvoNormB, "normalises by statistics of the batch"),
    ],
)
def test_a_layer_that_does_more_is_refused_by_name(make: Callable[[int], nn.Module], why: str) -> None:
    layer = make(4)
    name = type(layer).__name__
    with pytest.raises(ValueError, match=rf"'body.1' \({name}\) cannot be made compatible: .*{why}"):
        lmdp.make_compatible(nn.ModuleDict({"body": nn.Sequential(nn.Conv2d(1, 4, 3), layer)}))


def test_a_subclass_that_does_no_more_is_swapped() -> None:
    class Named(nn.BatchNorm2d):
        """Only a name."""

    assert type(lmdp.make_compatible(Named(4))) is nn.GroupNorm


def test_a_layer_in_two_places_stays_one_layer() -> None:
    shared = nn.BatchNorm2d(4)
    model = nn.Module()
    model.one = model.other = shared
    model.body = nn.Sequential(shared)
    compatible: Any = lmdp.make_compatible(model)
    assert type(compatible.one) is nn.GroupNorm
    assert compatible.one is compatible.other is compatible.body[0]


@pytest.mark.parametrize("channels", [2, 3, 4, 6, 16, 24, 32, 48, 64, 96])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm2d, (1, 1))], ids=["1d", "2d"])
def test_one_position_is_not_normalised_to_a_constant(
    kind: type[_BatchNorm], shape: tuple[int, ...], channels: int
) -> None:
    layer: Any = lmdp.make_compatible(kind(channels))
    assert layer.num_groups <= 32
    x = torch.randn(5, channels, *shape, generator=torch.Generator().manual_seed(0))
    assert layer(x).std() > 0.3


def test_a_layer_that_keeps_statistics_of_the_batch_is_refused_before_training() -> None:
    from lmdp.guards import check_model

    model = nn.Sequential(EvoNormB(1), nn.Flatten(), nn.Linear(36, 3))
    with pytest.raises(ValueError, match="'0': EvoNormB normalises by statistics of the batch, and stores them"):
        check_model(model)
    check_model(nn.Sequential(FrozenBatchNorm(1), nn.Flatten(), nn.Linear(36, 3)))


@pytest.mark.parametrize(("name", "activations"), [("densenet121", 121), ("efficientnet_b0", 49)])
def test_models_of_timm_keep_every_activation(name: str, activations: int) -> None:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported here: {error}")
    model = with_plain_statistics(timm.create_model(name, num_classes=5).double())
    compatible = without_groups(lmdp.make_compatible(model))
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kind: Any = nn.ReLU | nn.SiLU
    before, output = calls(model, kind, x)
    after, again = calls(compatible, kind, x)
    assert before == after == activations
    torch.testing.assert_close(again, output)
