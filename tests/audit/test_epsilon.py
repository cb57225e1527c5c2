"""Lower bounds on epsilon: right on paper, below the claim where it holds, above it for the paper's weights."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader

import lmdp
from lmdp.accounting import Mechanism, epsilon_spent
from lmdp.audit import bounds, canaries
from lmdp.membership.metrics import clopper_pearson
from lmdp.methods import METHODS, SOURCES

DELTA, CONFIDENCE = 1e-5, 0.99
PRIVATE = [method for method in METHODS.values() if method.private]
CERTIFIED = [
    (method.name, source)
    for method in PRIVATE
    for source in (method.sources or ("fixed",))
    if not SOURCES[source].refuted
]


# -- the statistics ---------------------------------------------------------------------------------------------------


def test_without_delta_and_epsilon_the_p_value_is_the_binomial_tail() -> None:
    for guesses, correct in [(10, 8), (100, 61), (100, 100), (7, 1)]:
        p = bounds.p_value(canaries=200, guesses=guesses, correct=correct, epsilon=0.0, delta=0.0)
        assert p == pytest.approx(float(binom.sf(correct - 1, guesses, 0.5)))


def test_with_epsilon_it_is_the_tail_of_randomised_response() -> None:
    for epsilon in (0.5, 1.0, 3.0):
        p = bounds.p_value(canaries=100, guesses=80, correct=70, epsilon=epsilon, delta=0.0)
        assert p == pytest.approx(float(binom.sf(69, 80, 1 / (1 + math.exp(-epsilon)))))


@pytest.mark.parametrize(
    ("m", "r", "v", "delta", "published"),
    [(100, 100, 75, 0.0, 0.702), (100, 100, 75, 1e-4, 0.699), (1000, 100, 75, 1e-4, 0.673)],
)
def test_the_values_printed_by_steinke_nasr_and_jagielski(
    m: int, r: int, v: int, delta: float, published: float
) -> None:
    lower = bounds.from_guesses(canaries=m, guesses=r, correct=v, delta=delta, confidence=0.95)
    assert lower == pytest.approx(published, abs=1e-3)


def test_the_delta_term_agrees_with_a_plain_loop() -> None:
    m, r, v, epsilon, delta = 60, 40, 31, 0.7, 1e-3
    q, worst = 1 / (1 + math.exp(-epsilon)), 0.0
    for i in range(1, v + 1):
        worst = max(worst, sum(float(binom.pmf(k, r, q)) for k in range(v - i, v)) / i)
    expected = float(binom.sf(v - 1, r, q)) + 2 * m * delta * worst
    assert bounds.p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta) == pytest.approx(expected)


def test_more_correct_guesses_show_more_and_delta_abstentions_and_confidence_less() -> None:
    def shown(**changes: Any) -> float:
        usual = {"canaries": 400, "guesses": 100, "correct": 85, "delta": 1e-5, "confidence": 0.95}
        return bounds.from_guesses(**(usual | changes))

    assert shown(correct=100) > shown(correct=90) > shown() > shown(correct=60) >= shown(correct=50) == 0
    assert shown(delta=0.0) >= shown() > shown(delta=1e-3)
    assert shown() > shown(canaries=40000)
    assert shown() > shown(confidence=0.999)
    assert shown(guesses=0, correct=0) == 0


def test_all_guesses_correct_has_a_closed_form() -> None:
    accuracy = 0.05 ** (1 / 100)
    lower = bounds.from_guesses(canaries=100, guesses=100, correct=100, delta=0.0, confidence=0.95)
    assert lower == pytest.approx(math.log(accuracy / (1 - accuracy)), rel=1e-6)


def test_a_p_value_is_valid_for_randomised_response() -> None:
    """The mechanism for which the bound is tight: it refutes its true epsilon as rarely as the confidence says."""
    rng, epsilon, refuted, trials = np.random.default_rng(0), 1.0, 0, 2000
    correct = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), trials)
    for v in correct:
        lower = bounds.from_guesses(canaries=200, guesses=200, correct=int(v), delta=0.0, confidence=0.95)
        refuted += lower > epsilon
    assert refuted <= 0.05 * trials + 3 * math.sqrt(0.05 * 0.95 * trials)
    assert refuted >= 0.02 * trials


def test_rates_use_both_sides_and_delta() -> None:
    def shown(fp: int, fn: int, delta: float = 0.0) -> float:
        return bounds.from_rates(
            false_positives=fp, negatives=500, false_negatives=fn, positives=500, delta=delta, confidence=0.95
        )

    assert shown(0, 300) == shown(300, 0) > 3
    assert shown(250, 250) == 0
    assert shown(0, 300, delta=0.3) < shown(0, 300)
    assert shown(0, 300, delta=0.9) == 0
    _, upper = clopper_pearson(0, 500, 0.95)
    assert shown(0, 0) == pytest.approx(math.log((1 - upper) / upper))


def test_a_gaussian_mechanism_is_never_refuted_more_often_than_the_confidence_allows() -> None:
    """Simulated scores of the mechanism itself, threshold chosen on one half: 300 audits at 90 %."""
    from lmdp.audit.epsilon import _best_threshold, _errors

    rng, sigma, delta = np.random.default_rng(1), 1.0, 1e-2
    claimed = epsilon_spent(sigma, 1.0, steps=1, delta=delta, accountant="pld")
    present, refuted = np.arange(200) % 2 == 0, 0
    for _ in range(300):
        scores = rng.normal(0, sigma, 200) + present
        threshold = _best_threshold(scores[:100], present[:100], delta, 0.9)
        errors = _errors(scores[100:], present[100:], threshold)
        refuted += bounds.from_rates(**errors, delta=delta, confidence=0.9) > claimed
    assert refuted <= 30


@pytest.mark.parametrize(("guesses", "correct"), [(5, 6), (11, 3)])
def test_impossible_counts_are_refused(guesses: int, correct: int) -> None:
    with pytest.raises(ValueError, match="must not exceed"):
        bounds.p_value(canaries=10, guesses=guesses, correct=correct, epsilon=1.0, delta=0.0)
    with pytest.raises(ValueError, match="errors in"):
        bounds.from_rates(false_positives=3, negatives=2, false_negatives=0, positives=2, delta=0.0, confidence=0.9)


# -- the engine -------------------------------------------------------------------------------------------------------


def one_run(method: str, weights: str, width: int = 401, **options: Any) -> lmdp.EpsilonBound:
    train = canaries.slate_training(
        batch_size=options.pop("batch_size", 350), noise_multiplier=1.0, epochs=2, method=method, weights=weights
    )
    many = canaries.dirac(2, width, width - 1)
    settings = {"delta": DELTA, "confidence": CONFIDENCE, "score": canaries.along, "canary": "dirac"} | options
    return lmdp.audit_epsilon(train, canaries.crowd(20, 2, width), many, **settings)


def repeated(method: str, weights: str, runs: int, sigma: float = 3.0, **options: Any) -> lmdp.EpsilonBound:
    train = canaries.slate_training(batch_size=30, noise_multiplier=sigma, method=method, weights=weights)
    settings = {"canary": "tipping", "score": canaries.tipped} | options
    canary = settings.pop("one", canaries.tipping(2, 2))
    return lmdp.audit_epsilon(
        train, canaries.crowd(39, 2, 2), [canary], delta=DELTA, confidence=CONFIDENCE, runs=runs, **settings
    )


@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
def test_one_run_shows_something_and_never_more_than_is_claimed(method: str, weights: str) -> None:
    bound = one_run(method, weights)
    assert 1.0 < bound.details["lower_any"] < bound.lower <= bound.claimed
    assert not bound.exceeded
    assert "no proof" in bound.verdict


def test_a_bound_says_of_which_family_it_speaks_and_what_holds_without_it() -> None:
    """The same run and the same guesses; only what is refuted differs."""
    own, gaussian, plain = (one_run("dpsgd", "fixed", family=family) for family in ("mechanism", "gaussian", "any"))
    assert own.details["correct"] == gaussian.details["correct"] == plain.details["correct"]
    assert own.details["lower_any"] == gaussian.details["lower_any"] == plain.lower
    assert min(own.lower, gaussian.lower) > 1.3 * plain.lower
    assert "assuming the stated steps" in own.verdict
    assert "assuming a mu-GDP mechanism" in gaussian.verdict
    assert "assuming" not in plain.verdict
    assert own.details["noise_multiplier"] > 1.0  # what was stated is not refuted
    older = {key: value for key, value in own.to_dict().items() if key != "family"}
    assert lmdp.EpsilonBound.from_dict(older).family == "any"
    with pytest.raises(ValueError, match="family is 'no such'"):
        lmdp.EpsilonBound.from_dict({**older, "family": "no such"})


@pytest.mark.parametrize(
    ("method", "weights"), [("dpsgd", "fixed"), *(each for each in CERTIFIED if METHODS[each[0]].reweighted)]
)
def test_the_tipping_canary_shows_no_more_than_is_claimed(method: str, weights: str) -> None:
    assert not repeated(method, weights, runs=200).exceeded


@pytest.mark.parametrize("method", [method.name for method in PRIVATE if "batch" in method.sources])
def test_the_papers_weights_spend_more_than_they_claim(method: str) -> None:
    bound = repeated(method, "batch", runs=300)
    assert bound.exceeded, bound
    assert "The claim does not hold" in str(bound)


def test_repeated_runs_of_a_bounded_canary_show_something_and_not_more_than_is_claimed() -> None:
    one = canaries.dirac(2, 2, 1)[0]
    bound = repeated("dpsgd", "fixed", runs=300, sigma=0.6, one=one, score=canaries.along, canary="dirac")
    assert 0.3 < bound.lower <= bound.claimed


@pytest.mark.slow
@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("canary", ["dirac", "tipping"])
def test_a_thousand_runs_show_no_more_than_is_claimed(method: str, weights: str, canary: str) -> None:
    one, score = {
        "dirac": (canaries.dirac(2, 2, 1)[0], canaries.along),
        "tipping": (canaries.tipping(2, 2), canaries.tipped),
    }[canary]
    assert not repeated(method, weights, runs=1000, sigma=1.0, one=one, score=score).exceeded


def test_noise_that_is_smaller_than_stated_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: a tenth of the noise. The claim is the engine's own and stays what it was."""

    honest = one_run("dpsgd", "fixed", batch_size=420)
    spread = Mechanism.gradient_std.fget
    assert spread is not None
    monkeypatch.setattr(Mechanism, "gradient_std", property(lambda self: spread(self) / 10))
    train = canaries.slate_training(batch_size=420, noise_multiplier=4.0, method="dpsgd")
    many, common = canaries.dirac(2, 401, 400), canaries.crowd(20, 2, 401)
    bound = lmdp.audit_epsilon(train, common, many, delta=DELTA, confidence=CONFIDENCE, score=canaries.along)
    assert bound.exceeded, bound
    assert not honest.exceeded


