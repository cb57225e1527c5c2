"""What each of two processes sends in its first steps under fully_shard: `python benchmarks/bytes.py`.

On an encoder of 6 blocks. Looks are made in the first three steps, and then in few.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist

from lmdp.app.bench import processes
from lmdp.app.bench.cases import CASES, Transformer

STEPS = 8
CASE = replace(CASES["encoder24"], make=lambda: Transformer(depth=6), shape=(8, 16, 256))


def sent(name: str) -> list[float]:
    """Megabytes, step by step."""
    step, counted = processes._CONTENDERS[name](CASE)
    each = []
    for _ in range(STEPS):
        before = counted()
        step()
        each.append((counted() - before) / 1e6)
    return each


def measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name in (processes.SHARDED, processes.SHARDED_PRIVATE):
        each = sent(name)
        if rank == 0:
            print(f"{name:18s} MB in steps 1 to {STEPS}: {', '.join(f'{one:.3f}' for one in each)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        both = [context.Process(target=measure, args=(rank, folder)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
