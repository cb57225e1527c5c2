"""Several processes on one machine, and what each of them is told."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import lmdp
from tests.certified.case import CERTIFIED, CRASHED, DELTA, ENGINES, Outcome, outcome_of

PATIENCE = 60
"""Seconds after which a process is not waited for."""

Work = Callable[[int], "lmdp.PrivacyEngine"]


def ranks(work: Work, folder: Path, *, world: int = 2, grouped: bool = True) -> Outcome:
    """The worst outcome of `world` ranks that each do the work; `grouped`: in a process group that is set up here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(rank: int) -> lmdp.PrivacyEngine:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"})
        if grouped:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        return work(rank)

    return forked([lambda rank=rank: one(rank) for rank in range(world)], folder)  # type: ignore[misc]


def forked(works: list[Callable[[], lmdp.PrivacyEngine]], folder: Path) -> Outcome:
    """The worst outcome of works that are done at the same time, each in a fork of this process."""
    context = multiprocessing.get_context("fork")
    answers = [folder / f"answer-{i}" for i in range(len(works))]
    processes = [context.Process(target=_answer, args=(work, answer)) for work, answer in zip(works, answers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    outcomes = [_read(answer) for answer in answers]
    return min(outcomes, key=lambda outcome: [CERTIFIED, CRASHED].index(outcome.kind) if outcome.kind in BAD else 2)


BAD = (CERTIFIED, CRASHED)


def _answer(work: Callable[[], lmdp.PrivacyEngine], answer: Path) -> None:
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")  # trainers of others warn of what they choose for two processes
    ENGINES.clear()
    answer.write_bytes(pickle.dumps(outcome_of(work, DELTA, taints=False)))
    os._exit(0)  # nothing of the parent's (reports of tests, process groups) is to be closed twice


def _read(answer: Path) -> Outcome:
    if not answer.exists():
        return Outcome(CRASHED, "a process gave no answer")
    outcome: Outcome = pickle.loads(answer.read_bytes())
    return outcome
