"""`lmdp.check`: one call finds every way of breaking a training that was ever measured, and lets sound ones pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from lmdp.audit.neighbours.outliers import outliers_of
from tests.audit.cases import CASES, SOUND, TOKENS, mlp, sentences, training, vectors


@pytest.mark.parametrize("name", CASES)
def test_a_broken_training_is_found(name: str) -> None:
    train, dataset = CASES[name]
    report = lmdp.check(train, dataset)
    assert not report.passed, report
    assert set(report.failures) - {"errors"}, "found by what it does, and not because it cannot be run"


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_training_passes(name: str) -> None:
    train, dataset = SOUND[name]
    report = lmdp.check(train, dataset)
    assert report.passed, report


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOKENS, attention_dropout=0.2, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def test_a_model_of_transformers_is_judged_by_its_own_loss_and_passes_with_a_mean_of_each_example() -> None:
    def each(model: nn.Module, batch: Any) -> Tensor:
        logits, labels = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
        return (losses / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()  # type: ignore[no-any-return]

    def inside(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    report = lmdp.check(training(llama, inside), sentences())
    assert "others' gradients" in report.failures, report
    assert lmdp.check(training(llama, each), sentences()).passed


# -- the examples it picks --------------------------------------------------------------------------------------------


def picked(examples: Any) -> dict[str, Any]:
    return {outlier.name: outlier.example for outlier in outliers_of(examples)}


def test_numbers_are_zeroed_scaled_and_spoilt_and_targets_are_only_exchanged() -> None:
    examples = [(torch.full((3,), float(i)), i % 2) for i in range(1, 9)]
    outliers = picked(examples)
    assert list(outliers) == ["copy", "other label", "largest", "zero", "scaled", "nan"]
    assert outliers["other label"][1] == 0
    assert outliers["largest"][0].tolist() == [8.0] * 3
    assert outliers["scaled"][0].tolist() == [1e6] * 3
    assert outliers["nan"][0].isnan().all()
    assert {outliers[name][1] for name in ("copy", "zero", "scaled", "nan")} == {1}
    assert examples[0][0].tolist() == [1.0] * 3, "what it is built from stays as it was"


def test_tokens_are_cut_down_to_one_and_to_padding_and_labels_follow_where_padding_is_not_counted() -> None:
    outliers = picked(sentences())
    assert list(outliers) == ["copy", "other label", "longest", "single token", "all padding"]
    single, nothing = outliers["single token"], outliers["all padding"]
    assert single["attention_mask"].tolist() == [1, 0, 0, 0, 0]
    assert single["input_ids"][1:].tolist() == [0] * 4
    assert single["labels"][1:].tolist() == [-100] * 4
    assert single["labels"][0] >= 0
    assert nothing["attention_mask"].sum() == 0
    assert (nothing["labels"] == -100).all()
    assert int(outliers["longest"]["attention_mask"].sum()) == 5


@pytest.mark.parametrize(
    ("example", "names"),
    [
        (np.ones(3, dtype=np.float32), {"zero", "scaled", "nan"}),
        ({"pixel_values": torch.ones(1, 2, 2), "labels": torch.tensor(0)}, {"zero", "scaled", "nan"}),
        ([1.0, 2.0, 3.0, 1], {"zero", "scaled", "nan"}),
        ({"input_ids": [4, 5, 6], "labels": 1}, {"longest", "single token"}),
        (("a question", "an answer"), {"longest", "single token", "no text"}),
        ({"sentence1": "a b", "sentence2": "c", "score": 0.3}, {"longest", "single token", "no text"}),
        (torch.ones(4, dtype=torch.uint8), set()),
        (object(), {"another"}),
    ],
    ids=["array", "images", "row", "tokens", "texts", "scored texts", "bytes", "object"],
)
def test_every_kind_of_example_has_its_outliers(example: Any, names: set[str]) -> None:
    assert set(picked([example, example])) - {"copy", "other label", "largest"} == names


# -- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passed() -> lmdp.CheckReport:
    return lmdp.check(training(), vectors())


@pytest.fixture(scope="module")
def failed() -> lmdp.CheckReport:
    train, dataset = CASES["labels_of_others_in_a_broadcast"]
    return lmdp.check(train, dataset)


def test_a_report_is_a_table_with_what_failed_first(passed: lmdp.CheckReport, failed: lmdp.CheckReport) -> None:
    for report in (passed, failed):
        rows = [line for line in str(report).splitlines() if line.startswith(("  ok", "  FAIL"))]
        assert len(rows) == max(len(each.findings) for each in report.reports.values())
        marks = [row.startswith("  FAIL") for row in rows]
        assert marks == sorted(marks, reverse=True)
        assert sum(marks) == len(report.failures)
    assert "NOT bounded as stated" in str(failed)
    assert "NOT" not in str(passed)
    with pytest.raises(KeyError, match="no example 'nothing'; there are copy"):
        passed["nothing"]


def test_the_evidence_is_one_sentence_that_holds_no_number_of_the_data(
    passed: lmdp.CheckReport, failed: lmdp.CheckReport
) -> None:
    assert passed.evidence() == (
        "lmdp.check ran this training 24 times, for 3 steps, with and without 6 examples, one at a time (copy, other "
        "label, largest, zero, scaled, nan): everything that left it was bounded as stated"
    )
    assert "NOT bounded: " in failed.evidence()
    assert "others' contributions (copy" in failed.evidence()


def test_a_report_becomes_plain_values(passed: lmdp.CheckReport, failed: lmdp.CheckReport) -> None:
    for report in (passed, failed):
        content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert content["passed"] is report.passed
        assert tuple(content["failures"]) == report.failures
        assert set(content["examples"]) == set(report.reports)


def test_runs_can_be_ended_after_a_few_steps() -> None:
    report = lmdp.check(training(passes=50), vectors(), steps=2)
    assert report.steps == 2
    assert report.passed


def test_chance_that_a_batch_shares_is_named() -> None:
    report = lmdp.check(
        training(before=lambda parts, batch: [batch[0] + torch.randn_like(batch[0]), batch[1]]), vectors()
    )
    assert not report.passed
    assert "drew different random numbers" in str(report)


def test_rates_of_dropout_are_put_back() -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.5), nn.TransformerEncoderLayer(3, 1, 4, dropout=0.25, batch_first=True))

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(module[1](module[0](batch[0])), batch[1])  # type: ignore[index]

    lmdp.check(training(lambda: model.requires_grad_(True), loss, allow_unused=True), vectors(), steps=1)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.25, 0.25, 0.25]
    assert model[2].self_attn.dropout == 0.25
    assert F.dropout(torch.ones(100), 0.5, True).eq(0).any()


def test_a_training_that_cannot_be_run_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        lmdp.check(training(before=lambda parts, batch: 1 / 0), vectors())
