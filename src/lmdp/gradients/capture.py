"""One forward and one backward pass; what each layer took in and the gradient at what it gave out.

While a module runs, its trainable parameters are kept out of the autograd graph: the backward pass computes gradients
of activations only, and no weight gradient that mixes examples is ever formed. A tap on the module's output receives
the output gradient and turns it, while it is in cache, into a *piece*: per-example norms and a promise of the sum.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from lmdp.gradients import attach as taps
from lmdp.gradients import generic
from lmdp.gradients.attach import Call, Owner, RootCall
from lmdp.gradients.batch import Gradients, Part
from lmdp.gradients.plan import Plan
from lmdp.gradients.precision import full_precision
from lmdp.gradients.rules import Piece, Use, rule_for
from lmdp.guards.independence import MixingProbe
from lmdp.layers import LayerMap, is_opaque, owned_parameters


class Tape:
    """Listens to one model. `take()` hands over the gradients of the last backward pass, once."""

    def __init__(
        self,
        model: nn.Module,
        layers: LayerMap,
        *,
        generic_modules: Iterable[str] = (),
        memory_budget: int | None = None,
        check_mixing: bool = False,
        mean_loss: bool = True,
    ) -> None:
        self.model = model
        self.layers = layers
        self.plan = Plan(memory_budget)
        self.seen: set[Owner] = set()
        self.repeated: set[Owner] = set()
        self.owners = _find_owners(self, frozenset(generic_modules))
        self.parameters = {o.full_names[n]: p for o in self.owners for n, p in o.parameters.items()}
        self._canonical = _canonical_names(self.parameters, layers)
        uses = Counter(name for o in self.owners for name in {self._canonical[f] for f in o.full_names.values()})
        self.canonical_parameters = {name: self.parameters[name] for name in layers.index}
        self._tied = {o for o in self.owners if any(uses[self._canonical[f]] > 1 for f in o.full_names.values())}
        self.dtype = min((p.dtype for p in self.parameters.values()), key=lambda dtype: torch.finfo(dtype).bits)
        self.device = next(iter(self.parameters.values())).device
        self._muted: Counter[nn.Parameter] = Counter()
        self.anchor = torch.zeros((), requires_grad=True)
        self._paused = False
        self._handles: list[RemovableHandle] = []
        self.generation = 0
        self.reset()
        _keep_freed_memory()
        self._attach()
        self.mixing = MixingProbe(model, mean_loss=mean_loss) if check_mixing else None
        weakref.finalize(self, _remove, self._handles)

    # -- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        taps.install_hooks()
        taps.place(self.model).root = weakref.ref(self)
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm):  # let in because it was frozen, in evaluation mode
                taps.place(module).eval_only = name
        for owner in self.owners:
            taps.place(owner.module).owner = weakref.ref(owner)
            for own, parameter in owner.parameters.items():
                name = owner.full_names[own]
                self._handles.append(parameter.register_post_accumulate_grad_hook(_refuse_direct_use(name)))

    def detach(self) -> None:
        """Leave the model as an ordinary one."""
        _remove(self._handles)
        for module in (*self.model.modules(), *(owner.module for owner in self.owners)):
            taps.PLACES.pop(module, None)
        if self.mixing is not None:
            self.mixing.close()
        self.reset()

    @staticmethod
    def is_attached_to(model: nn.Module) -> bool:
        return any(module in taps.PLACES for module in model.modules())

    # -- one pass ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all passes so far; their graphs can no longer deliver gradients."""
        self.generation += 1
        self.discard()

    def discard(self) -> None:
        """Throw away gradients that have arrived. A forward pass already made may still be followed by backward."""
        self.root_call: RootCall | None = None
        for parameter, depth in self._muted.items():
            if depth > 0:  # a forward pass was interrupted while its module was muted
                parameter.requires_grad_(True)
        self._muted.clear()
        self._batch_size: int | None = None
        self._parts: dict[Owner, Part] = {}
        self._shared: dict[str, Tensor] = {}
        self._added: set[Owner] = set()
        self._reached: set[str] = set()
        self._backward_pass: int | None = None
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether a backward pass has come to its end since the last `take`."""
        return self._complete

    @property
    def batch_size(self) -> int | None:
        """How many examples the last backward pass was about."""
        return self._batch_size

    def take(self) -> Gradients:
        """The gradients of the backward pass since the last `take`, and an end to everything before."""
        if not self._complete or self._batch_size is None:
            raise RuntimeError(
                "optimizer.step() found no gradients of the private model. Call loss.backward() on a loss computed "
                "from model(...) in this iteration, with gradients enabled, before every optimizer.step()."
            )
        reached = {self._canonical[name] for name in self._reached}
        unreached = [name for name in self.layers.index if name not in reached]
        found = Gradients(self._batch_size, list(self._parts.values()), self._shared, unreached)
        self.reset()
        return found

    def receive(self, call: Call, use: Use) -> None:
        """A tap's output gradient has arrived."""
        owner = call.owner
        if call.generation != self.generation:
            raise RuntimeError(
                f"backward() reached {owner} through a forward pass made before the last optimizer.step(). "
                "Compute the loss anew in every iteration."
            )
        if self._complete:
            raise RuntimeError(
                "backward() was called a second time before optimizer.step(): one example could then count twice. "
                "Add the losses and call backward() once; for batches too large for memory set "
                "max_physical_batch_size in make_private; to throw gradients away call optimizer.zero_grad()."
            )
        current = torch._C._current_graph_task_id()
        if self._backward_pass not in (None, current):
            raise RuntimeError(
                f"backward() reached {owner} while another backward pass was unfinished: one that raised (call "
                "optimizer.zero_grad() before going on), or one that it is nested in (use "
                "torch.utils.checkpoint with use_reentrant=False)."
            )
        if self._backward_pass is None:
            self._backward_pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._check_batch(call, use)
        if not self._reached:
            self.plan.begin(use.batch_size)
        self._reached.update(owner.full_names.values())
        if use.batch_size == 0:
            return
        self.seen.add(owner)
        self._paused = True
        try:
            with full_precision(owner.device):
                self._take_in(owner, owner.rule(use))
        finally:
            self._paused = False

    def _take_in(self, owner: Owner, piece: Piece) -> None:
        """A part of its own; the gradients themselves where a parameter was used before, in this module or another."""
        before = self._parts.pop(owner, None)
        if before is None and owner not in self._tied and owner not in self._added:
            self._parts[owner] = Part(owner.full_names, piece)
            return
        self.repeated.add(owner)
        self._added.add(owner)
        for each in (piece,) if before is None else (before.piece, piece):
            self._add_shared(owner, each)

    def _finish(self) -> None:
        self._complete = True

    def _check_batch(self, call: Call, use: Use) -> None:
        size = use.batch_size if call.root is None or call.root.batch_size is None else call.root.batch_size
        shapes = [tuple(g.shape) for g in use.output_grads]
        dims = [generic.output_batch_dim(use.module, i) for i in range(len(shapes))]
        if use.batch_size != size or any(len(s) <= d or s[d] != size for s, d in zip(shapes, dims)):
            name = call.owner.name  # no sizes below: that of a batch is private
            raise ValueError(
                f"{call.owner} took in or gave out another number of rows than the batch has examples: its first "
                "dimension must be the example, or per-example gradients cannot be told apart. Keep the batch first "
                "and look positions up for every example (index.expand(batch, -1)), or pass "
                f"generic=['{_parent(name)}'] to make_private so that the enclosing module is taken as a whole."
            )
        if self._batch_size not in (None, size):
            raise ValueError(
                "one loss was computed from batches of different sizes. All calls of the model that feed one loss must "
                "see the same examples, in the same order."
            )
        self._batch_size = size

    def _add_shared(self, owner: Owner, piece: Piece) -> None:
        for own, rows in piece.per_example().items():
            name = self._canonical[owner.full_names[own]]
            self._shared[name] = self._shared[name] + rows if name in self._shared else rows

    # -- while a module runs -----------------------------------------------------------------------------------------

    def mute(self, owner: Owner) -> None:
        """Keep the owner's parameters out of the graph until `unmute`."""
        for own, parameter in owner.parameters.items():
            if self._muted[parameter] == 0 and not parameter.requires_grad:
                raise RuntimeError(
                    f"parameter '{owner.full_names[own]}' was frozen after make_private. Call engine.detach(), freeze "
                    "it, and call make_private again."
                )
            self._muted[parameter] += 1
            parameter.requires_grad_(False)

    def unmute(self, owner: Owner) -> None:
        for parameter in owner.parameters.values():
            self._muted[parameter] -= 1
            if self._muted[parameter] == 0:
                parameter.requires_grad_(True)

    @contextmanager
    def unjudged(self) -> Iterator[None]:
        """A pass that is not the user's own: whether examples meet is asked of theirs."""
        mixing, self.mixing = self.mixing, None
        try:
            yield
        finally:
            self.mixing = mixing

    @property
    def listening(self) -> bool:
        return torch.is_grad_enabled() and not self._paused


