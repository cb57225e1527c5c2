"""One thread per test process, as the processes share the cores; and no instructions that the machine only claims."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmdp.gradients import compiled

pytest_plugins = ["tests.device.plugin"]  # the fixture `pretend`: a second device

torch.set_num_threads(1)

LINEAGE = tempfile.mkdtemp(prefix="lmdp-lineage-")
atexit.register(shutil.rmtree, LINEAGE, ignore_errors=True)
os.environ["LMDP_LINEAGE"] = LINEAGE


@pytest.fixture(autouse=True)
def _released_weights_are_remembered_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, by the processes that it starts too: no test begins with what another has released."""
    monkeypatch.setenv("LMDP_LINEAGE", f"{LINEAGE}/{uuid.uuid4().hex}")


ISA = "ONEDNN_MAX_CPU_ISA"
SHORT_PRODUCTS = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a; torch.nn.functional.linear(a, a)"


def _claims_tiles() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()


# Some virtual machines announce Intel's AMX and stop a process that uses it, as torch does for products in bfloat16.
if ISA not in os.environ and _claims_tiles():
    tried = subprocess.run([sys.executable, "-c", SHORT_PRODUCTS], stderr=subprocess.DEVNULL, check=False)
    os.environ[ISA] = "ALL" if tried.returncode == 0 else "AVX512_CORE_FP16"

# Laws that must hold with the compiled loops and without them.
WIDTHS = [width for width in (64, 32, 16) if width <= (compiled.vector_bytes() or 0)]
"""Of the vectors that this processor has; on some there is only one."""


def _named(width: int | None) -> str:
    return f"{width} bytes" if width else "PyTorch"


@pytest.fixture(scope="module", params=[*WIDTHS, None], ids=_named)
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """By compiled loops of every width, and by PyTorch."""
    yield from _by(request.param)


BY_PYTORCH = pytest.param(None, marks=pytest.mark.slow) if WIDTHS else None
"""Slow where there are compiled loops; `tests/record` compares both in every run."""


@pytest.fixture(scope="module", params=[*WIDTHS[:1], BY_PYTORCH], ids=_named)
def widest_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """By compiled loops, and by PyTorch."""
    yield from _by(request.param)


def _by(width: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "vector_bytes", lambda: width)
        yield
