"""Beside other models of which it is known who was in them, an example's scores are judged by its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lmdp
from lmdp.audit import Reference
from lmdp.membership.examples import content_keys, members_and_nonmembers
from lmdp.membership.references import masks
from lmdp.risk.shadow import halves

SIZE = 400
Sides = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class Hard(nn.Module):
    """One layer, which puts each example on the side of its class: how far depends on the example most of all, a little
    on the model (by its number and the example's content), and a little on whether the model was trained on it."""

    def __init__(self, number: int, members: Tensor, lift: float = 1.0) -> None:
        super().__init__()
        self.number, self.lift, self.members = number, lift, set(content_keys(members))
        self.layer, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.1]]))
            self.head.weight.copy_(torch.tensor([[-0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]))
            self.layer.bias.zero_()
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        keys = content_keys(x)
        draws = [np.random.default_rng([self.number, *key[:8]]).normal(size=2) for key in keys]
        noise = torch.from_numpy(np.stack(draws)).float()
        inside = torch.tensor([float(key in self.members) for key in keys])
        margin = 1 + 2 * x[:, 0] + self.lift * inside + 0.4 * noise[:, 0]
        return self.head(self.layer(torch.stack([margin * x[:, 1].sign(), noise[:, 1]], dim=1)))


def world(models: int, lift: float = 1.0, *, online: bool = True) -> tuple[nn.Module, Sides, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 2, generator=generator)
    y = (x[:, 1] > 0).long()
    member = halves(SIZE, models + 1, 0)
    inside = torch.from_numpy(member[0])
    sides = ((x[inside], y[inside]), (x[~inside], y[~inside]))
    references: list[Any] = []
    for number, mask in enumerate(member[1:], 1):
        part = torch.from_numpy(mask)
        model = Hard(number, x[part] if online else x[:0], lift)
        references.append(Reference(model, mask[member[0]], mask[~member[0]]) if online else model)
    return Hard(0, x[inside], lift), sides, references


def audited(models: int, **options: Any) -> Any:
    model, sides, references = world(models, **options)
    return lmdp.audit(model, *sides, references=references, controls=False, views=False, layers=["layer"])


@pytest.mark.parametrize("online", [True, False], ids=["trained on half of them", "trained on none of them"])
def test_references_find_membership_that_hard_examples_hide(online: bool) -> None:
    alone, calibrated = audited(0), audited(3, online=online)
    assert alone.layers[0].auc < 0.65
    assert calibrated.layers[0].auc > alone.layers[0].auc + 0.08
    assert calibrated.reference.auc > alone.reference.auc + 0.08
    assert " + " in calibrated.layers[0].attack
    assert not calibrated.layers[0].attack.endswith("raw")
    assert calibrated.references == 3


@pytest.mark.parametrize("online", [True, False], ids=["trained on half of them", "trained on none of them"])
def test_without_a_leak_references_find_none(online: bool) -> None:
    report = audited(3, lift=0.0, online=online)
    for leak in [*report.layers, report.reference]:
        assert abs(leak.auc - 0.5) < 3.5 * leak.auc_error


def test_who_was_in_a_reference_follows_the_examples_through_their_reordering() -> None:
    _, (inside, outside), references = world(2)
    examples = members_and_nonmembers(inside, outside, seed=0)
    assert isinstance(examples.inputs, Tensor)
    keys = content_keys(examples.inputs)
    for row, reference in zip(masks(references, examples), references):
        assert [key in reference.model.members for key in keys] == row.tolist()
        assert 0 < row.mean() < 1


def test_a_mask_of_another_length_or_kind_is_refused_before_anything_is_read() -> None:
    model, (inside, outside), (reference,) = world(1)
    short = Reference(reference.model, reference.members[:-1], reference.nonmembers)
    numbers = Reference(reference.model, np.ones(SIZE // 2), reference.nonmembers)
    for wrong, said in ((short, r"shape \(199,\)"), (numbers, "type float64")):
        with pytest.raises(ValueError, match=rf"reference 1: its mask of members has .*{said}.* 200 booleans"):
            lmdp.audit(model, inside, outside, references=[wrong])
    with pytest.raises(ValueError, match="there is no model"):
        lmdp.audit(None, inside, outside, references=[reference])


def test_a_report_says_how_many_references_there_were_and_older_ones_are_read(tmp_path: Path) -> None:
    report = audited(1)
    report.to_json(tmp_path / "audit.json")
    assert lmdp.AuditReport.load(tmp_path / "audit.json").references == 1
    alone = audited(0)
    assert "references" not in alone.to_dict()
    alone.to_json(tmp_path / "alone.json")
    assert lmdp.AuditReport.load(tmp_path / "alone.json") == alone
