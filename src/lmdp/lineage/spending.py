"""One private training as the accountant is told of it, and what several cost together. Plain numbers: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from lmdp.accounting import DEFAULT, MOST_STEPS, composed_epsilon
from lmdp.data.records import MAY_BE_MISSING, Amount, Must, Share, decoded, encoded

HEADER = "lmdp.spent"
"""Where the header of a model file tells of it."""
Steps = Annotated[int, Must(f"a whole number from 0 to {MOST_STEPS}", lambda number: 0 <= number <= MOST_STEPS)]


@dataclass(frozen=True)
class Spending:
    """One private training, as the accountant is told of it.

    run        which training it is: one that is continued, or recorded after several of its steps, counts once
    dataset    keyed digest of its data; "" where it is not known. Equal ones are the same data
    certified  whether the numbers can be relied on
    unit       whose privacy it keeps: what it cost one user cannot be told from what it cost one example
    """

    run: str
    noise_multiplier: Amount
    sample_rate: Share
    steps: Steps
    dataset: str = ""
    certified: bool = True
    unit: Annotated[str, MAY_BE_MISSING] = "example"


def epsilon_of(spent: Iterable[Spending], *, delta: float, accountant: str = DEFAULT) -> float:
    """Of all these trainings together."""
    events = [(one.noise_multiplier, one.sample_rate, one.steps) for one in together(spent)]
    return composed_epsilon(events, delta=delta, accountant=accountant)


def together(spent: Iterable[Spending]) -> tuple[Spending, ...]:
    """Each training once, with the most steps that were ever told of it; a doubt about it stays."""
    runs: dict[str, Spending] = {}
    for one in spent:
        before = runs.get(one.run, one)
        most = one if before.steps < one.steps else before
        runs[one.run] = replace(most, certified=one.certified and before.certified)
    return tuple(runs.values())


def metadata(spent: Sequence[Spending]) -> dict[str, str]:
    """For the header of a safetensors file."""
    return {HEADER: json.dumps(encoded(tuple(spent)), allow_nan=False)} if spent else {}


def from_metadata(header: Mapping[str, str], origin: str) -> tuple[Spending, ...]:
    """What `metadata` wrote; nothing where the header holds none."""
    try:
        content = json.loads(header.get(HEADER, "[]"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: {HEADER} is not JSON ({error})") from None
    return spendings(content, origin)


def spendings(content: Any, origin: str) -> tuple[Spending, ...]:
    """From JSON values."""
    return decoded(_Chain, {"spent": content}, origin).spent


@dataclass(frozen=True)
class _Chain:
    spent: tuple[Spending, ...]
