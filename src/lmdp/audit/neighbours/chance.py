"""What is random in a training besides draws and noise, made the same in runs whose batches differ.

Dropout draws one mask for the whole batch, so that one example more shifts the masks of all others: it is switched off,
which changes no sensitivity. What a dataset draws when an example is read (augmentation) is made to depend on that
example alone. What a loop draws for a whole batch cannot be mended here; its state is compared, so that a report can
say so.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients import randomness

FUNCTIONS = [
    (module, name)
    for module in (F, torch)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    if hasattr(module, name)
]
IN_PLACE = [(torch, f"{name}_") for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")]


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Functions that drop out give their input back, whoever calls them by way of torch."""

    def unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input

    with contextlib.ExitStack() as stack:
        for module, name in [*FUNCTIONS, *IN_PLACE]:
            stack.enter_context(mock.patch.object(module, name, unchanged))
        yield


@contextlib.contextmanager
def dropping_nothing(model: nn.Module) -> Iterator[None]:
    """Rates of dropout that modules keep as attributes are 0: attention, recurrent layers, stochastic depth."""
    before = [(m, name, rate) for m in model.modules() for name, rate in vars(m).items() if _is_rate(m, name, rate)]
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in before:
            setattr(module, name, rate)


def _is_rate(module: nn.Module, name: str, value: Any) -> bool:
    kind = type(module).__name__.lower()
    called_so = "drop" in name.lower() or (name == "p" and ("drop" in kind or "stochasticdepth" in kind))
    return called_so and isinstance(value, float) and 0 < value < 1


@contextlib.contextmanager
def lowest_precision() -> Iterator[set[torch.dtype]]:
    """The types that modules compute in, autocast included."""
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def state_of_chance() -> str:
    """Equal where the same numbers would be drawn next."""
    return hashlib.blake2b(repr(randomness.states()).encode(), digest_size=16).hexdigest()
