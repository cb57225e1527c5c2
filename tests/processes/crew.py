"""Processes that are started once and do one piece of work after the other, each in its place of a group."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 240.0
"""Seconds after which an answer is not waited for."""


class Failed(RuntimeError):
    """What a process of the crew has raised: the kind of it, and its message."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"process {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class Crew:
    """So many processes in one group. Work is a function and its arguments; all of it goes through pickle."""

    def __init__(self, size: int, folder: Path, *, seconds: float = PATIENCE) -> None:
        context = multiprocessing.get_context("fork")
        self.size = size
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder), there, seconds), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def begin(self, work: Callable[..., Any], *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, args)))

    def answers(self, patience: float = PATIENCE) -> list[Any]:
        """Of all: a value, `Failed`, or None from a process that is gone."""
        end, answers = time.monotonic() + patience, []
        for pipe in self._pipes:
            try:
                ready = pipe.poll(max(0.0, end - time.monotonic()))
                answers.append(pickle.loads(pipe.recv_bytes()) if ready else TimeoutError("no answer"))
            except (EOFError, ConnectionError):
                answers.append(None)
        return answers

    def __call__(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What each of them answers; raises what one of them has raised."""
        self.begin(work, *args)
        answers = self.answers()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, folder: str, pipe: Any, seconds: float) -> None:
    torch.set_num_threads(1)
    logging.disable()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LMDP_LINEAGE": f"{folder}/lineage"}
    meeting = {"init_method": f"file://{folder}/meet-{size}", "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **meeting)
    while True:
        try:
            work, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = work(*args)
        except Exception as error:
            answer = _failed(rank, error)
        pipe.send_bytes(pickle.dumps(answer))


def _failed(rank: int, error: Exception) -> Exception:
    return _Carried(rank, type(error).__name__, str(error), traceback.format_exc())


class _Carried(Failed):
    def __reduce__(self) -> Any:
        return _Carried, (self.rank, self.kind, self.message, str(self).partition("\n")[2])
