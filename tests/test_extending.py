"""Extension points are real: what the page shows is added, used and taken out again; errors say whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    assert len(BLOCKS) == len(NAMES)
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


def test_an_error_in_a_piece_says_whose_it_is() -> None:
    def broken(number: int) -> list[float]:
        return [1 / 0, number]

    extending.weight_source("mine")(broken)
    with pytest.raises(YourPieceFailed, match=r"your weight source 'mine' \(.*test_extending.py:\d+\) failed: Zero"):
        train("lm", weights="mine")


def test_a_method_of_the_wrong_shape_and_a_rule_that_is_not_exact_are_refused_when_they_are_added() -> None:
    with pytest.raises(YourPieceFailed, match="your method 'mine' gave"):
        extending.method("mine")(lambda norms, clip: norms[:, :0])

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    with pytest.raises(YourPieceFailed, match="is not exact"):
        extending.rule("mine", Shift, examples=[Example(Shift, (3,))])(lambda use: {"weight": use.output_grad * 1.01})
    assert "mine" not in RULES


def test_a_name_that_is_taken_or_awkward_is_refused() -> None:
    with pytest.raises(ValueError, match="is there already"):
        extending.method("dpsgd")(lambda norms, clip: norms)
    with pytest.raises(ValueError, match="letters, digits"):
        extending.attack("a b")(lambda evidence: evidence.features)
    assert not extending.removed("dpsgd")
    assert "dpsgd" in METHODS
