"""How long all attacks on a D-CNN take: python benchmarks/attacks.py --examples 10000

So many members and as many others (random images: what they are does not matter for the time), all 8 layers, controls
included. `OMP_NUM_THREADS` says how many threads torch, and so the attacks, may use.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import torch

import lmdp
from lmdp.membership import instrument
from lmdp.models import build, fresh


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--examples", type=int, default=10_000)
    number = options.parse_args().examples
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2 * number, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (2 * number,), generator=generator)
    model = fresh(lambda: build("d-cnn", (3, 32, 32), 10), 0)
    spent: dict[str, list[float]] = defaultdict(list)
    for name in ("collect", "attack_layers", "attack_output", "attack_controls"):
        _timed(name, spent)
    wall, processor = time.perf_counter(), time.process_time()
    report = lmdp.audit(model, (x[:number], y[:number]), (x[number:], y[number:]))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{number} + {number} examples, {len(report.layers)} layers, {torch.get_num_threads()} threads")
    print(f"{wall:.0f} s, {processor:.0f} s of processor time")
    for name, (seconds, busy) in spent.items():
        print(f"  {name:16} {seconds:6.1f} s, {busy:6.1f} s of processor time")


def _timed(name: str, spent: dict[str, list[float]]) -> None:
    from lmdp.audit import model

    inner = getattr(instrument, name)

    def timed(*args: object, **options: object) -> object:
        wall, processor = time.perf_counter(), time.process_time()
        result = inner(*args, **options)
        spent[name] = [time.perf_counter() - wall, time.process_time() - processor]
        return result

    setattr(model, name, timed)


if __name__ == "__main__":
    main()
