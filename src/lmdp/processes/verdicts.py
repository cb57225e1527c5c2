"""What all processes together know of the assumptions: what one of them has seen violated is violated for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmdp.guards import HOLDS, NOT_ESTABLISHED, VIOLATED, Judgement, Verdict
from lmdp.processes.group import Group

OTHER_PARAMETERS = "the parameters are not the same on all processes: something changed them on some only"


def everywhere(group: Group, judgement: Judgement, verdicts: Mapping[str, Verdict], digest: str) -> dict[str, Verdict]:
    """Of each assumption: holds where it does on every process. All must ask. `digest`: of this one's parameters."""
    told = group.told((dict(verdicts), digest))
    every = {key: _worst([of_one[key] for of_one, _ in told]) for key in verdicts}
    if len({of_one for _, of_one in told}) > 1:
        every["process"] = Verdict(VIOLATED, OTHER_PARAMETERS)
    if group.lost:
        judgement.doubted("process", group.lost)
        every["process"] = every["process"] if not every["process"].holds else Verdict(NOT_ESTABLISHED, group.lost)
    return every


def all_hold(verdicts: Mapping[str, Verdict]) -> bool:
    return all(verdict.holds for verdict in verdicts.values())


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    state = next((s for s in (VIOLATED, NOT_ESTABLISHED) if any(v.state == s for v in verdicts)), HOLDS)
    reasons = {rank: verdict.how for rank, verdict in enumerate(verdicts) if verdict.state == state}
    if state == HOLDS or (len(reasons) == len(verdicts) and len(set(reasons.values())) == 1):
        return verdicts[0]
    return Verdict(state, "; ".join(f"process {rank}: {how}" for rank, how in reasons.items()))


def said_by_all(group: Group, judgement: Judgement) -> dict[str, dict[str, list[str]]]:
    """What was said against the assumptions, for a saved run."""
    every = Judgement()
    for said in group.told(judgement.state()):
        every.inherit(said)
    return every.state()


def open_in_any(group: Group, state: Mapping[str, Any]) -> dict[str, Any]:
    """What nobody could look at yet on one of them is open, and only looks that all have made count."""
    every = group.told(dict(state))
    joined = dict(every[0])
    joined["ways"] = {name: why for one in every for name, why in one["ways"].items()}
    joined["once"] = {key: why for one in every for key, why in one["once"].items()}
    joined["companies"] = min(one["companies"] for one in every)
    joined["rows"] = next((one["rows"] for one in every if one["rows"]), "")
    return joined
