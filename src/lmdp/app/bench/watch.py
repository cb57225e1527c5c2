"""A stopwatch on functions of a running command: `python -m lmdp.app.bench.watch FILE train …` runs `lmdp train …`.

Writes to FILE, as JSON, the seconds of every call of each watched function; of a generator, those of every item.
Nothing else is slowed, as a profiler would slow the accountant's loops.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

WATCHED = {
    "stepping": ["lmdp.app.training:steps_of"],
    "release": ["lmdp.private.step:PrivateStep.release"],
    "loading": ["lmdp.private.sampling:PoissonLoader.__iter__"],
    "noise": ["lmdp.private.noise:Entropy.noise", "lmdp.private.noise:GaussianNoise.added"],
    "ledger": ["lmdp.accounting:Ledger.check_next", "lmdp.accounting:Ledger.record_step"],
    "epsilon": ["lmdp.accounting:Ledger.epsilon"],
    "logging": ["lmdp.app.training:Clock.draw", "lmdp.app.training:_row", "lmdp.app.training:_publish"],
    "evaluation": ["lmdp.app.network:test_accuracy"],
}
"""Parts of a training, and where they happen."""

Seconds = dict[str, list[float]]


def watch(part: str, place: str, seconds: Seconds) -> None:
    """From now on, calls of the function at `place` are timed."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, name, _timed(getattr(owner, name), seconds[part]))


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        if isinstance(result, GeneratorType):
            return _timed_items(result, seconds)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def _timed_items(items: Iterator[Any], seconds: list[float]) -> Iterator[Any]:
    while True:
        begin = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            seconds.append(time.perf_counter() - begin)
        yield item


def main(file: Path, words: list[str]) -> None:
    seconds: Seconds = defaultdict(list)
    for part, places in WATCHED.items():
        for place in places:
            watch(part, place, seconds)
    sys.argv = ["lmdp", *words]
    try:
        runpy.run_module("lmdp", run_name="__main__")
    finally:
        file.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
