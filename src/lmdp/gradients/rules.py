"""Which rule a module gets. Exact rules for the common layers, a generic one for everything else.

An exact rule applies only to a module that computes what its class computes: a subclass with its own forward, or
further parameters, goes to the generic rule.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lmdp.gradients import conv, embedding, generic, linear, norm
from lmdp.gradients.rows import Piece, Use
from lmdp.layers import is_opaque

__all__ = ["Piece", "Rule", "Use", "rule_for"]

Rule = Callable[[Use], Piece]

EXACT: dict[type[nn.Module], Rule] = {
    nn.Linear: linear.piece,
    nn.Conv1d: conv.piece,
    nn.Conv2d: conv.piece,
    nn.Conv3d: conv.piece,
    nn.Embedding: embedding.piece,
    nn.LayerNorm: norm.layer_norm,
    nn.RMSNorm: norm.rms_norm,
    nn.GroupNorm: norm.group_norm,
    nn.InstanceNorm1d: norm.instance_norm,
    nn.InstanceNorm2d: norm.instance_norm,
    nn.InstanceNorm3d: norm.instance_norm,
}


def rule_for(module: nn.Module) -> Rule:
    """The exact rule where the module's computation is known, otherwise the generic one."""
    known = {n for n, _ in module.named_parameters()} <= {"weight", "bias"}
    plain = known and not is_opaque(module) and "forward" not in vars(module)
    for kind, rule in EXACT.items():
        if plain and isinstance(module, kind) and _computes_like(type(module), kind):
            return rule
    return generic.piece


def _computes_like(mine: type[nn.Module], kind: type[nn.Module]) -> bool:
    return all(getattr(mine, name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward"))
