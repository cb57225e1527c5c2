"""Seeded trainings and run folders are bit for bit what they were when they were recorded.

`expected.json` was written when sums and noise began to be rounded to a public grid, on the machine that it names.
There every bit must agree. Other processors round otherwise in their kernels: there the sums of the parameters must
agree to rounding. What attacks found rests on numpy, scipy and scikit-learn too, and their kernels differ between
processors of one name: where they are not those that are named, results may differ by what a few changed ranks move.
"folder" is a run folder of an earlier version, resumed and audited; "whole" is one of this version.
A change that is meant to alter results records anew, and says so under "Privacy" in the changelog.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy
import sklearn
import torch

from lmdp.gradients import compiled
from tests.record import folders
from tests.record.models import MODELS
from tests.tables import choices

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    version = torch.__version__.partition("+")[0]
    return f"torch {version}, {torch.backends.cpu.get_cpu_capability()}, {names[0] if names else '?'}"


def libraries() -> str:
    """What attacks are computed by, and the processor as its maker numbers it."""
    info = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info)}
    numbers = " ".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping"))
    versions = (f"{each.__name__} {each.__version__}" for each in (numpy, scipy, sklearn))
    return f"processor {numbers}, {', '.join(versions)}"


SAME_MACHINE = Path("/proc/cpuinfo").exists() and machine() == EXPECTED["machine"]
SAME_LIBRARIES = SAME_MACHINE and libraries() == EXPECTED["libraries"]


@pytest.mark.parametrize("loops", ["compiled", "PyTorch"])
def test_seeded_trainings_of_every_method_and_source_end_with_the_recorded_bits(loops: str) -> None:
    if loops == "compiled" and compiled.vector_bytes() is None:
        pytest.skip("the inner loops are not compiled here")
    switch = {compiled.SWITCH: "1" if loops == "compiled" else "0"}
    command = [sys.executable, "-W", "error", "-m", "tests.record.trainings"]
    done = subprocess.run(command, cwd=HERE.parents[1], env=os.environ | switch, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    now, then = json.loads(done.stdout), EXPECTED["trainings"][loops]
    assert set(now) == set(then) == {f"{model} {method} {source}" for model in MODELS for method, source in choices()}
    for name, training in then.items():
        assert now[name]["epsilon"] == pytest.approx(training["epsilon"], rel=1e-9), name
        assert now[name]["sums"] == pytest.approx(training["sums"], rel=1e-3, abs=1e-4), name
    if SAME_MACHINE:
        differing = [name for name in then if now[name]["digest"] != then[name]["digest"]]
        assert differing == []


@pytest.mark.slow
def test_a_whole_run_leaves_the_recorded_folder(tmp_path: Path) -> None:
    folders.make(tmp_path)
    folders.run(tmp_path, *folders.HALF, "--resume")
    _same_folder(folders.held(tmp_path), EXPECTED["whole"])
    assert all(now == stated for now, stated in folders.bound(tmp_path).values())


def test_run_folders_of_an_earlier_version_open_are_audited_and_resumed(tmp_path: Path) -> None:
    shutil.copytree(HERE / "old", tmp_path, dirs_exist_ok=True)
    folders.run(tmp_path, *folders.HALF, "--resume")
    folders.run(tmp_path, "audit", "lm")
    _same_folder(folders.held(tmp_path), EXPECTED["folder"])
    told = folders.bound(tmp_path)
    assert told["half"][0] == told["half"][1]  # finished by this version
    assert told["lm"][1] == ""  # and by that one
    assert json.loads((tmp_path / "lm" / "audit.json").read_text())["sha256"] == told["lm"][0]


def _same_folder(now: dict[str, Any], then: dict[str, Any]) -> None:
    assert list(now) == list(then)
    if SAME_MACHINE:
        exact = [name for name in then if SAME_LIBRARIES or not name.endswith("audit.json")]
        assert [name for name in exact if now[name] != then[name]] == []
    for name in (name for name in then if name.endswith("audit.json")):
        assert dict(_leaves(now[name])) == pytest.approx(dict(_leaves(then[name])), abs=0.01), name
    for name in (name for name in then if name.endswith((".toml", "privacy.json"))):
        assert now[name] == then[name]


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every number with its place; all else as text, which must agree."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, f"{at}/{key}")
    else:
        yield at, value if isinstance(value, int | float) else str(value)
