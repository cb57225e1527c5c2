"""Calls of the model that are yet to be run again: at the end of a batch, when nothing of it is in memory any more.

Beside the batch itself, a second pass of the model would take as much memory once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lmdp.gradients import Capture
from lmdp.guards.loss import REMEDY, Output
from lmdp.guards.replay import RootCall, run_again
from lmdp.guards.ways import Way
from lmdp.guards.words import IN_MODEL

COMPANIES = 2
"""In which the model is run again."""


@dataclass
class Called:
    """One call of the model, with the outputs that a loss may be computed from."""

    call: RootCall
    outputs: dict[int, Output]


Reached = Sequence[tuple[Called, list[int]]]
"""Calls, and the places of those of their outputs that a loss was computed from."""


class Again:
    """Of one batch."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Reached, Way, tuple[bool, ...]]] = []

    def wait(self, reached: Reached, way: Way, capture: Capture) -> None:
        """A step is made in this way, which is not yet known."""
        if all(called.call.size >= 2 for called, _ in reached):
            self._waiting.append((reached, way, modes_of(capture)))

    def clear(self) -> None:
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def run(self, capture: Capture, handed: Callable[[Tensor], bool], *, mean_loss: bool) -> None:
        """Raises where examples are seen to meet."""
        waiting, self._waiting = self._waiting, []
        for reached, way, modes in waiting:
            if modes != modes_of(capture):
                way.tries -= 1  # it is another model now
                continue
            most = 1 if not way.needed else COMPANIES
            verdicts, sized = [], []
            for one, places in reached:
                chosen = [(i, one.outputs[i].rows) for i in places]
                answer = run_again(capture, one.call, chosen, handed, most, mean_loss=mean_loss)
                verdicts.append(answer.meet)
                sized.append(answer.sized)
            way.sized = way.sized or all(sized)
            if True in verdicts:
                raise RuntimeError(f"{IN_MODEL} {REMEDY}")
            if None in verdicts:
                shapes = [(one.outputs[i].tensor.shape, one.call.size) for one, places in reached for i in places]
                # Where an output has two dimensions as long as the batch, a batch of another size will tell.
                way.tries -= not any(list(shape).count(size) > 1 for shape, size in shapes)
            else:
                way.needed = way.tries = 0


def modes_of(capture: Capture) -> tuple[bool, ...]:
    """Which modules are in training mode."""
    return tuple(module.training for module in capture.model.modules())
