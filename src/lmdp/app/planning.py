"""Which noise, which batch and which learning rate suit so many examples and an epsilon: from public numbers alone.

With d parameters, noise multiplier σ, expected batch B and T steps, the noise in a released gradient is σ·C·√d / B
long, and the signal at most C: every example's part is clipped to C, and their mean is no longer than each. So

    noise of a step        σ·√d / B          times as long as the longest signal
    noise of a training    σ·√d / (B·√T)     the same of all steps together: signals add up, noise partly cancels

Larger batches lower the second until σ grows as fast as they do; from there on they only take steps away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lmdp.accounting import calibrate_noise
from lmdp.app.config import Config
from lmdp.methods import METHODS

PARAMETERS = 26_010
"""Of S-CNN on images of 28x28, where nobody says another number."""
ASSUMED = " (assumed: S-CNN on 28x28 grey; say yours with --parameters)"
SLOWEST, FASTEST, STRIDE = 0.1, 4.0, 0.6
"""Learning rates with C = 1 and without momentum, and how far noise may move the weights in a step."""
MUCH = 2.0
"""Times the noise that a suited batch would have: said, with that batch."""


@dataclass(frozen=True)
class Plan:
    """One training before it begins."""

    examples: int
    epsilon: float
    delta: float
    epochs: float
    batch_size: int
    noise_multiplier: float
    parameters: int

    @classmethod
    def of(cls, config: Config, examples: int, parameters: int) -> Plan:
        batch = config.batch_for(examples)
        steps = number_of_steps(config.epochs, examples, batch)
        sigma = calibrate_noise(
            target_epsilon=config.epsilon,
            target_delta=config.delta,
            sample_rate=min(1.0, batch / examples),
            steps=steps,
            accountant=config.accountant,
        )
        return cls(examples, config.epsilon, config.delta, config.epochs, batch, sigma, parameters)

    @property
    def sample_rate(self) -> float:
        return min(1.0, self.batch_size / self.examples)

    @property
    def steps(self) -> int:
        return number_of_steps(self.epochs, self.examples, self.batch_size)

    @property
    def noise_of_a_step(self) -> float:
        return self.noise_multiplier * math.sqrt(self.parameters) / self.batch_size

    @property
    def noise_of_a_training(self) -> float:
        return self.noise_of_a_step / math.sqrt(self.steps)

    def learning_rate(self, config: Config) -> float:
        """So large that the noise of a step moves the weights by about STRIDE; of two figures."""
        whole = min(FASTEST, max(SLOWEST, STRIDE / self.noise_of_a_step))
        bound = 1.0 if config.unit_clip else config.clip_norm
        momentum = config.momentum if config.optimizer == "sgd" else 0.0
        return float(f"{whole * (1 - momentum) / bound:.2g}")


def number_of_steps(epochs: float, examples: int, batch: int) -> int:
    return math.ceil(epochs * math.ceil(examples / batch - 1e-9) - 1e-9)


def suited(config: Config, examples: int, parameters: int) -> Config:
    """The same with a sample rate and a learning rate, where none was given: what a run keeps, to be run again."""
    if not METHODS[config.method].private:
        return config
    if config.batch_size is None and config.sample_rate is None:
        config = config.changed(sample_rate=config.rate_for(examples))
    if config.learning_rate is not None:
        return config
    if config.optimizer != "sgd":
        return config.changed(learning_rate=ADAPTIVE)
    return config.changed(learning_rate=Plan.of(config, examples, parameters).learning_rate(config))


ADAPTIVE = 0.002
"""The learning rate of optimizers that divide by the length of what they have seen."""


def told(config: Config, examples: int, parameters: int) -> str:
    """For the beginning of a training: what its noise is beside its signal, and what would be better, if anything."""
    plan = Plan.of(config, examples, parameters)
    text = (
        f"expected batch {plan.batch_size} of {examples} examples, {plan.steps} steps, learning rate "
        f"{config.learning_rate:g}: the noise of a step is {plan.noise_of_a_step:.2g} times the longest signal"
    )
    default = replace(config, batch_size=None, sample_rate=None)
    if default.batch_for(examples) <= MUCH * plan.batch_size:  # sigma is no smaller there: at most so much less noise
        return text
    better = Plan.of(default, examples, parameters)
    if plan.noise_of_a_step <= MUCH * better.noise_of_a_step:
        return text
    return f"{text}; at the same epsilon, batch_size = {better.batch_size} makes it {better.noise_of_a_step:.2g} times"


@dataclass(frozen=True)
class Measured:
    """A private training that was run, and the same without privacy: what `expected` is said from."""

    noise_of_a_training: float
    what: str
    private: float
    without: float


EVIDENCE = (
    Measured(0.0042, "58,823 digits of MNIST, tanh-cnn, epsilon 3", 0.980, 0.990),
    Measured(0.071, "2,265 digits of mnist-5k, s-cnn, epsilon 5", 0.907, 0.970),
    Measured(0.11, "1,442 digits of scikit-learn, s-cnn, epsilon 5", 0.837, 0.983),
    Measured(0.27, "2,265 digits of mnist-5k, s-cnn, epsilon 1", 0.746, 0.970),
)
"""By the commands in docs/utility.md: the first is a mean of three seeds, the others are one seed each."""


def expected(plan: Plan) -> str:
    """In words that the evidence supports: the nearest trainings that were run, below and above."""
    ordered = sorted(EVIDENCE, key=lambda each: each.noise_of_a_training)
    quieter = [each for each in ordered if each.noise_of_a_training <= plan.noise_of_a_training][-1:]
    louder = [each for each in ordered if each.noise_of_a_training > plan.noise_of_a_training][:1]
    near = [
        f"{where} noise ({each.noise_of_a_training:.2g}): {each.what}, {each.private:.1%} "
        f"(without privacy {each.without:.1%})"
        for where, chosen in (("less", quieter), ("more", louder))
        for each in chosen
    ]
    nothing = "" if louder else ". Nothing was run with as much noise: expect little, or nothing, above chance"
    return f"{'; '.join(near)}{nothing}. Other data, models and settings differ; a run on public data will tell"


def like_chance(row: Mapping[str, Any], labels: Sequence[int]) -> str:
    """That a test accuracy cannot be told from always naming the most frequent class; "" where it can."""
    if row["test_accuracy"] is None or not labels:
        return ""
    from scipy.stats import binomtest  # here, because importing it takes longer than a command that needs none

    total, chance = len(labels), max(Counter(labels).values()) / len(labels)
    low, high = binomtest(round(row["test_accuracy"] * total), total).proportion_ci(0.95, "wilson")
    if low > chance:
        return ""
    return (
        f"note: the accuracy is within its interval of chance ({row['test_accuracy']:.1%}, 95 % interval {low:.1%} – "
        f"{high:.1%}; always naming the most frequent class gives {chance:.1%}). lmdp plan says what would be better"
    )


def content(plan: Plan, config: Config) -> dict[str, Any]:
    """For programs."""
    return {
        **asdict(plan),
        "sample_rate": plan.sample_rate,
        "steps": plan.steps,
        "learning_rate": suited(config, plan.examples, plan.parameters).learning_rate,
        "noise_of_a_step": plan.noise_of_a_step,
        "noise_of_a_training": plan.noise_of_a_training,
        "expect": expected(plan),
    }


def page(plan: Plan, config: Config) -> str:
    rate = suited(config, plan.examples, plan.parameters).learning_rate
    return "\n".join(
        [
            f"epsilon {plan.epsilon:g}, delta {plan.delta:g}, {plan.examples} examples, {plan.parameters} parameters"
            f"{ASSUMED if plan.parameters == PARAMETERS else ''}",
            f"  noise multiplier   {plan.noise_multiplier:.4g} ({config.accountant})",
            f"  expected batch     {plan.batch_size} (sample rate {plan.sample_rate:.3g})",
            f"  epochs, steps      {plan.epochs:g}, {plan.steps}",
            f"  learning rate      {rate:g} ({config.optimizer}, clip norm {config.clip_norm:g}"
            f"{', in its units' if config.unit_clip else ''})",
            f"  noise of a step    {plan.noise_of_a_step:.2g} times the longest signal; of all steps together "
            f"{plan.noise_of_a_training:.2g}",
            f"  what to expect     {expected(plan)}",
        ]
    )
