"""Do examples meet, in the model, in the loss, or on the way there? Looked for in real steps, and refused if so.

The guarantee needs a loss that is a sum or mean of terms which each depend on one example. Looks, from the cheapest:

    graph      every step     the loss's terms are read off its graph, and what it divides by (proof, loss_scale)
    gradients  first steps    of outputs with respect to other rows' outputs (loss)
    replay     each new way   the model is run again with other examples beside half of the batch (replay)
    company    after 1, 2,    the data loader hands a batch out four times: with others in half of its places, and a
               16, 64,        few of it alone. With the parameters the same, the gradients of the rest must stay the
               1024 … steps   same (company). Sees everything, also what the loop does around the model

What was looked at is one *way* of making a step (ways). A step made in a new way is looked at again. Until then the
assumption is not established.

Nothing of this leaks. For a training in which no examples meet, the looks find nothing, whatever the data. They can
speak only where the guarantee did not hold in the first place.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lmdp.gradients import Capture, PerExampleGradients, randomness
from lmdp.gradients.attach import REGISTRY
from lmdp.gradients.capture import leading_dimension
from lmdp.guards.again import Again, Called, modes_of
from lmdp.guards.company import ENOUGH, Company, Part
from lmdp.guards.delivery import Delivery
from lmdp.guards.handed import Handed, by_units, kept_apart
from lmdp.guards.looks import Wish, is_due, steps_until_look
from lmdp.guards.loss import (
    REMEDY,
    Output,
    other_divisor,
    refuse_functions_of_totals,
    refuse_other_reduction,
    refuse_uneven_means,
    rows_meet,
    same,
)
from lmdp.guards.loss_scale import LossScale, walk
from lmdp.guards.processes import refuse_running_wrapper
from lmdp.guards.proof import Reading, shape_of
from lmdp.guards.replay import RootCall, Sketch, tolerance_of
from lmdp.guards.still import Held, Still, shift_of
from lmdp.guards.verdicts import HOLDS, NOT_ESTABLISHED, Judgement, Verdict
from lmdp.guards.ways import MOST, TRIES, Way, Ways, next_to_look_at
from lmdp.guards.words import AS_IT_IS, COLLATED, HALVED, IN_LOSS, OPEN, SEEDED

MOST_CALLS = 8
ENOUGH_ROWS = 64
"""Of a batch, in looks after the first one."""
LOOKS = 2
"""In company, for a loss that could not be read: it may weigh or choose examples alike by chance."""
OFTEN = 8
"""The whole graph, model and all, is compared in the first steps, and then in one of so many, nobody knows which."""


class Independence:
    """Watches one training. Raises where examples are seen to meet, and says so to the judgement."""

    def __init__(self, judgement: Judgement, *, mean_loss: bool) -> None:
        self.capture: Capture | None = None
        self.still: Held | None = None
        self._drawn: Callable[[], bool] = lambda: False
        self._judgement, self._mean_loss = judgement, mean_loss
        self._loss_scale = LossScale(mean_loss=mean_loss)
        self._made: list[Called] = []
        self._by_rows: set[tuple[int, int]] = set()
        self._losses, self._models = Ways(), Ways()
        self._inherited: dict[str, str] = {}
        self._step: tuple[Way, Way] | None = None
        self._handed: Handed | None = None
        self._rows: Tensor | None = None
        self._hooks, self._seeds, self._steps, self._states = 0, 0, 0, set[int]()
        self._looking = self._void = self._no_rows = self._closed = False
        self._collated: bool | None = True
        self._graph: frozenset[tuple[str, str]] = frozenset()
        self._modes: tuple[bool, ...] = ()
        self._company = Company(judgement)
        self._wished: Way | None = None
        self._again = Again()

    # -- what is told to it ------------------------------------------------------------------------------------------

    def hand_out(self, batch: Any, delivery: Delivery, rows: Tensor | None) -> None:
        """The loader hands out a batch of these examples; None in a look."""
        self._handed, self._rows = Handed(batch), rows
        self._void, self._hooks, self._seeds = delivery.empty, REGISTRY.tensor_hooks, REGISTRY.seeds
        each = self.capture.rows_each if self.capture else 1
        self.still = self._company.held(delivery, self._steps).of_units(each) if delivery.still else None
        self._drawn = randomness.draws() if delivery.still else lambda: False
        self._made, REGISTRY.states = [], set()
        self._again.clear()

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.still is None else Still(self.still)

    def collated(self, first: Any, second: Any, shared: Sequence[int], size: int) -> None:
        """Two batches that the same collation made of `size` examples, those in the places `shared` the same."""
        self._collated = kept_apart(first, second, shared, size, self.capture.rows_each if self.capture else 1)
        if self._collated is False:
            self._judgement.violated("sampling", "collating lets the examples of a batch meet; refused")
            raise RuntimeError(f"{COLLATED} {REMEDY}")

    def after_forward(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Remember the call; give the same outputs back, as others, so that the loss can be told from the model."""
        refuse_running_wrapper()
        size = leading_dimension((args, kwargs))
        if self._looking or self._void:
            return output
        self._no_rows = not size and not self._made
        if not size:
            return output
        leaves, spec = pytree.tree_flatten(output)
        outputs = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                leaves[i] = same(leaf) if self._steps < OFTEN or not leaf.dim() else leaf
                if leaf.shape[:1] == (size,) and size not in leaf.shape[1:]:
                    self._by_rows.add((i, leaf.dim()))  # of a batch as large as another dimension it is not sure
                counts = leaf.shape[:1] == (size,) and (i, leaf.dim()) in self._by_rows
                outputs[i] = Output(leaves[i], leaves[i].grad_fn, counts)
        kind = "cpu" if self.capture is None else self.capture.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._made.append(
            Called(RootCall(args, kwargs, size, cast, 0 if self.capture is None else self.capture.held), outputs)
        )
        del self._made[:-MOST_CALLS]
        return pytree.tree_unflatten(leaves, spec)

    def before_backward(self, loss: Tensor) -> float | None:
        """A mean is multiplied by the number of examples on its way back: 1/B is not the same for B and B − 1 examples,
        and where 16 bits round it, all examples would move together."""
        if self._looking or self._void or self._no_rows or self.capture is None or self.capture.watcher is not self:
            return None  # a look, no examples, or a pass on public data
        outputs = {output.node for called in self._made for output in called.outputs.values()}
        ends = self._ends(loss, outputs)
        if not ends:
            return None  # a loss of another model
        self._looking = True
        try:
            self._judge(loss, ends)
        except RuntimeError as error:
            self._refused(error)
            raise
        finally:
            self._looking = False
        counts = self._mean_loss and loss.element_size() > 2
        return float(max((called.call.size for called in self._made), default=1)) if counts else 1.0

    def sent(self, times: float) -> None:
        assert self.capture is not None
        self.capture.sent(times)

    def absorbed(self) -> None:
        """The gradients of a batch, or of a part of one, are added up and gone, and nothing is released yet: now its
        model is run again, where it must be."""
        if not self._again or self.capture is None:
            return
        self._looking, handed = True, self._handed or Handed(())
        try:
            self._again.run(self.capture, handed.__contains__, mean_loss=self._mean_loss)
        except RuntimeError as error:
            self._refused(error)
            raise
        finally:
            self._looking = False

    def in_company(self, gradients: PerExampleGradients, part: Delivery) -> None:
        """One part of a look has these gradients."""
        assert self.capture is not None
        factor, rows = gradients.factor(mean_loss=self._mean_loss), gradients.rows_each
        call = self._made[-1].call if self._made else None
        given = [leaf.detach() for leaf in (call.inputs() if call is not None else [])]
        inputs, handed = (by_units(t, part.size, rows) for t in (given, self._handed.tensors if self._handed else ()))
        tolerance, shared = tolerance_of(self.capture, call, sizes_differ=part.still), torch.tensor(part.shared).long()
        sketch = Sketch.of(gradients, self.capture, shared, tolerance, factor=factor)
        drawn = part.drawn or self._drawn()
        held = (*part.held, *(self.still.drawn if self.still is not None else ()))
        self.absorbed()
        complete = self._company.add(Part(sketch, inputs, handed, self._step or (), drawn, held), part, self._steps)
        self.still = None
        if complete and self._wished is not None and self._wished.open:
            self._wished.tries_in_company -= 1

    def released(self) -> None:
        """A step has been made."""
        if self._step is None and not self._void and not self._no_rows:
            self._judgement.doubted("loss", "the loss of some steps was differentiated where nobody could look at it")
        if self._handed is not None and (self._states & REGISTRY.states or REGISTRY.seeds != self._seeds):
            self._judgement.doubted("loss", SEEDED)
        self._states |= REGISTRY.states
        self._steps += 1
        for way in self._models if is_due(self._steps) else ():
            way.tries = way.tries if way.needed else 1  # what was seen once may have changed
        self._step, self._handed, self._hooks = None, None, REGISTRY.tensor_hooks
        self._made.clear()

    def close(self) -> None:
        self._made.clear()
        self._again.clear()
        self._company.clear()
        self._handed, self._closed, self.still = None, True, None

    # -- what is asked of it -----------------------------------------------------------------------------------------

    @property
    def steps_until_look(self) -> int:
        return steps_until_look(self._steps)

    def wish(self, *, now: bool) -> Wish | None:
        """Whom the next look should be at, if one is due; `now`: if it is of any use."""
        ways = [*self._losses, *self._models]
        useful = any(way.open and way.tries_in_company > 0 for way in ways) if now else is_due(self._steps)
        company = self._company
        at_once = 0 < company.in_doubt <= ENOUGH and company.looked_at == self._steps
        due = at_once or (useful and (now or company.looked_at < self._steps))
        if self._closed or not due or self._judgement.violations.get("loss"):
            return None
        self._wished = next_to_look_at(ways)
        rows = None if self._wished is None else self._wished.rows
        most = ENOUGH_ROWS if self._steps > 1 else None
        return Wish(rows, company.again, company.alone, most, shift_of(self._steps), company.accidents)

    def try_again(self) -> None:
        """Look once more at what could not be told."""
        for way in (*self._losses, *self._models):
            way.tries_in_company = way.needed + ENOUGH

    def open_ways(self) -> dict[str, str]:
        """Ways of making a step that nobody could look at yet, also in the run that this one goes on from → why."""
        names = self._losses.names() | self._models.names()
        inherited = {name: why for name, why in self._inherited.items() if name not in {"", *names}}
        unlooked = (self._steps or "" in self._inherited) and not self.companies
        none = {"": "no look has been made yet"} if unlooked else {}
        return inherited | none | self._losses.open() | self._models.open()

    @property
    def companies(self) -> int:
        """In how many looks the same examples had the same gradients beside others."""
        return self._company.passed

    def inherit(self, open_ways: Mapping[str, str], companies: int) -> None:
        """Of the run that this one goes on from. What was open stays so until a step is made in the same way."""
        self._inherited.update(open_ways)
        self._company.passed += companies

    def verdicts(self) -> dict[str, Verdict]:
        """Of the model, the loss, and whether what was drawn is what was stepped."""
        open_ways = list(dict.fromkeys(self.open_ways().values()))
        company = f"in {self.companies} looks the same examples had the same gradients beside others"
        if open_ways:
            doubt = Verdict(NOT_ESTABLISHED, OPEN.format(why=", ".join(open_ways)))
            return {"model": doubt, "loss": doubt, "sampling": doubt}
        replay = "run again on real batches, with other examples beside half of them, it gave the same gradients"
        graph = "in every step its terms could be read off its graph"
        return {
            "model": Verdict(HOLDS, company if any(way.needed for way in self._models) else replay),
            "loss": Verdict(HOLDS, company if any(way.needed > 1 for way in self._losses) else graph),
            "sampling": Verdict(HOLDS, company),
        }

    def _refused(self, error: RuntimeError) -> None:
        why = f"refused: {str(error).partition('.')[0]}"
        self._judgement.violated("model" if "the model lets" in str(error) else "loss", why)

    # -- how it judges -----------------------------------------------------------------------------------------------

    def _ends(self, loss: Tensor, outputs: set[Any]) -> dict[Any, str]:
        """Where the loss ends and the model begins: at these outputs, and at modules that the loss reads past them."""
        ends: dict[Any, str] = {}

        def stop(node: Any) -> bool:
            name = "output" if node in outputs else self._module(node)
            if name is not None:
                ends[node] = name
            return name is not None

        for _ in walk(loss.grad_fn, stop):
            pass
        return ends

    def _module(self, node: Any) -> str | None:
        """The module whose output this is, if it is one of the model's."""
        call = getattr(node, "call", None)
        return call.owner.name if call is not None and getattr(call, "capture", None) is self.capture else None

    def _judge(self, loss: Tensor, at: dict[Any, str]) -> None:
        """`at`: the model's outputs that the loss was computed from, and modules that it reads past them."""
        assert self.capture is not None
        every = [output for called in self._made for output in called.outputs.values() if output.node in at]
        # A loss that the model gives out is followed into the model, to the modules that it was computed from.
        ends = self._ends(loss, {output.node for output in every if output.tensor.dim()})
        refuse_uneven_means(loss, set(ends), self.capture.fetching, self._refused)
        if all(called.call.size > 1 for called in self._made):
            refuse_functions_of_totals(loss, set(ends))
        refuse_other_reduction(loss, self._mean_loss)
        reached = [(called, [i for i, o in called.outputs.items() if o.node in at]) for called in self._made]
        reached = [(called, places) for called, places in reached if places]
        outputs = [called.outputs[i] for called, places in reached for i in places]
        shape = shape_of(loss.grad_fn, ends.get)
        if self._steps < OFTEN or not secrets.randbelow(OFTEN):
            self._graph = shape_of(loss.grad_fn, lambda node: None)
            self._modes = modes_of(self.capture)
        sizes = {called.call.size for called, _ in reached}
        fixed, scaled, zero = True, False, False
        if len(sizes) == 1:
            fixed, scaled, zero = self._loss_scale.hold(loss, set(ends), next(iter(sizes)), shape)
        nodes = {output.node for output in outputs}
        widths = {o.node: o.tensor.shape[-1] for o in outputs if o.tensor.dim() > 1}
        past = any(n not in nodes for n in at)
        ends_at = {n: widths.get(n) for n in ends}
        way, proved = self._way_of_loss(loss, shape, reached, ends_at, past=past, scaled=scaled, zero=zero)
        model = self._way_of_model(past=past)
        self._step, alone = (way, model), sizes == {1}
        if self._mean_loss and loss.element_size() <= 2 and not alone:
            self._judgement.doubted("loss", HALVED)
        for each in self._step:
            each.see(self._rows, alone=alone)
        rows = [output for output in outputs if output.rows]
        if way.tries and not proved and rows:
            self._judge_gradients(loss, rows, way)
        if model.tries and not alone:
            self._again.wait(reached, model, self.capture)
        if not fixed:
            raise RuntimeError(other_divisor(self._mean_loss))

    def _way_of_loss(
        self,
        loss: Tensor,
        shape: frozenset[tuple[str, str]],
        reached: list[tuple[Called, list[int]]],
        ends: dict[Any, int | None],
        *,
        past: bool,
        scaled: bool,
        zero: bool,
    ) -> tuple[Way, bool]:
        """The way in which this loss is computed, and whether its graph proves that no example influences another.

        Past: modules were used other than through the model's outputs. Scaled: by the same factor as in other steps;
        zero: by none at all.
        """
        given = all(self._is_handed(leaf) for called, _ in reached for leaf in called.call.inputs())
        given = given and self._collated is not None
        hooked = REGISTRY.tensor_hooks != self._hooks
        read = Reading(ends, self._is_handed).proves(loss.grad_fn)
        proved = scaled and read and given and not past and not hooked
        reasons = {
            "parts of the model were used past its output": past,
            "the model was not given what the data loader handed out as it was": not given,
            "tensors had backward hooks": hooked,
            "the loss could not be read off its graph": not read,
            "neither graph nor model show what the loop does around them": True,
        }
        why = next(reason for reason, holds in reasons.items() if holds)
        key = (shape, past, given, hooked, proved, zero)
        return self._way(self._losses, key, Way(why, needed=1 if read else LOOKS, sized=scaled and read)), proved

    def _way_of_model(self, *, past: bool) -> Way:
        """The way in which the model is run. What is used past its output cannot be run again."""
        return self._way(self._models, (self._graph, self._modes, past), Way(AS_IT_IS, tries=0 if past else TRIES))

    def _way(self, ways: Ways, key: Any, new: Way) -> Way:
        way = ways.at(key, new)
        if way is None:
            self._judgement.doubted("loss", f"steps were made in more than {MOST} ways; not all were looked at")
        return way or new

    def _is_handed(self, tensor: Tensor) -> bool:
        """Whether the loader handed it out and nobody has changed it; so, too, if no loader is there to ask."""
        return self._handed is None or tensor in self._handed

    def _judge_gradients(self, loss: Tensor, rows: list[Output], way: Way) -> None:
        verdict = rows_meet(loss, rows)
        if verdict:
            raise RuntimeError(f"{IN_LOSS} {REMEDY}")
        way.tries = 0 if verdict is False else way.tries - 1
