"""What the same examples tell beside others, and without them.

The parameters are the same in all parts of a look, and so is the randomness. What comes out of the shared examples must
then be the same, whatever lies between the loader and the gradients. Where it is not, more looks follow, in which the
first part comes once more, in turn as the third and as the second one: that tells what changes from call to call (a
weight that follows the number of the step, losses that take turns) from what changes with the company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmdp.guards.delivery import Delivery
from lmdp.guards.loss import REMEDY
from lmdp.guards.replay import Sketch
from lmdp.guards.still import Held, Shape, drew_alike, shift_of
from lmdp.guards.verdicts import Judgement
from lmdp.guards.ways import Way
from lmdp.guards.words import BESIDE, PAD, UNSTEADY, WITHOUT

APART, MEET, REPLACED, SUSPECT, STEADY, UNCLEAR = "apart", "meet", "replaced", "suspect", "steady", "unclear"
ENOUGH = 5
"""Looks that find the same examples the same, after one that did not and before what it saw counts as over."""
SURE = 4
"""How many times as large as what rounding may do a difference must be, to refuse a training for it."""
MEETINGS = 3
"""Looks that find them different beside others, and the same when nothing else is, before that is sure."""


@dataclass(frozen=True)
class Part:
    """Of a look: its gradients, what the model was given, what the loader handed out, and how the step was made.

    `drawn`: whether random numbers were drawn that differ where the number of examples does; `held`: those that were
    held still.
    """

    sketch: Sketch
    inputs: list[Tensor]
    handed: list[Tensor]
    ways: Sequence[Way]
    drawn: bool = False
    held: tuple[tuple[Shape, bool], ...] = ()


class Company:
    """All looks of one training, and what they have told. Raises where examples are seen to meet.

    passed     in how many looks the same examples were the same
    in_doubt   how many looks since one in which they were not, while nobody knows why
    alone      whether that was found between an example among others and without them
    looked_at  the number of steps before the newest look
    accidents  random tensors with as many rows as a batch that are not of its examples
    """

    def __init__(self, judgement: Judgement) -> None:
        self.passed = self.in_doubt = self.looked_at = 0
        self.alone = False
        self.accidents: set[Shape] = set()
        self._judgement, self._steady, self._met = judgement, 0, 0
        self._parts: list[Part] = []

    def clear(self) -> None:
        self._parts = []

    @property
    def again(self) -> int:
        """Which part of the next look should be the first once more; 0 for none."""
        return (1 + self.in_doubt % 2) if self.in_doubt else 0

    def held(self, delivery: Delivery, steps: int) -> Held:
        """How randomness is held still in a part of the next look."""
        return Held(delivery.size, delivery.shared, shift_of(steps), self.accidents)

    def add(self, part: Part, delivery: Delivery, steps: int) -> bool:
        """One more part. Whether the look is complete."""
        self._parts = [*(self._parts if delivery.company > 1 else ()), part]
        if not delivery.company == delivery.companies == len(self._parts):
            return False
        self.looked_at = steps
        among, alone = (0, 3 - self.again) if self.again else (2, 3)
        if not drew_alike(self._parts[among].held, self._parts[alone].held, self.accidents):
            self._parts[among] = replace(self._parts[among], drawn=True)
        told = self._alone() if not self.in_doubt else None
        verdict = judge(self._parts[:3], again=self.again, alone=self.alone)
        if verdict == APART and told is False:
            self.alone, verdict = True, SUSPECT  # what was the same beside others is not without them
        self._met = {MEET: self._met + 1, STEADY: self._met}.get(verdict, 0)
        self._refuse(verdict)
        self._steady = self._steady + 1 if verdict == STEADY else 0
        apart = verdict == APART or self._steady >= ENOUGH
        ways = {id(way): way for each in self._parts for way in each.ways}.values()
        random = any(part.drawn for part in self._parts[2:])
        for way in ways:  # where 3 and 4 drew different numbers, what graph and model show is not all there is
            way.sized = bool(told) or (apart and self.alone) or (way.sized and not random)
        if self.in_doubt and apart and not self.alone and not all(way.sized for way in ways):
            self.alone, self.in_doubt, self._steady = True, 1, 0  # the other half of the question
        else:
            self.in_doubt = self.in_doubt + 1 if not apart and (self.in_doubt or verdict == SUSPECT) else 0
            self.alone = self.alone and bool(self.in_doubt)
        self.passed += apart
        for way in ways:
            way.looked_at, way.doubted = steps, bool(self.in_doubt)
            way.passed += apart
            way.why = UNSTEADY if way.doubted else way.why
        self._parts = []
        return True

    def _alone(self) -> bool | None:
        """Whether examples are the same without the others, in other places; None if that cannot be told."""
        among, alone = self._parts[2:]
        if among.drawn or alone.drawn or among.sketch.is_nothing:
            return None
        return not among.sketch.differs(alone.sketch)

    def _refuse(self, verdict: str) -> None:
        if verdict == REPLACED:
            self._judgement.violated("sampling", "the model was given other rows than the data loader handed out")
            raise RuntimeError(
                "the model was given the same rows for different examples of the data loader: rows of a batch were "
                "replaced, or shuffled in the loop. Train on what the loader hands out, in its order: it is drawn at "
                "random already, and the epsilon counts nothing else."
            )
        if self._met >= MEETINGS:
            self._judgement.violated("loss", "the same examples had other gradients in other company; refused")
            how = f"{WITHOUT}. {PAD}" if self.alone else f"{BESIDE}."
            raise RuntimeError(
                "the examples of a batch meet somewhere between the data loader and the gradients: the same examples "
                f"had other gradients {how} {REMEDY}"
            )


def judge(parts: Sequence[Part], *, again: int, alone: bool) -> str:
    """What the parts tell. `again`: which of them is the first once more, because an earlier look differed; else 0.

    `alone`: the other one has fewer examples.
    """
    first, second, third = (part.sketch for part in parts)
    other = parts[3 - again if again else 1]
    if not len(first.norms) or (alone and any(part.drawn for part in parts)):
        return UNCLEAR  # nobody is shared
    if _replaced(parts[0], other):
        return REPLACED
    if not again:
        return SUSPECT if first.differs(second) else APART
    if not first.differs(parts[again].sketch):
        if not first.differs(other.sketch):
            return STEADY
        return MEET if first.differs(other.sketch, SURE) else UNCLEAR
    return APART if first.is_midway(second, third) else UNCLEAR


def _replaced(one: Part, other: Part) -> bool:
    """Whether the model saw equal rows where the loader handed out examples that differ in all they consist of."""
    if not one.inputs or not other.inputs or len(one.handed) != len(other.handed) or not one.handed:
        return False
    seen_by_model, handed_out = list(zip(one.inputs, other.inputs)), list(zip(one.handed, other.handed))
    if any(a.shape != b.shape for a, b in (*seen_by_model, *handed_out)):
        return False
    seen = torch.stack([_rows_equal(a, b) for a, b in seen_by_model]).all(0)
    differ = torch.stack([~_rows_equal(a, b) for a, b in handed_out]).all(0)
    return bool((seen & differ).any())


def _rows_equal(a: Tensor, b: Tensor) -> Tensor:
    same: Tensor = (a == b).reshape(len(a), -1).all(dim=1)
    return same.cpu()
