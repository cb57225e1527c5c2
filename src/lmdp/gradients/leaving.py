"""Weights that leave a model in the middle of its training: by `state_dict()`, as a copy, or pickled whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_OURS: list[object] = []


@contextmanager
def only_looked_at() -> Iterator[None]:
    """Inside, what is read is not kept: nobody is told."""
    _OURS.append(None)
    try:
        yield
    finally:
        _OURS.pop()


class Leaving:
    """A hook of a module's `state_dict`. It calls the method `note`, of somebody whom it does not keep alive.

    It is a part of the module, and so is copied and pickled with it: that tells, too. A copy has none, but what takes
    the same arguments and does nothing, and can be read without this library.
    """

    def __init__(self, note: Callable[[], object]) -> None:
        self._note = weakref.WeakMethod(note)

    def __call__(self, module: Any, prefix: str, keep_vars: bool) -> None:
        self._tell()

    def __reduce__(self) -> tuple[type[type], tuple[slice]]:
        self._tell()
        return type, (slice(None),)

    def _tell(self) -> None:
        note = self._note()
        if note is not None and not _OURS:
            note()
