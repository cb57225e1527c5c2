"""What a rule takes and what it gives.

    Use → rule → Piece

A `Use` is one call of one module, as captured. A `Piece` is that module's part of every example's gradient, without
saying how it is held: it knows the squared norm of each example's part and can sum the parts under any per-example
weights. A `Rule` is one record of the table in `plan.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lmdp.gradients.fetching import Fetching, Flag


@dataclass(frozen=True)
class Sizes:
    """Numbers per example of a layer: positions T, features on both sides of a position, weights, inputs + outputs.

    part      which one it is, of a module that is several layers
    can_form_again  whether its rule need not keep gradients that it has formed
    """

    positions: int
    features: int
    weights: int
    factors: int
    batch_size: int
    bytes_each: int = 4
    part: str = ""
    can_form_again: bool = False


@dataclass(frozen=True)
class Use:
    """One call of one module: what was captured of it in the forward and in the backward pass.

    trainable     names of the parameters that are trained, relative to the module
    input         the first argument: of a plain layer, the one tensor that it takes
    output_grads  of all its outputs; `output_grad` is the first, of a plain layer the only one
    outputs       kept only for rules that need them
    as_before     for rules that draw once more what a module drew: puts torch's random numbers back to before the call
    drew          whether there is something to put back
    when          (flags, what to do if one is set): at once, or for flags on a device before anything is made of it all
    prefers_gram  which of its two ways a rule with a choice is to take
    forms_again   whether a rule that can is to form gradients once more for the sum, and not to keep them until then
    same_for_all  which of the flattened arguments are established to be the same for every example
    shared        whether the output is the same for every example; each has an output gradient of its own all the same
    autocast      whether the forward pass was made in shortened precision
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
    as_before: Callable[[], None] = lambda: None
    drew: bool = False
    when: Callable[[Sequence[Flag], Callable[[], object]], None] = field(default_factory=lambda: Fetching().when)
    prefers_gram: Callable[[Sizes], bool] = lambda sizes: False
    forms_again: Callable[[Sizes], bool] = lambda sizes: False
    is_data: bool = False
    same_for_all: frozenset[int] = frozenset()
    shared: bool = False
    autocast: bool = False


Shape = tuple[int, ...]
Pulled = tuple[Callable[[], "Piece"], tuple[Tensor | None, ...]]


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
        """The gradients themselves, [B, *shape]: for parameters whose uses have no leaner way to be added."""
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

    kinds      the classes of modules that it computes exactly; () if they are told otherwise, or if it takes any module
    piece      from a use to its piece
    explain    names of the trainable parameters → how gradients are held, and why, where there is nothing to choose
    examples   small modules of its kinds, on which tests try it
    features   numbers on both sides of a position, if the module leaves the rule two ways: forming, or Gram matrices
    runs_again whether the module is run again, so that its outputs and the state of torch's generator must be kept
    keeps_outputs  whether what the module gave out is kept for it
    draws      whether a module draws random numbers that the rule must draw once more: the generator's state is kept
    takes_more_dims  whether an input may have any number of dimensions between the example and its last ones
    join       from several uses of the same parameters, of one module or of several, to one piece; without it, the
               gradients of every use are formed and added
    sizes      of one use, where it may be better to form its gradients than to keep it until the others arrive
    like       tells modules of other libraries that it computes exactly, too
    is_plain   whether a module has no other parameters than the rule computes
    pull       from a use to what makes its piece, and the gradients at the tensors among its arguments, for a rule that
               comes by these too: torch's own backward of the module is then left out
    taken_in   (module, args, kwargs) → the shape of what it took in with the examples first, where they are elsewhere
    remedy     what to do if the rows of a model are not the examples after all
    """

    name: str
    kinds: tuple[type[nn.Module], ...]
    piece: Callable[[Use], Piece]
    explain: Callable[[frozenset[str]], tuple[str, str]]
    examples: tuple[Example, ...] = ()
    features: Callable[[Any], int | None] = lambda module: None
    runs_again: bool = False
    keeps_outputs: bool = False
    draws: Callable[[Any], bool] = lambda module: False
    takes_more_dims: bool = False
    join: Callable[[Sequence[Use]], Piece] | None = None
    sizes: Callable[[Use], Sizes] | None = None
    like: Callable[[nn.Module], bool] = lambda module: False
    is_plain: Callable[[nn.Module], bool] = lambda module: _has_only(module, {"weight", "bias"})
    pull: Callable[[Use], Pulled] | None = None
    taken_in: Callable[[Any, Any, Any], Shape] | None = None
    remedy: str = ""


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


def _has_only(module: nn.Module, names: set[str]) -> bool:
    return {name for name, _ in module.named_parameters()} <= names


def float_tensors(output: Any) -> tuple[Tensor, ...]:
    """The differentiable tensors in a module's output, whatever it is wrapped in."""
    return tuple(leaf for leaf in pytree.tree_leaves(opened(output)) if is_float(leaf))


def with_floats(output: Any, tensors: Iterable[Tensor]) -> Any:
    """The same output with these in the place of its `float_tensors`."""
    following = iter(tensors)

    def replaced(leaf: Any) -> Any:
        if _is_packed(leaf):
            return PackedSequence(next(following), *leaf[1:])
        return next(following) if is_float(leaf) else leaf

    return pytree.tree_map(replaced, output, is_leaf=_is_packed)


def opened(tree: Any) -> Any:
    """The same with packed sequences as plain tuples, into which every version of torch looks."""
    return pytree.tree_map(lambda leaf: tuple(leaf) if _is_packed(leaf) else leaf, tree, is_leaf=_is_packed)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """Of a call: by its place or by its name; None if it was not given."""
    return args[place] if len(args) > place else kwargs.get(name)


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
