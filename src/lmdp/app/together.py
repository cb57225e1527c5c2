"""`torchrun … -m lmdp`: the first process writes what is written and shows progress; the others do what it tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmdp.app import training
from lmdp.app.account import Account
from lmdp.app.canaries import planted
from lmdp.app.comparison import Estimating
from lmdp.app.config import Config
from lmdp.app.launched import several
from lmdp.app.network import fresh_model
from lmdp.app.pipeline import Beginning, estimate, parted_data, public_examples
from lmdp.app.progress import Interrupted, Show, stop_asked, stop_signals
from lmdp.app.shares import shared, take
from lmdp.lineage import Lineage
from lmdp.methods import METHODS
from lmdp.processes import Group, Parted


@contextmanager
def led(days: int | None = None) -> Iterator[Group]:
    """The processes that torchrun has started, or this one alone. The others than the first `follow` inside."""
    with all_processes(days) as group:
        yield group
        if group.rank == 0:
            group.same(None)


@contextmanager
def processes(config: Config) -> Iterator[Group]:
    """The same, for one training of this configuration."""
    if _are_several() and not METHODS[config.method].private:
        raise ValueError(
            f"method is {config.method!r}, which is not private, and trains in one process only. Start it without "
            "torchrun, or choose a private method."
        )
    with led() as group:
        yield group


@contextmanager
def all_processes(days: int | None = None) -> Iterator[Group]:
    """Those that torchrun has started, or this one alone. An error inside is raised by all of them. `days`: how long
    one waits for the others, if not as long as torch does.

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


def _backend() -> str:
    """Of the device of this process, which is the GPU of its own number where there are any."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "cpu:gloo,cuda:nccl"


def follow(group: Group) -> dict[str, Any]:
    """What another process than the first does: what that one tells it, until there is no more. Nothing is said."""
    while (told := group.same(None)) is not None:
        if isinstance(told, Beginning):
            _train(told, group)
        elif isinstance(told, Estimating):
            quiet = Show(quiet=True)
            estimate(told.config, parted_data(told.config, quiet), quiet, shared(group))
        else:
            take(told, group)
    return {"text": "", "json": {}}


def _train(told: Beginning, group: Group) -> None:
    """Of `pipeline.train`: it reads the same data, and makes the same steps."""
    quiet = Show(quiet=True)
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
