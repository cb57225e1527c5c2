"""What a rule takes and what it gives.

    Use → rule → Piece

A `Use` is one call of one module, as captured. A `Piece` is that module's part of every example's gradient, without
saying how it is held: it knows the squared norm of each example's part and can sum the parts under any per-example
weights. A `Rule` is one record of the table in `plan.py`.
"""

from __future__ import annotations

import dataclasses
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
    same_for_all  which of the flattened arguments are established to be the same for every example
    is_data       whether the inputs come from outside of what is differentiated, such as the batch itself. What is kept
                  of them is copied: others may write to them past torch's count, through x.numpy() or x.data
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
    is_data: bool = False
    same_for_all: frozenset[int] = frozenset()


class Piece(Protocol):
    """Parameter names are relative to the module. B examples throughout."""

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """Squared norms [B] of the examples' parts; keys are parameter names, or "" for all of them together."""
        ...

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors that it keeps until the step."""
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
    features   numbers on both sides of a position, if the module leaves the rule two ways: forming, or Gram matrices
    runs_again whether the module is run again, so that its outputs and the state of torch's generator must be kept
    takes_more_dims  whether an input may have any number of dimensions between the example and its last ones
    """

    name: str
    kinds: tuple[type[nn.Module], ...]
    piece: Callable[[Use], Piece]
    explain: Callable[[frozenset[str]], tuple[str, str]]
    examples: tuple[Example, ...] = ()
    features: Callable[[Any], int | None] = lambda module: None
    runs_again: bool = False
    takes_more_dims: bool = False


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


def refuse_hidden_tensors(owner: Owner, output: Any) -> None:
    """A dataclass that torch cannot look into would hide gradients from us."""
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            raise TypeError(
                f"{owner} has parameters of its own and returns a {type(leaf).__name__}, whose tensors cannot be seen. "
                "Return a tensor, tuple or dict, or register the class with torch.utils._pytree."
            )


def astray(owner: Owner) -> str:
    """Why its gradients cannot be told apart, and what to do."""
    parent = owner.name.rpartition(".")[0]  # no sizes below: that of a batch is private
    return (
        f"{owner} took in or gave out another number of rows than the batch has examples: its first "
        "dimension must be the example, or per-example gradients cannot be told apart. Keep the batch first "
        "and look positions up for every example (index.expand(batch, -1)), or pass "
        f"generic=['{parent}'] to make_private so that the enclosing module is taken as a whole."
    )
