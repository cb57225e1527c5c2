"""Linear layers that keep their weight the other way round, [in, out]: `Conv1D` of transformers, in GPT-2.

The rule is that of a linear layer; what it gives of the weight is turned round.

    norm²  ||G_iᵀ X_i||² + ||sum_t G_it||²               (weight, bias)
    sums   (sum_i s_i G_iᵀ X_i)ᵀ,  sum_i s_i sum_t G_it
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmdp.gradients import linear
from lmdp.gradients.contract import Example, Piece, Rule, Use

LIBRARY, NAME = "transformers.pytorch_utils", "Conv1D"


@dataclass(frozen=True)
class Transposed:
    """The piece of a linear layer, its weights turned round."""

    piece: Piece

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return self.piece.squared_norms

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.piece.kept

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return [_turned(sums) for sums in self.piece.weighted_sums(scales)]

    def per_example(self) -> dict[str, Tensor]:
        return _turned(self.piece.per_example())

    def without(self, dropped: Tensor) -> Transposed:
        return Transposed(self.piece.without(dropped))


def _turned(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: g.transpose(-1, -2).contiguous() if n == "weight" else g for n, g in gradients.items()}


def piece(use: Use) -> Piece:
    return Transposed(linear.piece(use))


def is_transposed(module: nn.Module) -> bool:
    """By the name of its class, so that nothing is imported, and by what it computes from made-up numbers."""
    if (type(module).__module__, type(module).__qualname__) != (LIBRARY, NAME):
        return False
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or weight.dim() != 2:
        return False
    with torch.no_grad():
        x = torch.linspace(-1, 1, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, 1, -1)
        output = type(module).forward(module, x)
        return isinstance(output, Tensor) and torch.allclose(output, x @ weight + bias, rtol=1e-3, atol=1e-4)


def _conv1d(outputs: int, inputs: int) -> nn.Module:
    module: nn.Module = getattr(importlib.import_module(LIBRARY), NAME)(outputs, inputs)
    return module


RULE = Rule(
    "transposed linear",
    (),
    piece,
    linear.RULE.explain,
    (Example(lambda: _conv1d(3, 4), (4,)), Example(lambda: _conv1d(60, 70), (2, 70))),
    features=lambda module: sum(module.weight.shape),
    takes_more_dims=True,
    like=is_transposed,
)
