"""Everything that is done to torch, to an optimizer, to parameters and to the process, and how it is undone.

    torch       two module hooks, which ask for every running module whether somebody listens to it; and the entry of
                `torch.autograd.backward`, which has no hook of its own, `Tensor.register_hook`, `torch.manual_seed`
                and `ReduceLROnPlateau.step`, whose calls are counted, while somebody watches losses
    optimizer   methods that are replaced, such as `step`
    parameters  a hook that refuses a gradient which reached a parameter past its module
    process     a count of its forks; and, by a call of its own, glibc's allocator

An `Attachment` takes the first three back in `detach`, or when it is forgotten; the last two cannot be taken back, and
change no result. Nothing is left on the model, whose copies, pickles and state dicts stay those of an ordinary model.
What the process knows is in one registry of weak references, the only state that outlives a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lmdp.gradients.leaving import Keeper, Leaving
from lmdp.gradients.shards import is_unsharding

Undo = Callable[[], None]


class Listener(Protocol):
    """Told of every forward pass of the modules that it listens to."""

    def before_forward(self, module: nn.Module) -> None: ...

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, raised: bool) -> Any:
        """Gives back the output, or what takes its place."""
        ...


class Watcher(Protocol):
    """Shown the outputs of a whole model, and every loss on which backward() is called.

    While it is `still`, the model is run once more inside `around()`, and so is every backward().
    """

    @property
    def still(self) -> object: ...
    def around(self) -> contextlib.AbstractContextManager[Any]: ...
    def after_forward(self, args: Any, kwargs: Any, output: Any) -> Any: ...
    def before_backward(self, loss: Tensor) -> float | None:
        """Gives back what this backward pass should be multiplied by; None if it is not about its model."""
        ...

    def sent(self, times: float) -> None:
        """What it is multiplied by."""

    def close(self) -> None: ...


class Registry:
    """Who listens to which module of this process, and who watches. `notes` on a module outlast its attachments.

    While somebody watches, `tensor_hooks` counts the backward hooks that are set on tensors, `seeds` how often torch's
    random numbers were seeded, `states` are those of its generator that somebody has put back, and `plateaus` holds
    optimizers whose learning rate follows a number that somebody measures.
    """

    def __init__(self) -> None:
        self.notes: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self.looks: set[int] = set()
        self._listeners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Listener]] = weakref.WeakKeyDictionary()
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._hooks: list[Undo] = []
        self.tensor_hooks = self.seeds = 0
        self.states: set[int] = set()
        self._backward: Any = None
        self._counted: list[Undo] = []
        self.plateaus: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._forks = 0
        self._lock = threading.RLock()

    @property
    def process(self) -> tuple[int, int]:
        """Tells a process from the one it was forked from, even if both have the same number, as with namespaces."""
        return os.getpid(), self._forks

    def count_fork(self) -> None:
        self._forks += 1

    def listener(self, module: nn.Module) -> Listener | None:
        reference = self._listeners.get(module)
        return None if reference is None else reference()

    def add_listener(self, listener: Listener, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            # Listeners first: what is forgotten at this very moment would else find nobody, and take the hooks off.
            self._listeners.update(dict.fromkeys(modules, weakref.ref(listener)))
            if not self._hooks:
                before = torch_hooks.register_module_forward_pre_hook(_before_forward)
                after = torch_hooks.register_module_forward_hook(_after_forward, with_kwargs=True, always_call=True)
                left: dict[int, Any] = torch_hooks._global_forward_hooks_with_kwargs  # of which torch removes nothing
                cast(Any, torch_hooks._global_forward_hooks).move_to_end(after.id, last=False)  # others come after
                self._hooks = [before.remove, after.remove, lambda: left.pop(after.id, None)]

    def remove_listener(self, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            for module in modules:
                self._listeners.pop(module, None)
            if not list(self._listeners):  # not its length, which counts modules that are being forgotten
                _take_back(self._hooks)

    def add_watcher(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.add(watcher)
            if self._backward is None:
                self._backward = torch.autograd.backward
                self._set_backward(self._watched(self._backward))
                self._counted = [
                    _wrapped(Tensor, "register_hook", lambda _, hook=None: self._count_hook(hook)),
                    *(_wrapped(place, "manual_seed", self._count_seed) for place in (torch, torch.random)),
                    *(_wrapped(place, "set_rng_state", self._note_state) for place in (torch, torch.random)),
                    _wrapped(ReduceLROnPlateau, "step", lambda scheduler, *_: self.plateaus.add(scheduler.optimizer)),
                ]

    def remove_watcher(self, watcher: Watcher | None) -> None:
        """Puts torch's own backward() back once nobody watches any more, unless somebody else wrapped it after us."""
        with self._lock:
            if watcher is not None:
                self._watchers.discard(watcher)
            if not list(self._watchers) and self._backward is not None:
                if getattr(torch.autograd.backward, "__wrapped__", None) is self._backward:
                    self._set_backward(self._backward)
                _take_back(self._counted)
                self._backward = None

    def _set_backward(self, function: Any) -> None:
        torch.autograd.backward = function

    def _count_hook(self, hook: Any) -> None:
        self.tensor_hooks += not is_unsharding(hook)

    def _count_seed(self, *_: Any) -> None:
        self.seeds += 1

    def _note_state(self, state: Tensor | None = None) -> None:
        """But those that a checkpoint puts back in the backward pass."""
        if state is not None and torch._C._current_graph_task_id() == -1:
            self.states.add(hash(state.numpy().tobytes()))

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            given = args[0] if args else kwargs.pop("grad_tensors", None)
            loss = _as_one(tensors, given)
            watchers = list(self._watchers) if loss is not None else []
            # Before any is still: one of a training that was left may be.
            wanted = {watcher: watcher.before_backward(cast(Tensor, loss)) for watcher in watchers}
            with contextlib.ExitStack() as around:
                for watcher in watchers:
                    around.enter_context(watcher.around())
                times = max((each for each in wanted.values() if each is not None), default=1.0)
                for watcher in (watcher for watcher, each in wanted.items() if each is not None):
                    watcher.sent(times)
                original(tensors, given if times == 1.0 else _multiplied(tensors, given, times), *args[1:], **kwargs)

        return backward


