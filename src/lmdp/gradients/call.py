"""One call of one module, from its forward pass until its output gradients arrive.

Call      what was noted of it; makes the `Use` that a rule is given
HandOver  an identity on its outputs, which hands over their gradients
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lmdp.gradients.attach import is_look
from lmdp.gradients.batch import Pass
from lmdp.gradients.contract import Owner, Use
from lmdp.gradients.fetching import Fetching
from lmdp.gradients.hosts import astray
from lmdp.gradients.leading import SHARED, Key, Leading, RootCall
from lmdp.gradients.plan import Choices
from lmdp.gradients.precision import full_precision
from lmdp.gradients.randomness import PutBack
from lmdp.gradients.rows import output_batch_dim


class Receiver(Protocol):
    """Whom a call is made for."""

    leading: Leading
    choices: Choices
    hosts: dict[str, str]
    fetching: Fetching

    def receive(self, call: Call, use: Use) -> tuple[Tensor | None, ...] | None: ...


@dataclass(frozen=True)
class Call:
    """One call of one owner, until its output gradients arrive. Without a spec, its one argument was a tensor.

    `examples`: how many it is about, where its rule tells that otherwise than by the length of the first tensor.
    """

    capture: Receiver
    owner: Owner
    made_in: Pass
    root: RootCall | None
    spec: Any
    rest: list[Any]
    slots: list[int]
    as_before: PutBack | None
    key: Key
    arguments: tuple[Key, ...] = ()
    autocast: bool = False
    examples: int | None = None
    shared: bool = False

    def use(self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...], output_grads: tuple[Tensor, ...]) -> Use:
        precise = [self._precise(tensor) for tensor in tensors]
        args, kwargs = (tuple(precise), {}) if self.spec is None else self._arranged(precise)
        gradients = tuple(self._precise(g) for g in output_grads)
        kinds = self.capture.leading.kinds
        size = next((len(t) for t in self._counted(precise, gradients) if t.dim() > 0), -1)
        return Use(
            module=self.owner.module,
            trainable=self.owner.trainable,
            input=cast(Tensor, args[0] if args else kwargs.get("input")),
            output_grad=gradients[0],
            batch_size=size if self.examples is None else self.examples,
            is_data=not any(tensor.requires_grad for tensor in tensors),
            same_for_all=frozenset(i for i, key in zip(self.slots, self.arguments) if kinds.get(key) == SHARED),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            output_grads=gradients,
            as_before=self.as_before or (lambda: None),
            drew=self.as_before is not None,
            when=self.capture.fetching.when,
            prefers_gram=functools.partial(self.capture.choices.prefers_gram, self.owner.name),
            forms_again=self.capture.choices.forms_again,
            shared=self.shared,
            autocast=self.autocast,
        )

    def _counted(self, inputs: list[Tensor], gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Where examples are counted: in what the module took in or, if that may be shared, in what it gave out."""
        return gradients if self.owner.rule.runs_again else inputs

    def _arranged(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.rest)
        for slot, tensor in zip(self.slots, tensors):
            leaves[slot] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _precise(self, tensor: Tensor) -> Tensor:
        """In the parameters' precision: norms and sums formed in bfloat16 (autocast) would be too small."""
        dtype = self.owner.dtype
        return tensor.detach().to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor.detach()


class HandOver(torch.autograd.Function):
    """Identity on a module's outputs that hands over the module's inputs and output gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, n_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.n_inputs = call, n_inputs
        outputs = tuple(output.detach() for output in tensors[n_inputs:])
        # A copy: what follows may change the output in place.
        keeps = call.owner.rule.runs_again or call.owner.rule.keeps_outputs
        ctx.outputs = tuple(o.clone() for o in outputs) if keeps else ()
        ctx.save_for_backward(*tensors[:n_inputs])  # autograd refuses if one is changed in place before backward
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        call, pull, at_inputs = ctx.call, ctx.call.owner.rule.pull, None
        if not is_look():
            at_inputs = call.capture.receive(call, call.use(ctx.saved_tensors, ctx.outputs, output_grads))
        elif pull is not None:
            with full_precision(call.owner.device):
                at_inputs = pull(call.use(ctx.saved_tensors, ctx.outputs, output_grads))[1]
        if at_inputs is None:
            return (None, None, None, *[None] * ctx.n_inputs, *output_grads)
        return (None, None, None, *at_inputs, *[None] * len(output_grads))  # torch's own way back was cut off


def batch_size_of(call: Call, use: Use) -> int:
    """How many examples a call is about; refused where its rows are not the batch's examples."""
    size = use.batch_size if call.root is None or call.root.batch_size is None else call.root.batch_size
    shapes = [tuple(g.shape) for g in use.output_grads] if call.examples is None else []
    dims = [output_batch_dim(use.module, i) for i in range(len(shapes))]
    elsewhere = call.key in call.capture.leading.not_rows and not call.shared
    if elsewhere or use.batch_size != size or any(len(s) <= d or s[d] != size for s, d in zip(shapes, dims)):
        raise ValueError(astray(call.owner, call.capture.hosts, "" if call.root is None else call.root.remedy))
    return size
