"""Weights that leave a model in the middle of its training: by `state_dict()`, as a copy, or pickled whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_OURS: list[object] = []


@contextmanager
def only_looked_at() -> Iterator[None]:
    """Inside, what is read is not kept: nobody is told."""
    _OURS.append(None)
    try:
        yield
    finally:
        _OURS.pop()


class Keeper(Protocol):
    """Of what was read."""

    def leave(self) -> None: ...


class Leaving:
    """A hook of a module's `state_dict`. It tells a keeper, whom it does not keep alive.

    It is a part of the module, and so is copied and pickled with it: that tells, too. A copy has none, but what takes
    the same arguments and does nothing, and can be read without this library.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = weakref.ref(keeper)

    def __call__(self, module: Any, prefix: str, keep_vars: bool) -> None:
        self._tell()

    def __reduce__(self) -> tuple[type[type], tuple[slice]]:
        self._tell()
        return type, (slice(None),)

    def _tell(self) -> None:
        keeper = self._keeper()
        if keeper is not None and not _OURS:
            keeper.leave()