def test_canaries_in_input_space_show_no_more_than_is_claimed() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, 30, generator=generator), torch.randint(0, 3, (100,), generator=generator)
    data = torch.utils.data.TensorDataset(x, y)

    def train(engine: lmdp.PrivacyEngine, dataset: Any) -> nn.Module:
        model = nn.Linear(30, 3)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(dataset, batch_size=60),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="dpsgd",
        )
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return model

    for kind in (canaries.mislabelled(data, 60, 3), canaries.noise_images(x[0], 60, 3, generator)):
        bound = lmdp.audit_epsilon(train, data, kind, delta=DELTA)
        assert bound.method == "one-run"
        assert not bound.exceeded


# -- the result -------------------------------------------------------------------------------------------------------


def test_the_claim_is_the_accountants_and_the_result_survives_json() -> None:
    bound = one_run("lm", "private")
    expected = epsilon_spent(1.0, 350 / 420, steps=4, delta=DELTA)
    assert bound.claimed == pytest.approx(expected)
    again = lmdp.EpsilonBound.from_dict(json.loads(json.dumps(bound.to_dict())))
    assert again == bound
    assert again.to_dict()["verdict"] == bound.verdict
    with pytest.raises(ValueError, match="the epsilon bound lacks"):
        lmdp.EpsilonBound.from_dict({})


