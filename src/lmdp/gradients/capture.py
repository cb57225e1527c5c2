"""One forward and one backward pass: what each module took in, and the gradient at what it gave out.

While a module runs, its trainable parameters are kept out of the autograd graph: the backward pass computes gradients
of activations only, and no weight gradient that mixes examples is ever formed. An identity behind the module's output
receives the output gradient and turns it, while it is in cache, into a piece: per-example norms and a promise of the
sum.

    before_forward → (the module runs) → after_forward … backward() → receive → take
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lmdp.gradients.attach import Attachment, Watcher, full_precision, is_look
from lmdp.gradients.batch import Pass, PerExampleGradients
from lmdp.gradients.contract import Owner, Use, astray, float_tensors, is_float, refuse_hidden_tensors
from lmdp.gradients.leading import SHARED, AsItWas, Key, Leading, RootCall, other_rows, undisturbed
from lmdp.gradients.plan import Choices, Plan, owners_of
from lmdp.gradients.rows import output_batch_dim
from lmdp.gradients.shared import Base, Shared, plain_value
from lmdp.layers import LayerMap


@dataclass(frozen=True)
class Call:
    """One call of one owner, until its output gradients arrive. Without a spec, its one argument was a tensor."""

    capture: Capture
    owner: Owner
    made_in: Pass
    root: RootCall | None
    spec: Any
    rest: list[Any]
    slots: list[int]
    rng_state: Tensor | None
    key: Key
    shared: bool = False
    arguments: tuple[Key, ...] = ()

    def use(self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...], output_grads: tuple[Tensor, ...]) -> Use:
        precise = [self._precise(tensor) for tensor in tensors]
        args, kwargs = (tuple(precise), {}) if self.spec is None else self._arranged(precise)
        gradients = tuple(self._precise(g) for g in output_grads)
        kinds = self.capture.leading.kinds
        return Use(
            module=self.owner.module,
            trainable=self.owner.trainable,
            input=cast(Tensor, args[0] if args else kwargs.get("input")),
            output_grad=gradients[0],
            batch_size=next((len(tensor) for tensor in precise if tensor.dim() > 0), -1),
            is_data=not any(tensor.requires_grad for tensor in tensors),
            same_for_all=frozenset(i for i, key in zip(self.slots, self.arguments) if kinds.get(key) == SHARED),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            output_grads=gradients,
            rng_state=self.rng_state,
            prefers_gram=functools.partial(self.capture.choices.prefers_gram, self.owner.name),
        )

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


class _HandOver(torch.autograd.Function):
    """Identity on a module's outputs that hands over the module's inputs and output gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, n_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.n_inputs = call, n_inputs
        outputs = tuple(output.detach() for output in tensors[n_inputs:])
        # Rules that run the module again compare. A copy: what follows may change the output in place.
        ctx.outputs = tuple(o.clone() for o in outputs) if call.owner.rule.runs_again else ()
        ctx.save_for_backward(*tensors[:n_inputs])  # autograd refuses if one is changed in place before backward
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        if not is_look():
            ctx.call.capture.receive(ctx.call, ctx.call.use(ctx.saved_tensors, ctx.outputs, output_grads))
        return (None, None, None, *[None] * ctx.n_inputs, *output_grads)


