"""`torchrun … -m lmdp train`: the first process writes the run folder and shows progress; the others make its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmdp.app import training
from lmdp.app.account import Account
from lmdp.app.canaries import planted
from lmdp.app.config import Config
from lmdp.app.launched import several
from lmdp.app.network import fresh_model
from lmdp.app.pipeline import Beginning, parted_data, public_examples
from lmdp.app.progress import Interrupted, Show, stop_asked, stop_signals
from lmdp.lineage import Lineage
from lmdp.methods import METHODS
from lmdp.processes import Group, Parted


@contextmanager
def processes(config: Config) -> Iterator[Group]:
    """Those that torchrun has started, or this one alone. An error inside is raised by all of them."""
    if _are_several() and not METHODS[config.method].private:
        raise ValueError(
            f"method is {config.method!r}, which is not private, and trains in one process only. Start it without "
            "torchrun, or choose a private method."
        )
    with all_processes() as group:
        yield group


@contextmanager
def all_processes(days: int | None = None) -> Iterator[Group]:
    """The same, whatever they are for. `days`: how long one waits for the others, if not as long as torch does.

    None leaves before all are done: torch's threads may abort a process whose peers go while it is still leaving.
    """
    begun = _are_several()
    if begun:
        dist.init_process_group(_backend(), timeout=None if days is None else timedelta(days=days))
    try:
        group = Group()
        with group.reaching_all():
            yield group
        with suppress(Parted):
            group.gathered("done")
    finally:
        if begun:
            dist.destroy_process_group()


def _are_several() -> bool:
    return several() and not dist.is_initialized()


def shared(group: Group) -> Callable[[Sequence[Callable[[], Any]]], list[Any]]:
    """Does pieces of work that do not depend on each other: each process every so-manieth, and all get all results."""

    def done(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        mine = [tasks[k]() for k in range(group.rank, len(tasks), group.size)]
        every = group.gathered(mine)
        return [every[k % group.size][k // group.size] for k in range(len(tasks))]

    return done


def _backend() -> str:
    """Of the device of this process, which is the GPU of its own number where there are any."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "cpu:gloo,cuda:nccl"


def follow(group: Group) -> None:
    """What another process than the first does of `pipeline.train`: it reads the same data, and makes the same steps.

    Nothing is written or said.
    """
    quiet = Show(quiet=True)
    told: Beginning = group.same(None)
    config, source = told.config, parted_data(told.config, quiet)
    model, public = fresh_model(config, source), public_examples(config, source, quiet)
    if told.key is not None:
        source = planted(config, source, told.key, quiet.say).source
    held = dict([*model.named_parameters(), *model.named_buffers()])
    account = Account(Lineage(held, run=told.run))
    job = training.prepare(config, model, source.train, risk=told.risk, public=public, account=account, group=group)
    _steps(job)
    if job.engine is not None:
        job.engine.detach()


def _steps(job: training.Job) -> None:
    """As `training.run` makes them, with what all processes are asked for."""
    checkpoint = job.group.same(None)
    if checkpoint is None:
        _tell(job)
    else:
        job.restore(checkpoint)
    at = checkpoint.metrics[-1]["step"] if checkpoint is not None and checkpoint.metrics else -1
    with torch.random.fork_rng(devices=[]), stop_signals() as stop:
        for _ in training.steps_of(job):
            due, stopping = training.evaluation_due(job), stop_asked(stop, job.group)
            if due or stopping:
                _tell(job)
                at = job.steps
            if stopping and job.steps < job.total:
                raise Interrupted(f"stopped after step {job.steps} of {job.total}")
        if at < job.steps:
            _tell(job)
    job.told()


def _tell(job: training.Job) -> None:
    job.told()
    job.checkpoint([])
