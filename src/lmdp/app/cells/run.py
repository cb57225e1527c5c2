"""All cells that are missing, side by side in processes of one thread each, with progress over all of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lmdp.app.cells.cell import HELD_OUT, IN_SAMPLE, TRAIN, Cell, estimate_for
from lmdp.app.cells.sources import Sources
from lmdp.app.cells.store import Store
from lmdp.app.progress import Show

Rates = Mapping[str, float]
RatesOf = Callable[[Cell, Store], "Rates | None"]
"""The error rates for a cell of `lm`, from what has been measured before it."""


def measure_all(
    cells: Sequence[Cell],
    out: Path,
    sources: Sources,
    show: Show,
    *,
    rates: RatesOf,
    jobs: int | None = None,
    device: str = "cpu",
) -> dict[str, str]:
    """Measure what is missing; risk estimates first, since trainings may need them. Returns why, for each that failed.

    A finished cell stays, whatever device it was measured on: the same call goes on where another was broken off.
    """
    store = Store(out)
    due = store.missing(cells)
    if there := len(dict.fromkeys(cells)) - len(due):
        show.say(f"{there} of {there + len(due)} cells are there already")
    if len(due) > 1:
        show.say(
            f"{len(due)} cells to measure; each is kept when it is done, and the same command goes on after a stop"
        )
    failed: dict[str, str] = {}
    done = 0
    with show.bar("cells", max(1, len(due))) as bar:
        for wave in ([c for c in due if c.kind != TRAIN], [c for c in due if c.kind == TRAIN]):
            work = [(cell, sources, rates(cell, store), device) for cell in wave]
            for cell, result in _side_by_side(work, jobs or os.cpu_count() or 1):
                done += 1
                if isinstance(result, BaseException):
                    failed[cell.name] = " ".join(str(result).split()) or type(result).__name__
                    show.say(f"{cell.name} failed: {failed[cell.name]}")
                else:
                    store.put(cell, result)
                bar.to(done, cell.name)
    return failed


def measured_rates(cell: Cell, store: Store) -> Rates | None:
    """Of the estimate, held out or in-sample; None for other rates, and where there is no estimate."""
    if cell.rates not in (HELD_OUT, IN_SAMPLE):
        return None
    estimate = store.get(estimate_for(cell))
    if estimate is None:
        return None
    if cell.rates == HELD_OUT:
        return {name: leak["error_rate"] for name, leak in estimate.result["heldout"].items()}
    return {name: 1 - pair[0] for name, pair in estimate.result["in_sample"].items()}


Work = tuple[Cell, Sources, "Rates | None", str]


def _side_by_side(work: Sequence[Work], jobs: int) -> Iterator[tuple[Cell, Any]]:
    """(cell, its result, or what went wrong), as they come."""
    if min(jobs, len(work)) <= 1:
        for each in work:
            try:
                yield each[0], _measured(*each)
            except Exception as error:
                yield each[0], error
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, which do not run in it
    with ProcessPoolExecutor(min(jobs, len(work)), context, initializer=_one_thread) as pool:
        running: dict[Future[Any], Cell] = {pool.submit(_measured, *each): each[0] for each in work}
        try:
            for future in as_completed(running):
                yield running[future], future.exception() or future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _measured(cell: Cell, sources: Sources, rates: Rates | None, device: str) -> dict[str, Any]:
    from lmdp.app.cells.measure import measure

    return measure(cell, sources, rates, device)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