def _find_owners(tape: Tape, whole: frozenset[str]) -> list[Owner]:
    """One owner for each module with trainable parameters; a module taken as a whole answers for its subtree."""
    known = {name for name, _ in tape.model.named_modules()}
    if unknown := sorted(whole - known):
        raise ValueError(f"generic names {unknown}, which are not modules of the model. It has {sorted(known)}.")
    owners: list[Owner] = []
    inside: list[str] = []
    for name, module in tape.model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        as_whole = name in whole or is_opaque(module)
        if as_whole:
            inside.append(f"{name}." if name else "")
        found = module.named_parameters() if as_whole else owned_parameters(module)
        parameters = {own: p for own, p in found if p.requires_grad}
        if parameters:
            rule = generic.piece if name in whole else rule_for(module)
            owners.append(Owner(tape, name, module, parameters, rule))
    return owners


def _canonical_names(parameters: dict[str, nn.Parameter], layers: LayerMap) -> dict[str, str]:
    """Every name of a parameter → the one the layer map knows it by (tied parameters have several)."""
    known = {id(p): name for name, p in parameters.items() if name in layers.index}
    return {name: known[id(p)] for name, p in parameters.items()}


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _keep_freed_memory() -> None:
    """Make glibc reuse what a step has freed, instead of returning it to the system and asking for it anew.

    Every page that comes from the system must be cleared and mapped first, which can take a fifth of a step's time.
    Whoever has set the allocator up (MALLOC_… or GLIBC_TUNABLES in the environment) is left alone, as are systems
    without glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _refuse_direct_use(name: str) -> Any:
    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"parameter '{name}' was used outside the forward of the module that owns it (a penalty in the loss, or a "
            f"parent reading its child's weights). Its gradient would mix examples. Use the optimizer's weight_decay "
            f"for a penalty; otherwise pass generic=['{_parent(_parent(name))}'] to make_private."
        )

    return refuse
