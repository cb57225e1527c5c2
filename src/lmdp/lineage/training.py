"""What the model of one training has behind it, and what the training adds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmdp.accounting import Mechanism
from lmdp.data.records import encoded
from lmdp.lineage.index import append, blind, digests, earlier, in_common, steps_noted
from lmdp.lineage.spending import Spending, epsilon_of, spendings, together

if TYPE_CHECKING:
    from torch import Tensor


class Lineage:
    """What the model of one training has behind it, and what the training adds.

    Made before the first step, from everything that is saved with the model: frozen weights cost what they cost too.
    `run` names a training that is continued; its steps so far are then no earlier ones. `inherited` is what such a
    training knew of when it began. `unit` is whose privacy it keeps: example, user, or user:COLUMN.
    `lost`: steps that such a training made, and its saved state does not know of.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        run: str = "",
        dataset: str = "",
        inherited: Sequence[Spending] = (),
        unit: str = "example",
    ) -> None:
        self.run, self.dataset, self.unit = run or secrets.token_hex(16), dataset, unit
        before = [one for one in together([*inherited, *earlier(parameters)]) if one.run != self.run]
        self.earlier = tuple(one for one in before if one.noise_multiplier or not self._differs(one))
        self.open = tuple(one for one in before if one not in self.earlier)
        self._fresh = set() if before else set(digests(parameters, casts=True))
        self.lost = 0

    def _differs(self, one: Spending) -> bool:
        """Whether it was trained on other data, as far as is known: on none of these examples."""
        differ = bool(one.dataset and self.dataset) and one.dataset != self.dataset
        return differ and not in_common(one.dataset, self.dataset)

    def state(self) -> dict[str, Any]:
        """For a saved run: its name, and what it had behind it."""
        return {"run": self.run, "earlier": encoded(self.earlier), **({"lost": self.lost} if self.lost else {})}

    def go_on(self, state: Mapping[str, Any], *, losing: bool = True) -> None:
        """This is the training of that state, continued: its steps so far are no earlier ones. `losing`: those that
        were noted after it are lost, unless whoever keeps the run counts or repeats them."""
        self.run = str(state.get("run", "")) or self.run
        behind = spendings(state.get("earlier", []), "the saved state")
        self.earlier = tuple(one for one in together([*behind, *self.earlier]) if one.run != self.run)
        steps, lost = int(state.get("steps", 0)), int(state.get("lost", 0))
        self.lost = max(lost, steps_noted(self.run) - steps) if losing else lost

    def steps_of(self, parameters: Mapping[str, Tensor]) -> int:
        """How many steps of this training are known to have been made for these weights, those that are lost aside."""
        return max((one.steps for one in earlier(parameters) if one.run == self.run), default=0) - self.lost

    def spent(
        self, noise_multiplier: float, sample_rate: float, steps: int, *, certified: bool = True
    ) -> tuple[Spending, ...]:
        """By the earlier trainings and by this one, so far."""
        now = Spending(self.run, noise_multiplier, sample_rate, steps + self.lost, self.dataset, certified, self.unit)
        return together([*self.earlier, now])

    def epsilon(self, mechanism: Mechanism, steps: int, delta: float) -> float:
        """Of all of it; of this training alone, where it began with fresh weights."""
        if not self.earlier:
            return mechanism.epsilon(steps + self.lost, delta)
        spent = self.spent(mechanism.noise_multiplier, mechanism.sample_rate, steps)
        return epsilon_of(spent, delta=delta, accountant=mechanism.accountant)

    def record(self, parameters: Mapping[str, Tensor], spent: Sequence[Spending]) -> None:
        """Remember what is being released."""
        append(self.released(parameters), together([*self.open, *spent]))

    def released(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """Digests of them, but for what is as it was before the training: that is public."""
        return set(digests(parameters, casts=True)) - self._fresh

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the account may be incomplete."""
        unsound = [one for one in self.earlier if not one.certified]
        told = (
            f"the model began with weights of an earlier training that is not certified ({len(unsound)} of "
            f"{len(self.earlier)})"
        )
        bare = any(not one.noise_multiplier for one in self.earlier)
        shown = (
            "the model began with weights that were trained on this data, or on some of it, without any noise"
            if bare
            else ""
        )
        apart = all(in_common(one.dataset, self.dataset) is False for one in self.open)
        unknown = (
            "the model began with weights that were trained without noise on data that cannot be compared with these "
            "(not known on this machine, or cut or scaled otherwise): whether they have examples in common is not "
            "known. Train those weights again on this machine, on examples of the same shape"
        )
        others = sorted({one.unit for one in self.earlier if one.noise_multiplier} - {self.unit})
        mixed = (
            f"the model began with weights of a training that kept the privacy of one {' or '.join(others)}: what it "
            f"cost one {self.unit} is not known, and epsilon is not that of both"
        )
        return tuple(
            filter(None, [blind(), told if unsound else "", shown, "" if apart else unknown, mixed if others else ""])
        )

    @property
    def said(self) -> tuple[str, ...]:
        """What a statement says of the earlier trainings."""
        said = []
        if self.earlier:
            steps = sum(one.steps for one in self.earlier)
            same = all(one.dataset and one.dataset == self.dataset for one in self.earlier)
            which = "the same data" if same else "data that may have people in common with this"
            said.append(
                f"the model began with weights that earlier trainings released ({len(self.earlier)}, of {steps} steps, "
                f"on {which}): epsilon is that of all of them together"
            )
        if self.lost:
            said.append(
                f"{self.lost} steps of this run were noted after those of the state that it goes on from: they are "
                "counted in epsilon, and not among its steps"
            )
        if self.open:
            said.append("the model began with weights that were trained on other data without privacy: they are public")
        return tuple(said)
