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
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lmdp.gradients.attach import Attachment, Watcher, full_precision, is_look
from lmdp.gradients.batch import NamedPiece, PerExampleGradients
from lmdp.gradients.contract import Owner, Piece, Use, float_tensors, is_float
from lmdp.gradients.plan import Choices, Plan, owners_of
from lmdp.gradients.rows import output_batch_dim
from lmdp.layers import LayerMap


@dataclass
class Arrived:
    """What a backward pass has delivered so far. `task`: the number that autograd gave the pass."""

    batch_size: int | None = None
    pieces: dict[Owner, NamedPiece] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    repeated: set[Owner] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    task: int | None = None
    complete: bool = False


@dataclass
class RootCall:
    """One call of the whole model, on `batch_size` examples."""

    batch_size: int | None = None


@dataclass
class Pass:
    """Everything between two steps: forward passes that may still be differentiated, and what has arrived of them."""

    arrived: Arrived = field(default_factory=Arrived)
    root: RootCall | None = None
    muted: Counter[nn.Parameter] = field(default_factory=Counter)
    rng_states: dict[Owner, Tensor] = field(default_factory=dict)
    busy: bool = False  # a rule is running, which may run its module again

    def discard(self) -> None:
        """Throw away what has arrived, and undo what an interrupted forward pass left behind."""
        for parameter, depth in self.muted.items():
            if depth > 0:
                parameter.requires_grad_(True)
        self.muted.clear()
        self.root = None
        self.arrived = Arrived()


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

    def use(self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...], output_grads: tuple[Tensor, ...]) -> Use:
        precise = [self._precise(tensor) for tensor in tensors]
        args, kwargs = (tuple(precise), {}) if self.spec is None else self._arranged(precise)
        gradients = tuple(self._precise(g) for g in output_grads)
        return Use(
            module=self.owner.module,
            trainable=self.owner.trainable,
            input=cast(Tensor, args[0] if args else kwargs.get("input")),
            output_grad=gradients[0],
            batch_size=next((len(tensor) for tensor in precise if tensor.dim() > 0), -1),
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
        # Every name of a parameter → the one the layer map knows it by (tied parameters have several).
        by_id = {id(p): name for name, p in every.items() if name in layers.index}
        self._canonical = {name: by_id[id(p)] for name, p in every.items()}
        self.parameters = {name: every[name] for name in layers.index}
        uses = Counter(name for o in self.owners for name in {self._canonical[f] for f in o.full_names.values()})
        self._tied = {o for o in self.owners if any(uses[self._canonical[f]] > 1 for f in o.full_names.values())}
        self.dtype = min((p.dtype for p in every.values()), key=lambda dtype: torch.finfo(dtype).bits)
        self.device = next(iter(every.values())).device
        self.choices = Choices(memory_budget)
        self._seen: set[str] = set()
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

    def plan(self) -> Plan:
        """Which rule every module uses, and why, as of the last backward pass."""
        return Plan.of(self.owners, self.choices, self._seen, self._repeated)

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
            self._pass.root = RootCall()
        owner = self._owner_of.get(module)
        if owner is not None:
            self._mute(owner)
            if owner.rule.runs_again:
                self._pass.rng_states[owner] = torch.get_rng_state()

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, raised: bool) -> Any:
        if not self._listening:
            return output
        owner, now = self._owner_of.get(module), self._pass
        if owner is not None:
            self._unmute(owner)
            output = self._handing_over(owner, args, kwargs, output, now.rng_states.pop(owner, None))
        if module is self.model and now.root is not None:
            now.root.batch_size = leading_dimension((args, kwargs))
            now.root = None
            if self.watcher is not None and not raised:
                output = self.watcher.after_forward(args, kwargs, output)
        return output

    @property
    def _listening(self) -> bool:
        return torch.is_grad_enabled() and not self._pass.busy

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
        if type(output) is Tensor and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # most layers
            if not is_float(output):
                return output
            call = Call(self, owner, self._pass, root, None, [], [0], rng_state)
            return _HandOver.apply(call, self._anchor, 1, args[0], output)[0]  # type: ignore[no-untyped-call]
        outputs = float_tensors(output)
        _refuse_hidden_tensors(owner, output)
        if not outputs:
            return output
        leaves, spec = pytree.tree_flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if i in slots else leaf for i, leaf in enumerate(leaves)]
        call = Call(self, owner, self._pass, root, spec, rest, slots, rng_state)
        inputs = [leaves[i] for i in slots]
        reporting = iter(_HandOver.apply(call, self._anchor, len(slots), *inputs, *outputs))  # type: ignore[no-untyped-call]
        return pytree.tree_map(lambda leaf: next(reporting) if is_float(leaf) else leaf, output)

    # -- while backward() runs ---------------------------------------------------------------------------------------

    def receive(self, call: Call, use: Use) -> None:
        """The output gradient of a call has arrived."""
        owner, arrived = call.owner, self._pass.arrived
        if call.made_in is not self._pass:
            raise RuntimeError(
                f"backward() reached {owner} through a forward pass made before the last optimizer.step(). "
                "Compute the loss anew in every iteration."
            )
        if arrived.complete:
            raise RuntimeError(
                "backward() was called a second time before optimizer.step(): one example could then count twice. "
                "Add the losses and call backward() once; for batches too large for memory set "
                "max_physical_batch_size in make_private; to throw gradients away call optimizer.zero_grad()."
            )
        task = torch._C._current_graph_task_id()
        if arrived.task not in (None, task):
            raise RuntimeError(
                f"backward() reached {owner} while another backward pass was unfinished: one that raised (call "
                "optimizer.zero_grad() before going on), or one that it is nested in (use "
                "torch.utils.checkpoint with use_reentrant=False)."
            )
        if arrived.task is None:
            arrived.task = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(arrived, "complete", True))
        arrived.batch_size = _batch_size(call, use, arrived.batch_size)
        if not arrived.reached:
            self.choices.begin(use.batch_size)
        arrived.reached.update(owner.full_names.values())
        if use.batch_size == 0:
            return
        self._seen.add(owner.name)
        self._pass.busy = True
        try:
            with full_precision(owner.device):
                self._take_in(arrived, owner, owner.rule.piece(use))
        finally:
            self._pass.busy = False

    def _take_in(self, arrived: Arrived, owner: Owner, piece: Piece) -> None:
        """As it is; the gradients themselves where a parameter was used before, in this module or another."""
        before = arrived.pieces.pop(owner, None)
        if before is None and owner not in self._tied and owner not in arrived.repeated:
            arrived.pieces[owner] = NamedPiece(owner.full_names, piece)
            return
        self._repeated.add(owner.name)
        arrived.repeated.add(owner)
        for each in (piece,) if before is None else (before.piece, piece):
            for relative, rows in each.per_example().items():
                name = self._canonical[owner.full_names[relative]]
                arrived.shared[name] = arrived.shared[name] + rows if name in arrived.shared else rows

    # -- between passes ----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether a backward pass has come to its end since the last `take`."""
        return self._pass.arrived.complete

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
        reached = {self._canonical[name] for name in arrived.reached}
        unreached = [name for name in self.layers.index if name not in reached]
        self._end_pass()
        return PerExampleGradients(arrived.batch_size, list(arrived.pieces.values()), arrived.shared, unreached)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, a pass that is not the user's: it puts an end to theirs, and nobody watches."""
        watcher, self.watcher = self.watcher, None
        self._end_pass()
        try:
            yield
        finally:
            self._end_pass()
            self.watcher = watcher

    def _end_pass(self) -> None:
        self._pass.discard()
        self._pass = Pass()


