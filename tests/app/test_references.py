"""References of an audit: the run's own training again on random halves, cell by cell, to be continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lmdp.app import cli, pipeline
from lmdp.app.config import Config
from lmdp.app.network import Network
from lmdp.app.progress import Show
from lmdp.app.references import _configuration, train_references
from lmdp.app.runs import RunFolder
from lmdp.audit import Reference
from tests.app.test_cli import SMALL, make_npz


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that learns its 120 examples by heart."""
    folder = tmp_path_factory.mktemp("trained")
    spec = make_npz(folder / "private.npz", train=120, test=120)
    given = [*SMALL, "--data", spec, "--method", "sgd", "--seed", "3", "--out", str(folder / "run"), "--quiet"]
    assert cli.main(["train", *given]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def references(run: Path, number: int, workers: int = 1, show: Show | None = None) -> list[Reference]:
    folder, quiet = RunFolder(run), Show(quiet=True)
    source = pipeline.private_data(folder.config(), quiet)
    assert source.test is not None
    inside = source.train.take(range(100))  # the other 20 are in every reference
    network = Network.of(folder.config(), source)
    return train_references(
        *(number, folder, source.train, inside, source.test, network, show or quiet),
        risk=None,
        public=None,
        workers=workers,
    )


def test_each_reference_has_half_of_the_audited_examples_and_everything_else(run: Path) -> None:
    first, second = references(run, 2)
    for reference in (first, second):
        assert reference.members is not None
        assert reference.nonmembers is not None
        assert 30 < np.sum(reference.members) < 70
        assert 36 < np.sum(reference.nonmembers) < 84
    assert list(first.members) != list(second.members)  # type: ignore[arg-type]
    saved = json.loads((run / "references/1/cell.json").read_text())
    assert saved["examples"] == 20 + np.sum(first.members) + np.sum(first.nonmembers)
    assert "Never publish" in (run / "references/PRIVATE.txt").read_text()


def test_finished_cells_stay_and_missing_and_changed_ones_are_trained_again(run: Path) -> None:
    references(run, 2)
    weights = {k: load_file(run / f"references/{k}/model.safetensors") for k in (1, 2)}
    written = (run / "references/1/model.safetensors").stat().st_mtime_ns
    (run / "references/2/cell.json").unlink()  # as if it had been broken off
    references(run, 2)
    assert (run / "references/1/model.safetensors").stat().st_mtime_ns == written
    again = load_file(run / "references/2/model.safetensors")
    assert all(np.array_equal(again[name], weights[2][name]) for name in again)
    record = json.loads((run / "references/1/cell.json").read_text())
    (run / "references/1/cell.json").write_text(json.dumps(record | {"content": "0" * 32}))
    references(run, 1)
    assert (run / "references/1/model.safetensors").stat().st_mtime_ns > written


def test_every_seed_of_a_run_gives_its_references_seeds_that_a_configuration_takes() -> None:
    for seed in (0, 3, 2**31 - 1):
        seeds = [_configuration(Config(data="digits", seed=seed), k).seed for k in range(1, 40)]
        assert len(set(seeds)) == 39


@pytest.mark.slow
def test_processes_train_the_same_references(run: Path) -> None:
    references(run, 2, workers=2)
    weights = [load_file(run / f"references/{k}/model.safetensors") for k in (1, 2)]
    shutil.rmtree(run / "references")
    references(run, 2, workers=1)
    for k, before in zip((1, 2), weights):
        after = load_file(run / f"references/{k}/model.safetensors")
        assert all(np.array_equal(after[name], before[name]) for name in before)


def test_an_audit_with_references_says_so_and_says_what_it_chose(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert cli.main(["audit", str(run), "--references", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["references"] == 1
    assert all(" + " in layer["attack"] for layer in report["layers"])


def test_what_cannot_have_references_is_refused(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "e.npz", member=rng.normal(size=(120, 4)), nonmember=rng.normal(size=(120, 4)))
    assert cli.main(["audit", str(tmp_path / "e.npz"), "--references", "2"]) == 2
    assert "nothing to train" in capsys.readouterr().err
    assert cli.main(["audit", str(run), "--references", "-1"]) == 2
    assert "ask for 1 to 256" in capsys.readouterr().err
