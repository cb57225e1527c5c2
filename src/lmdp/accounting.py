"""How much privacy a run has spent, by the accountants of `dp-accounting`, and the statement that says so.

Only floats here: what was sampled and how much noise was added arrive as plain numbers. One training step is one
Poisson-subsampled Gaussian mechanism; neighbouring datasets differ by adding or removing one example.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

AccountantName = str


@dataclass(frozen=True)
class Accountant:
    """One way to add up what steps spend. `make` gives a new one of `dp-accounting`."""

    name: str
    help: str
    make: Callable[[], Any]


def _rdp() -> Any:
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant()


def _pld() -> Any:
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant()


ACCOUNTANTS: dict[str, Accountant] = {
    "rdp": Accountant("rdp", "Rényi differential privacy: fast", _rdp),
    "pld": Accountant("pld", "privacy loss distributions: less noise for the same epsilon, and takes longer", _pld),
}

MOST_STEPS = 10**12
NEIGHBOURS = "add or remove one example"
NOT_COVERED = (
    "losses or models in which examples of a batch meet (class-weighted, masked or ignore_index means, contrastive "
    "losses, mixup, batch statistics): the guarantee assumes a sum or mean of terms that each depend on one example",
    "parameters outside the module that make_private was given, and risk or public data that is not public",
    "hyper-parameters and models chosen by looking at private data: every run counts for itself",
    "diagnostics: they are computed from private gradients without noise and are off by default",
    "audits: they are computed on private members",
    "losses, accuracies or batch sizes that your own code prints or stores during training",
    "test examples: an accuracy measured on them is published without noise",
    "anything an observer learns from running time, memory use or crashes",
)


@dataclass(frozen=True)
class Mechanism:
    """One training step as the accountant sees it."""

    noise_multiplier: float
    sample_rate: float

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"noise_multiplier is {self.noise_multiplier}; it must be a finite number, 0 or more")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate is {self.sample_rate}; it must be above 0 and at most 1")


@lru_cache(1024)
def epsilon_spent(mechanism: Mechanism, *, steps: int, delta: float, accountant: AccountantName = "rdp") -> float:
    """The epsilon of `steps` repetitions of a mechanism at this delta; infinite without noise, 0 without steps."""
    _check_delta(delta)
    if not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps is {steps}; it must be 0 to {MOST_STEPS}")
    if steps == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    book = _accountant(accountant)
    with _quiet():
        book.compose(_event(mechanism, steps))
        return float(book.get_epsilon(delta))


@lru_cache(1024)
def calibrate_noise(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: AccountantName = "rdp",
) -> float:
    """The smallest noise multiplier (to 1e-4 of itself) whose epsilon after `steps` steps is at most the target."""
    from dp_accounting import ExplicitBracketInterval, LowerEndpointAndGuess, calibrate_dp_mechanism

    _check_delta(target_delta)
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise ValueError(f"target_epsilon is {target_epsilon}; it must be a finite number above 0")
    if steps < 1:
        raise ValueError(f"steps is {steps}; calibration needs at least 1 step")

    def calibrated(name: AccountantName, bracket: Any, tolerance: float) -> float:
        with _quiet():
            sigma = calibrate_dp_mechanism(
                lambda: _accountant(name),
                lambda sigma: _event(Mechanism(sigma, sample_rate), steps),
                target_epsilon,
                target_delta,
                bracket_interval=bracket,
                tol=tolerance,
            )
        return float(sigma)

    smallest = 0.05  # below this the accountants' own numerics give out; no useful guarantee lies there
    sigma = calibrated("rdp", LowerEndpointAndGuess(smallest, 1.0), 1e-4 * smallest)
    if accountant == "rdp":
        return sigma
    # PLD needs no more noise than RDP, and each of its evaluations is slow: search only below the RDP answer.
    low = max(smallest, 0.5 * sigma)
    return min(sigma, calibrated(accountant, ExplicitBracketInterval(low, sigma * 1.001), 1e-4 * sigma))


@dataclass
class Ledger:
    """Counts the steps of one run and refuses the one that would overspend.

    `planned_steps` is a number of steps known to fit the target, so that the accountant is only asked beyond it.
    """

    mechanism: Mechanism
    accountant: AccountantName = "rdp"
    target_epsilon: float | None = None
    target_delta: float | None = None
    planned_steps: int = 0
    steps: int = 0

    def check_next(self) -> None:
        """Raise if one more step would pass the target epsilon."""
        if self.target_epsilon is None or self.target_delta is None or self.steps < self.planned_steps:
            return
        after = epsilon_spent(self.mechanism, steps=self.steps + 1, delta=self.target_delta, accountant=self.accountant)
        if after > self.target_epsilon:
            raise RuntimeError(
                f"step {self.steps + 1} would bring epsilon to {after:.4f}, past the target {self.target_epsilon} "
                f"(delta {self.target_delta}). The {self.steps} steps so far are within it. Stop here, or start a new "
                "run with more epochs or a larger target_epsilon."
            )

    def record_step(self) -> None:
        self.steps += 1

    def epsilon(self, delta: float) -> float:
        return epsilon_spent(self.mechanism, steps=self.steps, delta=delta, accountant=self.accountant)


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run promises, and what it does not. `to_dict()` is the content of `privacy.json`."""

    epsilon: float
    delta: float
    accountant: str
    sampling: str
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float
    steps: int
    clip_norm: float
    sensitivity: float
    method: str
    weight_source: str
    noise_source: str = "not stated"
    reasons: tuple[str, ...] = ()
    neighbouring_relation: str = NEIGHBOURS
    not_covered: tuple[str, ...] = NOT_COVERED
    certified: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "certified", not self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {k: "inf" if v == math.inf else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PrivacyStatement:
        """What `to_dict` made, read back; `certified` follows from the reasons and cannot be set."""
        names = {f.name for f in fields(cls) if f.init and (f.name in content or f.name != "noise_source")}
        if missing := [name for name in names if name not in content]:
            raise ValueError(f"the privacy statement lacks {sorted(missing)}")
        return cls(**{f.name: _read(f.name, str(f.type), content[f.name]) for f in fields(cls) if f.name in names})

    def __str__(self) -> str:
        verdict = "certified" if self.certified else "claimed, NOT certified"
        lines = [
            f"(epsilon, delta) = ({self.epsilon:.4g}, {self.delta:g}), {verdict}",
            f"  method            {self.method}, weights: {self.weight_source}",
            f"  neighbours        {self.neighbouring_relation}",
            f"  sampling          {self.sampling}, rate {self.sample_rate:.6g} "
            f"(expected batch {self.expected_batch_size:g})",
            f"  steps             {self.steps}",
            f"  noise multiplier  {self.noise_multiplier:.6g} x sensitivity {self.sensitivity:g}",
            f"  noise from        {self.noise_source}",
            f"  clip norm         {self.clip_norm:g}",
            f"  accountant        {self.accountant}",
        ]
        lines += [f"  not certified     because {reason}" for reason in self.reasons]
        lines += [f"  not covered       {item}" for item in self.not_covered]
        return "\n".join(lines)


def _read(name: str, kind: str, value: Any) -> Any:
    """A field of a saved statement: what is not of its type is refused, since certification follows from it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and (value == "inf" or (number and 0 <= value < math.inf)):
        return math.inf if value == "inf" else float(min(value, 1e300))
    if kind == "int" and number and isinstance(value, int) and value >= 0:
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"the privacy statement has {name} {str(value)[:60]!r}, which is no {kind}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie strictly between 0 and 1 (usually below 1 / dataset size)")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the accountant's log lines about RDP orders it left out: leaving one out can only raise epsilon."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _accountant(name: AccountantName) -> Any:
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant is {name!r}; it must be {' or '.join(map(repr, ACCOUNTANTS))}")
    return ACCOUNTANTS[name].make()


def _event(mechanism: Mechanism, steps: int) -> Any:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    step = PoissonSampledDpEvent(mechanism.sample_rate, GaussianDpEvent(mechanism.noise_multiplier))
    return SelfComposedDpEvent(step, steps)
