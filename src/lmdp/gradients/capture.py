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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lmdp.gradients.attach import Attachment, Watcher, is_plainly_called
from lmdp.gradients.batch import Arrived, Pass, PerExampleGradients
from lmdp.gradients.call import Call, HandOver, batch_size_of
from lmdp.gradients.contract import Owner, Use, float_tensors, is_float, opened, refuse_hidden_tensors, with_floats
from lmdp.gradients.fetching import Fetching
from lmdp.gradients.hosts import astray, hosts_of, unfollowed
from lmdp.gradients.leading import ROWS, SHARED, AsItWas, Leading, RootCall, other_rows, undisturbed
from lmdp.gradients.plan import Choices, Plan, owners_of
from lmdp.gradients.precision import full_precision
from lmdp.gradients.randomness import PutBack, remember_torch
from lmdp.gradients.repeated import targets_of
from lmdp.gradients.shards import live
from lmdp.gradients.shared import Base, Shared, plain_value
from lmdp.layers import LayerMap


class Capture:
    """Listens to one model until `detach`. `take()` hands over the gradients of the last backward pass, once.

    generic_modules  names of modules whose whole subtree gets the generic rule
    memory_budget    bytes that layers may keep between backward and step; see `plan.Choices`
    watcher          shown the model's outputs and the losses
    rows_each        how many rows of a batch, following each other, are one example: their gradients are added
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerMap,
        generic_modules: Iterable[str] = (),
        memory_budget: int | None = None,
        *,
        watcher: Watcher | None = None,
        rows_each: int = 1,
    ) -> None:
        self.rows_each = rows_each
        self.model, self.layers, self.watcher = model, layers, watcher
        self.owners = owners_of(model, frozenset(generic_modules))
        every = {o.full_names[name]: p for o in self.owners for name, p in o.parameters.items()}
        self.parameters = {name: model.get_parameter(name) for name in layers.index}
        # Every name of a parameter → the one the layer map knows it by (tied parameters have several).
        by_id = {id(p): name for name, p in self.parameters.items()}
        self._names = {o: {name: by_id[id(p)] for name, p in o.parameters.items()} for o in self.owners}
        self._targets = targets_of(self._names)
        self.dtype = min((p.dtype for p in every.values()), key=lambda dtype: torch.finfo(dtype).bits)
        self.device = next(iter(every.values())).device
        self.choices, self.fetching = Choices(memory_budget), Fetching()
        self.leading = Leading()
        self._repeated: dict[str, tuple[str | None, str]] = {}
        self.hosts: dict[str, str] = {}  # modules that cannot tell whose rows are whose → what to take as a whole
        self._anchor = torch.zeros((), requires_grad=True)
        self._pass = self._new_pass()
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
            self._pass.begin(RootCall(before=AsItWas(module) if again else None, put_back=remember_torch()))
        self._enter(self._owner_of.get(module))

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, raised: bool) -> Any:
        self._pass.record()
        if not self._listening:
            return output
        output = self._leave(self._owner_of.get(module), args, kwargs, output)
        root = self._pass.root
        if module is self.model and root is not None:
            self._pass.root = None
            root.batch_size = leading_dimension((args, kwargs))
            while not raised and self.leading.close(root, functools.partial(self._elsewhere, args, kwargs, root)):
                (root.put_back if root.before is None else root.before.restore)()
                root = RootCall(root.batch_size, before=root.before, put_back=root.put_back)
                output = self._run(root, args, kwargs)
            if not raised:
                self._name_hosts(root, args, kwargs)
            if self.watcher is not None and not raised:
                if self.watcher.still and root.before is not None:
                    root.before.restore()
                    root = RootCall(root.batch_size)
                    with self.watcher.around():
                        output = self._run(root, args, kwargs)
                    self._name_hosts(root, args, kwargs)
                output = self.watcher.after_forward(args, kwargs, output)
        return output

    def _name_hosts(self, root: RootCall, args: Any, kwargs: Any) -> None:
        """Find out what is to be taken as a whole, for refusals; refuse what could not be followed."""
        lost = {*root.astray, *root.unfollowed}
        if root.batch_size and not lost <= self.hosts.keys():
            with self._unheard():
                self.hosts |= hosts_of(self.model, lost, args, kwargs, root.batch_size)
        for module, what in root.unfollowed.items():
            raise RuntimeError(unfollowed(module, what, self.hosts))

    def _run(self, root: RootCall, args: Any, kwargs: Any) -> Any:
        """The whole model once more, without the hooks that others have put around it: they have seen this call."""
        self._pass.begin(root, again=True)
        owner = self._owner_of.get(self.model)
        self._enter(owner)
        output = self._leave(owner, args, kwargs, self.model.forward(*args, **kwargs))
        self._pass.root = None
        return output

    def _elsewhere(self, args: Any, kwargs: Any, here: RootCall, all_of_them: bool) -> RootCall:
        """What the modules take in when the model is run on other rows of the batch, and nobody watches."""
        with self._unheard(), undisturbed(self.model):
            self._pass.busy = False
            fewer, args, kwargs = other_rows(args, kwargs, here.batch_size or 0, all_of_them=all_of_them)
            root = RootCall(fewer)
            self._run(root, args, kwargs)
            return root

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        users, self._pass = self._pass, Pass(busy=True)
        try:
            yield
        finally:
            self._pass.discard()
            self._pass = users

    @property
    def _listening(self) -> bool:
        return torch.is_grad_enabled() and not self._pass.busy

    def _enter(self, owner: Owner | None) -> None:
        if owner is not None:
            self._mute(owner)
            if owner.rule.runs_again or owner.rule.draws(owner.module):
                self._pass.randomness[owner] = remember_torch()
            if owner.rule.pull is not None and is_plainly_called(owner.module):  # it would record for nobody
                self._pass.unrecorded = True
                torch.set_grad_enabled(False)

    def _leave(self, owner: Owner | None, args: Any, kwargs: Any, output: Any) -> Any:
        if owner is None:
            return output
        self._pass.record()
        self._unmute(owner)
        return self._handing_over(owner, args, kwargs, output, self._pass.randomness.pop(owner, None))

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
            live(owner.module, name, parameter).requires_grad_(False)

    def _unmute(self, owner: Owner) -> None:
        for name, parameter in owner.parameters.items():
            self._pass.muted[parameter] -= 1
            if self._pass.muted[parameter] == 0:
                parameter.requires_grad_(True)
                live(owner.module, name, parameter).requires_grad_(True)

    def _handing_over(self, owner: Owner, args: Any, kwargs: Any, output: Any, as_before: PutBack | None) -> Any:
        """The same output, made to report its gradient."""
        self._pass.count(owner)
        root = self._pass.root
        self._pass.held += sum(t.nbytes for t in pytree.tree_leaves((args, kwargs, output)) if isinstance(t, Tensor))
        plain = type(output) is Tensor and not kwargs and len(args) == 1 and type(args[0]) is Tensor
        if plain and not owner.rule.runs_again:  # most layers
            if not is_float(output):
                return output
            key, kind = self.leading.ask(root, owner.name, tuple(args[0].shape))
            call = Call(self, owner, self._pass, root, None, [], [0], as_before, key)
            if kind == SHARED and not args[0].requires_grad:
                return self._shared(call, [args[0]], output)
            self._note_astray(call, kind)
            return HandOver.apply(call, self._anchor, 1, args[0], output)[0]  # type: ignore[no-untyped-call]
        outputs = float_tensors(output)
        refuse_hidden_tensors(owner, output)
        if not outputs:
            return output
        leaves, spec = pytree.tree_flatten(opened((args, kwargs)))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if i in slots else leaf for i, leaf in enumerate(leaves)]
        inputs = [plain_value(leaves[i]) for i in slots]
        rows = outputs if owner.rule.runs_again and isinstance(output, Tensor) else inputs
        shape, examples = next((tuple(t.shape) for t in rows if t.dim()), ()), None
        if owner.rule.taken_in is not None:
            shape = owner.rule.taken_in(owner.module, args, kwargs)
            examples = shape[0] if shape else -1
            if root is not None:
                root.remedy = owner.rule.remedy
        key, kind = self.leading.ask(root, owner.name, shape)
        noted = tuple(self.leading.note(root, f"{owner.name}, argument {i}", tuple(leaves[i].shape)) for i in slots)
        shortened = torch.is_autocast_enabled(owner.device.type)
        call = Call(self, owner, self._pass, root, spec, rest, slots, as_before, key, noted, shortened, examples)
        if isinstance(output, Shared) or (kind == SHARED and not any(t.requires_grad for t in inputs)):
            if isinstance(output, Tensor):
                return self._shared(call, inputs, output)
            raise ValueError(astray(owner, self.hosts))
        self._note_astray(call, kind)
        if owner.rule.pull is not None:
            if any(isinstance(leaf, Shared) for leaf in leaves):
                raise ValueError(astray(owner, self.hosts))
            outputs = tuple(output.detach() for output in outputs)
        reporting = HandOver.apply(call, self._anchor, len(slots), *inputs, *outputs)  # type: ignore[no-untyped-call]
        return with_floats(output, reporting)

    def _note_astray(self, call: Call, kind: str) -> None:
        if kind != ROWS and call.root is not None:
            call.root.astray.add(call.owner.name)

    def _shared(self, call: Call, inputs: list[Tensor], output: Tensor) -> Tensor:
        """An output that is the same for every example: followed until it meets them, and only then reporting."""
        call = dataclasses.replace(call, shared=True)
        value, before, rule = plain_value(output), output if isinstance(output, Shared) else None, call.owner.rule
        # [1, …] → [1, …]: one row for all examples
        single = not rule.runs_again and value.dim() > 0 and all(t.dim() and len(t) == 1 for t in (value, *inputs))
        if not rule.runs_again and (len(inputs) != 1 or not (single or rule.takes_more_dims)):
            raise ValueError(astray(call.owner, self.hosts, rule.remedy))

        def report(size: int) -> Tensor:
            each = value.expand(size, *value.shape) if before is None else before.for_each(size)
            each = each.squeeze(1) if single else each
            given = inputs if rule.runs_again else [t.expand(size, *t.shape[1:] if single else t.shape) for t in inputs]
            (copies,) = HandOver.apply(call, self._anchor, len(given), *given, each)  # type: ignore[no-untyped-call]
            return cast(Tensor, copies.unsqueeze(1) if single else copies)

        def ask(what: str, shape: tuple[int, ...], default: str) -> str:
            return self.leading.ask(call.root, what, shape, default=default)[1]

        def later(what: str) -> bool:
            root = self._pass.root
            if root is None or root is not call.root:  # the call of the model is over
                return False
            root.unfollowed.setdefault(call.owner.name, what)
            return True

        return Base(call.owner.name, value, report, ask, later).tensor()

    # -- while backward() runs ---------------------------------------------------------------------------------------

    def receive(self, call: Call, use: Use) -> tuple[Tensor | None, ...] | None:
        """The output gradient of a call has arrived. Gives the gradients at its inputs, if its rule computes them."""
        owner, arrived = call.owner, self._pass.arrived
        if call.made_in is not self._pass:
            raise RuntimeError(
                f"backward() reached {owner} through a forward pass made before the last optimizer.step(). "
                "Compute the loss anew in every iteration."
            )
        arrived.admit(owner)
        if call.root is None:
            self.leading.outside.add(owner.name)
        arrived.set_size(batch_size_of(call, use))
        if not arrived.reached:
            self.choices.begin(use.batch_size)
        arrived.reached.update(self._names[owner].values())
        self._pass.busy = True
        try:
            with full_precision(owner.device):
                pulled, at_inputs = owner.rule.pull(use) if owner.rule.pull is not None else (None, None)
                if use.batch_size > 0:
                    arrived.take_in(owner, use, pulled, self._targets[owner], self._pass.calls)
                return at_inputs
        finally:
            self._pass.busy = False

    # -- between passes ----------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """How many bytes the modules took in and gave out, in the newest call of the model."""
        return self._pass.held

    @property
    def batch_size(self) -> int | None:
        """How many examples the last backward pass was about."""
        return self._pass.arrived.batch_size

    def sent(self, times: float) -> None:
        """The backward pass that comes now is multiplied by this."""
        self._pass.arrived.sent = times

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
        with full_precision(self.device):
            arrived.join_rest()
        arrived.refuse_changed()
        self._repeated |= {o.name: target.planned for target in arrived.repeated for o in target.names}
        unreached = [name for name in self.layers.index if name not in arrived.reached]
        self._end_pass()
        pieces = list(arrived.pieces.values())
        return PerExampleGradients(arrived.batch_size, pieces, unreached, self.device, arrived.sent, arrived.rows_each)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, a pass that is not the user's: it puts an end to theirs, and nobody watches."""
        self._end_pass()
        with self.beside():
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, a pass beside the user's, which goes on afterwards as if there had been none; nobody watches.

        Each row is an example.
        """
        theirs = self._pass, self.watcher, self.rows_each
        self._pass, self.watcher, self.rows_each = Pass(), None, 1
        try:
            yield
        finally:
            self._end_pass()
            self._pass, self.watcher, self.rows_each = theirs

    def _end_pass(self) -> None:
        self._pass.discard()
        self._pass = self._new_pass()

    def _new_pass(self) -> Pass:
        return Pass(Arrived(rows_each=self.rows_each))


def leading_dimension(inputs: Any) -> int | None:
    """Length of the first tensor with a length: how many examples a call is about."""
    return next((len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
