"""Members and non-members: put in an order that depends on their content only, balanced, and checked for overlap."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Examples:
    """Inputs with labels (None where unknown), in content order, and which of them are members."""

    inputs: Tensor
    labels: Tensor | None
    member: NDArray[np.bool_]
    dropped: int

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def label_array(self) -> NDArray[np.int64] | None:
        return None if self.labels is None else self.labels.numpy().astype(np.int64)


def gather(data: Any) -> tuple[Tensor, Tensor | None]:
    """(inputs, labels) of a dataset, of (inputs, labels), or of inputs alone."""
    if isinstance(data, TensorDataset):
        tensors = data.tensors
        return tensors[0], tensors[1] if len(tensors) > 1 else None
    if isinstance(data, Tensor):
        return data, None
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data), None
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data):
        inputs, labels = (torch.as_tensor(d) for d in data)
        return inputs, labels
    if isinstance(data, Dataset):
        return _stack([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    raise TypeError(f"examples are a {type(data).__name__}; pass a dataset, a tensor, or (inputs, labels)")


def content_keys(inputs: Tensor, salt: str = "") -> list[bytes]:
    """A hash of every example's content; equal exactly for equal examples."""
    rows = inputs.contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16, salt=salt.encode()[:16]).digest() for row in rows]


def refuse_overlap(public: Tensor, private: Tensor) -> None:
    """Raise if an example of the public shadow data is also private."""
    if public.shape[1:] != private.shape[1:]:
        return
    common = set(content_keys(public.float())) & set(content_keys(private.float()))
    if common:
        raise ValueError(
            f"{len(common)} examples are in both the shadow data and the private data. Shadow data must be public and "
            "disjoint from private data, or the risk estimate itself leaks. Remove them from the shadow data."
        )


def members_and_nonmembers(members: Any, nonmembers: Any, *, seed: int) -> Examples:
    """Both groups as one, balanced by leaving out some of the larger, in an order that ignores how they were given.

    An example that occurs in both groups says nothing about membership and is dropped from both.
    """
    (x_in, y_in), (x_out, y_out) = gather(members), gather(nonmembers)
    if x_in.shape[1:] != x_out.shape[1:]:
        raise ValueError(f"members have shape {tuple(x_in.shape[1:])} and non-members {tuple(x_out.shape[1:])}")
    keys_in, keys_out = content_keys(x_in, str(seed)), content_keys(x_out, str(seed))
    both = set(keys_in) & set(keys_out)
    pick_in = [i for i in sorted(range(len(keys_in)), key=keys_in.__getitem__) if keys_in[i] not in both]
    pick_out = [i for i in sorted(range(len(keys_out)), key=keys_out.__getitem__) if keys_out[i] not in both]
    size = min(len(pick_in), len(pick_out))
    if size == 0:
        raise ValueError(
            f"of {len(x_in)} members and {len(x_out)} non-members, {len(both)} occur in both groups, and none is left "
            "to compare. Non-members must be examples that were not trained on."
        )
    pick_in, pick_out = pick_in[:size], pick_out[:size]
    keys = [keys_in[i] for i in pick_in] + [keys_out[i] for i in pick_out]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    labelled = y_in is not None and y_out is not None
    return Examples(
        torch.cat([x_in[pick_in], x_out[pick_out]])[order],
        torch.cat([y_in[pick_in], y_out[pick_out]])[order] if labelled else None,  # type: ignore[index]
        np.array([True] * size + [False] * size)[order],
        len(x_in) + len(x_out) - 2 * size,
    )


def _stack(items: list[Any]) -> tuple[Tensor, Tensor | None]:
    if not items:
        raise ValueError("the dataset is empty")
    first = items[0]
    if isinstance(first, tuple | list):
        inputs = torch.stack([torch.as_tensor(item[0]) for item in items])
        labels = torch.tensor([int(item[1]) for item in items]) if len(first) > 1 else None
        return inputs, labels
    return torch.stack([torch.as_tensor(item) for item in items]), None
