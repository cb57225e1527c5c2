"""Work of several processes that torchrun has started: pieces that do not depend on each other, each done by one.

A piece follows from what it is given, and is done on one thread; so the results are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lmdp.membership.workers import Share, side_by_side
from lmdp.processes import Group

Tasks = Sequence[Callable[[], Any]]
AT_ONCE = 5
"""Pieces that each process is sent at a time: the folds of a layer."""


def shared(group: Group) -> Share:
    """Where all processes have come to the same pieces by themselves: each does every so-manieth for all."""

    def done(tasks: Tasks) -> Iterable[Any]:
        return _together(tasks, group, lambda mine: [task() for task in mine])

    return done


def handed_out(group: Group | None) -> Share:
    """Where the first process alone knows the pieces: it sends them to the others, who `take` them."""
    if group is None or not group.several:
        return side_by_side

    def done(tasks: Tasks) -> Iterator[Any]:
        for start in range(0, len(tasks), AT_ONCE * group.size):
            sent = list(tasks[start : start + AT_ONCE * group.size])
            group.same(sent)
            yield from take(sent, group)

    return done


def take(tasks: Tasks, group: Group) -> list[Any]:
    """This process's part of pieces that the first one has sent; the results of all."""
    return _together(tasks, group, side_by_side)


def _together(tasks: Tasks, group: Group, share: Share) -> list[Any]:
    every = group.gathered(list(share([tasks[k] for k in range(group.rank, len(tasks), group.size)])))
    return [every[k % group.size][k // group.size] for k in range(len(tasks))]
