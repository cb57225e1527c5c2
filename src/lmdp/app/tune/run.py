"""`tune`: one half of the public data plays the private part, the other is its shadow data; then a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmdp.app.cells.cell import ALIKE, HELD_OUT, TRAIN, Cell
from lmdp.app.cells.choice import Point, least_leaky
from lmdp.app.cells.run import measure_all
from lmdp.app.cells.sources import Sources
from lmdp.app.cells.store import Store
from lmdp.app.config import Config
from lmdp.app.progress import Show
from lmdp.app.runs.files import write, write_json
from lmdp.app.tune.search import Values, searched
from lmdp.methods import METHODS
from lmdp.risk import RiskProfile

SETTING = "tune"
KEPT = ("model", "method", "weights", "epsilon", "delta", "sample_rate", "size", "channels", "unit_clip")
CANARIES, FEWEST = 1000, 600


@dataclass(frozen=True)
class Wanted:
    """What is tuned: an architecture on public data at an epsilon, over these options."""

    public: str
    base: Mapping[str, Any]
    methods: tuple[str, ...]
    options: Mapping[str, tuple[float, ...]]
    seeds: int
    tolerance: float

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        methods: Sequence[str],
        options: Mapping[str, Sequence[float]],
        seeds: int,
        tolerance: float,
        examples: int,
    ) -> Wanted:
        """Refuses what cannot be tuned, before anything long begins."""
        if not config.shadow:
            raise ValueError("there is no public data to tune on: name it with --shadow SPEC")
        if "half=" in config.shadow:
            raise ValueError(f"--shadow is {config.shadow!r}: leave half= out, tuning takes both halves")
        if seeds < 1 or not 0 <= tolerance < 1:
            raise ValueError(f"--seeds is {seeds} and --tolerance {tolerance:g}; 1 or more, and 0 to below 1")
        if unfit := [name for name in methods if not METHODS[name].private]:
            raise ValueError(f"--methods has {unfit[0]!r}, which is not private: there is no epsilon to keep")
        if empty := [key for key, tried in options.items() if not tried]:
            raise ValueError(f"--{empty[0].replace('_', '-')}s is empty; give values, separated by commas")
        join = "&" if "?" in config.shadow else "?"
        limit = f"&limit={examples}" if examples else ""
        base = {
            **config.to_dict(),
            "data": f"{config.shadow}{join}half=1{limit}",
            "shadow": f"{config.shadow}{join}half=2{limit}",
            "accountant": "rdp",
            "unit_clip": True,  # so that the learning rate and C come apart
        }
        chosen = {key: tuple(dict.fromkeys(tried)) for key, tried in options.items()}
        return cls(config.shadow, base, tuple(methods), chosen, seeds, tolerance)


@dataclass(frozen=True)
class Tuned:
    """The chosen point, each method's own, and all that were tried, by method."""

    best: Point
    own_best: dict[str, Point]
    tried: dict[str, list[Point]]


def tune(wanted: Wanted, out: Path, show: Show, *, command: str, jobs: int | None = None) -> Tuned:
    """Goes on where it was broken off; leaves best.toml (a recipe), tune.json, frontier.svg and report.html."""
    from lmdp.app.tune.page import figure, render

    wanted = _sized(wanted, show)
    out.mkdir(parents=True, exist_ok=True)
    rates = _rates(wanted, out, show)
    own_best, tried = {}, {}
    for method in wanted.methods:
        own_best[method], tried[method] = _of_method(method, wanted, out, show, rates, jobs)
    best = least_leaky(list(own_best.values()), wanted.tolerance)
    tuned = Tuned(best, own_best, tried)
    write(out / "best.toml", _recipe(wanted, tuned, out))
    write_json(out / "tune.json", to_dict(tuned))
    write(out / "frontier.svg", figure(tuned))
    write(out / "report.html", render(wanted, tuned, command))
    return tuned


