"""What a step of many processes costs, on paper, from what is measured here: `python benchmarks/scaling.py`.

Measured on one core of this machine: making and adding noise, drawing coins, and the accountant. Computed: bytes and
memory of what lasts through a step (not of activations, which follow from the batch of a process).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lmdp.accounting import Grid, Ledger, Mechanism, calibrate_noise
from lmdp.private.noise import Noised, Shared
from lmdp.processes.group import BUCKET, RECORD

NUMBERS = 5_000_000
MODELS = {"110 M": 110e6, "1 B": 1e9}
PROCESSES = (8, 64, 1000)
EXAMPLES = (1e6, 1e8)
LARGEST = {"110 M": 24e6, "1 B": 64e6}
"""Numbers of the word vectors, the largest unit that fully_shard gathers."""
UNITS = {"110 M": 13, "1 B": 25}
"""That fully_shard was called on: 12 and 24 blocks, and the model itself."""
PASS_ON = 1e-4
"""Seconds until a record is with the next process of a ring. Assumed: there was no network to measure it on."""
HELD = 5
"""Weights, sums, released gradient, and the two averages of Adam: of 4 bytes each."""


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
    print("\nencoder  processes  memory: data parallel  fully_shard, with the largest unit and its sums whole")
    for name, numbers in MODELS.items():
        for size in PROCESSES:
            sharded = 4 * (HELD * numbers / size + 2 * LARGEST[name])
            print(f"{name:>7s}  {size:9d}  {4 * HELD * numbers / 1e9:18.2f} GB  {sharded / 1e9:8.2f} GB")
    shards()
    print("\nexamples  coins of a step, whole data  with sharded=True on 64")
    for examples in EXAMPLES:
        whole = examples / 1e6 * of_coins
        print(f"{examples:8.0e}  {whole:25.3f} s  {whole / 64:21.4f} s")
    charge()


def shards() -> None:
    """What fully_shard exchanges in a step. A unit is gathered forward and backward, and its sums are scattered: each
    after a record of all processes, one more of which comes before the release, one after the other."""
    print("\nencoder  processes  fully_shard: gathered and scattered, each sends  records of all  each gets  passed on")
    for name, numbers in MODELS.items():
        for size in PROCESSES:
            sent, records = 3 * (size - 1) / size * 4 * numbers, 3 * UNITS[name] + 1
            gets = records * size * RECORD.size
            print(
                f"{name:>7s}  {size:9d}  {sent / 1e9:45.2f} GB  {records:14d}  {gets / 1e6:6.1f} MB"
                f"  {records * (size - 1) * PASS_ON:7.2f} s"
            )


def charge() -> None:
    """Of 10,000 steps at q = 0.001 by both accountants: what one step takes, an epsilon asked for, and calibration."""
    print("\naccountant  a step charged  an epsilon  calibration")
    for accountant in ("rdp", "pld"):
        begin = time.process_time()
        sigma = calibrate_noise(
            target_epsilon=8.0, target_delta=1e-6, sample_rate=0.001, steps=10_000, accountant=accountant
        )
        calibrated = time.process_time() - begin
        ledger = Ledger(Mechanism("dpsgd", "none", 1.0, 1.0, sigma, 0.001, 1000.0, accountant), 8.0, 1e-6, 10_000)
        begin = time.process_time()
        for _ in range(1000):
            ledger.check_next()
            ledger.record_step()
        step = (time.process_time() - begin) / 1000
        begin = time.process_time()
        ledger.epsilon(1e-6)
        print(f"{accountant:>10s}  {1e6 * step:11.1f} us  {time.process_time() - begin:8.2f} s  {calibrated:9.1f} s")


if __name__ == "__main__":
    main()
