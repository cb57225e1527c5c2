"""`lmdp bench --processes`: what is measured is there, and two processes send little more than DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmdp.app import cli
from lmdp.app.bench.processes import PLAIN, PRIVATE, processes_text


def test_options_of_other_measurements_and_one_process_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--processes", "2", "--only", "lm"]) == 2
    assert "it takes --models, --steps, --batch and --out" in capsys.readouterr().err
    assert cli.main(["bench", "--processes", "2", "--batch", "3"]) == 2
    assert "batch is 3; it must be at least 4" in capsys.readouterr().err
    assert cli.main(["bench", "--batch", "3"]) == 2
    assert "--batch is 3, which is of --processes: leave it out" in capsys.readouterr().err
    assert cli.main(["bench", "--processes", "1"]) == 2
    assert "processes is 1; it must be 2 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_send_little_more_than_ddp(tmp_path: Path) -> None:
    assert cli.main(["bench", "--processes", "2", "--models", "s-cnn", "--steps", "2", "--out", str(tmp_path)]) == 0
    measured = json.loads((tmp_path / "processes.json").read_text())
    (alone,), (two,) = measured["models"]["scnn"]["1"], measured["models"]["scnn"]["2"]
    assert alone["bytes"] == {PLAIN: 0, PRIVATE: 0}
    assert two["bytes"][PRIVATE] <= 1.05 * two["bytes"][PLAIN]
    assert all(peak > 0 for peak in two["peak_bytes"].values())
    assert list(measured["growth"]["scnn"]) == ["1", "2", "4"]
    assert "S-CNN" in processes_text(measured)
    assert "times as fast by 1 → 2 → 4 processes: SGD, DDP 1.00 → " in processes_text(measured)
