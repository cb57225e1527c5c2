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


@dataclass(frozen=True)
class Sizes:
    """Numbers per example of a layer: positions T, features on both sides of a position, weights, inputs + outputs."""

    positions: int
    features: int
    weights: int
    factors: int
    batch_size: int
    bytes_each: int = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """All but the batch."""
        return self.positions, self.features, self.weights, self.factors

    @property
    def gram_work(self) -> int:
        """Two T x T Gram matrices and a few passes over them. Constants fitted on CPU, in multiply-adds."""
        return self.positions**2 * (self.features + 300)

    @property
    def formed_work(self) -> int:
        """Every per-example weight is written, read for the norm and read again for the sum: little while in cache."""
        return (60 if self.weights > IN_CACHE else 5) * self.weights

    @property
    def extra_work(self) -> int:
        """Of the dearer rule over the cheaper one."""
        return abs(self.gram_work - self.formed_work)

    def kept(self, gram: bool) -> int:
        """Bytes that stay until the step."""
        return self.batch_size * self.bytes_each * (self.factors if gram else self.weights)

    @property
    def gram_is_lean(self) -> bool:
        return self.factors < self.weights


IN_CACHE = 2**15
"""Weights of a layer whose gradients for a usual batch are not written to memory and read back."""


@dataclass(frozen=True)
class Use:
    """One call of one module: what was captured of it in the forward and in the backward pass.

    trainable     names of the parameters that are trained, relative to the module
    outputs       kept only for rules that run the module again
    rng_state     of torch's generator before the call, for the same rules
    prefers_gram  which of its two ways a rule with a choice is to take
    """

    module: nn.Module
    trainable: frozenset[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    output_grads: tuple[Tensor, ...]
    batch_size: int
    rng_state: Tensor | None = None
    prefers_gram: Callable[[Sizes], bool] = lambda sizes: False

    @property
    def input(self) -> Tensor:
        """The one tensor that a plain layer takes."""
        value = self.args[0] if self.args else self.kwargs["input"]
        assert isinstance(value, Tensor)
        return value

    @property
    def output_grad(self) -> Tensor:
        return self.output_grads[0]


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