def _sized(wanted: Wanted, show: Show) -> Wanted:
    """With as many non-members and canaries as the data has room for; few examples get noise for canaries."""
    from lmdp.app import pipeline

    size = len(pipeline.private_data(Config.of(dict(wanted.base)), show).train)
    if size < FEWEST:
        raise ValueError(
            f"one half of {wanted.public} has {size} training examples; tuning needs at least {FEWEST}, to train on, "
            "to attack and to compare with. Choose more public data."
        )
    few = size < 4 * FEWEST
    audited = {
        "holdout": 0.3 if few else 0.2,
        "canaries": 300 if few else min(CANARIES, size // 5),
        "canary_kind": "noise" if few else "mislabelled",
    }
    return replace(wanted, base={**wanted.base, **audited})


def to_dict(tuned: Tuned) -> dict[str, Any]:
    def row(point: Point) -> dict[str, Any]:
        return {**dict(point.values), "accuracies": list(point.accuracies), "leakages": list(point.leakages)}

    return {
        "best": row(tuned.best),
        "by_method": {method: row(point) for method, point in tuned.own_best.items()},
        "tried": {method: [row(point) for point in points] for method, points in tuned.tried.items()},
    }


def _rates(wanted: Wanted, out: Path, show: Show) -> Mapping[str, float] | None:
    """Error rates that `lm` weighs layers by, from the shadow half; estimated once, and kept as risk.json."""
    if not any(_weighed(method) for method in wanted.methods):
        return None
    path = out / "risk.json"
    if not path.exists():
        from lmdp.app import pipeline

        config = Config.of({key: value for key, value in wanted.base.items() if key != "data"})
        profile = pipeline.estimate(config, None, show)
        write_json(path, profile.to_dict())
    profile = RiskProfile.load(path)
    if profile.note:
        show.say(f"note: {profile.note}")
    return profile.weight_rates


def _weighed(method: str) -> bool:
    return METHODS[method].reweighted and not METHODS[method].optimal


def _of_method(
    method: str, wanted: Wanted, out: Path, show: Show, rates: Mapping[str, float] | None, jobs: int | None
) -> tuple[Point, list[Point]]:
    """The search of one method. r is tried where it has an effect, and else as many more learning rates."""
    weighed = _weighed(method) and rates is not None and len(set(rates.values())) > 1
    options = {key: tried for key, tried in wanted.options.items() if key != "emphasis" or weighed}
    more = 0 if weighed else len(wanted.options.get("emphasis", ())) - 1

    def measure(settings: Sequence[Values]) -> list[Point]:
        cells = {i: _cells(wanted, values, weighed) for i, values in enumerate(settings)}
        every = [cell for group in cells.values() for cell in group]
        failed = measure_all(every, out, Sources(), show, rates=lambda cell, store: rates, jobs=jobs)
        if failed:
            raise RuntimeError(
                f"{len(failed)} cells failed: {next(iter(failed.values()))}. The same command tries again"
            )
        store = Store(out)
        return [_point(values, [m.result for m in store.measured(cells[i])]) for i, values in enumerate(settings)]

    show.say(f"{method}: " + ", ".join(f"{key} {' '.join(f'{o:g}' for o in tried)}" for key, tried in options.items()))
    finer = {"learning_rate": more} if more > 0 and "learning_rate" in options else {}
    return searched({"method": method}, options, measure, wanted.tolerance, finer)


def _cells(wanted: Wanted, values: Values, weighed: bool) -> list[Cell]:
    given = {**wanted.base, **values}
    given["weights"] = METHODS[values["method"]].source("private")
    more = {"rates": HELD_OUT if weighed else ALIKE, "examples": 1000}
    return [Cell.of(TRAIN, SETTING, {**given, "seed": seed}, **more) for seed in range(1, wanted.seeds + 1)]


def _point(values: Values, results: Sequence[Mapping[str, Any]]) -> Point:
    leakages = [max(leak["auc"] for leak in result["canaries"].values()) for result in results]
    return Point(tuple(values.items()), tuple(result["accuracy"] for result in results), tuple(leakages))


def _recipe(wanted: Wanted, tuned: Tuned, out: Path) -> str:
    """A recipe for `lmdp train --recipe`: what was chosen, and what it was chosen for. Data are left to be named."""
    method = tuned.best["method"]
    values = {key: value for key, value in wanted.base.items() if key in KEPT} | dict(tuned.best.values)
    values["weights"] = METHODS[method].source("private")
    if _weighed(method):
        values["risk"] = str((out / "risk.json").absolute())
    lines = Config.of(values).to_toml().splitlines()
    told = (
        f"# Chosen by lmdp tune on public data: {wanted.public}. There it gave a test accuracy of\n"
        f"# {tuned.best.accuracy:.3f} and an AUC of {tuned.best.leakage:.3f} on canaries (seeds: {wanted.seeds}).\n"
        "# The choice costs no privacy, and is no promise for other data.\n"
    )
    return told + "".join(f"{line}\n" for line in lines if line.partition(" = ")[0] in values)
