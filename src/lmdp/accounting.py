"""The mechanism of one step as one frozen value, and how much privacy its steps spend, by `dp-accounting`.

Only plain numbers here: no torch. One step is one Poisson-subsampled Gaussian mechanism; neighbouring datasets
differ by adding or removing one example.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lmdp.methods import ADD_OR_REMOVE


@dataclass(frozen=True)
class Accountant:
    """One way to add up what steps spend. `make` gives a new one of `dp-accounting`, for epsilons of that size."""

    name: str
    help: str
    make: Callable[[float], Any]


def _rdp(about: float) -> Any:
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant()


def _pld(about: float) -> Any:
    """Privacy losses are rounded up to multiples of this interval: any choice gives an upper bound."""
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(value_discretization_interval=min(10.0, max(1e-4, 1e-5 * about)))


ACCOUNTANTS: dict[str, Accountant] = {
    "pld": Accountant("pld", "privacy loss distributions: the least noise for the same epsilon", _pld),
    "rdp": Accountant("rdp", "Rényi differential privacy: faster, and some 5 % more noise", _rdp),
}
DEFAULT = "pld"
TOO_LARGE = 1e7
"""An epsilon that protects nobody, and whose distribution of privacy losses fits no memory: RDP's stands."""
ROUNDING, MOST_FEW = 2.0**-50, 100
"""Of delta, for each step that is composed, and for as many more whatever their number. Measured: at most a tenth."""


def accountant_named(name: str) -> Accountant:
    """Refuses a name that does not exist. `prv`, of other libraries, is the same idea as `pld`, and taken for it."""
    name = "pld" if name == "prv" else name
    if name == "gdp":
        raise ValueError(
            "accountant is 'gdp', an approximation that can state too small an epsilon; use 'pld', which is as tight"
        )
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant is {name!r}; it must be {' or '.join(map(repr, ACCOUNTANTS))}")
    return ACCOUNTANTS[name]


MOST_STEPS = 10**12


@dataclass(frozen=True)
class Grid:
    """Where a sum with noise of deviation `std` is rounded to: multiples of `step`, a power of two.

    It follows from public numbers only, so that rounding to it tells nothing of data.
    """

    std: float
    step: float

    @classmethod
    def of(cls, std: float, largest: float = 0.0) -> Grid:
        """2^18 to 2^19 steps in a deviation; fewer only where a sum as large as `largest` would have over 2^41."""
        finest = max(math.ldexp(std, -18), math.ldexp(largest, -40), 2.0**-1000)
        return cls(std, math.ldexp(0.5, math.frexp(finest)[1]))


@dataclass(frozen=True)
class Mechanism:
    """One step of a training as everybody sees it: what is added up, how far one example moves it, how it is noised.

    sensitivity          how far one example moves the sum, under `neighbouring_relation`
    noise_multiplier     of all that a step releases, taken together: this is what the accountant is told
    statistic_share      φ: the part of the budget that pays for the statistic behind the layer weights, of which one
                         example moves at most 1. Released jointly, each in units of its own noise, gradient and
                         statistic are one Gaussian mechanism: σ^-2 = σ_g^-2 + σ_v^-2
    expected_batch_size  what the noisy sum is divided by: public, unlike the size of a batch
    unit, rows_per_unit  what counts as one example here, and how many rows of a batch are averaged to be one
    """

    method: str
    weight_source: str
    clip_norm: float
    sensitivity: float
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float
    accountant: str = DEFAULT
    statistic_share: float = 0.0
    neighbouring_relation: str = ADD_OR_REMOVE
    unit: str = "example"
    rows_per_unit: int = 1

    def __post_init__(self) -> None:
        _check_step(self.noise_multiplier, self.sample_rate)

    @property
    def gradient_std(self) -> float:
        """σ_g x sensitivity, of the noise on the sum."""
        return self.noise_multiplier / math.sqrt(1 - self.statistic_share) * self.sensitivity

    @property
    def statistic_std(self) -> float:
        """σ_v, of the noise on the statistic; 0 where there is none."""
        return self.noise_multiplier / math.sqrt(self.statistic_share) if self.statistic_share else 0.0

    @property
    def gradient_grid(self) -> Grid:
        """Of the sum, before it is divided by the expected batch size."""
        return Grid.of(self.gradient_std, self.sensitivity * self.expected_batch_size)

    @property
    def statistic_grid(self) -> Grid:
        return Grid.of(self.statistic_std, self.expected_batch_size)

    def event(self, steps: int = 1) -> Any:
        """`steps` steps as a `DpEvent` of dp-accounting, which can be composed with others."""
        return _event(self.noise_multiplier, self.sample_rate, steps)

    def epsilon(self, steps: int, delta: float) -> float:
        return epsilon_spent(
            self.noise_multiplier, self.sample_rate, steps=steps, delta=delta, accountant=self.accountant
        )


