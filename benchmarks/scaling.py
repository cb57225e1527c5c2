"""What a step of many processes costs, on paper, from what is measured here: `python benchmarks/scaling.py`.

Measured on one core of this machine: making and adding noise, and drawing coins. Computed: bytes and memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lmdp.accounting import Grid
from lmdp.private.noise import Noised, Shared
from lmdp.processes.group import BUCKET, RECORD

NUMBERS = 5_000_000
MODELS = {"110 M": 110e6, "1 B": 1e9}
PROCESSES = (8, 64, 1000)
EXAMPLES = (1e6, 1e8)


def seconds(work: Callable[[int], object]) -> float:
    """Of one core, for a million numbers; the median of seven."""
    times = []
    for number in range(1, 8):
        begin = time.process_time()
        work(number)
        times.append(time.process_time() - begin)
    return statistics.median(times) / NUMBERS * 1e6


def noise(step: int) -> object:
    ones, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(NUMBERS)
    return Shared(bytes(32)).noise(step).added(Noised([zeros], [zeros.clone()], ones, Grid.of(1.0)))


def main() -> None:
    torch.set_num_threads(1)
    of_noise, of_coins = seconds(noise), seconds(lambda draw: Shared(bytes(32)).uniforms(draw, NUMBERS))
    print(f"measured, one core: noise {1000 * of_noise:.1f} ms, coins {1000 * of_coins:.1f} ms for a million numbers\n")
    print("encoder  processes  sums, each sends  records, each gets  sums kept  noise")
    for name, numbers in MODELS.items():
        for size in PROCESSES:
            ring = 2 * (size - 1) / size * 4 * numbers
            print(
                f"{name:>7s}  {size:9d}  {ring / 1e9:13.2f} GB  {size * RECORD.size / 1e3:15.1f} kB"
                f"  {(4 * numbers + BUCKET) / 1e9:6.2f} GB  {numbers / 1e6 * of_noise:4.1f} s"
            )
    print("\nexamples  coins of a step, whole data  with sharded=True on 64")
    for examples in EXAMPLES:
        whole = examples / 1e6 * of_coins
        print(f"{examples:8.0e}  {whole:25.3f} s  {whole / 64:21.4f} s")


if __name__ == "__main__":
    main()
