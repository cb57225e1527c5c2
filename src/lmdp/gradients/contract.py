"""What a rule takes and what it gives.

    Use → rule → Piece

A `Use` is one call of one module, as captured. A `Piece` is that module's part of every example's gradient, without
saying how it is held: it knows the squared norm of each example's part and can sum the parts under any per-example
weights. A `Rule` is one record of the table in `plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Sizes:
    """Numbers per example of a layer: positions T, features on both sides of a position, weights, inputs + outputs."""

    positions: int
    features: int
    weights: int
    factors: int
    batch_size: int
    bytes_each: int = 4


@dataclass(frozen=True)
class Use:
    """One call of one module: what was captured of it in the forward and in the backward pass.

    trainable     names of the parameters that are trained, relative to the module
    input         the first argument: of a plain layer, the one tensor that it takes
    output_grads  of all its outputs; `output_grad` is the first, of a plain layer the only one
    outputs       kept only for rules that run the module again
    rng_state     of torch's generator before the call, for the same rules
    prefers_gram  which of its two ways a rule with a choice is to take
    """

    module: nn.Module
    trainable: frozenset[str]
    input: Tensor
    output_grad: Tensor
    batch_size: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    output_grads: tuple[Tensor, ...]
    rng_state: Tensor | None = None
    prefers_gram: Callable[[Sizes], bool] = lambda sizes: False


class Piece(Protocol):
    """Parameter names are relative to the module. B examples throughout."""

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """Squared norms [B] of the examples' parts; keys are parameter names, or "" for all of them together."""
        ...

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """sum_i scales[name][s, i] * gradient_i of every parameter, in its shape, for each s."""
        ...

    def per_example(self) -> dict[str, Tensor]:
        """The gradients themselves, [B, *shape]: for parameters that are used more than once."""
        ...

    def without(self, dropped: Tensor) -> Piece:
        """The same with the examples where `dropped` is true set to exactly zero."""
        ...


@dataclass(frozen=True)
class Example:
    """A small module, and the shape of one example of what it takes: real numbers, or indices below `indices`."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    indices: int | None = None


@dataclass(frozen=True)
class Rule:
    """One record of the table of rules.

    kinds      the classes of modules that it computes exactly; () for the one that takes any module
    piece      from a use to its piece
    explain    names of the trainable parameters → how gradients are held, and why, where there is nothing to choose
    examples   small modules of its kinds, on which tests try it
    chooses    whether it has two ways, so that nothing can be said before its first gradient arrives
    runs_again whether the module is run again, so that its outputs and the state of torch's generator must be kept
    """

    name: str
    kinds: tuple[type[nn.Module], ...]
    piece: Callable[[Use], Piece]
    explain: Callable[[frozenset[str]], tuple[str, str]]
    examples: tuple[Example, ...] = ()
    chooses: bool = False
    runs_again: bool = False


@dataclass(frozen=True, eq=False)
class Owner:
    """A module whose trainable parameters are handled by one rule. `parameters` are named relative to the module."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    rule: Rule

    @cached_property
    def full_names(self) -> dict[str, str]:
        """Of the parameters: relative to the module → in the model."""
        return {name: f"{self.name}.{name}" if self.name else name for name in self.parameters}

    @cached_property
    def trainable(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @cached_property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @cached_property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def __str__(self) -> str:
        return f"module '{self.name}' ({type(self.module).__name__})"


def float_tensors(output: Any) -> tuple[Tensor, ...]:
    """The differentiable tensors in a module's output, whatever it is wrapped in."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if is_float(leaf))


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
