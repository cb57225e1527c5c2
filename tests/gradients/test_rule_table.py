"""The table of rules: every record is exact on its examples, and one record is all that a new rule needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.plan import RULES, rule_for
from lmdp.gradients.rows import Rows, Stored
from lmdp.layers import LayerMap
from tests.gradients.reference import Comparison, compare, quadratic, split

pytestmark = pytest.mark.usefixtures("widest_loops")
DOCS = Path(__file__).parents[2] / "docs" / "modules.md"


def inputs(example: Example, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if example.indices is not None:
        return torch.randint(0, example.indices, (5, *example.shape), generator=generator)
    return torch.randn(5, *example.shape, generator=generator, dtype=dtype)


def tried(example: Example, dtype: torch.dtype) -> Comparison:
    torch.manual_seed(0)
    module, batch = example.make().to(dtype), inputs(example, dtype)
    return compare(module, quadratic, batch, split(batch))


def records() -> list[Any]:
    return [
        pytest.param(rule, ex, id=f"{rule.name} {i}") for rule in RULES.values() for i, ex in enumerate(rule.examples)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=["double", "single"])
@pytest.mark.parametrize(("rule", "example"), records())
def test_every_rule_agrees_with_one_example_at_a_time_on_its_examples(
    rule: Rule, example: Example, dtype: torch.dtype, bound: float
) -> None:
    assert rule_for(example.make()) is rule
    assert tried(example, dtype).worst <= bound


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_kind_of_every_rule_has_an_example(rule: Rule) -> None:
    assert rule.examples
    assert {type(example.make()) for example in rule.examples} >= set(rule.kinds)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_docs_name_every_kind_of_every_rule(rule: Rule) -> None:
    told = DOCS.read_text()
    assert [kind.__name__ for kind in rule.kinds if kind.__name__ not in told] == []


class Gain(nn.Module):
    """A module that no rule of the table computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass
class Counted:
    """The exact rule of a gain, times a factor, and how often it was asked."""

    factor: float = 1.0
    asked: int = 0

    def __call__(self, use: Use) -> Piece:
        self.asked += 1
        return Stored({"weight": Rows.of(self.factor * use.input * use.output_grad)})


def gain(piece: Counted) -> Rule:
    return Rule("gain", (Gain,), piece, lambda trainable: ("formed", "it is small"), (Example(Gain, (4,)),))


def test_a_rule_is_added_by_one_record_and_is_then_chosen_planned_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule_for(Gain()) is RULES["generic"]
    piece = Counted()
    monkeypatch.setitem(RULES, "gain", gain(piece))
    assert rule_for(Gain()) is RULES["gain"]
    assert [param.values[0].name for param in records()].count("gain") == 1
    assert tried(RULES["gain"].examples[0], torch.float64).worst <= 1e-8
    assert piece.asked == 1
    model = nn.Sequential(Gain())
    capture = Capture(model, LayerMap.of(model))
    planned = capture.plan()
    capture.detach()
    assert [(m.kind, m.rule, m.reason) for m in planned.modules] == [("Gain", "formed", "it is small")]


def test_a_rule_that_is_wrong_fails_the_test_that_its_record_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "gain", replace(gain(Counted(factor=1.01))))
    assert tried(RULES["gain"].examples[0], torch.float64).worst > 1e-3
