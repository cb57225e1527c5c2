"""Which cells each of the paper's tables and figures needs. A cell that two of them need is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmdp.app.cells.cell import ALIKE, HELD_OUT, IN_SAMPLE, PRINTED, STEP, TRAIN, Cell, estimate_for
from lmdp.app.reproduce.paper import BASELINES, EXPERIMENTS
from lmdp.app.reproduce.scales import Scale
from lmdp.methods import METHODS


@dataclass(frozen=True)
class Contender:
    """A way to train: a method, where its layer weights come from, and by which error rates."""

    method: str
    weights: str = "private"
    rates: str = ALIKE

    @property
    def label(self) -> str:
        label = METHODS[self.method].label
        if not METHODS[self.method].reweighted:
            return label
        more = {HELD_OUT: ", held-out rates", IN_SAMPLE: ", in-sample rates"}.get(self.rates, "")
        return f"{label} ({self.weights}{more})"


SGD, DPSGD = Contender("sgd"), Contender("dpsgd")
LM = Contender("lm", "private", PRINTED)
"""The library's default: certified weights, with the error rates that the paper prints."""
AS_PUBLISHED = Contender("lm", "batch", PRINTED)
COMPARED = tuple(Contender(name) for name in BASELINES)
OPTIMAL = tuple(Contender("lm-optimal", source) for source in METHODS["lm-optimal"].sources)
REWEIGHTED = (
    *(Contender("lm", source, PRINTED) for source in METHODS["lm"].sources),
    *(Contender("lm", "private", rates) for rates in (HELD_OUT, IN_SAMPLE)),
    *OPTIMAL,
)
CONTENDERS = (SGD, *COMPARED, *REWEIGHTED)
FRONTIER = (DPSGD, LM, Contender("autos"), Contender("psac"))


@dataclass(frozen=True)
class Grid:
    """Cells for some experiments at a scale, with so many seeds."""

    scale: Scale
    experiments: tuple[str, ...]
    seeds: int

    def trained(self, experiment: str, contender: Contender, **values: Any) -> list[Cell]:
        """One cell for each seed. Values that a method does not have are left out, so that cells are shared.

        Attacks in-sample are made where nothing is varied: in the cells of Table 2.
        """
        usual = self.scale.base(experiment) | {"emphasis": EXPERIMENTS[experiment].emphasis}
        base = self.scale.base(experiment) | values
        base["method"] = contender.method
        if contender == SGD:
            base |= self.scale.sgd.get(experiment, {})
        if METHODS[contender.method].reweighted:
            base["weights"] = contender.weights
        if contender.rates != ALIKE:
            base.setdefault("emphasis", EXPERIMENTS[experiment].emphasis)
        else:
            base.pop("emphasis", None)
        return [
            Cell.of(
                TRAIN,
                experiment,
                {**base, "seed": seed},
                rates=contender.rates,
                in_sample=all(usual[key] == value for key, value in values.items()),
                examples=self.scale.examples,
            )
            for seed in range(1, self.seeds + 1)
        ]

    def estimated(self, experiment: str, shadow: str) -> list[Cell]:
        """Risk of the experiment's architecture on a shadow set."""
        limit = self.scale.limits[experiment][1]
        return [estimate_for(c) for c in self.trained(experiment, LM, shadow=self.scale.data(shadow, limit))]

    def needed(self, cells: Sequence[Cell]) -> list[Cell]:
        """The risk estimates that these trainings use, and then the trainings."""
        measured = [estimate_for(cell) for cell in cells if cell.rates in (HELD_OUT, IN_SAMPLE)]
        return list(dict.fromkeys([*measured, *cells]))

    # -- what the paper shows ----------------------------------------------------------------------------------------

    def fig2(self) -> list[Cell]:
        return [cell for name in self.experiments for cell in self.trained(name, SGD)]

    def table2(self) -> list[Cell]:
        return self.needed([c for n in self.experiments for each in CONTENDERS for c in self.trained(n, each)])

    def curves(self) -> list[Cell]:
        return [cell for cell in self.table2() if cell.kind == TRAIN and cell["method"] != "sgd"]

    def shadow(self) -> list[Cell]:
        pairs = [(name, shadow) for name in self.ablated for shadow in self.scale.shadows[name]]
        return [cell for name, shadow in pairs for cell in self.estimated(name, shadow)]

    def epsilon(self) -> list[Cell]:
        return list(self._varied("epsilon", self.scale.epsilons, (DPSGD, LM)))

    def clip(self) -> list[Cell]:
        return list(self._varied("clip_norm", self.scale.clip_norms, (DPSGD, LM)))

    def emphasis(self) -> list[Cell]:
        return list(self._varied("emphasis", self.scale.emphases, (LM,)))

    def step(self) -> list[Cell]:
        return [
            Cell.of(STEP, name, {"model": EXPERIMENTS[name].model}, examples=self.scale.timed_steps)
            for name in self.experiments
        ]

    def frontier(self) -> list[Cell]:
        """Leakage against accuracy: every method over epsilons and learning rates."""
        cells: list[Cell] = []
        for name in self.ablated:
            rate = self.scale.base(name)["learning_rate"]
            for epsilon in self.scale.frontier_epsilons:
                for factor in self.scale.frontier_rates:
                    values = {"epsilon": epsilon, "learning_rate": rate * factor}
                    for contender in FRONTIER:
                        cells += self.trained(name, contender, **values)
        return cells

    @property
    def ablated(self) -> tuple[str, ...]:
        return self.scale.ablated(self.experiments)

    def _varied(self, key: str, values: Sequence[float], contenders: Sequence[Contender]) -> Iterator[Cell]:
        for name in self.ablated:
            for value in values:
                for contender in contenders:
                    yield from self.trained(name, contender, **{key: value})


PARTS: dict[str, Callable[[Grid], list[Cell]]] = {
    "fig2": Grid.fig2,
    "table2": Grid.table2,
    "shadow": Grid.shadow,
    "fig3": Grid.curves,
    "fig4": Grid.curves,
    "epsilon": Grid.epsilon,
    "clip": Grid.clip,
    "emphasis": Grid.emphasis,
    "time": Grid.step,
    "memory": Grid.step,
    "frontier": Grid.frontier,
}
"""What can be asked for; `all` is all of them."""


def cells_of(what: Sequence[str], grid: Grid) -> list[Cell]:
    """Without repetition, in the order in which they are best measured: seed by seed, so that little is told of all."""
    cells = dict.fromkeys(cell for part in what for cell in PARTS[part](grid))
    return sorted(cells, key=lambda cell: cell.seed)
