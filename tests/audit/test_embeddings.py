"""Embeddings alone: what is a leak, what is a difference between two groups, and what is not a number."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lmdp
from lmdp.audit import AuditReport

N = 200
Arrays = dict[str, Any]


def clouds(apart: float, size: int = N, width: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two random clouds, of which nothing was ever trained on."""
    generator = np.random.default_rng(seed)
    return generator.normal(apart, 1, (size, width)), generator.normal(0, 1, (size, width))


def served(shift: float, leak: float, seed: int = 0) -> Arrays:
    """A service with a random embedding; `shift` lies between the groups' inputs, `leak` is what it adds to members."""
    inside, outside = clouds(shift, seed=seed)
    table = np.random.default_rng(seed + 1).normal(size=(8, 5))
    return {
        "member": inside @ table + leak,
        "nonmember": outside @ table,
        "member_inputs": inside,
        "nonmember_inputs": outside,
    }


def audited(arrays: Arrays) -> AuditReport:
    inputs = (arrays["member_inputs"], arrays["nonmember_inputs"]) if "member_inputs" in arrays else None
    return lmdp.audit(None, arrays["member"], arrays["nonmember"], inputs=inputs)


def test_two_random_clouds_may_be_a_difference_between_the_groups_and_are_not_called_a_leak() -> None:
    report = lmdp.audit(None, *clouds(1.0))
    assert report.peak.interval[0] > 0.5
    assert "may be a difference between the groups, and not a leak" in report.verdict
    assert "gives membership away" not in str(report)
    assert "Add arrays member_inputs and nonmember_inputs" in str(report)


def test_with_raw_inputs_a_difference_between_the_groups_is_told_from_a_leak() -> None:
    """The remedy that an audit without control names."""
    shifted, leaking = audited(served(1.0, 0.0)), audited(served(0.0, 3.0))
    assert [control.name for control in shifted.controls] == ["(input)"]
    assert "differ before any training is looked at (control '(input)'" in shifted.verdict
    assert "Layer 'embedding' gives membership away" in leaking.verdict
    assert not leaking.controls[0].fires
    assert "Add arrays" not in str(leaking)
    quiet = audited(served(0.0, 0.0))
    assert "No layer gives membership away measurably" in quiet.verdict


def test_an_audit_of_embeddings_says_what_it_cannot_see(tmp_path: Path) -> None:
    inside, outside = clouds(0.0)
    labels = np.arange(N) % 3
    for members, nonmembers, said in (
        (inside, outside, "without labels (member_labels)"),
        ((inside, labels), (outside, labels), "with labels"),
    ):
        report = lmdp.audit(None, members, nonmembers)
        assert f"one layer as it was served, {said}: no other layer, no augmented copies, no output" in str(report)
    report.to_json(tmp_path / "audit.json")
    assert AuditReport.load(tmp_path / "audit.json") == report
    report.to_html(tmp_path / "audit.html")
    assert "no canaries" in (tmp_path / "audit.html").read_text()


def test_a_file_with_raw_inputs_is_audited_with_a_control_and_rows_may_come_in_any_order(tmp_path: Path) -> None:
    arrays = served(1.0, 0.0)
    labels = {f"{side}_labels": np.arange(N) % 2 for side in ("member", "nonmember")}
    np.savez(tmp_path / "e.npz", **arrays, **labels)
    order = np.random.default_rng(0).permutation(N)
    moved = {name: array[order] if name.startswith("member") else array for name, array in (arrays | labels).items()}
    np.savez(tmp_path / "moved.npz", **moved)
    first, second = (lmdp.audit_embeddings(tmp_path / name) for name in ("e.npz", "moved.npz"))
    assert first.controls
    assert first.to_dict() | {"seconds": 0} == second.to_dict() | {"seconds": 0}


