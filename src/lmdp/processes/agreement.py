"""What must be the same on all processes before they train together: program, versions, settings, model, optimizer."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lmdp.accounting import Mechanism
from lmdp.gradients import Capture, compiled
from lmdp.guards.content import is_sharded
from lmdp.processes.group import Group

T = TypeVar("T", bound=Callable[..., Any])

ROOT = Path(__file__).parent.parent
SOURCES = (".py", ".c", ".h")
OF_EACH = frozenset({"group", "max_physical_batch_size", "memory_budget"})
"""Settings that each process may choose for itself: parts of a batch, and how its gradients are held, change no sum."""
AS_OBJECTS = frozenset({"module", "optimizer", "data_loader", "risk", "layers", "unit", "public_data", "criterion"})
"""What is compared by what it is, once that is known, or, like a function, by nobody."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of an object in memory, as it prints itself: another one in every process."""


def on_all(function: T) -> T:
    """The method is called on all processes: `group` becomes a Group, and an error on one is raised on all.

    Before anything else its settings are compared: some say what processes exchange.
    """

    @functools.wraps(function)
    def called(self: Any, **settings: Any) -> Any:
        group = settings.get("group")
        group = settings["group"] = group if isinstance(group, Group) else Group(group)
        with group.reaching_all():
            if group.several:
                group.agreed(_plain({**_defaults(self.make_private), **_defaults(function), **settings}))
            return function(self, **settings)

    return called  # type: ignore[return-value]


def agree(
    capture: Capture, optimizer: torch.optim.Optimizer, group: Group, mechanism: Mechanism, **settings: Any
) -> None:
    """Refuse to begin where processes differ in what they are going to do. All then begin with the first one's model.
    (Of one under fully_shard each has its part already.)

    Settings are compared by what they print, modules too: by name, type, `extra_repr` and mode.
    """
    if not group.several:
        return
    shapes = {name: (tuple(p.shape), str(p.dtype), p.device.type) for name, p in capture.parameters.items()}
    rates = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
    facts = {
        **versions(),
        "parameters": _short(shapes),
        "fully_shard": any(map(is_sharded, capture.parameters.values())),
        "optimizer": f"{type(optimizer).__name__} {_short(rates)}",
        **{f.name: str(getattr(mechanism, f.name)) for f in fields(mechanism)},
        **{name: str(value) for name, value in settings.items()},
    }
    group.agreed(facts)
    pieces = _pieces(capture)
    if len(set(group.gathered(_short(pieces)))) > 1:  # each by its name only where they differ
        group.agreed(pieces)
    held = (*capture.model.parameters(), *capture.model.buffers())
    group.broadcast([tensor for tensor in held if not is_sharded(tensor)])


def versions() -> dict[str, str]:
    """What computes here: by other versions of it processes may round otherwise, and drift apart."""
    return {
        "lmdp": source_digest(),
        "compiled loops": "off" if compiled.vector_bytes() is None else "on",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """Of the program itself, what is compiled of it included: two versions may have the same number."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be compared as they are."""
    named = {name: value for name, value in settings.items() if name not in OF_EACH | AS_OBJECTS}
    return {name: _comparable(value) for name, value in named.items()}


def _comparable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return sorted(map(str, value)) if isinstance(value, list | tuple | set | frozenset) else type(value).__name__


def _pieces(capture: Capture) -> dict[str, str]:
    """What the model is put together of, and which parameters count as a layer: by names."""
    layers = {f"layer {layer.name!r}": " ".join(layer.parameters) for layer in capture.layers}
    return layers | {f"module {name or 'itself'!r}": _told(m) for name, m in capture.model.named_modules()}


def _told(module: nn.Module) -> str:
    kind, mode = type(module), "" if module.training else " in evaluation mode"
    return f"{kind.__module__}.{kind.__qualname__}({ADDRESS.sub('', module.extra_repr())}){mode}"


def _short(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()
