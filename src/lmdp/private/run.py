"""One private training as it stands: its parts, its account, and what is known of every assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdp.accounting import Ledger, Mechanism, check_delta
from lmdp.gradients import Capture
from lmdp.gradients.attach import REGISTRY
from lmdp.guards import HOLDS, NOT_ESTABLISHED, Verdict, Watch
from lmdp.guards.content import digest_of
from lmdp.guards.delivery import SKIPPED, DeliveryLog
from lmdp.guards.words import EARLIER_STEPS, LATER_STEPS, OTHER_WEIGHTS
from lmdp.lineage import Lineage, Noted, note_all_but
from lmdp.private.noise import PROMISE
from lmdp.private.optimizer import PrivateOptimizer
from lmdp.private.step import PrivateStep
from lmdp.processes import Population, all_hold, everywhere, open_in_any, said_by_all
from lmdp.statement import ALL_HOLD, PrivacyStatement, warn_unless_certified

IDENTITY = ("noise_multiplier", "sample_rate", "clip_norm", "method", "weight_source", "accountant")


@dataclass(eq=False)
class Run:
    """One private training: its parts, and what is known of it besides what they count themselves."""

    capture: Capture
    step: PrivateStep
    optimizer: PrivateOptimizer
    ledger: Ledger
    log: DeliveryLog | None
    watch: Watch
    population: Population
    lineage: Lineage | None
    allow_large_delta: bool

    def __post_init__(self) -> None:
        self.held, self._continues, self._warned = self.step.options.held, "", False
        self._noted = Noted(self.ledger, self.held.trained(), self.lineage is None)
        self._noted.follow(self)
        self.capture.attachment.tell_of_reading(self.capture.model, self._noted)
        self.watch.at_begin = self._begin
        self.watch.at_rest = self.held.settle if self.held.sharded else self.watch.at_rest
        for assumption, why in self.population.doubts:
            self.watch.judgement.doubted(assumption, why)
        earlier = sum(ledger.steps for ledger in REGISTRY.notes.setdefault(self.capture.model, []))
        if earlier:
            self.watch.judgement.violated("account", EARLIER_STEPS.format(steps=earlier))
        REGISTRY.notes[self.capture.model].append(self.ledger)

    @property
    def mechanism(self) -> Mechanism:
        return self.ledger.mechanism

    def open_lineage(self) -> Lineage:
        """What the weights have cost that training begins with."""
        if self.lineage is None:
            note_all_but(self)
            name = self.held.group.name  # one training, whoever notes it
            self.lineage = Lineage(self.held.everything(), run=name, unit=self.mechanism.unit)
        self._noted.lineage = self.lineage
        return self.lineage

    def _begin(self) -> None:
        """Whatever was asked before the first step, what counts is what it begins with."""
        if self.ledger.steps:
            self.look_for_later_steps()
            if self._continues not in ("", digest_of(self.held.trained())):
                self.watch.judgement.doubted("account", OTHER_WEIGHTS)
            return
        if self._noted.records:
            self.lineage = None
        self.open_lineage()
        if any(float(kept.get("step", 1)) for kept in self.optimizer.optimizer.state.values() if kept):
            self.watch.judgement.doubted("content", "the optimizer brought state along, of steps that nobody knows")

    def look_for_later_steps(self) -> None:
        """Weights that this run released after more steps than its state knows of."""
        steps = self.open_lineage().steps_of(self.held.trained())
        if steps > self.ledger.steps:
            self.watch.judgement.violated("account", LATER_STEPS.format(steps=steps))

    def epsilon(self, delta: float) -> float:
        return self.open_lineage().epsilon(self.mechanism, self.ledger.steps, delta)

    def told_epsilon(self, delta: float) -> float:
        """Warns once where it is not certified, by what was seen in steps. (Weights may be put aside for a moment.)"""
        epsilon, ledger, looked = self.epsilon(delta), self.ledger, self.watch.looked()
        if ledger.steps and not self._warned:
            looked |= {"sampling": self._sampling(looked["sampling"]), "account": self._account()}
            verdicts = self.watch.judgement.verdicts(ALL_HOLD | looked)
            passing = bool(self.log and self.log.passing)
            awaited = self.watch.awaited(ledger.steps, ledger.planned_steps, passing=passing)
            self._warned = warn_unless_certified(epsilon, verdicts, awaited, ledger.steps, self.population.size)
        return epsilon

    @property
    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common with the run that goes on from it."""
        mechanism = self.mechanism
        return {
            **{name: getattr(mechanism, name) for name in IDENTITY},
            "dataset_size": self.population.size,
            "layers": list(self.capture.layers.names),
            **({} if mechanism.rows_per_unit == 1 else {"unit": [mechanism.unit, mechanism.rows_per_unit]}),
        }

    def statement(self, delta: float) -> PrivacyStatement:
        """As of now. What is stated may be released, so the weights are noted with what they cost."""
        if large := check_delta(delta, self.population.size, allowed=self.allow_large_delta):
            self.watch.judgement.doubted("account", large)
        verdicts, group = self.verdicts(), self.population.group
        statement = PrivacyStatement.of(
            self.mechanism,
            steps=self.ledger.steps,
            epsilon=max(group.told(self.epsilon(delta))),  # earlier trainings may be known to one of them only
            delta=delta,
            dataset_size=self.population.size,
            processes=group.size,
            sampling="not Poisson (fixed batches)" if self.log is None else "Poisson",
            noise_source=self.step.randomness.source,
            verdicts=verdicts,
        )
        self.record(certified=statement.certified)
        return statement

    def record(self, *, certified: bool | None = None) -> None:
        """Note the weights with what they cost, for trainings that go on from them. None: as certified as they are;
        of several processes none knows that of the others, unless all ask for it."""
        if self._noted.is_due:
            if certified is None:
                certified = not self.population.group.several and all_hold(self.verdicts())
            self.open_lineage()
            self._noted.record(certified=certified)

    def state(self) -> dict[str, Any]:
        """What a run that goes on from this one must know of it."""
        verdicts, group = self.verdicts(), self.population.group  # also after a statement: what happened since counts
        self.record(certified=all_hold(verdicts))
        return {
            "identity": self.identity,
            "steps": self.ledger.steps,
            "source": self.step.source.state(),
            "said": said_by_all(group, self.watch.judgement),
            "open": open_in_any(group, self.watch.open_state()),
            **self.open_lineage().state(),
            "parameters": digest_of(self.held.trained()),
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """From what another run of the same identity has left."""
        self.ledger.steps = int(state["steps"])
        for reason in state.get("reasons", ()):  # of an earlier version
            self.watch.judgement.violated("account", str(reason))
        self.watch.judgement.inherit(state.get("said", {}))
        self.watch.inherit(state.get("open", {}))
        self.watch.content.restart()
        self.open_lineage().go_on(state, losing=self._noted.records)
        self.look_for_later_steps()
        self.step.source.restore(dict(state.get("source", {})))
        self._continues = str(state.get("parameters", ""))

    def verdicts(self) -> dict[str, Verdict]:
        """Of every assumption, as of now, on all processes."""
        guards, group = self.watch.verdicts(), self.population.group
        if group.parted:
            self.watch.judgement.violated("process", group.parted)
        here = self.watch.judgement.verdicts(
            {
                **guards,
                "sampling": self._sampling(guards["sampling"]),
                "numbers": Verdict(HOLDS, PROMISE),
                "weights": Verdict(HOLDS, f"they come from {self.mechanism.weight_source!r}, before the batch is seen"),
                "account": self._account(),
            }
        )
        digest = digest_of(self.held.trained()) if group.several and not self.held.sharded else ""
        return everywhere(group, self.watch.judgement, here, digest)

    def _account(self) -> Verdict:
        lineage = self.open_lineage()
        if lineage.doubts:
            return Verdict(NOT_ESTABLISHED, "; ".join(lineage.doubts))
        begun = lineage.said or ("no private training that is known here released the weights it began with",)
        return Verdict(HOLDS, "; ".join([*begun, f"the number of {self.mechanism.unit}s counts as public"]))

    def _sampling(self, as_handed_out: Verdict) -> Verdict:
        """That what was drawn was stepped; `as_handed_out`: and that it was what the model saw."""
        judgement = self.watch.judgement
        if self.optimizer.foreign_steps:
            judgement.violated("sampling", "steps used batches that did not come from the data loader of make_private")
        if self.log is not None and self.log.skipped:
            judgement.violated("sampling", SKIPPED)
        return as_handed_out
