"""What a cell is measured on."""

from __future__ import annotations

from importlib import import_module

import pytest
from torch import nn

from lmdp.app.bench.cases import CASES, Case
from lmdp.app.cells.cell import STEP, Cell
from lmdp.app.cells.measure import _source, _thinned, measure
from lmdp.app.cells.sources import Sources
from lmdp.app.config import Config


def test_members_are_drawn_anew_for_every_seed_and_alike_for_every_method() -> None:
    base = Config(data="digits", holdout=0.3, seed=1, method="dpsgd")
    one = _source(base)
    sides = [set(part.digests(b"k")) for part in (one.train, one.held_out)]  # type: ignore[union-attr]
    assert not sides[0] & sides[1]
    for changed in ({"method": "sgd"}, {"epsilon": 1.0}, {"learning_rate": 3.0}):
        same = _source(base.changed(**changed))
        assert set(same.train.digests(b"k")) == sides[0]
    other = _source(base.changed(seed=2))
    members = set(other.train.digests(b"k"))
    assert len(other.train) == len(one.train)
    assert members | set(other.held_out.digests(b"k")) == sides[0] | sides[1]  # type: ignore[union-attr]
    assert 0.5 < len(members & sides[0]) / len(sides[0]) < 0.9  # 0.7 by chance


def test_a_long_curve_is_thinned_by_means_of_neighbours() -> None:
    curve = [(float(i), float(i % 2)) for i in range(600)]
    thin = _thinned(curve)
    assert len(thin) == 60
    assert {y for _, y in thin} == {0.5}
    assert _thinned(curve[:3]) == curve[:3]
    assert _thinned([]) == []


def test_a_timing_keeps_every_turn_of_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Case("a small model", lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), (6, 3, 2, 2))
    monkeypatch.setitem(CASES, "scnn", small)
    monkeypatch.setattr(import_module("lmdp.app.bench.run"), "peak_memory", lambda *_, **__: 7)
    result = measure(Cell.of(STEP, "mnist", {"model": "s-cnn"}, examples=3), Sources(), None)
    assert {len(turns) for turns in result["turns"].values()} == {3}
    assert {"lmdp dpsgd", "lmdp lm (private)", "lmdp lm-optimal (batch)"} <= set(result["turns"])
    assert result["peak_bytes"]["lmdp dpsgd"] == 7
    assert result["seconds"] > 0
