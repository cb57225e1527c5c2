"""`python -m tests.fuzz.long --inputs 100000`: mutated files for every reader, with a bound on memory and time.

Prints a line per reader: how many inputs, how many were read all the same, how many refused. Anything else than a
ValueError or OSError, a reader that takes longer than 5 seconds, and a file written outside of the sandbox end the run
with the input that caused it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.parsers import Parser, outcome, parsers

SECONDS, MEMORY = 5, 6 * 2**30
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Strayed(BaseException):
    """A reader wrote outside of the sandbox, or took too long."""


def fence(sandbox: Path) -> None:
    """From now on, opening a file for writing outside of the sandbox raises; so does a reader that hangs."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes) or not (arguments[2] or 0) & WRITING:
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((str(sandbox), "/dev/null")):
            raise Strayed(f"{path} was opened for writing")

    def late(*_: Any) -> None:
        raise Strayed(f"took longer than {SECONDS} s")

    sys.addaudithook(hook)
    signal.signal(signal.SIGALRM, late)


def attack(parser: Parser, number: int, folder: Path, keep: Path) -> str:
    raw = parser.mutate(random.Random(f"{parser.name} {number}"), parser.valid)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return outcome(parser, raw, folder)
    except (Exception, Strayed) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        culprit = keep / f"{number}-{parser.name}"
        culprit.write_bytes(raw)
        print(f"{parser.name}, input {number}: {type(error).__name__}: {error}; kept as {culprit}")  # noqa: T201
        traceback.print_exc(limit=-3, file=sys.stdout)
        return f"FAILED {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--inputs", type=int, default=100_000, help="over all readers")
    options.add_argument("--only", default="", help="a part of a reader's name")
    options.add_argument("--first", type=int, default=0, help="number of the first input, to go on from an earlier run")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = [parser for parser in parsers() if chosen.only in parser.name]
    each, failed = -(-chosen.inputs // len(table)), 0
    with tempfile.TemporaryDirectory() as folder_name:
        sandbox = Path(folder_name).resolve()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        fence(sandbox)
        for parser in table:
            start, counts = time.monotonic(), Counter[str]()
            folder = sandbox / parser.name.replace(".", "-")
            folder.mkdir()
            for number in range(chosen.first, chosen.first + each):
                counts[attack(parser, number, folder, sandbox)] += 1
                if sum(count for name, count in counts.items() if name.startswith("FAILED")) >= 5:
                    break
            failed += sum(count for name, count in counts.items() if name.startswith("FAILED"))
            told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            seconds = time.monotonic() - start
            print(f"{parser.name:24} {sum(counts.values()):7} inputs: {told} ({seconds:.0f} s)", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
