"""All guards of one run, in the order in which a step meets them.

hand_out → (the model runs, backward) → check → absorbed or in_company → (the step is released) → settle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from lmdp.gradients import Capture, PerExampleGradients, randomness
from lmdp.gradients.attach import REGISTRY
from lmdp.guards.content import Content, Glance, local
from lmdp.guards.delivery import Delivery
from lmdp.guards.handed import Read
from lmdp.guards.independence import Independence
from lmdp.guards.looks import FIRST, Looks, Wish, look
from lmdp.guards.processes import Processes
from lmdp.guards.still import Held
from lmdp.guards.verdicts import HOLDS, NOT_ESTABLISHED, Judgement, Verdict
from lmdp.guards.words import MEASURED, NO_LOOKS

STANDARD = (default_collate, default_convert)
ROWS = "every module took in and gave out as many rows as the batch has examples"
CHOICES = 3
"""In which examples are collated."""
CHANGED_GRADIENTS = "gradients were changed between their release and the optimizer"
OFF = Verdict(NOT_ESTABLISHED, "nobody looked: check_mixing=False")


class Watch:
    """Of one model, in one of so many `processes` that train it together. `independence` is None where looking for
    examples that meet was switched off.

    `at_begin` is called once, before the first private batch is seen; `at_rest` whenever the model does not run, before
    it is looked at.
    """

    def __init__(
        self, capture: Capture, judgement: Judgement, independence: Independence | None, processes: int = 1
    ) -> None:
        self.judgement, self.independence = judgement, independence
        self._capture, self._collated = capture, False
        self._stepped, self._inherited_rows = False, ("", "")
        self._kept: list[tuple[int, int]] | None = None
        self.at_begin: Callable[[], object] = lambda: None
        self.at_rest: Callable[[], object] = lambda: None
        self._processes = Processes(capture.model, capture.parameters.values(), judgement, processes)
        self.content = Content(capture.model, capture.parameters, judgement, capture.fetching)
        if independence is not None:
            independence.capture = capture

    def hand_out(self, batch: Any, delivery: Delivery, rows: Tensor | None) -> None:
        """The loader hands out a batch of these examples; None in a look."""
        self.at_rest()
        self._begin()
        if self.independence is not None:
            self.independence.hand_out(batch, delivery, rows)

    def look_at_collation(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        """Once: what collating makes of an example must not depend on the others. Torch's own need no look."""
        if self.independence is None or self._collated or collate in STANDARD:
            return
        self._collated = True
        read, size, looks = Read(dataset), min(8, len(dataset)), 0
        for seed in range(CHOICES):

            def collated(at: Tensor, held: Held | None, seed: int = seed) -> tuple[Any, bool]:
                with randomness.same(seed):
                    return None if held is not None else collate(read(at.tolist())), False

            wish = Wish(torch.arange(size // 2))
            ((one, delivery), (other, _), *_), _ = look(wish, size, None, collated)
            if delivery.shared:
                self.independence.collated(one, other, delivery.shared, delivery.size)
                looks += 1
        if not looks:
            self.independence.collated(None, None, (), 0)

    def check(self) -> None:
        """Before a batch is absorbed: raises, or notes what it sees."""
        self.at_rest()
        self._processes.check()
        self.content.check()
        self._begin()

    def _begin(self) -> None:
        if self.content.begin():
            self.at_begin()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Inside, random numbers of the loop are held still, if this is the part of a look that needs it."""
        with nullcontext() if self.independence is None else self.independence.around():
            yield

    def alone(self, looks: Looks | None) -> AbstractContextManager[None]:
        """Inside, the data loader hands out these and nothing else. Refused where it hands out none."""
        if looks is None:
            raise RuntimeError(NO_LOOKS)
        return looks.alone()

    def in_company(self, gradients: PerExampleGradients, part: Delivery) -> None:
        if self.independence is not None:
            self.independence.in_company(gradients, part)

    def absorbed(self) -> None:
        """A batch, or a part of one, is added up. Nothing is released yet."""
        if self.independence is not None:
            self.independence.absorbed()
            self.at_rest()

    @contextmanager
    def released(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer makes its step: what was released must be what it takes."""
        parameters = list(self._capture.parameters.values())
        before = Glance(p.grad for p in parameters)

        def compare(*_: Any) -> None:
            self.content.check_parameters()
            if optimizer in REGISTRY.plateaus:
                self.judgement.doubted("account", MEASURED)
            if self._kept not in (None, _versions(optimizer)):
                self.judgement.doubted("content", "the optimizer's state was changed between two of its steps")
            changed = Glance(p.grad for p in parameters).differs(before)
            self._capture.fetching.when(changed, lambda: self.judgement.doubted("content", CHANGED_GRADIENTS))

        handle = optimizer.register_step_pre_hook(compare)  # after all that the user has registered
        try:
            yield
        finally:
            handle.remove()
        self._kept = _versions(optimizer)

    def settle(self) -> None:
        """A step has been released, and the optimizer has made it."""
        self._stepped = True
        self.content.settle()
        if self.independence is not None:
            self.independence.released()

    def open_state(self) -> dict[str, Any]:
        """For a saved run: what nobody could look at yet."""
        looks = self.independence
        ways, companies = ({}, 0) if looks is None else (looks.open_ways(), looks.companies)
        rows = {"rows": self._rows_doubt() or "", "rows_how": self._rows_how()}
        once = {"rows": self._rows().how} if self._capture.leading.outside else {}
        if (processes := self._processes.verdict()).state != HOLDS:
            once["process"] = processes.how
        if looks is None:
            once |= dict.fromkeys(("model", "loss", "sampling", "rows"), OFF.how)
        return {"ways": ways, "companies": companies, **rows, "once": once}

    def inherit(self, state: Mapping[str, Any]) -> None:
        """What was open in the run that this one goes on from. What was `once` so is so for good."""
        for key, why in dict(state.get("once", {})).items():
            self.judgement.doubted(str(key), str(why))
        self._inherited_rows = str(state.get("rows", "")), str(state.get("rows_how", ""))
        if self.independence is not None:
            ways = {str(name): str(why) for name, why in dict(state.get("ways", {})).items()}
            self.independence.inherit(ways, int(state.get("companies", 0)))

    def verdicts(self) -> dict[str, Verdict]:
        """Of the assumptions that guards look at; `sampling` says whether batches were stepped as handed out."""
        self.at_rest()
        return {**self.looked(), "content": self.content.verdict()}

    def looked(self) -> dict[str, Verdict]:
        """The same, without looking at what the model holds now."""
        looked = dict.fromkeys(("model", "loss", "sampling"), OFF)
        if self.independence is not None:
            looked = self.independence.verdicts()
        return {**looked, "rows": self._rows(), "process": self._processes.verdict()}

    def awaited(self, steps: int, planned: int, *, passing: bool) -> set[str]:
        """Of these nothing bad was seen, and looks that are due soon may establish them: in the pass that is on, before
        the second step, or before so many steps as were planned."""
        if self.independence is None or not (passing or steps < 2 or steps < min(planned, FIRST[-1])):
            return set()
        judgement = self.judgement
        return {"model", "loss", "sampling", "rows"} - {*judgement.violations, *judgement.doubts}

    def _rows(self) -> Verdict:
        if self.independence is None:
            return OFF
        doubt = self._rows_doubt()
        return Verdict(NOT_ESTABLISHED, doubt) if doubt else Verdict(HOLDS, self._rows_how() or ROWS)

    def _rows_doubt(self) -> str | None:
        """Before a step of this run, what was open in the one that it goes on from."""
        return self._capture.rows_doubt if self._stepped else self._inherited_rows[0]

    def _rows_how(self) -> str:
        return (self._capture.rows_established if self._stepped else self._inherited_rows[1]) or ""


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Which tensors an optimizer keeps, and how often each was written."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [(id(value), local(value)._version) for value in kept if isinstance(value, Tensor)]
