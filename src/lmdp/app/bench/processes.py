"""One step by several processes of one thread each: time, peak memory and bytes sent, beside DistributedDataParallel.

The batch is that of one process, dealt to all. Both make their steps in turns, in the same processes; a step takes as
long as the slowest process does. Peak memory is measured in processes of their own. A model of blocks is measured
under fully_shard, too, beside SGD under fully_shard.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.app.bench.cases import CASES, Case, case_name
from lmdp.app.bench.contenders import CLIP, NOISE, Step, mean_loss
from lmdp.app.bench.measure import Say, forget_peak, peak
from lmdp.processes import Group

PLAIN, PRIVATE = "SGD, DDP", "lm, private weights"
SHARDED, SHARDED_PRIVATE = "SGD, fully_shard", "lm, fully_shard"
HEAD = "processes  {0:>16s}  private  ratio (quartiles)    MB sent: SGD, private (looked at)  peak MB: SGD, private"
UNTIMED = 2
"""Steps before those that are measured. One look is left: the first step that is measured."""
GROWTH = (1, 2, 4)
"""Processes that growth is told of; those beyond what was asked for are timed only."""
DEFAULT = ("scnn", "transformer", "encoder24")


def by_processes(
    most: int,
    *,
    models: Sequence[str] = DEFAULT,
    steps: int = 9,
    batch: int | None = None,
    out: Path | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measured for 1, 2, 4 … processes, up to `most`. A model of blocks under fully_shard, too, by several.

    `batch`: of all processes together; each case has one of its own.
    """
    if most < 2:
        raise ValueError(f"processes is {most}; it must be 2 or more (lmdp bench alone measures one)")
    if batch is not None and batch < max(most, *GROWTH):
        raise ValueError(f"batch is {batch}; it must be at least {max(most, *GROWTH)}, one example for each process")
    sizes = sorted({most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})
    measured: dict[str, Any] = {"torch": torch.__version__, "steps": steps, "batch": batch, "cores": os.cpu_count()}
    measured |= {"models": {}, "growth": {}}
    for name in dict.fromkeys(case_name(model) for model in models):
        rows = measured["models"][name] = {}
        for size in sizes:
            say(f"{CASES[name].of_size(batch).title}: {size} processes")
            pairs = [(PLAIN, PRIVATE), *([(SHARDED, SHARDED_PRIVATE)] if CASES[name].blocks and size > 1 else [])]
            rows[size] = [_compared(size, name, steps, batch, pair) for pair in pairs]
        measured["growth"][name] = {
            size: (rows[size][0] if size in rows else _started(size, name, steps, batch, (PLAIN, PRIVATE))[0])[
                "seconds"
            ]
            for size in GROWTH
        }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "processes.json").write_text(json.dumps(measured, indent=1))
    return measured


def _compared(size: int, name: str, steps: int, batch: int | None, pair: tuple[str, str]) -> dict[str, Any]:
    """The steps of both in turns, and the peak of each by itself."""
    row = _started(size, name, steps, batch, pair)[0]
    peaks = {which: _started(size, name, 3, batch, (which,)) for which in pair}
    return row | {"peak_bytes": {which: max(one["peak"] for one in every) for which, every in peaks.items()}}


def processes_text(measured: dict[str, Any]) -> str:
    lines = [f"{measured['steps']} steps, one thread for each process, {measured['cores']} cores"]
    for name, rows in measured["models"].items():
        lines += ["", CASES[name].of_size(measured["batch"]).title]
        for plain, private in ((PLAIN, PRIVATE), (SHARDED, SHARDED_PRIVATE)):
            of_pair = {size: row for size, every in rows.items() for row in every if plain in row["seconds"]}
            lines += [HEAD.format(plain)] if of_pair else []
            lines += [_line(int(size), row, (plain, private)) for size, row in of_pair.items()]
        lines += [_grown(measured["growth"][name], measured["cores"])]
    return "\n".join(lines)


def _grown(seconds: dict[Any, dict[str, float]], cores: int) -> str:
    """How many times as fast as by one process a step of the same batch is."""
    sizes = {int(size): times for size, times in seconds.items()}
    told = ", ".join(
        f"{which} {' → '.join(f'{sizes[1][which] / times[which]:.2f}' for times in sizes.values())}"
        for which in (PLAIN, PRIVATE)
    )
    more = [size for size in sizes if size > cores]
    beyond = f" ({', '.join(map(str, more))} processes share {cores} cores: no gain is to be had)" if more else ""
    return f"times as fast by {' → '.join(map(str, sizes))} processes: {told}{beyond}"


def _line(size: int, row: dict[str, Any], pair: tuple[str, str]) -> str:
    plain, private = (1000 * row["seconds"][which] for which in pair)
    sent, peaks = ([row[of][which] / 1e6 for which in pair] for of in ("bytes", "peak_bytes"))
    most = row["most_bytes"][pair[1]] / 1e6
    low, high = row["quartiles"]
    return (
        f"{size:9d}  {plain:13.0f} ms  {private:4.0f} ms  {row['ratio']:5.2f} ({low:.2f}-{high:.2f})"
        f"  {sent[0]:14.3f}, {sent[1]:7.3f} ({most:.3f})  {peaks[0]:12.0f}, {peaks[1]:7.0f}"
    )