class Capture:
    """Listens to one model until `detach`. `take()` hands over the gradients of the last backward pass, once.

    generic_modules  names of modules whose whole subtree gets the generic rule
    memory_budget    bytes that layers may keep between backward and step; see `plan.Choices`
    watcher          shown the model's outputs and the losses
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerMap,
        *,
        generic_modules: Iterable[str] = (),
        memory_budget: int | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.model, self.layers, self.watcher = model, layers, watcher
        self.owners = owners_of(model, frozenset(generic_modules))
        every = {o.full_names[name]: p for o in self.owners for name, p in o.parameters.items()}
        self.parameters = {name: model.get_parameter(name) for name in layers.index}
        # Every name of a parameter → the one the layer map knows it by (tied parameters have several).
        by_id = {id(p): name for name, p in self.parameters.items()}
        self._names = {o: {name: by_id[id(p)] for name, p in o.parameters.items()} for o in self.owners}
        uses = Counter(name for names in self._names.values() for name in set(names.values()))
        self._tied = {o for o, names in self._names.items() if any(uses[name] > 1 for name in names.values())}
        self.dtype = min((p.dtype for p in every.values()), key=lambda dtype: torch.finfo(dtype).bits)
        self.device = next(iter(every.values())).device
        self.choices = Choices(memory_budget)
        self.leading = Leading()
        self._repeated: set[str] = set()
        self._anchor = torch.zeros((), requires_grad=True)
        self._pass = Pass()
        # A frozen BatchNorm was let in because it was in evaluation mode, and must stay there.
        self._eval_only = {m: name for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
        self._owner_of = {owner.module: owner for owner in self.owners}
        self.attachment = Attachment()
        self.attachment.listen(self, {model, *self._eval_only, *self._owner_of})
        self.attachment.refuse_direct_use(every)
        if watcher is not None:
            self.attachment.watch(watcher)

    def detach(self) -> None:
        """Leave the model as an ordinary one."""
        self.attachment.detach()
        if self.watcher is not None:
            self.watcher.close()
        self._end_pass()

    def plan(self, *, numbers: bool = False) -> Plan:
        """Which rule every module uses, and why, as of the last backward pass; without what it tells of the batch."""
        return Plan.of(self.owners, self.choices, self._repeated, numbers=numbers)

    @property
    def rows_established(self) -> str | None:
        """How it was established that the rows which every module took in are the examples, or shared by all."""
        return self.leading.established

    @property
    def rows_doubt(self) -> str | None:
        """Why it is not established."""
        return self.leading.doubt

    # -- while a module runs -----------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        if module.training and module in self._eval_only:
            raise RuntimeError(
                f"module '{self._eval_only[module]}' ({type(module).__name__}) was put into training mode: it would "
                "mix the examples of a batch and store their statistics. Call eval() on it after model.train(), or use "
                "lmdp.make_compatible(model)."
            )
        if not self._listening:
            return
        if module is self.model:
            again = not self.leading.settled or (self.watcher is not None and self.watcher.still)
            self._pass.root = RootCall(before=AsItWas(module) if again else None)
        self._enter(self._owner_of.get(module))

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, raised: bool) -> Any:
        if not self._listening:
            return output
        output = self._leave(self._owner_of.get(module), args, kwargs, output)
        root = self._pass.root
        if module is self.model and root is not None:
            self._pass.root = None
            root.batch_size = leading_dimension((args, kwargs))
            while not raised and self.leading.close(root, lambda size: self._elsewhere(args, kwargs, size)):
                if root.before is not None:
                    root.before.restore()
                root = RootCall(root.batch_size, before=root.before)
                output = self._run(root, args, kwargs)
            if self.watcher is not None and not raised:
                if self.watcher.still and root.before is not None:
                    root.before.restore()
                    with self.watcher.around():
                        output = self._run(RootCall(root.batch_size), args, kwargs)
                output = self.watcher.after_forward(args, kwargs, output)
        return output

    def _run(self, root: RootCall, args: Any, kwargs: Any) -> Any:
        """The whole model once more, without the hooks that others have put around it: they have seen this call."""
        self._pass.root = root
        owner = self._owner_of.get(self.model)
        self._enter(owner)
        output = self._leave(owner, args, kwargs, self.model.forward(*args, **kwargs))
        self._pass.root = None
        return output

    def _elsewhere(self, args: Any, kwargs: Any, size: int) -> RootCall:
        """What the modules take in when the model is run on other rows of the batch, and nobody watches."""
        users, self._pass = self._pass, Pass()
        try:
            with undisturbed(self.model):
                fewer, args, kwargs = other_rows(args, kwargs, size)
                root = RootCall(fewer)
                self._run(root, args, kwargs)
                return root
        finally:
            self._pass.discard()
            self._pass = users

    @property
    def _listening(self) -> bool:
        return torch.is_grad_enabled() and not self._pass.busy

    def _enter(self, owner: Owner | None) -> None:
        if owner is not None:
            self._mute(owner)
            if owner.rule.runs_again:
                self._pass.rng_states[owner] = torch.get_rng_state()

    def _leave(self, owner: Owner | None, args: Any, kwargs: Any, output: Any) -> Any:
        if owner is None:
            return output
        self._unmute(owner)
        return self._handing_over(owner, args, kwargs, output, self._pass.rng_states.pop(owner, None))

    def _mute(self, owner: Owner) -> None:
        """Keep the owner's parameters out of the graph until `_unmute`."""
        for name, parameter in owner.parameters.items():
            if self._pass.muted[parameter] == 0 and not parameter.requires_grad:
                raise RuntimeError(
                    f"parameter '{owner.full_names[name]}' was frozen after make_private. Call engine.detach(), freeze "
                    "it, and call make_private again."
                )
            self._pass.muted[parameter] += 1
            parameter.requires_grad_(False)

    def _unmute(self, owner: Owner) -> None:
        for parameter in owner.parameters.values():
            self._pass.muted[parameter] -= 1
            if self._pass.muted[parameter] == 0:
                parameter.requires_grad_(True)

    def _handing_over(self, owner: Owner, args: Any, kwargs: Any, output: Any, rng_state: Tensor | None) -> Any:
        """The same output, made to report its gradient."""
        root = self._pass.root
        if type(output) is Tensor and not kwargs and len(args) == 1 and type(args[0]) is Tensor:  # most layers
            if not is_float(output):
                return output
            key, kind = self.leading.ask(root, owner.name, tuple(args[0].shape))
            call = Call(self, owner, self._pass, root, None, [], [0], rng_state, key)
            if kind == SHARED and not args[0].requires_grad:
                return self._shared(call, args[0], output)
            return _HandOver.apply(call, self._anchor, 1, args[0], output)[0]  # type: ignore[no-untyped-call]
        outputs = float_tensors(output)
        refuse_hidden_tensors(owner, output)
        if not outputs:
            return output
        leaves, spec = pytree.tree_flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if i in slots else leaf for i, leaf in enumerate(leaves)]
        inputs = [plain_value(leaves[i]) for i in slots]
        key, kind = self.leading.ask(root, owner.name, next((tuple(t.shape) for t in inputs if t.dim()), ()))
        noted = tuple(self.leading.note(root, f"{owner.name}, argument {i}", tuple(leaves[i].shape)) for i in slots)
        call = Call(self, owner, self._pass, root, spec, rest, slots, rng_state, key, arguments=noted)
        if isinstance(output, Shared) or (kind == SHARED and not any(t.requires_grad for t in inputs)):
            if len(inputs) != 1 or not isinstance(output, Tensor):
                raise ValueError(astray(owner))
            return self._shared(call, inputs[0], output)
        reporting = iter(_HandOver.apply(call, self._anchor, len(slots), *inputs, *outputs))  # type: ignore[no-untyped-call]
        return pytree.tree_map(lambda leaf: next(reporting) if is_float(leaf) else leaf, output)

    def _shared(self, call: Call, given: Tensor, output: Tensor) -> Tensor:
        """An output that is the same for every example: followed until it meets them, and only then reporting."""
        call = dataclasses.replace(call, shared=True)
        value, before = plain_value(output), output if isinstance(output, Shared) else None
        single = bool(given.dim() and value.dim()) and len(given) == len(value) == 1  # [1, …]: one row for all examples
        if not single and not call.owner.rule.takes_more_dims:
            raise ValueError(astray(call.owner))

        def report(size: int) -> Tensor:
            each = value.expand(size, *value.shape) if before is None else before.for_each(size)
            inputs = given.expand(size, *given.shape[1:] if single else given.shape)
            each = each.squeeze(1) if single else each
            (copies,) = _HandOver.apply(call, self._anchor, 1, inputs, each)  # type: ignore[no-untyped-call]
            return cast(Tensor, copies.unsqueeze(1) if single else copies)

        def ask(what: str, shape: tuple[int, ...], aside: bool) -> str:
            return self.leading.ask(call.root, what, shape, aside=aside)[1]

        return Base(call.owner.name, value, report, ask).tensor()

    # -- while backward() runs ---------------------------------------------------------------------------------------

    def receive(self, call: Call, use: Use) -> None:
        """The output gradient of a call has arrived."""
        owner, arrived = call.owner, self._pass.arrived
        if call.made_in is not self._pass:
            raise RuntimeError(
                f"backward() reached {owner} through a forward pass made before the last optimizer.step(). "
                "Compute the loss anew in every iteration."
            )
        arrived.admit(owner)
        if call.root is None:
            self.leading.outside.add(owner.name)
        arrived.set_size(_batch_size(call, use))
        if not arrived.reached:
            self.choices.begin(use.batch_size)
        arrived.reached.update(self._names[owner].values())
        if use.batch_size == 0:
            return
        self._pass.busy = True
        try:
            with full_precision(owner.device):
                piece = owner.rule.piece(use)
                if not arrived.take_in(owner, piece, self._names[owner], tied=owner in self._tied):
                    self._repeated.add(owner.name)
        finally:
            self._pass.busy = False

    # -- between passes ----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        """How many examples the last backward pass was about."""
        return self._pass.arrived.batch_size

    def discard(self) -> None:
        """Throw away gradients that have arrived. A forward pass already made may still be followed by backward."""
        self._pass.discard()

    def take(self) -> PerExampleGradients:
        """The gradients of the backward pass since the last `take`, and an end to everything before."""
        arrived = self._pass.arrived
        if not arrived.complete or arrived.batch_size is None:
            raise RuntimeError(
                "optimizer.step() found no gradients of the private model. Call loss.backward() on a loss computed "
                "from model(...) in this iteration, with gradients enabled, before every optimizer.step()."
            )
        arrived.refuse_changed()
        unreached = [name for name in self.layers.index if name not in arrived.reached]
        self._end_pass()
        return PerExampleGradients(arrived.batch_size, list(arrived.pieces.values()), arrived.shared, unreached)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, a pass that is not the user's: it puts an end to theirs, and nobody watches."""
        self._end_pass()
        with self.beside():
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, a pass beside the user's, which goes on afterwards as if there had been none; nobody watches."""
        watcher, self.watcher = self.watcher, None
        theirs, self._pass = self._pass, Pass()
        try:
            yield
        finally:
            self._end_pass()
            self._pass, self.watcher = theirs, watcher

    def _end_pass(self) -> None:
        self._pass.discard()
        self._pass = Pass()


def leading_dimension(inputs: Any) -> int | None:
    """Length of the first tensor with a length: how many examples a call is about."""
    return next((len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


def _batch_size(call: Call, use: Use) -> int:
    """How many examples a call is about; refused where its rows are not the batch's examples."""
    size = use.batch_size if call.root is None or call.root.batch_size is None else call.root.batch_size
    shapes = [tuple(g.shape) for g in use.output_grads]
    dims = [output_batch_dim(use.module, i) for i in range(len(shapes))]
    elsewhere = call.key in call.capture.leading.not_rows and not call.shared
    if elsewhere or use.batch_size != size or any(len(s) <= d or s[d] != size for s, d in zip(shapes, dims)):
        raise ValueError(astray(call.owner))
    return size
