"""Work that is cut into independent pieces, done side by side, each piece on one thread.

The matrices of an attack are so small that several threads inside one product only wait for each other; several
attacks at a time do not. A piece gives the same result whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

T = TypeVar("T")
Share = Callable[[Sequence[Callable[[], Any]]], Iterable[Any]]
"""Does pieces of work that do not depend on each other, and gives their results in their order."""


def side_by_side(tasks: Sequence[Callable[[], T]], workers: int | None = None) -> Iterator[T]:
    """The results of all tasks, in their order. `workers`: as many as torch may use threads, unless given."""
    workers = workers or torch.get_num_threads()
    with _one_thread_each(), ThreadPoolExecutor(min(workers, max(1, len(tasks))), initializer=_limit) as pool:
        yield from pool.map(_call, tasks)


def _call(task: Callable[[], T]) -> T:
    return task()


def _limit() -> None:
    torch.set_num_threads(1)  # which holds for the thread that says so


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    with threadpool_limits(1, "blas"):
        try:
            yield
        finally:
            torch.set_num_threads(before)