@lru_cache(1024)
def epsilon_spent(
    noise_multiplier: float, sample_rate: float, *, steps: int, delta: float, accountant: str = DEFAULT
) -> float:
    """The epsilon of `steps` Poisson-subsampled Gaussians at this delta; infinite without noise, 0 without steps."""
    _check_step(noise_multiplier, sample_rate)
    _check_delta(delta)
    if not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps is {steps}; it must be 0 to {MOST_STEPS}")
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    return _epsilon(accountant, [_event(noise_multiplier, sample_rate, steps)], delta)


def composed_epsilon(
    trainings: Sequence[tuple[float, float, int]], *, delta: float, accountant: str = DEFAULT
) -> float:
    """The epsilon of several trainings on the same data together, each (noise multiplier, sample rate, steps).

    One may have gone on from what another released, and been chosen by it: composition is adaptive.
    """
    return _composed(tuple(trainings), delta, accountant)


@lru_cache(1024)
def _composed(trainings: tuple[tuple[float, float, int], ...], delta: float, accountant: str) -> float:
    _check_delta(delta)
    spending = [each for each in trainings if each[2]]
    if any(noise_multiplier == 0 for noise_multiplier, _, _ in spending):
        return math.inf
    return _epsilon(accountant, [_event(*each) for each in spending], delta) if spending else 0.0


def _epsilon(accountant: str, events: Sequence[Any], delta: float) -> float:
    """RDP's, or the smaller of that and another accountant's: both are upper bounds.

    Distributions of privacy losses are composed by Fourier transforms, in double precision: what rounding may do to
    delta is taken off it first. Where that leaves nothing, RDP's stands.
    """
    make = accountant_named(accountant).make
    rdp = _added_up(_rdp(0.0), events, delta)
    left = delta - ROUNDING * (MOST_FEW + sum(event.count for event in events))
    if make is _rdp or rdp > TOO_LARGE or left <= 0:
        return rdp
    return min(rdp, _added_up(make(rdp), events, left, rdp))


def _added_up(book: Any, events: Sequence[Any], delta: float, otherwise: float = math.inf) -> float:
    """What the accountant says; `otherwise`, where its numbers overflow or cannot be told apart."""
    with _quiet():
        try:
            for event in events:
                book.compose(event)
            return float(book.get_epsilon(delta))
        except (ArithmeticError, ValueError):
            return otherwise


