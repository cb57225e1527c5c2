"""A step of a recurrent text classifier: seconds and peak memory of non-private SGD, lmdp and Opacus, in one run.

    python benchmarks/recurrent.py [--kind LSTM] [--layers 1] [--repeats 11] [--packed]

Embedding 128, 256 units, 64 texts of 64 words. Opacus runs its own DPLSTM, DPGRU or DPRNN, and never packed here.
Processor seconds on one thread, in turns; bytes above the idle process at the highest point of three steps, each alone
in a fresh process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lmdp.app.bench import contenders, measure

WORDS, EMBEDDING, UNITS, BATCH, TIMES, CLASSES = 10_000, 128, 256, 64, 64, 4
NAMES = ("sgd", "lmdp dpsgd", "lmdp lm", "opacus hooks")


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int, packed: bool) -> None:
        super().__init__()
        self.embed, self.head, self.packed = nn.Embedding(WORDS, EMBEDDING), nn.Linear(UNITS, CLASSES), packed
        self.layer = kind(EMBEDDING, UNITS, num_layers=layers, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.packed:
            lengths = (words > 0).sum(1)
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            last = self.layer(x)[1]
            return self.head((last[0] if isinstance(last, tuple) else last)[-1])
        return self.head(self.layer(x)[0][:, -1])


def step_of(name: str, options: argparse.Namespace) -> contenders.Step:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (BATCH, TIMES), generator=generator)
    if options.packed:
        lengths = torch.randint(TIMES // 2, TIMES + 1, (BATCH, 1), generator=generator)
        words = words * (torch.arange(TIMES) < lengths)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    torch.manual_seed(0)
    if name.startswith("opacus"):
        from opacus import layers as dp

        model = Classifier(getattr(dp, f"DP{options.kind}"), options.layers, packed=False)
        return contenders.opacus(name.split()[1])(model, words, y)
    model = Classifier(getattr(nn, options.kind), options.layers, options.packed)
    return contenders.sgd(model, words, y) if name == "sgd" else contenders.private(name.split()[1])(model, words, y)


def peak(name: str, options: argparse.Namespace) -> int:
    if name.startswith("opacus"):
        import opacus  # noqa: F401  (its own size is not counted)
    before = measure._reset_peak()
    step = step_of(name, options)
    for _ in range(3):
        step()
    return measure._peak() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="LSTM", choices=["LSTM", "GRU", "RNN"])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--peak", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.peak:
        print(peak(options.peak, options))
        return
    steps = {name: measure.warm(step_of(name, options)) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(options.repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    print(f"{options.kind}, {options.layers} layers{', packed' if options.packed else ''}")
    base_time, base_peak = statistics.median(seconds["sgd"]), 0
    for name in NAMES:
        command = [sys.executable, "-W", "ignore", *sys.argv, "--peak", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        most = int(done.stdout.split()[-1])
        base_peak = base_peak or most
        middle = statistics.median(seconds[name])
        print(f"{name:14s} {1e3 * middle:8.1f} ms {middle / base_time:6.2f} x", end="")
        print(f"   {most / 2**20:7.1f} MB {most / base_peak:5.2f} x", flush=True)


if __name__ == "__main__":
    main()
