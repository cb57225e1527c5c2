"""Models under `fully_shard`: a module has its parameters whole only while it runs, forward or backward.

In between, each process holds a part of every parameter, and the module's attribute is that part. What runs
the model again must leave the hooks alone that put the whole in its place (`keep_unsharding`).
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_unsharding(hook: Any) -> bool:
    """Whether a hook is one that `fully_shard` has set."""
    return "fsdp" in str(getattr(hook, "__module__", "")) or "fsdp" in type(getattr(hook, "__self__", None)).__module__


def keep_unsharding(module: nn.Module) -> None:
    """Take all hooks of a module's forward away but those without which it has no parameters."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number in [number for number, hook in hooks.items() if not is_unsharding(hook)]:
            del hooks[number]


def live(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """What stands in the place of a module's parameter now: itself, or the whole of it."""
    path, _, last = name.rpartition(".")
    held = module.get_submodule(path)._parameters.get(last)
    return parameter if held is None else held
