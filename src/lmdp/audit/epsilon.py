"""How much epsilon a training really spends, at least: canaries are put in or left out, and an observer guesses which.

    repeated   one canary, many runs: a threshold on its score is chosen on one half of the runs and tested on the other
    one-run    many canaries, each in with probability 1/2, and a single run: guesses about the most telling ones

A bound from one run speaks of a family of mechanisms (`lmdp.audit.bounds.FAMILIES`): of any that is private at all, or
of the training's own steps with less noise than stated. The latter assumes more and shows more; the record says which.

A lower bound above the claimed epsilon refutes the claim. One below it proves nothing: another canary may show more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from lmdp.accounting import DEFAULT
from lmdp.audit.bounds import FAMILIES, Family, from_rates, one_run, usual_guesses
from lmdp.audit.canaries import lower_loss
from lmdp.audit.curves import GaussianSteps
from lmdp.audit.neighbours.training import Staged, StagedEngine, Train, as_dataset, with_places
from lmdp.data.records import MAY_BE_MISSING, AmountOrInfinity, Count, Share, decoded, encoded, one_of
from lmdp.gradients import randomness
from lmdp.private import PrivacyStatement

Method = Literal["repeated", "one-run"]
Score = Callable[[Any, Any], float]
"""score(what `train` returned, canary): higher where the canary seems to have been in."""
Progress = Callable[[int, int], None]
"""Called with the number of runs done and to do."""

MEANING = "a lower bound at or below the claimed epsilon is not a proof of the claim: other canaries may show more"


@dataclass(frozen=True)
class EpsilonBound:
    """At least this much epsilon, with this confidence, beside what is claimed.

    `family` says of which mechanisms this holds. `details` has counts and, where the family is not "any", `lower_any`:
    what the same guesses show without assuming it (each bound is at the stated confidence by itself).
    """

    claimed: AmountOrInfinity
    lower: AmountOrInfinity
    delta: Share
    confidence: Share
    method: Annotated[str, one_of(*get_args(Method))]
    canary: str
    canaries: Count
    runs: Count
    training: str
    accountant: str
    details: Mapping[str, float] = field(default_factory=dict)
    meaning: str = MEANING
    family: Annotated[str, one_of(*FAMILIES), MAY_BE_MISSING] = "any"

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.lower > self.claimed

    @property
    def verdict(self) -> str:
        assumed = "" if self.family == "any" else f", assuming {FAMILIES[self.family]}"
        shown = (
            f"{self.training}, canary '{self.canary}': epsilon ≥ {self.lower:.3g} (delta {self.delta:g}, "
            f"{self.confidence:.0%} confidence{assumed})"
        )
        if self.exceeded:
            return f"{shown}, above the claimed {self.claimed:.3g}. The claim does not hold."
        return f"{shown}; {self.claimed:.3g} is claimed. That is no contradiction, and no proof of the claim."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
        return {**encoded(self), "exceeded": self.exceeded, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> EpsilonBound:
        """What `to_dict` made, read back; the verdict follows from the numbers and cannot be set."""
        return decoded(cls, content, "the epsilon bound")

    def __str__(self) -> str:
        return self.verdict


def audit_epsilon(
    train: Train,
    dataset: Any,
    canaries: Sequence[Any],
    *,
    delta: float,
    method: Method | None = None,
    runs: int = 1000,
    guesses: int | None = None,
    family: Family = "mechanism",
    score: Score | None = None,
    confidence: float = 0.95,
    canary: str = "",
    seed: int = 0,
    accountant: str = DEFAULT,
    progress: Progress | None = None,
) -> EpsilonBound:
    """Put canaries into a training, or leave them out, and bound its epsilon from below by how well that is guessed.

    train       train(engine, dataset): builds everything, calls engine.make_private, runs the loop and returns what the
                observer sees: the model, or as much as you like (a stronger observer gives a tighter bound)
    canaries    examples of the dataset's form. One is audited by repeated runs, several in one run
    delta       the delta of the claim; the claimed epsilon is the engine's own
    runs        for "repeated": how many trainings, half of them with the canary
    guesses     for "one-run": how many canaries are guessed about, half as in and half as out; a quarter unless given.
                Decide before you look
    family      for "one-run": which mechanisms of a smaller epsilon are refuted. "mechanism": steps, sampling rate as
                the engine states them, and any noise; "gaussian": mu-GDP; "any": all that are (epsilon, delta)-private
    score       score(returned, canary), higher where the canary was in; minus the model's cross entropy unless given
    """
    method = method or ("repeated" if len(canaries) == 1 else "one-run")
    _check(method, canaries, delta, runs, guesses, confidence)
    if method == "repeated":
        family = "any"
    game = _Game(train, as_dataset(dataset), list(canaries), score or lower_loss(), seed, accountant)
    if method == "repeated":
        lower, details = _repeated(game, runs, delta, confidence, progress)
    else:
        lower, details = _one_run(game, guesses or usual_guesses(len(canaries)), family, delta, confidence)
    statement = game.statement(delta)
    source = "" if statement.weight_source == "none" else f", weights {statement.weight_source}"
    return EpsilonBound(
        claimed=statement.epsilon,
        lower=lower,
        delta=delta,
        confidence=confidence,
        method=method,
        canary=canary or ("canary" if len(canaries) == 1 else "canaries"),
        canaries=len(canaries),
        runs=runs if method == "repeated" else 1,
        training=f"{statement.method}{source}",
        accountant=accountant,
        details=details,
        family=family,
    )


@dataclass
class _Game:
    """Plays one round: a training with some canaries in and the others out."""

    train: Train
    dataset: Any
    canaries: list[Any]
    score: Score
    seed: int
    accountant: str
    _engine: StagedEngine | None = None

    def play(self, present: Sequence[bool], number: int) -> list[float]:
        """The score of every canary after one training, with randomness that no other round shares."""
        size, seed = len(self.dataset), self.seed * 10_000_019 + number
        here = torch.tensor([True] * size + list(present))
        stage = Staged(lambda uniforms: uniforms.where(here, 2.0))
        engine = StagedEngine(seed, stage, self.accountant)
        with randomness.same(seed):
            seen = self.train(engine, with_places(self.dataset, self.canaries, present))
        if not engine.attached:
            raise ValueError("train() never called engine.make_private on the engine that it was given")
        self._engine = self._engine or engine
        return [float(self.score(seen, canary)) for canary in self.canaries]

    def statement(self, delta: float) -> PrivacyStatement:
        assert self._engine is not None
        return self._engine.privacy_statement(delta)

    def steps(self, delta: float) -> GaussianSteps:
        """What the engine states of its steps."""
        stated = self.statement(delta)
        return GaussianSteps(stated.noise_multiplier, stated.sample_rate, stated.steps)


def _repeated(
    game: _Game, runs: int, delta: float, confidence: float, progress: Progress | None
) -> tuple[float, dict[str, float]]:
    scores = np.empty(runs)
    present = np.arange(runs) % 2 == 0
    for run in range(runs):
        scores[run] = game.play([bool(present[run])], run)[0]
        if progress is not None:
            progress(run + 1, runs)
    scores = np.nan_to_num(scores, nan=-np.inf)
    for_choice = np.arange(runs) < runs // 2
    threshold = _best_threshold(scores[for_choice], present[for_choice], delta, confidence)
    errors = _errors(scores[~for_choice], present[~for_choice], threshold)
    lower = from_rates(**errors, delta=delta, confidence=confidence)
    return lower, {"threshold": threshold, **errors}


def _best_threshold(scores: NDArray[np.float64], present: NDArray[np.bool_], delta: float, confidence: float) -> float:
    """The threshold that would have shown the most in these runs."""

    def shown(threshold: float) -> float:
        return from_rates(**_errors(scores, present, threshold), delta=delta, confidence=confidence)

    levels = np.unique(scores)
    thresholds = np.append((levels[1:] + levels[:-1]) / 2, levels[-1])
    return float(max(thresholds, key=shown))


def _errors(scores: NDArray[np.float64], present: NDArray[np.bool_], threshold: float) -> dict[str, int]:
    said_in = scores > threshold
    return {
        "false_positives": int((said_in & ~present).sum()),
        "negatives": int((~present).sum()),
        "false_negatives": int((~said_in & present).sum()),
        "positives": int(present.sum()),
    }


def _one_run(
    game: _Game, guesses: int, family: Family, delta: float, confidence: float
) -> tuple[float, dict[str, float]]:
    present = (torch.rand(len(game.canaries), generator=torch.Generator().manual_seed(game.seed)) < 0.5).numpy()
    scores = np.array(game.play(present.tolist(), 0))
    steps = game.steps(delta) if family == "mechanism" else None
    bound, plain = (
        one_run(scores, present, delta=delta, confidence=confidence, mechanism=steps, family=each, guesses=guesses)
        for each in (family, "any")
    )
    details: dict[str, float] = {"guesses": guesses, "correct": bound.correct, "included": bound.included}
    if family != "any":
        details["lower_any"] = plain.lower
    if bound.noise_multiplier is not None:
        details["noise_multiplier"] = bound.noise_multiplier
    return bound.lower, details


def _check(
    method: str, canaries: Sequence[Any], delta: float, runs: int, guesses: int | None, confidence: float
) -> None:
    if method not in ("repeated", "one-run"):
        raise ValueError(f"method is {method!r}; it must be 'repeated' or 'one-run'")
    if len(canaries) == 0:
        raise ValueError("canaries must be a list of examples, each as the dataset gives them, with at least 1")
    if method == "repeated" and len(canaries) != 1:
        raise ValueError(
            f"there are {len(canaries)} canaries; repeated runs are about 1. Use method='one-run' for more."
        )
    if method == "repeated" and runs < 8:
        raise ValueError(f"runs is {runs}; repeated runs need at least 8, and hundreds to show anything")
    if guesses is not None and not 1 <= guesses <= len(canaries):
        raise ValueError(f"guesses is {guesses}; it must lie between 1 and the {len(canaries)} canaries")
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise ValueError(f"delta is {delta} and confidence {confidence}; both must lie between 0 and 1")