def test_an_example_of_both_groups_is_known_by_its_input_though_the_service_answers_otherwise() -> None:
    arrays = served(0.0, 0.0)
    arrays["nonmember_inputs"][:20] = arrays["member_inputs"][:20]
    assert audited(arrays).members == N - 20


def test_inputs_may_be_token_ids_by_name() -> None:
    inside, outside = clouds(0.0)
    words = torch.randint(1, 50, (2, N, 6), generator=torch.Generator().manual_seed(0))
    words[0, :, 0] = 7  # a word that only members begin with
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in words]
    assert lmdp.audit(None, inside, outside, inputs=inputs).controls[0].fires


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("who", ["member", "nonmember"])
def test_embeddings_that_are_not_finite_are_refused_with_their_rows_and_the_remedy_works(
    who: str, value: float
) -> None:
    arrays = {name: array for name, array in served(0.0, 0.0).items() if "inputs" not in name}
    arrays[who][[3, 50], 2] = value
    other = {"member": "nonmember", "nonmember": "member"}[who]
    with pytest.raises(ValueError, match=rf"2 of 200 rows of '{who}' \(rows 3, 50\)") as refused:
        audited(arrays)
    assert f"0 of 200 rows of '{other}'" in str(refused.value)
    remedy = re.search(r"keep (np.*?\.all\(1\))\)", str(refused.value))
    assert remedy is not None
    with np.errstate(over="ignore"):
        kept = {name: rows[eval(remedy[1], {"np": np, "rows": rows})] for name, rows in arrays.items()}
    report = audited(kept)
    assert (report.members, report.nonmembers) == (198, 198)
    assert "No layer gives membership away" in report.verdict


class Overflowing(nn.Module):
    """Finite on what was not marked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(torch.where(x[:, :1] > 5, torch.full_like(h, float("nan")), h))


def test_a_model_that_is_not_finite_for_one_group_only_is_said_to_be_so() -> None:
    inside, outside = (torch.from_numpy(rows).float() for rows in clouds(0.0, size=250))
    inside[:150, 0] = 9.0
    report = lmdp.audit(Overflowing(), inside, outside, views=False)
    assert report.peak.auc > 0.75
    assert report.verdict.startswith(
        "All 150 examples for which layer 'head' is not finite (NaN or infinite) are members"
    )
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == report.verdict
    remedy = lmdp.audit(Overflowing(), inside[150:], outside, views=False)  # without those examples
    assert "not finite" not in remedy.verdict
    outside[:150, 0] = 9.0
    assert not lmdp.audit(Overflowing(), inside, outside, controls=False, views=False).one_sided


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"member": np.zeros(N)}, r"member embeddings are float64 of shape \(200,\); they must be real numbers"),
        ({"member": np.zeros((N, 5), dtype=complex)}, "complex128 of shape"),
        ({"member": np.zeros((N, 4))}, r"shape \(4,\), non-members of \(5,\)"),
        ({"member_inputs": np.zeros((N - 1, 8))}, "200 member embeddings and 199 member_inputs"),
        ({"nonmember_inputs": np.zeros((N, 7))}, r"shape \(8,\) and non-members \(7,\)"),
        ({"member_inputs": np.array(["a text"] * N)}, "member_inputs are <U6; a control needs numbers"),
        ({"member_labels": np.zeros(N - 1), "nonmember_labels": np.zeros(N)}, r"member_labels have shape \(199,\)"),
        ({"member_labels": np.zeros(N)}, "has only member_labels of"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Arrays, complaint: str) -> None:
    np.savez(tmp_path / "e.npz", **served(0.0, 0.0) | change)
    with pytest.raises(ValueError, match=complaint):
        lmdp.audit_embeddings(tmp_path / "e.npz")


def test_inputs_beside_a_model_are_refused() -> None:
    inside, outside = (torch.from_numpy(rows).float() for rows in clouds(0.0))
    with pytest.raises(ValueError, match="inputs= belong to embeddings"):
        lmdp.audit(Overflowing(), inside, outside, inputs=(inside, outside))
