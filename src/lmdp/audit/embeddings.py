"""Embeddings that a service returned, made ready for an audit: checked, balanced, beside their raw inputs if given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmdp.audit.finite import refuse_not_finite
from lmdp.data.npz import read_arrays
from lmdp.membership.compaction import compact_inputs
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples, count, gather, members_and_nonmembers

LAYER = "embedding"
SIDES = ("member", "nonmember")
ARRAYS = tuple(f"{side}{part}" for part in ("", "_labels", "_inputs") for side in SIDES)


@dataclass(frozen=True)
class Embeddings:
    """Members and non-members as one: what an adversary sees of them, and what a blind one does (None: no inputs)."""

    evidence: Evidence
    blind: Evidence | None
    examples: Examples

    @property
    def notes(self) -> tuple[str, ...]:
        """What such an audit can see and what not."""
        labels = "with labels" if self.evidence.labels is not None else "without labels (member_labels)"
        seen = (
            f"This audit sees one layer as it was served, {labels}: no other layer, no augmented copies, no output of "
            "the model, no canaries. Finding nothing here says less than an audit of the model itself."
        )
        control = (
            "Without raw inputs there is no control, and a leak cannot be told from a difference between the groups. "
            "Add arrays member_inputs and nonmember_inputs (in Python inputs=(…, …)) with the inputs of these "
            "embeddings, row by row; lmdp embed writes them with --inputs."
        )
        return (seen,) if self.blind is not None else (seen, control)


def embedded(members: Any, nonmembers: Any, inputs: Sequence[Any] | None, seed: int) -> Embeddings:
    """Both groups balanced, in content order. With inputs, who is in both groups is told by these."""
    rows, labels = zip(*(_rows(data, side) for data, side in zip((members, nonmembers), SIDES)))
    if rows[0].shape[1:] != rows[1].shape[1:]:
        raise ValueError(
            f"members have embeddings of shape {tuple(rows[0].shape[1:])}, non-members of {tuple(rows[1].shape[1:])}"
        )
    refuse_not_finite(rows[0], rows[1])
    raw = [_inputs(part, side) for part, side in zip(inputs, SIDES)] if inputs is not None else list(rows)
    for side, part, given in zip(SIDES, raw, rows):
        if count(part) != len(given):
            raise ValueError(
                f"there are {len(given)} {side} embeddings and {count(part)} {side}_inputs; there must be as many, row "
                "by row"
            )
    numbers = torch.arange(len(rows[0]) + len(rows[1])).split([len(part) for part in rows])
    chosen = members_and_nonmembers(*zip(raw, numbers), seed=seed)
    assert chosen.labels is not None
    every = torch.cat(list(rows))[chosen.labels].flatten(1).numpy()
    classes = None if labels[0] is None or labels[1] is None else torch.cat(list(labels))[chosen.labels].long()
    examples = Examples(chosen.inputs, classes, chosen.member, chosen.dropped)
    blind = None if inputs is None else Evidence(compact_inputs(chosen.inputs, seed=seed), examples.label_array)
    return Embeddings(Evidence(every, examples.label_array), blind, examples)


def read_embeddings(path: str | Path) -> tuple[list[Any], list[Any] | None]:
    """Members and non-members, each with its labels where the file has those of both; and, likewise, raw inputs."""
    stored = read_arrays(Path(path), ARRAYS)
    arrays = {name: array.copy() for name, array in stored.items()}  # torch wants arrays that could be written to
    if not arrays.keys() >= set(SIDES):
        raise ValueError(f"{path} lacks arrays of embeddings; it must have 'member' and 'nonmember'")
    both: list[Any] = [arrays[side] for side in SIDES]
    if labels := _of_both(arrays, "labels", path):
        both = list(zip(both, labels))
    return both, _of_both(arrays, "inputs", path)


def _of_both(arrays: dict[str, Any], part: str, path: str | Path) -> list[Any] | None:
    there = [name for side in SIDES if (name := f"{side}_{part}") in arrays]
    if len(there) == 1:
        raise ValueError(f"{path} has only {there[0]} of member_{part} and nonmember_{part}; add the other, or drop it")
    return [arrays[name] for name in there] or None


def _inputs(data: Any, side: str) -> Any:
    if isinstance(data, np.ndarray) and data.dtype.kind not in "biuf":
        raise ValueError(f"{side}_inputs are {data.dtype}; a control needs numbers: pixels, or the token ids of texts")
    return gather(data)[0]


def _rows(data: Any, side: str) -> tuple[Tensor, Tensor | None]:
    rows, labels = gather(data)
    if not isinstance(rows, Tensor):
        raise TypeError("embeddings are inputs by name; without a model, pass one array of them")
    if rows.dim() < 2 or rows.is_complex():
        raise ValueError(
            f"{side} embeddings are {str(rows.dtype).removeprefix('torch.')} of shape {tuple(rows.shape)}; they must "
            "be real numbers, one row for each example"
        )
    if labels is not None and labels.shape != (len(rows),):
        raise ValueError(f"{side}_labels have shape {tuple(labels.shape)}; there must be one for each of {len(rows)}")
    return rows.float(), labels
