"""Prints what becomes of every case: python -m tests.certified.table [broken|sound] [part of a name]"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.certified.broken import BROKEN
from tests.certified.case import Case
from tests.certified.sound import SOUND

TABLES = {"broken": BROKEN, "sound": SOUND}


PATIENCE = 180
"""Seconds after which a case is given up."""


def give_up(*_: Any) -> None:
    raise TimeoutError(f"no answer in {PATIENCE} seconds")


def line(case: Case) -> str:
    begun = time.perf_counter()
    signal.alarm(PATIENCE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = str(case.outcome(Path(folder)))
        except pytest.skip.Exception as reason:
            outcome = f"skipped: {reason}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            outcome = f"crashed: {type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
    return f"{case.name:42} {time.perf_counter() - begun:5.1f} s  {outcome}"


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, give_up)
    chosen = [word for word in words if word in TABLES] or list(TABLES)
    parts = [word for word in words if word not in TABLES]
    for kind in chosen:
        print(f"\n{kind}")  # noqa: T201
        for case in TABLES[kind].values():
            if all(part in case.name for part in parts):
                print(line(case), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