@lru_cache(1024)
def calibrate_noise(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = DEFAULT,
) -> float:
    """The smallest noise multiplier (to 1e-4 of itself) whose epsilon after `steps` steps is at most the target."""
    from dp_accounting import LowerEndpointAndGuess, calibrate_dp_mechanism

    _check_step(1.0, sample_rate)
    _check_delta(target_delta)
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise ValueError(f"target_epsilon is {target_epsilon}; it must be a finite number above 0")
    if steps < 1:
        raise ValueError(f"steps is {steps}; calibration needs at least 1 step")

    make = accountant_named(accountant).make

    if _added_up(_rdp(0.0), [_event(SMALLEST, sample_rate, steps)], target_delta) <= target_epsilon:
        return SMALLEST
    with _quiet():
        rdp = float(
            calibrate_dp_mechanism(
                partial(_rdp, 0.0),
                lambda sigma: _event(sigma, sample_rate, steps),
                target_epsilon,
                target_delta,
                bracket_interval=LowerEndpointAndGuess(SMALLEST, 1.0),
                tol=1e-4 * SMALLEST,
            )
        )
    if make is _rdp:
        return rdp
    rough = partial(make, COARSE * max(10.0, target_epsilon))

    def roughly(sigma: float) -> float:
        return _added_up(rough(), [_event(sigma, sample_rate, steps)], target_delta)

    def spent(sigma: float) -> float:
        return epsilon_spent(sigma, sample_rate, steps=steps, delta=target_delta, accountant=accountant)

    # Every evaluation is slow. A search on a coarse grid leaves so little that one step along its slope is enough.
    low = high = rdp
    while roughly(low) <= target_epsilon and low > SMALLEST:
        low, high = max(SMALLEST, 0.8 * low), low
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if roughly(middle) <= target_epsilon else (middle, high)
    sigma = high
    if spent(sigma) > target_epsilon:
        return rdp
    slope = (roughly(0.99 * sigma) - roughly(sigma)) / (0.01 * sigma)
    least = max(SMALLEST, sigma - (target_epsilon - spent(sigma)) / slope) if 0 < slope < math.inf else sigma
    tried = (least + more * (sigma - least) for more in (0.0, 0.1, 0.5, 1.0))
    return next(each for each in tried if spent(each) <= target_epsilon or each >= sigma)


SMALLEST = 0.05
"""A noise multiplier below which the accountants' own numerics give out; no useful guarantee lies there."""
COARSE = 10
"""How many times as large an epsilon a first search is made for."""


@dataclass
class Ledger:
    """Counts the steps of one run and refuses the one that would overspend.

    `planned_steps` is a number of steps known to fit the target, so that the accountant is only asked beyond it.
    `noting` is called when a step was counted and nothing of it is released yet.
    """

    mechanism: Mechanism
    target_epsilon: float | None = None
    target_delta: float | None = None
    planned_steps: int = 0
    steps: int = 0
    noting: Callable[[], object] = lambda: None

    def check_next(self) -> None:
        """Raise if one more step would pass the target epsilon."""
        if self.target_epsilon is None or self.target_delta is None or self.steps < self.planned_steps:
            return
        after = self.mechanism.epsilon(self.steps + 1, self.target_delta)
        if after > self.target_epsilon:
            raise RuntimeError(
                f"step {self.steps + 1} would bring epsilon to {after:.4f}, past the target {self.target_epsilon} "
                f"(delta {self.target_delta}). The {self.steps} steps so far are within it. Stop here, or start a new "
                "run with more epochs or a larger target_epsilon."
            )

    def record_step(self) -> None:
        self.steps += 1
        self.noting()

    def epsilon(self, delta: float) -> float:
        return self.mechanism.epsilon(self.steps, delta)


def check_delta(delta: float, size: int, *, allowed: bool = False) -> str:
    """Refuse a delta of 1 / `size` or more, unless it is allowed; what there is to say of it then, "" if nothing.

    Publishing one example of `size`, drawn at random, whole and without any noise, is (0, 1 / size)-private.
    """
    _check_delta(delta)
    if delta * size < 1:
        return ""
    told = f"delta is {delta:g}, not below 1 / {size} examples: such a promise allows to publish somebody's data whole"
    if not allowed:
        raise ValueError(
            f"{told}. Choose a delta below {1 / size:.3g}; only to compare with others, set allow_large_delta."
        )
    return f"{told} (allowed by allow_large_delta)"


def _check_step(noise_multiplier: float, sample_rate: float) -> None:
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier is {noise_multiplier}; it must be a finite number, 0 or more")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate is {sample_rate}; it must be above 0 and at most 1")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie strictly between 0 and 1 (usually below 1 / dataset size)")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines about RDP orders that were left out (which can only raise epsilon), and without overflows."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):  # beyond an epsilon of 709, e^epsilon is infinite: an upper bound all the same
            yield
    finally:
        logger.setLevel(level)


def _event(noise_multiplier: float, sample_rate: float, steps: int) -> Any:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    step = PoissonSampledDpEvent(sample_rate, GaussianDpEvent(noise_multiplier))
    return SelfComposedDpEvent(step, steps)
