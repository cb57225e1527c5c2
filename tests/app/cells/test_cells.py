"""Cells: named by what was chosen, kept whole, measured once, and gone on with after anything."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmdp.app.cells import run
from lmdp.app.cells.cell import HELD_OUT, IN_SAMPLE, RISK, TRAIN, Cell, estimate_for
from lmdp.app.cells.run import measure_all, measured_rates
from lmdp.app.cells.sources import FILES, Sources
from lmdp.app.cells.store import Store
from lmdp.app.progress import Show

VALUES = {"method": "lm", "epsilon": 5.0, "seed": 1, "model": "s-cnn", "data": "mnist", "shadow": "digits"}


def cell(**changed: Any) -> Cell:
    return Cell.of(TRAIN, "mnist", {**VALUES, **changed})


def test_a_cell_is_named_by_its_values_whatever_their_order() -> None:
    backwards = Cell.of(TRAIN, "mnist", dict(reversed(VALUES.items())))
    assert backwards == cell()
    assert backwards.name == cell().name
    others = [
        cell(epsilon=8.0),
        cell(sample_rate=0.1),  # not in the readable part of the name
        Cell.of(RISK, "mnist", VALUES),
        Cell.of(TRAIN, "mnist", VALUES, rates=HELD_OUT),
        Cell.of(TRAIN, "mnist", VALUES, in_sample=True),
    ]
    assert len({each.name for each in [cell(), *others]}) == 6
    assert all("/" not in each.name for each in others)


def test_a_cell_comes_back_from_its_dictionary() -> None:
    one = Cell.of(TRAIN, "mnist", VALUES, rates=HELD_OUT, in_sample=True, examples=7)
    assert Cell.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_results_are_found_again_and_damaged_files_count_as_missing(tmp_path: Path) -> None:
    store, one = Store(tmp_path), cell()
    assert one not in store
    store.put(one, {"accuracy": 0.123456789, "curve": [(1.0, 0.5)]})
    found_again = store.get(one)
    assert found_again is not None
    assert found_again.result == {"accuracy": 0.12346, "curve": [[1.0, 0.5]]}
    assert store.missing([one, cell(seed=2), one]) == [cell(seed=2)]
    (file,) = (tmp_path / "cells").iterdir()
    file.write_text(file.read_text()[:-9])
    assert one not in store
    other = {"cell": cell(seed=2).to_dict(), "result": {}}
    file.write_text(json.dumps(other))  # under a wrong name
    assert one not in store


def test_what_is_missing_is_measured_and_what_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(cell: Cell, sources: Sources, rates: Mapping[str, float] | None, device: str) -> dict[str, Any]:
        assert device == "mps"
        measured.append(cell.name)
        if cell.seed == 2 and measured.count(cell.name) == 1:
            raise ValueError("the disk\nis full")
        return {"heldout": {"fc": {"error_rate": 0.4}}, "in_sample": {"fc": [0.9, 0.8]}, "rates": dict(rates or {})}

    monkeypatch.setattr(run, "_measured", measure)
    wanted = [Cell.of(TRAIN, "mnist", {**VALUES, "seed": seed}, rates=HELD_OUT) for seed in (1, 2)]
    cells = [*wanted, *map(estimate_for, wanted[:1])]
    stream = io.StringIO()

    def go() -> dict[str, str]:
        return measure_all(cells, tmp_path, Sources(), Show(stream=stream), rates=measured_rates, jobs=1, device="mps")

    assert go() == {wanted[1].name: "the disk is full"}
    assert measured[0] == estimate_for(wanted[0]).name  # trainings may need it
    first = Store(tmp_path).get(wanted[0])
    assert first is not None
    assert first.result["rates"] == {"fc": 0.4}
    assert go() == {}
    again = len(measured)
    assert go() == {}
    assert len(measured) == again
    assert "3 of 3 cells are there already" in stream.getvalue()


def test_rates_come_from_the_estimate_on_the_same_shadow_data_with_the_same_seed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    by = {kind: Cell.of(TRAIN, "mnist", VALUES, rates=kind) for kind in (HELD_OUT, IN_SAMPLE)}
    assert measured_rates(by[HELD_OUT], store) is None
    store.put(estimate_for(by[HELD_OUT]), {"heldout": {"fc": {"error_rate": 0.4}}, "in_sample": {"fc": [0.75, 0.7]}})
    assert measured_rates(by[HELD_OUT], store) == {"fc": 0.4}
    assert measured_rates(by[IN_SAMPLE], store) == {"fc": 0.25}
    assert measured_rates(by[IN_SAMPLE].changed(seed=2), store) is None
    assert measured_rates(by[IN_SAMPLE].changed(shadow="svhn"), store) is None
    assert measured_rates(cell(), store) is None


def test_data_sets_are_taken_from_a_folder_with_the_options_of_the_cell(tmp_path: Path) -> None:
    (tmp_path / f"{FILES['cifar10'][1]}.npz").touch()
    sources = Sources.of(tmp_path, {"mnist": "npz:mine.npz?half=1"})
    assert sources.resolved("cifar10?limit=5") == f"npz:{tmp_path}/{FILES['cifar10'][1]}.npz?limit=5"
    assert sources.resolved("mnist?limit=5") == "npz:mine.npz?half=1&limit=5"
    assert sources.resolved("svhn") == "svhn"
    with pytest.raises(ValueError, match=r"imagenet.npz into a --data-folder"):
        sources.resolved("imagenet?limit=5")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Sources.of(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds none of mnist\.npz"):
        Sources.of(tmp_path / "empty")