def leading_dimension(inputs: Any) -> int | None:
    """Length of the first tensor with a length: how many examples a call is about."""
    return next((len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


def _batch_size(call: Call, use: Use, before: int | None) -> int:
    """How many examples a call is about; refused where its rows are not the batch's examples."""
    size = use.batch_size if call.root is None or call.root.batch_size is None else call.root.batch_size
    shapes = [tuple(g.shape) for g in use.output_grads]
    dims = [output_batch_dim(use.module, i) for i in range(len(shapes))]
    if use.batch_size != size or any(len(s) <= d or s[d] != size for s, d in zip(shapes, dims)):
        parent = call.owner.name.rpartition(".")[0]  # no sizes below: that of a batch is private
        raise ValueError(
            f"{call.owner} took in or gave out another number of rows than the batch has examples: its first "
            "dimension must be the example, or per-example gradients cannot be told apart. Keep the batch first "
            "and look positions up for every example (index.expand(batch, -1)), or pass "
            f"generic=['{parent}'] to make_private so that the enclosing module is taken as a whole."
        )
    if before not in (None, size):
        raise ValueError(
            "one loss was computed from batches of different sizes. All calls of the model that feed one loss must "
            "see the same examples, in the same order."
        )
    return size


def _refuse_hidden_tensors(owner: Owner, output: Any) -> None:
    """A dataclass that torch cannot look into would hide gradients from us."""
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            raise TypeError(
                f"{owner} has parameters of its own and returns a {type(leaf).__name__}, whose tensors cannot be seen. "
                "Return a tensor, tuple or dict, or register the class with torch.utils._pytree."
            )
