"""Epsilon agrees with an independent accountant, calibration meets its target, and statements say what holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from lmdp.accounting import (
    ACCOUNTANTS,
    SMALLEST,
    Ledger,
    Mechanism,
    calibrate_noise,
    check_delta,
    composed_epsilon,
    epsilon_spent,
)
from lmdp.guards import ASSUMPTIONS, HOLDS, VIOLATED, Verdict
from lmdp.private import PrivacyStatement

GRID = [
    (sigma, rate, steps)
    for sigma in (0.6, 0.8, 1.0, 2.0, 4.0)
    for rate in (0.001, 0.01, 0.05, 0.2)
    for steps in (1, 100, 2000)
]


def mechanism(sigma: float, rate: float, **changes: Any) -> Mechanism:
    return Mechanism(
        **(
            {
                "method": "dpsgd",
                "weight_source": "none",
                "clip_norm": 1.0,
                "sensitivity": 1.0,
                "noise_multiplier": sigma,
                "sample_rate": rate,
                "expected_batch_size": 10.0,
            }
            | changes
        )
    )


def test_epsilon_agrees_with_opacus_within_one_percent_on_a_grid() -> None:
    """Above epsilon 20 the best Rényi orders lie below 1.7, where dp-accounting leaves out those that converge slowly:
    ours may then be higher than theirs, never lower. Opacus is given orders beyond 63, as dp-accounting has them."""
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is an optional peer")
    for sigma, rate, steps in GRID:
        peer = accountants.RDPAccountant()
        peer.history = [(sigma, rate, steps)]
        theirs = peer.get_epsilon(1e-5, alphas=orders)
        ours = epsilon_spent(sigma, rate, steps=steps, delta=1e-5, accountant="rdp")
        assert ours >= theirs * 0.99, (sigma, rate, steps)
        if theirs <= 20:
            assert ours <= theirs * 1.01, (sigma, rate, steps)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(0.8, 0.01, 500), (1.0, 0.05, 200), (2.0, 0.2, 100), (1.0, 1.0, 5)]
)
def test_pld_is_at_most_rdp(sigma: float, rate: float, steps: int) -> None:
    pld, rdp = (epsilon_spent(sigma, rate, steps=steps, delta=1e-5, accountant=name) for name in ("pld", "rdp"))
    assert 0.5 * rdp < pld <= rdp


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    target=st.floats(0.05, 5000),
    delta=st.sampled_from([1e-5, 1e-6]),
    rate=st.floats(0.002, 1.0),
    steps=st.integers(1, 2000),
)
@example(target=716.8, delta=1e-6, rate=0.2175, steps=1466)  # e^epsilon is infinite
def test_calibrated_noise_meets_the_target_and_hardly_less_would_not(
    accountant: str, target: float, delta: float, rate: float, steps: int
) -> None:
    asked: Any = {"target_epsilon": target, "target_delta": delta, "sample_rate": rate, "steps": steps}
    sigma = calibrate_noise(**asked, accountant=accountant)
    told: Any = {"steps": steps, "delta": delta, "accountant": accountant}
    assert epsilon_spent(sigma, rate, **told) <= target
    if sigma > SMALLEST:
        assert epsilon_spent(0.99 * sigma, rate, **told) > target


@pytest.mark.parametrize("target", [1e-3, 3.0, 5000.0, 1e6])
def test_calibration_by_pld_needs_at_most_the_noise_of_rdp_and_is_the_default(target: float) -> None:
    question: Any = {"target_epsilon": target, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}
    rdp, pld = (calibrate_noise(**question, accountant=name) for name in ("rdp", "pld"))
    assert pld < rdp if target == 3.0 else pld <= rdp
    assert calibrate_noise(**question) == pld
    assert epsilon_spent(pld, 0.01, steps=1000, delta=1e-5) <= target


@pytest.mark.parametrize("steps", [1, 10**4, pytest.param(10**7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sigma", [1e-3, 0.05, 30.0])
def test_every_accountant_answers_within_memory_however_large_epsilon_is(sigma: float, steps: int) -> None:
    pld, rdp = (epsilon_spent(sigma, 0.5, steps=steps, delta=1e-5, accountant=name) for name in ("pld", "rdp"))
    assert 0 < pld <= rdp


def test_no_steps_cost_nothing_and_no_noise_protects_nothing() -> None:
    assert epsilon_spent(1.0, 0.1, steps=0, delta=1e-5) == 0
    assert epsilon_spent(0.0, 0.1, steps=1, delta=1e-5) == math.inf


def test_the_ledger_raises_before_the_step_that_would_overspend() -> None:
    sigma = calibrate_noise(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, steps=20)
    ledger = Ledger(mechanism(sigma, 0.1), target_epsilon=2.0, target_delta=1e-5, planned_steps=20)
    for _ in range(20):
        ledger.check_next()
        ledger.record_step()
    assert ledger.epsilon(1e-5) <= 2.0
    with pytest.raises(RuntimeError, match=r"step 21 would bring epsilon to .* past the target 2"):
        ledger.check_next()
    assert ledger.steps == 20


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_ledger_asks_the_accountant_it_was_given(accountant: str) -> None:
    spent = epsilon_spent(1.0, 0.05, steps=100, delta=1e-5, accountant=accountant)
    stepped = mechanism(1.0, 0.05, accountant=accountant)
    ledger = Ledger(stepped, target_epsilon=spent, target_delta=1e-5, steps=99)
    ledger.check_next()
    ledger.record_step()
    assert ledger.epsilon(1e-5) == spent
    with pytest.raises(RuntimeError, match="step 101"):
        ledger.check_next()


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_an_impossible_delta_is_refused_with_its_value(delta: float) -> None:
    with pytest.raises(ValueError, match=r"delta is .* strictly between 0 and 1"):
        epsilon_spent(1.0, 0.1, steps=1, delta=delta)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon is 0.0"),
        ({"target_epsilon": math.inf}, "target_epsilon is inf"),
        ({"steps": 0}, "steps is 0"),
        ({"sample_rate": 1.5}, "sample_rate is 1.5"),
        ({"sample_rate": 0.0}, "sample_rate is 0.0"),
    ],
)
def test_an_impossible_calibration_is_refused_with_what_is_wrong(changes: dict[str, float], complaint: str) -> None:
    question = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 10} | changes
    with pytest.raises(ValueError, match=complaint):
        calibrate_noise(**question)


def statement(**changes: object) -> PrivacyStatement:
    fields = {
        "epsilon": 3.0,
        "delta": 1e-5,
        "accountant": "rdp",
        "sampling": "Poisson",
        "noise_multiplier": 1.0,
        "sample_rate": 0.01,
        "expected_batch_size": 10.0,
        "steps": 5,
        "clip_norm": 1.0,
        "sensitivity": 1.0,
        "method": "lm",
        "weight_source": "private",
    }
    return PrivacyStatement(**(fields | changes))


def test_a_statement_is_certified_exactly_when_there_is_no_reason_against_it() -> None:
    all_hold = dict.fromkeys(ASSUMPTIONS, Verdict(HOLDS, "seen"))
    assert statement(verdicts=all_hold).certified
    doubtful = statement(verdicts=all_hold | {"numbers": Verdict(VIOLATED, "the seed is fixed")})
    assert not doubtful.certified
    assert "claimed, NOT certified" in str(doubtful)
    assert ": the seed is fixed" in str(doubtful)


def test_a_statement_is_json_with_the_fields_of_privacy_json() -> None:
    fields = json.loads(json.dumps(statement(epsilon=math.inf).to_dict(), allow_nan=False))
    assert fields["epsilon"] == "inf"
    promised = "epsilon delta accountant neighbouring_relation sampling noise_multiplier sample_rate steps clip_norm"
    assert set(promised.split()) | {"method", "weight_source", "certified", "reasons", "not_covered"} <= set(fields)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_trainings_one_after_the_other_cost_more_than_each_and_no_more_than_their_sum(accountant: str) -> None:
    settings = {"delta": 1e-5, "accountant": accountant}
    parts = [(1.0, 0.02, 200), (2.0, 0.05, 300)]
    alone = [epsilon_spent(sigma, rate, steps=steps, **settings) for sigma, rate, steps in parts]  # type: ignore[arg-type]
    both = composed_epsilon(parts, **settings)  # type: ignore[arg-type]
    assert max(alone) < both <= sum(alone)
    assert both == pytest.approx(composed_epsilon(parts[::-1], **settings), rel=1e-6)  # type: ignore[arg-type]
    assert composed_epsilon(parts[:1], **settings) == pytest.approx(alone[0])  # type: ignore[arg-type]
    assert composed_epsilon([*parts, (3.0, 0.1, 0)], **settings) == pytest.approx(both)  # type: ignore[arg-type]


def test_a_training_in_two_halves_costs_what_it_costs_whole() -> None:
    whole = epsilon_spent(1.2, 0.01, steps=1000, delta=1e-5)
    assert composed_epsilon([(1.2, 0.01, 400), (1.2, 0.01, 600)], delta=1e-5) == pytest.approx(whole)
    assert composed_epsilon([(1.2, 0.01, 400), (0.0, 0.01, 1)], delta=1e-5) == math.inf
    assert composed_epsilon([], delta=1e-5) == 0
    with pytest.raises(ValueError, match="delta is 0"):
        composed_epsilon([], delta=0)


def test_a_delta_that_allows_to_publish_somebody_whole_is_refused_or_told_of() -> None:
    assert check_delta(1e-5, 99_999) == ""
    for delta, size in ((0.5, 1202), (1 / 1000, 1000), (1e-5, 100_000)):
        with pytest.raises(ValueError, match=rf"delta is {delta:g}, not below 1 / {size} examples"):
            check_delta(delta, size)
        assert "allow_large_delta" in check_delta(delta, size, allowed=True)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        check_delta(1.0, 1, allowed=True)
