"""The plain thing: one example at a time through ordinary autograd. Everything fast is compared with this."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.gradients import Capture, PerExampleGradients
from lmdp.layers import LayerMap

Loss = Callable[[nn.Module, Any], Tensor]


def one_by_one(model: nn.Module, loss: Loss, examples: list[Any]) -> list[dict[str, Tensor]]:
    """The gradient of every example on its own. `loss(model, batch)` sums over the examples of a batch."""
    model = copy.deepcopy(model)
    found = []
    for example in examples:
        model.zero_grad()
        loss(model, example).backward()
        found.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters(remove_duplicate=False)
                if p.requires_grad
            }
        )
    return found


def layer_norms(gradients: list[dict[str, Tensor]], layers: LayerMap) -> Tensor:
    rows = []
    for gradient in gradients:
        parts = [torch.cat([gradient[name].flatten() for name in layer.parameters]) for layer in layers]
        rows.append(torch.stack([part.double().norm() for part in parts]))
    return torch.stack(rows)


def captured(model: nn.Module, loss: Loss, batch: Any, **options: Any) -> tuple[PerExampleGradients, LayerMap]:
    """The gradients that are captured, leaving the model as it was."""
    layers = LayerMap.of(model)
    capture = Capture(model, layers, **options)
    try:
        loss(model, batch).backward()
        assert all(p.grad is None for p in model.parameters() if p.requires_grad), "a mean weight gradient was formed"
        return capture.take(), layers
    finally:
        capture.detach()


@dataclass
class Comparison:
    norms: float
    sums: float

    @property
    def worst(self) -> float:
        return max(self.norms, self.sums)


def relative(found: Tensor, expected: Tensor, *, least: float = 0.0) -> float:
    scale = max(float(expected.abs().max()), least)
    return float((found - expected).abs().max()) / (scale if scale > 0 else 1.0)


def compare(model: nn.Module, loss: Loss, batch: Any, examples: list[Any], **options: Any) -> Comparison:
    """Worst relative error of norms (each against itself) and of weighted sums (against the largest entry)."""
    expected = one_by_one(model, loss, examples)
    gradients, layers = captured(model, loss, batch, **options)
    assert gradients.batch_size == len(examples)
    assert gradients.unreached == []
    norms = layer_norms(expected, layers)
    found = gradients.squared_norms(layers).sqrt().double()
    norm_error = float(((found - norms).abs() / norms.clamp(min=norms.max() * 1e-6)).max())

    scales = torch.rand((3, *norms.shape), generator=torch.Generator().manual_seed(1), dtype=norms.dtype).unbind()
    sums = gradients.weighted_sums(scales[:1], layers) + gradients.weighted_sums(scales[1:], layers)
    return Comparison(norm_error, max(_sum_error(expected, *each, layers) for each in zip(scales, sums)))


def _sum_error(expected: list[dict[str, Tensor]], scales: Tensor, sums: dict[str, Tensor], layers: LayerMap) -> float:
    wanted = {
        name: sum(scale * each[name] for scale, each in zip(scales[:, at], expected))
        for name, at in layers.index.items()
    }
    # The bias of a key in attention has no gradient but rounding; as for norms, so little counts as nothing.
    least = 1e-6 * max(float(value.abs().max()) for value in wanted.values())
    assert {name: value.shape for name, value in sums.items()} == {n: value.shape for n, value in wanted.items()}
    return max(relative(sums[name], value, least=least) for name, value in wanted.items())


def split(batch: Tensor) -> list[Tensor]:
    return [batch[i : i + 1] for i in range(len(batch))]


def quadratic(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that needs no labels and treats examples alike: half the squared output, weighted by position."""
    output = model(batch)
    output = output[0] if isinstance(output, tuple) else output
    flat = output.reshape(len(batch), -1)
    return (flat.square() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).sum() / 2