REGISTRY = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=REGISTRY.count_fork)


class Attachment:
    """What one training has attached to. `detach` takes all of it back; so does forgetting the attachment.

    An optimizer whose methods are replaced holds the attachment: there is nothing to take back once it is forgotten.
    """

    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._methods: list[Undo] = []
        weakref.finalize(self, _take_back, self._undo)

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        """A copy has attached to nothing."""
        return Attachment, ()

    def listen(self, listener: Listener, modules: Iterable[nn.Module]) -> None:
        """Nothing below may hold a module or an optimizer: it may hold us, and would then never be forgotten."""
        held = weakref.WeakSet(modules)
        REGISTRY.add_listener(listener, held)
        self._undo.append(lambda: REGISTRY.remove_listener(list(held)))

    def watch(self, watcher: Watcher) -> None:
        REGISTRY.add_watcher(watcher)
        reference = weakref.ref(watcher)
        self._undo.append(lambda: REGISTRY.remove_watcher(reference()))

    def refuse_direct_use(self, parameters: Mapping[str, nn.Parameter]) -> None:
        names = [*parameters]
        for name, parameter in parameters.items():
            self._undo.append(parameter.register_post_accumulate_grad_hook(_refusal(name, names)).remove)

    def tell_of_reading(self, model: nn.Module, keeper: Keeper) -> None:
        """Tell the keeper whenever the weights of the model, or of a part of it, are read to be kept."""
        for module in model.modules():
            self._undo.append(module.register_state_dict_pre_hook(Leaving(keeper)).remove)

    def replace(self, optimizer: torch.optim.Optimizer, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Put `method` in the place of an optimizer's own, and return the original one."""
        original = getattr(optimizer, name)

        def instead(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        if hasattr(original, "_wrapped_by_lr_sched"):  # a scheduler counts its calls, and would warn of a new one
            vars(instead)["_wrapped_by_lr_sched"] = True
        # Bound to the optimizer, because learning-rate schedulers rebind `optimizer.step.__func__`.
        self.set(optimizer, name, types.MethodType(instead, optimizer))
        return original  # type: ignore[no-any-return]

    def set(self, optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
        """Give an optimizer an attribute of this value."""
        before = vars(optimizer).get(name)
        vars(optimizer)[name] = value

        def put_back() -> None:
            vars(optimizer).pop(name, None)
            vars(optimizer).update({} if before is None else {name: before})

        self._methods.append(put_back)

    def detach(self) -> None:
        _take_back(self._methods)
        _take_back(self._undo)


def is_attached(model: nn.Module) -> bool:
    """Whether somebody listens to the model or to one of its modules."""
    return any(REGISTRY.listener(module) is not None for module in model.modules())


def is_plainly_called(module: nn.Module) -> bool:
    """Whether nobody but us does anything between a call of a module and its forward."""
    return not module._forward_pre_hooks and len(torch_hooks._global_forward_pre_hooks) == 1


@contextlib.contextmanager
def look(at: Tensor) -> Iterator[None]:
    """Inside, differentiating `at` delivers nothing to listeners: it is a guard's look, not the user's backward()."""
    tasks: list[int] = []

    def mark(_: Any) -> None:
        tasks.append(torch._C._current_graph_task_id())
        REGISTRY.looks.add(tasks[-1])

    assert at.grad_fn is not None
    handle = at.grad_fn.register_prehook(mark)
    try:
        yield
    finally:
        handle.remove()
        REGISTRY.looks.difference_update(tasks)


def is_look() -> bool:
    """Whether the backward pass that is running is a guard's look."""
    return bool(REGISTRY.looks) and torch._C._current_graph_task_id() in REGISTRY.looks


SWITCH = "LMDP_KEEP_MEMORY"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, -1  # as in malloc.h


def keep_freed_memory() -> bool:
    """Make glibc reuse what a step has freed, for as long as the process lives; returns whether it does.

    Every page that comes from the system must be cleared and mapped first, which can take a fifth of a step's time.
    Whoever has set the allocator up (MALLOC_… or GLIBC_TUNABLES in the environment) is left alone, as are systems
    without glibc. LMDP_KEEP_MEMORY=0 in the environment switches it off.
    """
    return _allocator(mapped_from=2**30, trimmed_from=_NEVER)


def give_freed_memory_back() -> bool:
    """The opposite, unless LMDP_KEEP_MEMORY=1: for models that are taken apart because memory is short.

    Blocks of a megabyte and more go back at once; smaller ones too would save little, and cost as much time again.
    """
    return os.environ.get(SWITCH) != "1" and _allocator(mapped_from=2**20, trimmed_from=2**20)


def _allocator(mapped_from: int, trimmed_from: int) -> bool:
    if os.environ.get(SWITCH) == "0":
        return False
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mapped_from) and mallopt(_TRIM_THRESHOLD, trimmed_from))


# -- what torch calls -------------------------------------------------------------------------------------------------


def _before_forward(module: nn.Module, args: Any) -> None:
    listener = REGISTRY.listener(module)
    if listener is not None:
        listener.before_forward(module)


def _after_forward(module: nn.Module, args: Any, *rest: Any) -> Any:
    # Called with (kwargs, output); after a forward that raised, torch leaves out the kwargs and the output is None.
    kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
    listener = REGISTRY.listener(module)
    if listener is None:
        return output
    return listener.after_forward(module, args, kwargs, output, raised=len(rest) != 2)


def _lists(tensors: Any, gradients: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """What backward() was given, in whatever form."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return losses, [gradients] * len(losses) if gradients is None or isinstance(gradients, Tensor) else list(gradients)


def _as_one(tensors: Any, gradients: Any) -> Tensor | None:
    """The one number that is differentiated, whatever form backward() was given it in."""
    losses, given = _lists(tensors, gradients)
    if not losses or len(losses) != len(given) or not all(loss.requires_grad for loss in losses):
        return None
    if len(losses) == 1 and losses[0].numel() == 1:
        return losses[0]
    with torch.enable_grad():
        parts = [loss.sum() if g is None else (loss * g.detach()).sum() for loss, g in zip(losses, given)]
        return torch.stack(parts).sum()


def _multiplied(tensors: Any, gradients: Any, times: float) -> list[Tensor]:
    """What is to be sent into a backward pass of these, so many times."""
    losses, given = _lists(tensors, gradients)
    return [torch.full_like(loss, times) if g is None else g * times for loss, g in zip(losses, given)]


def _hosts_like(name: str, parameters: Iterable[str]) -> list[str]:
    """What reads this parameter, perhaps: what its owner is in, or the owner; and the same in every other block."""
    alike = [other for other in parameters if re.sub(r"\d+", "#", other) == re.sub(r"\d+", "#", name)]
    owners = [other.rpartition(".")[0] for other in alike]
    return sorted({owner.rpartition(".")[0] or owner for owner in owners})


def _refusal(name: str, names: Iterable[str]) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        whole = _hosts_like(name, names)
        raise RuntimeError(
            f"parameter '{name}' was used outside the forward of the module that owns it (a penalty in the loss, or a "
            f"parent reading its child's weights). Its gradient would mix examples. Use the optimizer's weight_decay "
            f"for a penalty; otherwise pass generic={whole} to make_private."
        )

    return refuse


def _wrapped(kind: Any, name: str, note: Callable[..., None]) -> Undo:
    """Call `note`, with what it was given by place, before every call of a method or function. What it returns puts the
    original back, unless others wrapped it too."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return original(*args, **kwargs)

    setattr(kind, name, noted)
    return lambda: setattr(kind, name, original) if getattr(kind, name) is noted else None


def _take_back(undo: list[Undo]) -> None:
    while undo:
        undo.pop()()
