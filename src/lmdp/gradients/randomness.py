"""What torch, numpy and Python draw at random: remembered, put back, seeded. On every device that draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

PutBack = Callable[[], None]


def generators() -> list[torch.Generator]:
    """The default generators of all devices that are in use, that of the host first."""
    return [torch.default_generator, *(one for kind in _accelerators() for one in _defaults(kind))]


def _accelerators() -> list[str]:
    """Kinds of devices that may have generators of their own. Nothing is initialised by asking."""
    kinds = [kind for kind in ("cuda", "xpu", "mps") if hasattr(torch, kind)]
    return [*kinds, torch._C._get_privateuse1_backend_name()]


def _defaults(kind: str) -> list[torch.Generator]:
    module: Any = getattr(torch, kind, None)
    if module is None or not getattr(module, "is_initialized", lambda: True)() or not module.is_available():
        return []
    return [module._get_default_mps_generator()] if kind == "mps" else list(getattr(module, "default_generators", ()))


def remember_torch() -> PutBack:
    """Call what it returns to let torch draw the same once more."""
    states = [(generator, generator.get_state()) for generator in generators()]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back


def remember() -> PutBack:
    """The same of torch, numpy and Python."""
    python, numeric, of_torch = random.getstate(), np.random.get_state(), remember_torch()  # noqa: NPY002  users' code

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002
        of_torch()

    return put_back


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """What torch draws inside, it draws once more afterwards."""
    put_back = remember_torch()
    try:
        yield
    finally:
        put_back()


@contextlib.contextmanager
def same(seed: int) -> Iterator[None]:
    """Every run inside draws the same (initial weights, dropout, shuffles), and nobody else's draws change."""
    put_back = remember()
    for generator in generators():
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        put_back()


def draws() -> Callable[[], bool]:
    """Call what it returns to learn whether random numbers have been drawn since."""
    before = states()
    return lambda: states() != before


def states() -> tuple[Any, ...]:
    """Equal where the same numbers would be drawn next."""
    numeric: Any = np.random.get_state()  # noqa: NPY002  users' code may draw from it
    of_torch = [generator.get_state().numpy().tobytes() for generator in generators()]
    return of_torch, numeric[1].tobytes(), numeric[2:], random.getstate()
