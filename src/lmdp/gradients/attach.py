"""Taps: how a tape listens to modules without leaving anything on the model.

Two process-wide module hooks look up, by weak reference, whether the module that is running belongs to a tape; copies,
pickles and state dicts of the model are those of an ordinary model.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from lmdp.gradients import generic
from lmdp.gradients.rules import Rule, Use
from lmdp.guards import independence as mixing

if TYPE_CHECKING:
    from lmdp.gradients.capture import Tape


@dataclass
class Place:
    """What a module is to the tapes of this process. Weak references: a model may outlive its tape."""

    owner: weakref.ref[Owner] | None = None
    root: weakref.ref[Tape] | None = None
    eval_only: str | None = None


PLACES: weakref.WeakKeyDictionary[nn.Module, Place] = weakref.WeakKeyDictionary()


def place(module: nn.Module) -> Place:
    """The module's place, made if need be."""
    return PLACES.setdefault(module, Place())


class Owner:
    """A module whose trainable parameters are handled by one rule."""

    def __init__(self, tape: Tape, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], rule: Rule):
        self.tape = tape
        self.name = name
        self.module = module
        self.parameters = parameters
        self.rule = rule
        self.full_names = {own: f"{name}.{own}" if name else own for own in parameters}
        self.trainable = frozenset(parameters)
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device

    def __str__(self) -> str:
        return f"module '{self.name}' ({type(self.module).__name__})"


@dataclass
class RootCall:
    """One call of the whole model, on `batch_size` examples."""

    batch_size: int | None = None


@dataclass(frozen=True)
class Call:
    """One call of one owner, until its output gradients arrive. Without a spec, its one argument was a tensor."""

    owner: Owner
    root: RootCall | None
    generation: int
    spec: Any
    rest: list[Any]
    slots: list[int]
    rng: Tensor | None

    def use(self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...], output_grads: tuple[Tensor, ...]) -> Use:
        precise = [self._precise(tensor) for tensor in tensors]
        args, kwargs = (tuple(precise), {}) if self.spec is None else self._arranged(precise)
        first = next((tensor for tensor in precise if tensor.dim() > 0), None)
        return Use(
            self.owner.module,
            self.owner.trainable,
            args,
            kwargs,
            outputs,
            tuple(self._precise(g) for g in output_grads),
            first.shape[0] if first is not None else -1,
            self.rng,
            functools.partial(self.owner.tape.plan.prefers_gram, self.owner.name),
        )

    def _arranged(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.rest)
        for slot, tensor in zip(self.slots, tensors):
            leaves[slot] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _precise(self, tensor: Tensor) -> Tensor:
        """In the parameters' precision: norms and sums formed in bfloat16 (autocast) would break the bound."""
        own = self.owner.dtype
        return tensor.detach().to(own) if tensor.is_floating_point() and tensor.dtype != own else tensor.detach()


def tap(owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, rng: Tensor | None) -> Any:
    """The same output, made to report its gradient."""
    tape = owner.tape
    if type(output) is Tensor and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # most layers
        if not generic.is_float(output):
            return output
        call = Call(owner, tape.root_call, tape.generation, None, [], [0], rng)
        return _Tap.apply(call, tape.anchor, 1, args[0], output)[0]  # type: ignore[no-untyped-call]
    outputs = generic.float_tensors(output)
    _refuse_hidden_tensors(owner, output)
    if not outputs:
        return output
    leaves, spec = pytree.tree_flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if i in slots else leaf for i, leaf in enumerate(leaves)]
    call = Call(owner, tape.root_call, tape.generation, spec, rest, slots, rng)
    tapped = iter(_Tap.apply(call, tape.anchor, len(slots), *[leaves[i] for i in slots], *outputs))  # type: ignore[no-untyped-call]
    return pytree.tree_map(lambda leaf: next(tapped) if generic.is_float(leaf) else leaf, output)


class _Tap(torch.autograd.Function):
    """Identity on a module's outputs that hands over the module's inputs and output gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, n_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.n_inputs = call, n_inputs
        outputs = tuple(output.detach() for output in tensors[n_inputs:])
        # The generic rule runs the module again and compares. A copy: what follows may change the output in place.
        ctx.outputs = tuple(o.clone() for o in outputs) if call.owner.rule is generic.piece else ()
        ctx.save_for_backward(*tensors[:n_inputs])  # autograd refuses if one is changed in place before backward
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        if not mixing.probing:
            use = ctx.call.use(ctx.saved_tensors, ctx.outputs, output_grads)
            ctx.call.owner.tape.receive(ctx.call, use)
        return (None, None, None, *[None] * ctx.n_inputs, *output_grads)


# -- process-wide hooks, installed once, inert for modules of no tape -------------------------------------------------

_installed = False
_rng_states: dict[Owner, Tensor] = {}


def install_hooks() -> None:
    global _installed
    if not _installed:
        hooks.register_module_forward_pre_hook(_before_forward)
        hooks.register_module_forward_hook(_after_forward, with_kwargs=True, always_call=True)
        _installed = True


def _before_forward(module: nn.Module, args: Any) -> None:
    at = PLACES.get(module)
    if at is None:
        return
    if at.eval_only is not None and module.training:
        raise RuntimeError(
            f"module '{at.eval_only}' ({type(module).__name__}) was put into training mode: it would mix the "
            "examples of a batch and store their statistics. Call eval() on it after model.train(), or use "
            "lmdp.make_compatible(model)."
        )
    tape = at.root() if at.root is not None else None
    if tape is not None and tape.listening:
        tape.root_call = RootCall()
    owner = at.owner() if at.owner is not None else None
    if owner is not None and owner.tape.listening:
        owner.tape.mute(owner)
        if owner.rule is generic.piece:
            _rng_states[owner] = torch.get_rng_state()


def _after_forward(module: nn.Module, args: Any, *rest: Any) -> Any:
    # Called with (kwargs, output); after a forward that raised, torch leaves out the kwargs and the output is None.
    kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
    at = PLACES.get(module)
    if at is None:
        return output
    owner = at.owner() if at.owner is not None else None
    if owner is not None and owner.tape.listening:
        owner.tape.unmute(owner)
        output = tap(owner, args, kwargs, output, _rng_states.pop(owner, None))
    tape = at.root() if at.root is not None else None
    if tape is not None and tape.root_call is not None and tape.listening:
        tape.root_call.batch_size = _leading_dimension((args, kwargs))
        tape.root_call = None
        if tape.mixing is not None and len(rest) == 2:
            output = tape.mixing.after_forward(args, kwargs, output)
    return output


def _leading_dimension(inputs: Any) -> int | None:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return len(tensors[0]) if tensors else None


def _refuse_hidden_tensors(owner: Owner, output: Any) -> None:
    """A dataclass that torch cannot look into would hide gradients from the tape."""
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            raise TypeError(
                f"{owner} has parameters of its own and returns a {type(leaf).__name__}, whose tensors cannot be seen. "
                "Return a tensor, tuple or dict, or register the class with torch.utils._pytree."
            )
