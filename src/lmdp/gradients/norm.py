"""LayerNorm, GroupNorm, InstanceNorm, RMSNorm: an element-wise scale and shift of a normalised input.

With x̂_i the normalised input of example i and G_i its output gradient, both summed over what scale and shift share,

    norm²  ||sum x̂_i G_i||² + ||sum G_i||²             (scale, shift)
    sums   sum_i s_i sum x̂_i G_i,  sum_i s_i sum G_i
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.rows import Rows, Stored, chunks, joined


def layer_norm(use: Use) -> Piece:
    """Scale and shift have the shape of the last dimensions; an example's other dimensions are summed."""
    module = use.module
    assert isinstance(module, nn.LayerNorm)
    normalise = partial(F.layer_norm, normalized_shape=list(module.normalized_shape), eps=module.eps)
    return _formed(use, normalise, _over_middle(use, len(module.normalized_shape)))


def rms_norm(use: Use) -> Piece:
    module = use.module
    assert isinstance(module, nn.RMSNorm)
    normalise = partial(F.rms_norm, normalized_shape=list(module.normalized_shape), eps=module.eps)
    return _formed(use, normalise, _over_middle(use, len(module.normalized_shape)))


def group_norm(use: Use) -> Piece:
    """Scale and shift are per channel; an example's positions are summed."""
    module = use.module
    assert isinstance(module, nn.GroupNorm)
    return _formed(use, partial(F.group_norm, num_groups=module.num_groups, eps=module.eps), _over_positions)


def instance_norm(use: Use) -> Piece:
    """The same with one group per channel (of a module that keeps no running statistics)."""
    eps = float(getattr(use.module, "eps"))  # noqa: B009  (typed as a module attribute)
    return _formed(use, lambda x: F.group_norm(x, x.shape[1], eps=eps), _over_positions)


def _over_middle(use: Use, last: int) -> Callable[[Tensor], Tensor]:
    """[B, *middle, *shape] → [B, *shape], for a shape of `last` dimensions."""
    middle = list(range(1, use.output_grad.dim() - last))
    return lambda values: values.sum(dim=middle) if middle else values


def _over_positions(values: Tensor) -> Tensor:
    """[B, C, *positions] → [B, C]."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _formed(use: Use, normalise: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Piece:
    """A few examples at a time, so that the normalised input is never written to memory as a whole."""
    x, g = use.input, use.output_grad
    parts: dict[str, list[Tensor]] = {name: [] for name in ("weight", "bias") if name in use.trainable}
    for chunk in chunks(len(x), x[0].numel()):
        if "weight" in parts:
            parts["weight"].append(total(normalise(x[chunk]).mul_(g[chunk])))
        if "bias" in parts:
            parts["bias"].append(total(g[chunk]))
    return Stored({name: Rows.of(joined(of_parameter)) for name, of_parameter in parts.items()})


def _explain(trainable: frozenset[str]) -> tuple[str, str]:
    return "formed", "a scale and a shift are small"


def _instance(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind(3, affine=True)


RULES = (
    Rule(
        "layer norm",
        (nn.LayerNorm,),
        layer_norm,
        _explain,
        (Example(lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),),
        takes_more_dims=True,
    ),
    Rule(
        "rms norm", (nn.RMSNorm,), rms_norm, _explain, (Example(lambda: nn.RMSNorm(4), (5, 4)),), takes_more_dims=True
    ),
    Rule("group norm", (nn.GroupNorm,), group_norm, _explain, (Example(lambda: nn.GroupNorm(2, 4), (4, 5, 3)),)),
    Rule(
        "instance norm",
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        instance_norm,
        _explain,
        (
            Example(_instance(nn.InstanceNorm1d), (3, 5)),
            Example(_instance(nn.InstanceNorm2d), (3, 4, 4)),
            Example(_instance(nn.InstanceNorm3d), (3, 2, 3, 2)),
        ),
    ),
)
