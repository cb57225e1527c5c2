"""The bench measures what it says, names what is missing, and writes what it promises. Times are not tested."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from lmdp.bench import contenders, measure, run
from lmdp.bench.cases import CASES, Case


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Case("a small model", lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), (6, 3, 2, 2))
    monkeypatch.setitem(CASES, "scnn", small)


def test_the_bench_times_all_contenders_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    lines: list[str] = []
    found = run(models=["scnn"], steps=2, memory=False, out=tmp_path, say=lines.append)
    rows = found["models"]["scnn"]["rows"]
    assert rows["non-private SGD"]["time"] == pytest.approx(1.0)
    ours = ("dpsgd", "autos", "psac", "lm (private)", "lm (public)", "lm (fixed)", "lm (batch)", "lm-optimal (public)")
    assert {f"lmdp {name}" for name in ours} <= set(rows)
    assert "naive torch.func lm" in rows
    assert found["models"]["scnn"]["error"] < 1e-5
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    drawn = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert set(rows) <= {t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert any("largest relative error" in line for line in lines)


def test_a_missing_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    lines: list[str] = []
    found = run(models=["scnn"], steps=2, only=["dpsgd"], memory=False, say=lines.append)
    assert any("opacus is not installed" in line for line in lines)
    assert set(found["models"]["scnn"]["rows"]) == {"non-private SGD", "lmdp dpsgd"}


def test_a_contender_that_cannot_run_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(contenders, "naive", broken)
    lines: list[str] = []
    found = run(models=["scnn"], steps=2, only=["naive"], memory=False, say=lines.append)
    assert set(found["models"]["scnn"]["rows"]) == {"non-private SGD"}
    assert any("no such kernel" in line for line in lines)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    peak = measure.peak_memory("scnn", "lmdp dpsgd")
    assert peak is not None
    assert 2**20 < peak < 2**31
    assert measure.peak_memory("scnn", "no such contender") is None


def test_names_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        run(models=["nosuch"])
    with pytest.raises(ValueError, match="steps is 1"):
        run(models=["scnn"], steps=1)


def test_the_transformer_of_the_bench_is_private_as_it_stands() -> None:
    with torch.random.fork_rng():
        assert measure.exactness(CASES["transformer"], examples=2) < 1e-4