def test_no_noise_claims_infinity_and_nothing_refutes_it() -> None:
    train = canaries.slate_training(batch_size=420, noise_multiplier=0.0, method="dpsgd")
    many, common = canaries.dirac(2, 101, 100), canaries.crowd(20, 2, 101)
    bound = lmdp.audit_epsilon(train, common, many, delta=DELTA, score=canaries.along)
    assert math.isinf(bound.claimed)
    assert not bound.exceeded
    assert bound.to_dict()["claimed"] == "inf"


def test_what_makes_no_sense_is_refused() -> None:
    train, common = canaries.slate_training(batch_size=4, noise_multiplier=1.0), canaries.crowd(8, 2, 4)
    two = canaries.dirac(2, 4, 2)
    with pytest.raises(ValueError, match="at least 1"):
        lmdp.audit_epsilon(train, common, [], delta=DELTA)
    with pytest.raises(ValueError, match="Use method='one-run'"):
        lmdp.audit_epsilon(train, common, two, delta=DELTA, method="repeated")
    with pytest.raises(ValueError, match="at least 8"):
        lmdp.audit_epsilon(train, common, two[:1], delta=DELTA, runs=2)
    with pytest.raises(ValueError, match="guesses is 3"):
        lmdp.audit_epsilon(train, common, two, delta=DELTA, guesses=3)
    with pytest.raises(ValueError, match="delta is 2"):
        lmdp.audit_epsilon(train, common, two, delta=2)
    with pytest.raises(ValueError, match="do not fit"):
        canaries.dirac(2, 4, 4)
    with pytest.raises(ValueError, match="never called"):
        lmdp.audit_epsilon(lambda engine, dataset: nn.Linear(1, 1), common, two, delta=DELTA)
