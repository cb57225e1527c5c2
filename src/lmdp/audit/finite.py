"""Values that are not finite (NaN, infinite) say nothing of membership, and give it away where one group has them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmdp.membership.evidence import Array, Evidence

AT_ONCE = 65536


def refuse_not_finite(members: Tensor, nonmembers: Tensor) -> None:
    """Raise if any embedding is not finite in single precision, with how many there are, and where."""
    groups = {"member": members, "nonmember": nonmembers}
    sound = {name: finite_rows(rows.flatten(1).numpy()) for name, rows in groups.items()}
    if all(kept.all() for kept in sound.values()):
        return
    told = []
    for name, kept in sound.items():
        where = ", ".join(map(str, np.flatnonzero(~kept)[:5])) + (", …" if (~kept).sum() > 5 else "")
        told.append(f"{(~kept).sum()} of {len(kept)} rows of '{name}'" + (f" (rows {where})" if where else ""))
    raise ValueError(
        f"embeddings are not finite (NaN, infinite, or beyond single precision) in {' and '.join(told)}. Attacks would "
        "tell the groups apart by that, and not by what a model has learnt. Leave these rows out, with their labels "
        "and inputs (keep np.isfinite(np.float32(rows)).all(1)), or find out why the service returned them."
    )


def one_sided(collected: Mapping[str, Evidence], member: NDArray[np.bool_]) -> str:
    """A sentence where a layer, or the output, is not finite for examples of one group only; "" where none is."""
    first = next(iter(collected.values()))
    kinds = {f"layer '{name}'": evidence.features for name, evidence in collected.items()}
    if first.outputs is not None:
        kinds["the output"] = first.outputs
    for name, rows in kinds.items():
        faulty = ~finite_rows(rows)
        inside, outside = int((faulty & member).sum()), int((faulty & ~member).sum())
        if (inside == 0) != (outside == 0):
            who = "members" if inside else "non-members"
            return (
                f"All {inside + outside} examples for which {name} is not finite (NaN or infinite) are {who}: attacks "
                "tell the groups apart by that alone. Look at these inputs and at the model, or leave the examples "
                "out, before anything is read into these numbers."
            )
    return ""


def finite_rows(rows: Array) -> NDArray[np.bool_]:
    """Which rows hold nothing else; bit by bit, because rows may lie on a disk."""
    parts = [np.isfinite(rows[start : start + AT_ONCE]).all(axis=1) for start in range(0, len(rows), AT_ONCE)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)
