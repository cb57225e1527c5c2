"""A mean over a batch is undone before anything is rounded, in whatever way backward() is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp

Backward = Callable[[Tensor], None]
WAYS: dict[str, tuple[Backward, float]] = {
    "plain": (lambda loss: loss.backward(), 1.0),
    "multiplied": (lambda loss: loss.backward(torch.tensor(2.0)), 2.0),
    "by keyword": (lambda loss: loss.backward(gradient=torch.tensor(2.0)), 2.0),
    "torch.autograd": (lambda loss: torch.autograd.backward(loss), 1.0),
    "a list": (lambda loss: torch.autograd.backward([loss]), 1.0),
    "a list, multiplied": (lambda loss: torch.autograd.backward([loss], [torch.tensor(0.5)]), 0.5),
    "by keyword, torch.autograd": (
        lambda loss: torch.autograd.backward([loss], grad_tensors=[torch.tensor(0.5)]),
        0.5,
    ),
    "graph kept": (lambda loss: loss.backward(retain_graph=True), 1.0),
}


def attached(model: nn.Module, size: int, **options: Any) -> tuple[lmdp.PrivacyEngine, torch.optim.Optimizer]:
    engine, optimizer = lmdp.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {"noise_multiplier": 0, "max_grad_norm": 1e6, "method": "dpsgd"} | options
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
        poisson_sampling=False,
        **settings,
    )
    return engine, optimizer


def released(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("looked_at", [True, False])
def test_what_is_released_is_the_mean_gradient_however_backward_is_called(way: str, looked_at: bool) -> None:
    backward, times = WAYS[way]
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3).double(), torch.randn(7, 5).double(), torch.randint(0, 3, (7,))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), model.parameters())])
    engine, optimizer = attached(model, 7, check_mixing=looked_at)
    seen: list[Tensor] = []
    loss = F.cross_entropy(model(x), y)
    loss.register_hook(seen.append)
    backward(loss.float() if "multiplied" in way or "keyword" in way else loss)
    optimizer.step()
    torch.testing.assert_close(released(model), times * expected, rtol=1e-6, atol=1e-9)
    assert float(seen[-1]) == pytest.approx(times * (7 if looked_at else 1))
    engine.detach()


def test_a_loss_of_another_model_between_backward_and_step_changes_nothing() -> None:
    torch.manual_seed(0)
    model, other, x = nn.Linear(5, 3), nn.Linear(5, 1), torch.randn(7, 5)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(model(x).square().mean(), model.parameters())])
    engine, optimizer = attached(model, 7)
    model(x).square().mean().backward()
    other(x).mean().backward()
    optimizer.step()
    torch.testing.assert_close(released(model), expected)
    assert float(other.bias.grad) == pytest.approx(1.0)
    engine.detach()


def test_one_loss_of_two_private_models_is_undone_once_for_both() -> None:
    torch.manual_seed(0)
    models, x = [nn.Linear(5, 3).double() for _ in range(2)], torch.randn(7, 5).double()
    loss = sum(model(x).square().mean() for model in models)
    expected = [
        torch.cat([p.flatten() for p in torch.autograd.grad(loss, m.parameters(), retain_graph=True)]) for m in models
    ]
    engines, optimizers = zip(*(attached(model, 7) for model in models))
    total = models[0](x).square().mean() + models[1](x).square().mean()
    total.backward()
    for optimizer in optimizers:
        optimizer.step()
    for model, each in zip(models, expected):
        torch.testing.assert_close(released(model), each)
    for engine in engines:
        engine.detach()


@pytest.mark.parametrize("size", [700, 901, 3928])
def test_sixteen_bits_do_not_move_all_examples_with_their_number(size: int) -> None:
    """Between `size` and `size` − 1 the nearest 16-bit number to 1/B changes."""
    torch.manual_seed(0)
    model = nn.Linear(64, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x = F.normalize(torch.randn(size, 64) + 1.0, dim=1)
    y = torch.zeros(size, dtype=torch.long)
    y[::3] = 1

    def total(rows: slice) -> Tensor:
        engine, optimizer = attached(model, size, max_grad_norm=1.01)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x[rows])
        F.cross_entropy(out.float(), y[rows]).backward()
        optimizer.step()
        engine.detach()
        return size * released(model)

    moved = total(slice(0, size)) - total(slice(1, size))
    assert 0.5 < float(moved.norm()) <= 1.01
