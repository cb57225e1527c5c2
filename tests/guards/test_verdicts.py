"""A statement is certified where every assumption holds, and nowhere else; nothing said against one is taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lmdp.guards import ASSUMPTIONS, HOLDS, NOT_ESTABLISHED, VIOLATED, Judgement, Verdict
from lmdp.private import PrivacyStatement
from tests.private.test_engine import private, train

ALL_HOLD = {key: Verdict(HOLDS, f"seen: {sentence}") for key, sentence in ASSUMPTIONS.items()}


def statement(**verdicts: Verdict) -> PrivacyStatement:
    numbers = dict.fromkeys(("noise_multiplier", "sample_rate", "expected_batch_size", "clip_norm", "sensitivity"), 1.0)
    words = dict.fromkeys(("accountant", "sampling", "method", "weight_source"), "x")
    return PrivacyStatement(epsilon=1.0, delta=1e-5, steps=3, verdicts=ALL_HOLD | verdicts, **numbers, **words)


def test_a_statement_is_certified_where_all_hold() -> None:
    assert statement().certified
    assert statement().reasons == ()


@pytest.mark.parametrize("state", [VIOLATED, NOT_ESTABLISHED])
@pytest.mark.parametrize("key", ASSUMPTIONS)
def test_one_assumption_that_does_not_hold_is_enough_against_it(key: str, state: str) -> None:
    doubtful = statement(**{key: Verdict(state, "because")})
    assert not doubtful.certified
    assert doubtful.reasons == ("because",)
    assert doubtful.verdicts[key] == state
    assert (ASSUMPTIONS[key], state, "because") in doubtful.table()
    assert f"{state:<17s} {ASSUMPTIONS[key]}: because" in str(doubtful)


@pytest.mark.parametrize("key", ASSUMPTIONS)
def test_an_assumption_of_which_a_statement_does_not_speak_is_not_established(key: str) -> None:
    content = statement().to_dict()
    del content["verdicts"][key]
    assert PrivacyStatement.from_dict(content).verdicts[key] == NOT_ESTABLISHED


def test_a_statement_read_back_is_the_same_and_cannot_be_made_certified_by_hand() -> None:
    doubtful = statement(loss=Verdict(VIOLATED, "examples met"))
    content = json.loads(json.dumps(doubtful.to_dict()))
    assert PrivacyStatement.from_dict(content) == doubtful
    assert not PrivacyStatement.from_dict(content | {"certified": True, "reasons": []}).certified


def test_a_statement_of_an_earlier_version_is_not_certified_and_keeps_its_reasons() -> None:
    content = statement().to_dict()
    del content["verdicts"]
    assert not PrivacyStatement.from_dict(content | {"certified": True, "reasons": []}).certified
    told = PrivacyStatement.from_dict(content | {"reasons": ["the seed is fixed (5)"]})
    assert told.reasons == ("the seed is fixed (5)",)


@pytest.mark.parametrize("wrong", [3, ["model"], {"model": "holds"}, {"model": {"state": "perhaps", "how": ""}}])
def test_verdicts_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"verdict|state"):
        PrivacyStatement.from_dict(statement().to_dict() | {"verdicts": wrong})


def test_what_was_said_against_an_assumption_stays() -> None:
    judgement = Judgement()
    judgement.doubted("loss", "could not be looked at")
    judgement.violated("loss", "examples met")
    judgement.violated("loss", "examples met")
    later = Judgement()
    later.inherit(json.loads(json.dumps(judgement.state())))
    for each in (judgement, later):
        verdict = each.verdicts(ALL_HOLD)["loss"]
        assert (verdict.state, verdict.why) == (VIOLATED, "examples met")
        assert each.verdicts(ALL_HOLD)["model"] == HOLDS
    with pytest.raises(KeyError, match="no assumption 'los'"):
        judgement.violated("los", "a slip")


def test_what_was_seen_of_a_run_goes_with_its_state() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert not engine.privacy_statement(1e-5).certified
    other, *_ = private()
    other.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    assert "something else than the optimizer" in other.privacy_statement(1e-5).verdicts["content"].why


def test_a_check_is_evidence_and_turns_no_verdict() -> None:
    class Check:
        def evidence(self) -> str:
            return "passed for 3 outliers"

    doubtful = statement(loss=Verdict(NOT_ESTABLISHED, "nobody looked")).with_check(Check())
    assert doubtful.checks == ("passed for 3 outliers",)
    assert not doubtful.certified
    assert PrivacyStatement.from_dict(doubtful.to_dict()) == doubtful


def test_every_assumption_holds_of_an_ordinary_training_and_says_how() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    verdicts = engine.privacy_statement(1e-5).verdicts
    assert list(verdicts) == list(ASSUMPTIONS)
    assert all(verdict == HOLDS and verdict.how for verdict in verdicts.values())


def test_looking_that_is_switched_off_establishes_nothing() -> None:
    engine, model, optimizer, loader = private(check_mixing=False)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    verdicts = engine.privacy_statement(1e-5).verdicts
    open_ones = {key for key, verdict in verdicts.items() if verdict == NOT_ESTABLISHED}
    assert open_ones == {"model", "loss", "rows", "sampling"}
