"""LayerNorm, GroupNorm, InstanceNorm, RMSNorm: an element-wise scale and shift of a normalised input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.private.rules.pieces import Piece, Rows, Stored, Use


def layer_norm(use: Use) -> Piece:
    """Scale and shift have the shape of the last dimensions; an example's other dimensions are summed."""
    module, x, g = use.module, use.input, use.output_grad
    assert isinstance(module, nn.LayerNorm)
    return _over_last(use, module.normalized_shape, F.layer_norm(x, module.normalized_shape, eps=module.eps), g)


def rms_norm(use: Use) -> Piece:
    module, x, g = use.module, use.input, use.output_grad
    assert isinstance(module, nn.RMSNorm)
    return _over_last(use, module.normalized_shape, F.rms_norm(x, list(module.normalized_shape), eps=module.eps), g)


def group_norm(use: Use) -> Piece:
    """Scale and shift are per channel; an example's positions are summed."""
    module, x, g = use.module, use.input, use.output_grad
    assert isinstance(module, nn.GroupNorm)
    return _per_channel(use, F.group_norm(x, module.num_groups, eps=module.eps), g)


def instance_norm(use: Use) -> Piece:
    """The same with one group per channel (of a module that keeps no running statistics)."""
    module, x, g = use.module, use.input, use.output_grad
    eps = float(getattr(module, "eps"))  # noqa: B009  (typed as a module attribute)
    return _per_channel(use, F.group_norm(x, x.shape[1], eps=eps), g)


def _over_last(use: Use, shape: tuple[int, ...], normalised: Tensor, g: Tensor) -> Piece:
    middle = list(range(1, g.dim() - len(shape)))

    def total(values: Tensor) -> Tensor:
        return values.sum(dim=middle) if middle else values

    return _stored(use, total(g * normalised), total(g))


def _per_channel(use: Use, normalised: Tensor, g: Tensor) -> Piece:
    def total(values: Tensor) -> Tensor:
        return values.flatten(2).sum(2) if values.dim() > 2 else values

    return _stored(use, total(g * normalised), total(g))


def _stored(use: Use, weight: Tensor, bias: Tensor) -> Piece:
    both = {"weight": weight, "bias": bias}
    return Stored({name: Rows.of(both[name]) for name in both if name in use.trainable})