def _started(size: int, case: str, steps: int, batch: int | None, which: tuple[str, ...]) -> list[dict[str, Any]]:
    """What each of so many fresh processes has measured."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        every = [
            context.Process(target=_measure, args=(rank, size, folder, case, steps, batch, which))
            for rank in range(size)
        ]
        for process in every:
            process.start()
        for process in every:
            process.join()
        if any(process.exitcode for process in every):
            raise RuntimeError(f"a process that was measured ended with {[process.exitcode for process in every]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _measure(
    rank: int, size: int, folder: str, name: str, steps: int, batch: int | None, which: tuple[str, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    case, before = CASES[name].of_size(batch), forget_peak()
    answer = _timed({each: _CONTENDERS[each](case) for each in which}, steps)
    Path(folder, f"{rank}.json").write_text(json.dumps(answer | {"peak": peak() - before}))
    dist.barrier()
    dist.destroy_process_group()


def _timed(ready: dict[str, tuple[Step, Callable[[], int]]], steps: int) -> dict[str, Any]:
    """Medians of seconds and bytes of each contender (and most bytes: those of a step with a look), and of the ratios
    of steps that followed each other."""
    for step, _ in ready.values():
        for _ in range(UNTIMED):
            step()
    seconds: dict[str, list[float]] = {which: [] for which in ready}
    bytes_sent: dict[str, list[int]] = {which: [] for which in ready}
    for _ in range(steps):
        for which, (step, sent) in ready.items():
            before = sent()
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds[which].append(time.perf_counter() - start)
            bytes_sent[which].append(sent() - before)
    ratios = sorted(b / a for a, b in zip(*seconds.values())) if len(seconds) == 2 else []
    return {
        "seconds": {which: statistics.median(times) for which, times in seconds.items()},
        "bytes": {which: statistics.median(given) for which, given in bytes_sent.items()},
        "most_bytes": {which: max(given) for which, given in bytes_sent.items()},
        "ratio": statistics.median(ratios) if ratios else None,
        "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]] if ratios else None,
    }


def _share(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = case.batch()
    return x[dist.get_rank() :: dist.get_world_size()], y[dist.get_rank() :: dist.get_world_size()]


def _plain(case: Case) -> tuple[Step, Callable[[], int]]:
    """SGD under torch's own data parallel training, which sends every gradient once."""
    (x, y), model = _share(case), DistributedDataParallel(case.model())
    optimizer, ready = torch.optim.SGD(model.parameters(), lr=0.1), [0]
    step, size = _loop(model, optimizer, x, y), sum(p.nbytes for p in model.parameters() if p.requires_grad)

    def counted() -> None:
        step()
        ready[0] += dist.get_world_size() > 1

    return counted, lambda: ready[0] * size


def _private(case: Case, model: nn.Module | None = None) -> tuple[Step, Callable[[], int]]:
    (x, y), model = _share(case), model or case.model()
    optimizer, group = torch.optim.SGD(model.parameters(), lr=0.1), Group()
    whole = TensorDataset(*case.batch())
    lmdp.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(whole, batch_size=len(whole)),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        group=group,
    )
    return _loop(model, optimizer, x, y), lambda: group.sent


def _sharded(case: Case) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model: Any = case.model()
    for block in model.blocks:
        fully_shard(block)
    whole: nn.Module = fully_shard(model)
    return whole


def _plain_sharded(case: Case) -> tuple[Step, Callable[[], int]]:
    """Whatever torch gives to its two collectives in a step is counted."""
    (x, y), model, sent = _share(case), _sharded(case), [0]
    step = _loop(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)

    def counted() -> None:
        with ExitStack() as counting:
            for name in ("all_gather_single", "reduce_scatter_single"):
                counting.enter_context(_counting(name, sent))
            step()

    return counted, lambda: sent[0]


@contextmanager
def _counting(name: str, sent: list[int]) -> Iterator[None]:
    original = getattr(dist, name)

    def counted(output: Any = None, given: Any = None, *args: Any, **named: Any) -> Any:
        tensor = next(t for t in (given, named.get("input_tensor"), named.get("input")) if t is not None)
        sent[0] += tensor.nbytes
        return original(*(t for t in (output, given) if t is not None), *args, **named)

    setattr(dist, name, counted)
    try:
        yield
    finally:
        setattr(dist, name, original)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()

    return step


_CONTENDERS: dict[str, Callable[[Case], tuple[Step, Callable[[], int]]]] = {
    PLAIN: _plain,
    PRIVATE: _private,
    SHARDED: _plain_sharded,
    SHARDED_PRIVATE: lambda case: _private(case, _sharded(case)),
}
