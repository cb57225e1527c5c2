"""Extension points are real: what the page shows is added, used and taken out again; errors say whose they are."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp import extending
from lmdp.app.cli import main
from lmdp.app.config import Config
from lmdp.extending import YourPieceFailed
from lmdp.gradients.contract import Example
from lmdp.gradients.plan import RULES, rule_for
from lmdp.membership.attacks import ATTACKS, attacks_on
from lmdp.membership.evidence import Evidence
from lmdp.methods import METHODS, SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
NAMES = ("half-clip", "later-layers", "scale", "sparsity", "stripes")


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    before = [dict(table) for table in (METHODS, SOURCES, RULES, ATTACKS)]
    yield
    for name in (*NAMES, "mine"):
        extending.removed(name)
    assert [dict(table) for table in (METHODS, SOURCES, RULES, ATTACKS)] == before


@pytest.fixture
def names() -> dict[str, Any]:
    """Everything that the page defines."""
    defined: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), defined)
    return defined


def train(method: str, **options: Any) -> lmdp.PrivacyEngine:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), lmdp.PrivacyEngine()
    *_, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        **options,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return engine


def test_every_piece_of_the_page_is_short() -> None:
    assert len(BLOCKS) == 1 + len(NAMES)  # the first builds a model of the library
    assert all(len(block.splitlines()) <= 30 for block in BLOCKS)


def test_a_method_of_your_own_trains_certified_and_configurations_know_it(names: dict[str, Any]) -> None:
    assert train("half-clip").privacy_statement(1e-3).certified
    assert Config(method="half-clip").method == "half-clip"


def test_a_weight_source_of_your_own_is_used_and_is_never_certified(names: dict[str, Any]) -> None:
    engine = train("lm", weights="later-layers", public_every=1)
    first, second = engine.layer_weights or (0.0, 0.0)
    assert second > first
    (reason,) = engine.privacy_statement(1e-3).reasons
    assert "'later-layers', of your own" in reason


def test_a_rule_of_your_own_is_taken(names: dict[str, Any]) -> None:
    assert rule_for(names["Scale"](3)) is RULES["scale"]
    assert list(RULES)[-1] == "generic"


def test_an_attack_of_your_own_is_tried(names: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    members = rng.standard_normal((200, 8)) * (rng.random((200, 8)) < 0.3)
    evidence = Evidence(np.concatenate([members, rng.standard_normal((200, 8))]))
    score = attacks_on(evidence)["sparsity"](evidence, np.arange(400) < 200, 0)
    assert score(evidence)[:200].mean() > score(evidence)[200:].mean() + 1


def test_a_reader_of_your_own_is_loaded_by_its_spec(names: dict[str, Any]) -> None:
    source = lmdp.data.load("stripes?limit=100")
    assert len(source.train) == 100
    assert source.classes == ("across", "along")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e12), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(-5, 1e9))
def test_whatever_a_method_gives_one_example_moves_the_sum_by_no_more_than_it_says(rows: Any, wild: float) -> None:
    try:
        extending.method("mine", sensitivity=lambda layers: 2.0)(lambda norms, clip: norms * 0 + wild)
        norms = torch.tensor(rows, dtype=torch.float64)
        scales = METHODS["mine"].scales(norms, 0.5)  # type: ignore[misc]
        assert bool(((scales * norms).norm(dim=1) <= 1.0).all())
        alone = torch.cat([METHODS["mine"].scales(row[None], 0.5) for row in norms])  # type: ignore[misc]
        assert torch.equal(scales, alone)
    finally:
        extending.removed("mine")


def test_a_method_that_reads_the_batch_sees_one_example_at_a_time() -> None:
    extending.method("mine")(lambda norms, clip: norms * 0 + 1 / norms.sum())
    scales = METHODS["mine"].scales(torch.tensor([[1.0], [2.0]]), 1.0)  # type: ignore[misc]
    assert torch.allclose(scales, torch.tensor([[1.0], [0.5]]))


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("mine")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def use_method(function: Any) -> None:
    extending.method("mine")(function)


def use_source(function: Any) -> None:
    extending.weight_source("mine")(function)
    train("lm", weights="mine")


def use_rule(function: Any) -> None:
    extending.rule("mine", Scaled, examples=[Example(Scaled, (3,))])(function)


def use_attack(function: Any) -> None:
    extending.attack("mine")(function)
    evidence = Evidence(np.random.default_rng(0).standard_normal((40, 4)))
    attacks_on(evidence)["mine"](evidence, np.arange(40) < 20, 0)


def use_reader(function: Any) -> None:
    extending.reader("mine")(function)
    lmdp.data.load("mine")


USED = {
    extending.method: (use_method, [None, 3.0, torch.ones(1, 9)]),
    extending.weight_source: (use_source, [None, [1.0], [1.0, 2.0, 3.0], ["a", "b"], [1.0, -1.0], [1.0, float("nan")]]),
    extending.rule: (use_rule, [None, {}, {"weight": 1}, {"weight": torch.ones(4)}, {"bias": torch.ones(4, 3)}]),
    extending.attack: (
        use_attack,
        [None, np.ones(40), np.ones((39, 1)), np.full((40, 1), np.nan), np.full((40, 1), "a")],
    ),
    extending.reader: (use_reader, [None, "images"]),
}
"""How a piece of each table is used, and results that break its contract."""


def test_every_door_is_tried() -> None:
    doors = {
        door for name, door in vars(extending).items() if name in re.findall(r"^    (\w+)  ", extending.__doc__, re.M)
    }
    assert set(USED) == doors


@pytest.mark.parametrize("door", USED, ids=lambda door: door.__name__)
def test_an_error_in_a_piece_says_whose_it_is_and_where_it_stands(door: Any) -> None:
    with pytest.raises(YourPieceFailed, match=r"^your [a-z ]+ 'mine' \(.*test_extending.py:\d+\) failed: Zero.*: mine"):
        USED[door][0](fails)


@pytest.mark.parametrize("door, result", [(door, each) for door, (_, every) in USED.items() for each in every])
def test_a_result_that_breaks_the_contract_is_told_as_that_of_the_piece(door: Any, result: Any) -> None:
    with pytest.raises(YourPieceFailed, match=r"^your [a-z ]+ 'mine' \(.*test_extending.py:\d+\) gave"):
        USED[door][0](lambda *_: result)


def test_pieces_beside_a_model_are_known_to_the_command_line_and_to_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pieces", None)
    monkeypatch.delitem(sys.modules, "pieces")
    (tmp_path / "pieces.py").write_text("\n".join([BLOCKS[0], BLOCKS[1], BLOCKS[2], BLOCKS[5]]))
    options = [
        "--model",
        "pieces:net",
        "--data",
        "stripes",
        "--delta",
        "1e-3",
        "--epochs",
        "0.3",
        "--quiet",
        "--accountant",
        "rdp",
    ]
    assert main(["train", *options, "--method", "half-clip", "--out", "run"]) == 0
    assert main(["train", *options, "--weights", "later-layers", "--out", "other"]) == 2
    assert "your weight source 'later-layers'" in capsys.readouterr().err
    for name in NAMES:
        extending.removed(name)
    del sys.modules["pieces"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (["audit", "../run"], ["embed", "../run", "--out", "e.npz"], ["train", "--out", "../run", "--resume"]):
        assert main([*words, "--quiet"]) == 2
        said = f"trained with pieces:net from {tmp_path}: run there, or set PYTHONPATH={tmp_path}"
        assert capsys.readouterr().err.count(said) == 1
    with pytest.raises(ValueError, match=r"'pieces', which is not in .*; trained with pieces:net from"):
        lmdp.load("../run")
    monkeypatch.syspath_prepend(tmp_path)
    assert Config.load("../run/config.toml").method == "half-clip"
    assert main(["export", "../run", "--to", "given", "--quiet"]) == 0
    assert str(tmp_path) not in Path("given/model.json").read_text()


def test_the_recipe_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    (command,) = re.findall(r"^lmdp (train --recipe mine.toml .*)$", PAGE.read_text(), re.M)
    Path("mine.toml").write_text(recipe)
    assert main([*command.split(), "--epochs", "0.2", "--accountant", "rdp", "--quiet"]) == 0
    ran = Config.load("runs/mine/config.toml").to_dict()
    assert {key: ran[key] for key in tomllib.loads(recipe)} == {**tomllib.loads(recipe), "epochs": 0.2}


def test_a_rule_that_is_not_exact_is_refused_when_it_is_added() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    with pytest.raises(YourPieceFailed, match="is not exact"):
        extending.rule("mine", Shift, examples=[Example(Shift, (3,))])(lambda use: {"weight": use.output_grad * 1.01})
    assert "mine" not in RULES


def test_a_piece_with_the_name_of_a_built_in_of_another_table_is_taken_out_alone() -> None:
    before = METHODS["dpsgd"]
    extending.attack("dpsgd")(lambda evidence: evidence.features)
    assert extending.removed("dpsgd")
    assert "dpsgd" not in ATTACKS
    assert METHODS["dpsgd"] is before
    assert not extending.removed("dpsgd")


def test_an_attack_that_needs_what_no_evidence_has_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'logits'; evidence can have labels, views, outputs"):
        extending.attack("mine", needs=("labels", "logits"))(lambda evidence: evidence.features)
    assert {each.name for each in fields(Evidence)} == {"features", *extending.PARTS}


def test_a_name_that_is_taken_or_awkward_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is there already; choose another name$"):
        extending.method("dpsgd")(lambda norms, clip: norms)
    with pytest.raises(ValueError, match="letters, digits"):
        extending.attack("a b")(lambda evidence: evidence.features)
    assert not extending.removed("dpsgd")
    assert "dpsgd" in METHODS
