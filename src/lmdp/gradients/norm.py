"""LayerNorm, GroupNorm, InstanceNorm, RMSNorm: an element-wise scale and shift of a normalised input."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients.rows import Piece, Rows, Stored, Use, chunks, joined


def layer_norm(use: Use) -> Piece:
    """Scale and shift have the shape of the last dimensions; an example's other dimensions are summed."""
    module = use.module
    assert isinstance(module, nn.LayerNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return _over_last(use, module.normalized_shape, lambda x: F.layer_norm(x, shape, eps=eps))


def rms_norm(use: Use) -> Piece:
    module = use.module
    assert isinstance(module, nn.RMSNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return _over_last(use, module.normalized_shape, lambda x: F.rms_norm(x, shape, eps=eps))


def group_norm(use: Use) -> Piece:
    """Scale and shift are per channel; an example's positions are summed."""
    module = use.module
    assert isinstance(module, nn.GroupNorm)
    groups, eps = module.num_groups, module.eps
    return _per_channel(use, lambda x: F.group_norm(x, groups, eps=eps))


def instance_norm(use: Use) -> Piece:
    """The same with one group per channel (of a module that keeps no running statistics)."""
    eps = float(getattr(use.module, "eps"))  # noqa: B009  (typed as a module attribute)
    return _per_channel(use, lambda x: F.group_norm(x, x.shape[1], eps=eps))


def _over_last(use: Use, shape: tuple[int, ...], normalise: Callable[[Tensor], Tensor]) -> Piece:
    middle = list(range(1, use.output_grad.dim() - len(shape)))

    def total(values: Tensor) -> Tensor:
        return values.sum(dim=middle) if middle else values

    return _stored(use, normalise, total)


def _per_channel(use: Use, normalise: Callable[[Tensor], Tensor]) -> Piece:
    def total(values: Tensor) -> Tensor:
        return values.flatten(2).sum(2) if values.dim() > 2 else values

    return _stored(use, normalise, total)


def _stored(use: Use, normalise: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Piece:
    """A few examples at a time, so that the normalised input is never written to memory as a whole."""
    x, g = use.input, use.output_grad
    found: dict[str, list[Tensor]] = {name: [] for name in ("weight", "bias") if name in use.trainable}
    for some in chunks(len(x), x[0].numel()):
        if "weight" in found:
            found["weight"].append(total(normalise(x[some]).mul_(g[some])))
        if "bias" in found:
            found["bias"].append(total(g[some]))
    return Stored({name: Rows.of(joined(parts)) for name, parts in found.items()})
