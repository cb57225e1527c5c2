"""Which modules to take as a whole where the rows inside of them are not the examples.

A decoder that lays all tokens of a batch one after the other, attention within windows, a sequence that comes first: a
module in there cannot tell whose rows are whose. The smallest module around it that takes in and gives out a row for
every example can, and is what a refusal names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients.contract import Owner, float_tensors
from lmdp.gradients.leading import ROWS, Shape, kind_of, other_rows, undisturbed
from lmdp.gradients.shards import keep_unsharding


@dataclass(frozen=True)
class Shapes:
    """Of one call of a module: what it took in that is differentiated, and what it gave out.

    `plain`: whether it was given nothing but tensors and values. Another object, such as a cache of keys, may hold what
    belongs to all examples.
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    plain: bool


PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
Calls = Mapping[str, list[Shapes]]


def hosts_of(model: nn.Module, astray: Iterable[str], args: Any, kwargs: Any, size: int) -> dict[str, str]:
    """Module → the smallest one around it with a row for every example; none if the model cannot be run to see."""
    with undisturbed(model):
        try:
            fewer, args_there, kwargs_there = other_rows(args, kwargs, size)
            here, there = _calls(model, args, kwargs), _calls(model, args_there, kwargs_there)
        except Exception:  # any model may refuse to run on other rows, for any reason
            return {}
    by_example = {name for name in here if _is_by_example(here[name], size, there.get(name, []), fewer)}
    return {name: next((host for host in _around(name) if host in by_example), "") for name in astray}


def _around(name: str) -> list[str]:
    """The modules around one, from the inside."""
    hosts = []
    while name:
        name = name.rpartition(".")[0]
        hosts.append(name)
    return hosts


def _calls(model: nn.Module, args: Any, kwargs: Any) -> Calls:
    calls: dict[str, list[Shapes]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            leaves = pytree.tree_leaves((args, kwargs))
            inputs = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
            outputs = tuple(tuple(leaf.shape) for leaf in float_tensors(output))
            plain = all(isinstance(leaf, PLAIN) for leaf in leaves)
            calls.setdefault(name, []).append(Shapes(inputs, outputs, plain))

        return hook

    for name, module in model.named_modules():
        keep_unsharding(module)
        module.register_forward_hook(note(name), with_kwargs=True)
    with torch.enable_grad():
        model.forward(*args, **kwargs)
    return calls


def _is_by_example(here: list[Shapes], size: int, there: list[Shapes], fewer: int) -> bool:
    if not here or len(here) != len(there):
        return False
    for a, b in zip(here, there):
        pairs = [*zip(a.inputs, b.inputs), *zip(a.outputs, b.outputs)]
        same = len(a.inputs) == len(b.inputs) and len(a.outputs) == len(b.outputs)
        if not (same and a.plain and a.outputs and all(kind_of(x, size, y, fewer) == ROWS for x, y in pairs)):
            return False
    return True


def astray(owner: Owner, hosts: Mapping[str, str], remedy: str = "") -> str:
    """Why its gradients cannot be told apart, and what to do. `remedy`: of a rule that was there before."""
    remedy = remedy or "Keep the batch first and look positions up for every example (index.expand(batch, -1))"
    # no sizes below: that of a batch is private
    return (
        f"{owner} took in or gave out another number of rows than the batch has examples: its first dimension must be "
        f"the example, or per-example gradients cannot be told apart. {remedy}, or {_as_a_whole(owner.name, hosts)}"
    )


def unfollowed(module: str, what: str, hosts: Mapping[str, str]) -> str:
    """The same of an output that is shared by all examples, and of what becomes of it."""
    return (
        f"the output of module '{module}' is the same for every example, and {what}: whose gradient is whose "
        "cannot be told. Compute it for every example (look positions up with index.expand(batch, -1), keep the "
        f"batch first), or {_as_a_whole(module, hosts)}"
    )


def _as_a_whole(module: str, hosts: Mapping[str, str]) -> str:
    named = {module.rpartition(".")[0], *hosts.values()} if module not in hosts else {*hosts.values()}
    whole = sorted(name for name in named if not any(_is_inside(name, other) for other in named))
    what = "the model" if whole == [""] else "what encloses it"
    return f"pass generic={whole} to make_private so that {what} is taken as a whole."


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
