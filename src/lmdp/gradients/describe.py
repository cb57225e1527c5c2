"""`engine.plan()`: which rule every module uses, and why."""

from __future__ import annotations

from dataclasses import dataclass

from lmdp.gradients import compiled, conv, embedding, generic, linear, norm
from lmdp.gradients.attach import Owner
from lmdp.gradients.capture import Tape
from lmdp.gradients.plan import Plan

NORMS = (norm.layer_norm, norm.rms_norm, norm.group_norm, norm.instance_norm)


@dataclass(frozen=True)
class PlannedModule:
    """One module of the plan. `kept_bytes` stay in memory between backward and step, where there is a choice.

    They are those of one example, because the size of a Poisson batch is private.
    """

    name: str
    kind: str
    rule: str
    reason: str
    kept_bytes: int | None


@dataclass(frozen=True)
class PrivatePlan:
    """One line per module; printing it gives a table."""

    modules: tuple[PlannedModule, ...]
    memory_budget: int | None
    kept_bytes: int
    loops: str

    def __str__(self) -> str:
        width = max((len(m.name) for m in self.modules), default=0)
        lines = [
            f"{m.name:{width}s}  {m.kind:12s}  {m.rule:12s}  {_kilobytes(m.kept_bytes):>9s}  {m.reason}"
            for m in self.modules
        ]
        budget = "no memory budget" if self.memory_budget is None else f"budget {self.memory_budget / 2**20:.1f} MB"
        kept = f"kept between backward and step: {_kilobytes(self.kept_bytes)} an example ({budget})"
        return "\n".join([*lines, kept, self.loops])


def describe(tape: Tape) -> PrivatePlan:
    """The plan as of the last backward pass."""
    plan = tape.plan
    modules = tuple(_module(o, tape, plan) for o in tape.owners)
    return PrivatePlan(modules, plan.memory_budget, sum(m.kept_bytes or 0 for m in modules), compiled.description())


def _module(owner: Owner, tape: Tape, plan: Plan) -> PlannedModule:
    entry = plan.entries.get(owner.name)
    kept = None
    if owner in tape.repeated:
        rule, reason = "formed", "used more than once: the gradients of all uses are added"
    elif entry is not None:
        rule, reason = "gram" if entry.gram else "formed", entry.reason
        kept = entry.sizes.kept(entry.gram) // entry.sizes.batch_size
    elif owner.rule is generic.piece:
        rule, reason = "generic", "no exact rule for this module: each example is run again by torch.func"
    elif owner.rule in NORMS:
        rule, reason = "formed", "a scale and a shift are small"
    elif owner.rule is embedding.piece:
        rule, reason = "touched rows", "an example touches only the rows that it indexes"
    elif owner not in tape.seen:
        rule, reason = "undecided", "decided when its first gradient arrives"
    elif "weight" not in owner.trainable:
        rule, reason = "factors", "only its bias is trained"
    elif owner.rule is linear.piece:
        rule, reason = "factors", "one position per example: the norm is |x||g|"
    else:
        assert owner.rule is conv.piece
        rule, reason = "formed", "a grouped convolution"
    return PlannedModule(owner.name, type(owner.module).__name__, rule, reason, kept)


def _kilobytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**10:.1f} kB"
