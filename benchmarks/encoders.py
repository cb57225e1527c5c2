"""`python benchmarks/encoders.py [MODEL …]`: processor time and peak memory of a private step, as ratios to SGD's.

One thread, steps in turns, models of `lmdp bench`: `lm` with its default weights, and the time of Opacus where it is
installed and runs. Processor time is what a step costs on a machine that others use as well; `lmdp bench` measures the
time that passes, on all threads.
"""

import sys
import time
import warnings

import torch

from lmdp.app.bench.cases import CASES, Case
from lmdp.app.bench.contenders import OURS, SGD, Step, contenders
from lmdp.app.bench.measure import peak_memory, prepared, spread, warm

MODELS = ("minilm", "siamese", "lora", "gpt2", "lstm", "transformer")
PEERS = ("opacus hooks", "opacus ghost")
STEPS = 5


def measured(name: str) -> str:
    seconds = processor_seconds(CASES[name])
    parts = [f"{CASES[name].title:40s}"]
    for who in (who for who in seconds if who != SGD):
        ratio = spread([mine / plain for mine, plain in zip(seconds[who], seconds[SGD])])
        parts.append(f"{who} {ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})")
    peaks = {who: peak_memory(name, who) for who in (SGD, OURS)}
    return "  ".join([*parts, f"memory {peaks[OURS] / peaks[SGD]:.2f} of {peaks[SGD] / 2**20:.0f} MB"])


def processor_seconds(case: Case) -> dict[str, list[float]]:
    batch, steps = case.batch(), dict[str, Step]()
    for who in (who for who in (SGD, OURS, *PEERS) if who in contenders()[0]):
        try:
            steps[who] = warm(prepared(case, who, batch))
            steps[who]()  # the third one still has looks
        except Exception:  # a peer may raise anything
            if who in (SGD, OURS):
                raise
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(STEPS):
        for who, step in steps.items():
            start = time.process_time()
            step()
            seconds[who].append(time.process_time() - start)
    return seconds


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for model in sys.argv[1:] or MODELS:
        print(measured(model), flush=True)
