"""The privacy statement: what a run promises, under which mechanism, and what is known of each of its assumptions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Protocol

from lmdp.accounting import Mechanism
from lmdp.data.records import MAY_BE_MISSING, AmountOrInfinity, Count, decoded, encoded
from lmdp.guards.verdicts import ASSUMPTIONS, HOLDS, NOT_ESTABLISHED, Verdict, unjudged
from lmdp.methods import ADD_OR_REMOVE

NOT_COVERED = (
    "losses or models in which examples of a batch meet (class-weighted, masked or ignore_index means, contrastive "
    "losses, mixup, batch statistics): the guarantee assumes a sum or mean of terms that each depend on one example",
    "parameters outside the module that make_private was given, and risk or public data that is not public",
    "hyper-parameters and models chosen by looking at private data: every run counts for itself; learning rates, early "
    "stopping and curricula that follow a private loss",
    "what is made of private data before training: initial weights, normalisation, encodings, a dataset whose items "
    "contain other items or that holds an example more than once",
    "what your own code remembers of private batches from step to step and feeds back (queues, running means, peers)",
    "diagnostics: they are computed from private gradients without noise and are off by default",
    "audits: they are computed on private members",
    "losses, accuracies or batch sizes that your own code prints or stores during training",
    "test examples: an accuracy measured on them is published without noise",
    "anything an observer learns from running time, memory use or crashes",
)


ALL_HOLD = dict.fromkeys(ASSUMPTIONS, Verdict(HOLDS, "nothing was seen against it"))


class NotCertifiedWarning(UserWarning):
    """`engine.get_epsilon` gave the epsilon of a training whose privacy statement is not certified, or `lmdp.load` a
    model that is not the one that its statement speaks of."""


def warn_unless_certified(
    epsilon: float, verdicts: Mapping[str, Verdict], awaited: Set[str], steps: int, size: int
) -> bool:
    """Of a number that would be taken for a promise; whether it warned. `awaited`: what looks to come may establish."""
    missing = [key for key, verdict in verdicts.items() if not verdict.holds and key not in awaited]
    if not missing:
        return False
    rests_on = "; ".join(f"{ASSUMPTIONS[key]} ({verdicts[key]})" for key in missing)
    after = f"after {steps} step{'s' if steps > 1 else ''}"
    warnings.warn(
        f"epsilon {epsilon:.4g} is claimed, NOT certified, {after}: {rests_on}. "
        f"print(engine.privacy_statement(delta)) says why, and what to do about it (delta below {1 / size:.3g}).",
        NotCertifiedWarning,
        stacklevel=4,
    )
    return True


class Check(Protocol):
    """A check of the same training, such as `lmdp.check` makes."""

    def evidence(self) -> str: ...


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run promises, and what it does not. `to_dict()` is the content of `privacy.json`.

    verdicts  assumption → what is known of it; an epsilon is certified only where all hold
    reasons   why it is not certified, if so
    checks    what was seen when the training was run again with and without one example
    unit      what is protected as one, and counted by sample rate and expected batch size: `rows_per_unit` rows each
    dataset_size, processes
              how many examples there are, and how many processes trained on them together; sample rate and expected
              batch size are of all of them. 0 examples: not stated
    """

    epsilon: AmountOrInfinity
    delta: AmountOrInfinity
    accountant: str
    sampling: str
    noise_multiplier: AmountOrInfinity
    sample_rate: AmountOrInfinity
    expected_batch_size: AmountOrInfinity
    steps: Count
    clip_norm: AmountOrInfinity
    sensitivity: AmountOrInfinity
    method: str
    weight_source: str
    noise_source: Annotated[str, MAY_BE_MISSING] = "not stated"
    verdicts: Annotated[Mapping[str, Any], MAY_BE_MISSING] = field(default_factory=unjudged)
    checks: Annotated[tuple[str, ...], MAY_BE_MISSING] = ()
    neighbouring_relation: str = ADD_OR_REMOVE
    unit: Annotated[str, MAY_BE_MISSING] = "example"
    rows_per_unit: Annotated[Count, MAY_BE_MISSING] = 1
    dataset_size: Annotated[Count, MAY_BE_MISSING] = 0
    processes: Annotated[Count, MAY_BE_MISSING] = 1
    not_covered: tuple[str, ...] = NOT_COVERED
    reasons: tuple[str, ...] = field(init=False)
    certified: bool = field(init=False)

    def __post_init__(self) -> None:
        unknown = Verdict(NOT_ESTABLISHED, "the statement does not speak of it")
        verdicts = {key: self.verdicts.get(key, unknown) for key in ASSUMPTIONS}
        reasons = dict.fromkeys(verdict.how for verdict in verdicts.values() if not verdict.holds)
        object.__setattr__(self, "verdicts", verdicts)
        object.__setattr__(self, "reasons", tuple(reasons))
        object.__setattr__(self, "certified", not reasons)

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        *,
        steps: int,
        epsilon: float,
        delta: float,
        sampling: str,
        noise_source: str,
        verdicts: Mapping[str, Verdict],
        dataset_size: int = 0,
        processes: int = 1,
    ) -> PrivacyStatement:
        """What so many steps of a mechanism promise. `epsilon` is that of all that was spent, by earlier runs too."""
        printed = {f.name: getattr(mechanism, f.name) for f in fields(mechanism) if f.name in cls.__dataclass_fields__}
        return cls(
            epsilon=epsilon,
            delta=delta,
            sampling=sampling,
            steps=steps,
            noise_source=noise_source,
            verdicts=verdicts,
            dataset_size=dataset_size,
            processes=processes,
            **printed,
        )

    def table(self) -> list[tuple[str, str, str]]:
        """(assumption, state, how), one for each."""
        return [(ASSUMPTIONS[key], verdict.state, verdict.how) for key, verdict in self.verdicts.items()]

    def with_check(self, check: Check) -> PrivacyStatement:
        """The same with what a check has seen. It is evidence, and does not turn a verdict."""
        return replace(self, checks=(*self.checks, check.evidence()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
        return dict(encoded(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PrivacyStatement:
        """What `to_dict` made, read back; `certified` follows from the verdicts and cannot be set."""
        where = "the privacy statement"
        statement = decoded(cls, {k: v for k, v in content.items() if k != "verdicts"}, where)
        given = content.get("verdicts")
        if given is None:  # of an earlier version
            reasons = "; ".join(str(reason) for reason in content.get("reasons", ()))
            return replace(statement, verdicts=unjudged(*[reasons] if reasons else []))
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: verdicts is a {type(given).__name__}; it must be an object with fields")
        verdicts = {key: decoded(Verdict, value, f"{where}, verdict {key!r}") for key, value in given.items()}
        return replace(statement, verdicts=verdicts)

    def __str__(self) -> str:
        certified = "certified" if self.certified else "claimed, NOT certified"
        of = f" of {self.dataset_size} {self.unit}s" if self.dataset_size else ""
        by = f", by {self.processes} processes together" if self.processes > 1 else ""
        weights = "no layer weights" if self.weight_source == "none" else f"layer weights: {self.weight_source}"
        lines = [
            f"(epsilon, delta) = ({self.epsilon:.4g}, {self.delta:g}), {certified}",
            f"  method            {self.method}, {weights}",
            f"  neighbours        {self.neighbouring_relation}",
            f"  sampling          {self.sampling}, rate {self.sample_rate:.6g}{of} "
            f"(expected batch {self.expected_batch_size:g}{'' if self.unit == 'example' else f' {self.unit}s'}){by}",
            f"  steps             {self.steps}",
            f"  noise multiplier  {self.noise_multiplier:.6g} x sensitivity {self.sensitivity:g}",
            f"  noise from        {self.noise_source}",
            f"  clip norm         {self.clip_norm:g}",
            f"  accountant        {self.accountant}",
        ]
        if self.rows_per_unit > 1:
            said = f"one {self.unit}: the gradients of its {self.rows_per_unit} rows are averaged, then clipped as one"
            lines.insert(3, f"  unit              {said}")
        lines += [f"  {state:<17s} {sentence}: {how}" for sentence, state, how in self.table()]
        lines += [f"  checked           {seen}" for seen in self.checks]
        lines += [f"  not covered       {item}" for item in self.not_covered]
        return "\n".join(lines)
