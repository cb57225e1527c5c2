"""Several methods on the same data, at the same epsilon: risk once, each trained and audited, all side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdp.accounting import check_delta
from lmdp.app.account import refuse_empty, refuse_inferred
from lmdp.app.config import Config
from lmdp.app.network import fresh_model
from lmdp.app.pipeline import audit, estimate, parted_data, train
from lmdp.app.progress import Show
from lmdp.app.reports import story, summary, write_report
from lmdp.app.runs import RunFolder, write_json
from lmdp.app.shares import shared
from lmdp.data import Source
from lmdp.data.examples import units
from lmdp.data.records import encoded
from lmdp.methods import METHODS
from lmdp.processes import Group
from lmdp.report import Story
from lmdp.risk import RiskProfile


@dataclass(frozen=True)
class Estimating:
    """What they must know to estimate risk with it."""

    config: Config


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same data, at the same epsilon."""

    out: Path
    runs: tuple[RunFolder, ...]
    story: Story


def compare(
    config: Config,
    methods: Sequence[str],
    out: Path,
    show: Show,
    *,
    command: str,
    resume: bool = False,
    group: Group | None = None,
) -> Comparison:
    """Estimate risk once, train and audit each method, and report them side by side. `group`: as of `audit`."""
    whole = RunFolder(out)
    with whole.claim():
        config = whole.resumed(config)
        whole.check(config, resume=resume)
        source = parted_data(config, show)
        if not whole.has_run:
            refuse_empty(source, config)
        if any(METHODS[method].private for method in methods) and not whole.has_run:
            refuse_inferred(source, config)
            check_delta(config.delta, units(source.train), allowed=config.allow_large_delta)
        fresh_model(config, source, show.say)
        whole.begin(config)
        risk = _risk_of(config, whole, source, show, group)
        folders = []
        for method in methods:
            folder = RunFolder(out / method)
            if not folder.finished:
                gain = config.unit_gain and method == config.method  # of lm alone
                weights = METHODS[method].source(config.weights)
                chosen = config.changed(method=method, weights=weights, unit_gain=gain)
                others = [out / other for other in methods]
                with_it: dict[str, Any] = {"source": source, "risk": risk, "beside": others}
                train(chosen, folder.path, show, command=command, resume=resume, group=group, **with_it)
            if not (folder / "audit.json").exists():
                audit(folder.path, show, command=command, source=source, group=group)
            folders.append(folder)
        told = story(folders, command, risk)
        write_report(whole, told)
        results = {folder.path.name: summary(folder) for folder in folders}
        write_json(whole / "results.json", {"results": results, "together": encoded(told.together)})
    return Comparison(out, tuple(folders), told)


def _risk_of(config: Config, whole: RunFolder, source: Source, show: Show, group: Group | None) -> RiskProfile:
    if config.risk is not None:
        return RiskProfile.load(config.risk)
    path = whole / "risk.json"
    if path.exists():
        return RiskProfile.load(path)
    if group is not None:
        group.same(Estimating(config))
    profile = estimate(config, source, show, None if group is None else shared(group))
    write_json(path, profile.to_dict())
    return profile


def table(results: dict[str, Any]) -> str:
    """One line for each method: the most vulnerable examples first, where canaries were planted, then ordinary ones."""
    planted = any("canaries" in row for row in results.values())
    first = f"  {'canaries: AUC (95 % interval)':38}{'TPR at 1 %':>11}" if planted else ""
    head = "ordinary examples: AUC (95 % interval)" if planted else "leakiest layer: AUC (95 % interval)"
    lines = [f"{'method':16}{'epsilon':>9}  {'test accuracy':>13}{first}  {head}"]
    for name, row in results.items():
        epsilon = row["epsilon"] if isinstance(row["epsilon"], str) else f"{row['epsilon']:.2f}"
        accuracy = "" if row["test_accuracy"] is None else f"{row['test_accuracy']:.1%}"
        canaries = row.get("canaries")
        cells = (
            f"  {_peak(canaries):38}{canaries['peak_tpr_at_1pct']:>11.3f}"
            if canaries
            else f"{'':51}"
            if planted
            else ""
        )
        lines.append(f"{name:16}{epsilon:>9}  {accuracy:>13}{cells}  {_peak(row)}")
    return "\n".join(lines)


def _peak(row: dict[str, Any]) -> str:
    low, high = row["peak_auc_interval"]
    return f"{row['peak_layer']:12} {row['peak_auc']:.3f} ({low:.3f} – {high:.3f})"
