"""What must be the same on all processes before they train together: program, versions, settings, model, optimizer."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from lmdp.accounting import Mechanism
from lmdp.gradients import Capture
from lmdp.guards.content import is_sharded
from lmdp.processes.group import Group

T = TypeVar("T", bound=Callable[..., Any])

ROOT = Path(__file__).parent.parent


def on_all(function: T) -> T:
    """The method is called on all processes: `group` becomes a Group, and an error on one is raised on all."""

    @functools.wraps(function)
    def called(self: Any, **settings: Any) -> Any:
        group = settings.get("group")
        group = settings["group"] = group if isinstance(group, Group) else Group(group)
        with group.reaching_all():
            return function(self, **settings)

    return called  # type: ignore[return-value]


def agree(
    capture: Capture, optimizer: torch.optim.Optimizer, group: Group, mechanism: Mechanism, **settings: Any
) -> None:
    """Refuse to begin where processes differ in what they are going to do. All then begin with the first one's model.
    (Of one under fully_shard each has its part already.)

    Settings are compared by what they print.
    """
    if not group.several:
        return
    shapes = {name: (tuple(p.shape), str(p.dtype), p.device.type) for name, p in capture.parameters.items()}
    rates = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
    facts = {
        "lmdp": source_digest(),
        "torch": torch.__version__,
        "parameters": _short(shapes),
        "fully_shard": any(map(is_sharded, capture.parameters.values())),
        "optimizer": f"{type(optimizer).__name__} {_short(rates)}",
        **{f.name: str(getattr(mechanism, f.name)) for f in fields(mechanism)},
        **{name: str(value) for name, value in settings.items()},
    }
    group.agreed(facts)
    held = (*capture.model.parameters(), *capture.model.buffers())
    group.broadcast([tensor for tensor in held if not is_sharded(tensor)])


@functools.cache
def source_digest() -> str:
    """Of the program itself: two versions may have the same number."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _short(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()
