"""Members and non-members: put in an order that depends on their content only, balanced, and checked for overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lmdp.models import Inputs

MASK = "attention_mask"
LABELS = ("labels", "label")
"""What examples that are mappings call their label."""


CHUNK = 256
"""Examples that are read at a time of a dataset."""
Read = Callable[[list[int]], Inputs]


@dataclass(frozen=True, eq=False)
class Lazy:
    """Examples of datasets, in an order of their own, read when they are asked for and never all at once.

    Example k is number `place[k]` of the dataset that `reads[which[k]]` reads.
    """

    reads: tuple[Read, ...]
    which: NDArray[np.int64]
    place: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.place)

    def at(self, index: Any) -> Inputs:
        """Those that a slice names, in memory."""
        which, place = self.which[index], self.place[index]
        order, parts = [], []
        for number, read in enumerate(self.reads):
            rows = np.flatnonzero(which == number)
            if len(rows):
                order.append(rows)
                parts.append(read(place[rows].tolist()))
        together = parts[0] if len(parts) == 1 else _joined(*parts)
        return take(together, torch.from_numpy(np.argsort(np.concatenate(order), kind="stable")))


Stored = Inputs | Lazy
"""Examples in memory, or to be read."""


@dataclass(frozen=True)
class Examples:
    """Inputs with labels (None where unknown), in content order, and which of them are members."""

    inputs: Stored
    labels: Tensor | None
    member: NDArray[np.bool_]
    dropped: int
    origin: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Which one each was, counted from the first member to the last non-member, as they were given."""
    given: tuple[int, int] = (0, 0)
    """How many members and non-members that were."""

    def __len__(self) -> int:
        return len(self.member)

    @property
    def label_array(self) -> NDArray[np.int64] | None:
        return None if self.labels is None else self.labels.numpy().astype(np.int64)


def count(inputs: Stored) -> int:
    """How many examples there are."""
    return len(inputs) if isinstance(inputs, Tensor | Lazy) else len(next(iter(inputs.values())))


def take(inputs: Stored, index: Any) -> Inputs:
    """Those of the examples that an index or a slice names, in memory."""
    if isinstance(inputs, Lazy):
        return inputs.at(index)
    return inputs[index] if isinstance(inputs, Tensor) else {name: rows[index] for name, rows in inputs.items()}


def each_tensor(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same inputs with every tensor changed."""
    return change(inputs) if isinstance(inputs, Tensor) else {name: change(rows) for name, rows in inputs.items()}


def shapes(inputs: Inputs) -> Any:
    """Of one example: by this, two groups can be told to be examples of one kind."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:])
    return {name: tuple(rows.shape[1:]) for name, rows in sorted(inputs.items())}


def gather(data: Any) -> tuple[Inputs, Tensor | None]:
    """(inputs, labels) of a dataset, of (inputs, labels), or of inputs alone; on the host, where they are looked at.

    Inputs are tensors, or mappings of tensors by name, in which labels may stand too ("labels"). Labels that are not
    one number per example (the words of a text to be written) stay with the inputs, for the model.
    """
    return _on_host(*_gathered(data))


def _on_host(inputs: Any, labels: Tensor | None) -> tuple[Inputs, Tensor | None]:
    if not isinstance(inputs, Tensor):
        inputs = {name: torch.as_tensor(rows) for name, rows in inputs.items()}
        for name in (name for name in LABELS if labels is None and name in inputs and inputs[name].dim() == 1):
            labels = inputs.pop(name)
        if not inputs or len({len(rows) for rows in inputs.values()}) > 1:
            sizes = {name: len(rows) for name, rows in inputs.items()}
            raise ValueError(f"examples by name must have as many rows under every name, and at least one; got {sizes}")
    return each_tensor(inputs, lambda rows: rows.detach().cpu()), None if labels is None else labels.detach().cpu()


def _gathered(data: Any) -> tuple[Any, Tensor | None]:
    if isinstance(data, TensorDataset):
        tensors = data.tensors
        return tensors[0], tensors[1] if len(tensors) > 1 else None
    if isinstance(data, Tensor):
        return data, None
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data), None
    if isinstance(data, Mapping):
        return data, None
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data):
        inputs, labels = (torch.as_tensor(d) for d in data)
        return inputs, labels
    if isinstance(data, tuple | list) and len(data) == 2 and [isinstance(d, Mapping) for d in data] == [True, False]:
        return data[0], torch.as_tensor(data[1])
    if isinstance(data, Dataset) or (
        isinstance(data, Sized) and hasattr(data, "__getitem__") and type(data) is not str
    ):
        return _stack([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    raise TypeError(f"examples are a {type(data).__name__}; pass a dataset, a tensor, or (inputs, labels)")


def content_keys(inputs: Inputs, salt: str = "") -> list[bytes]:
    """A hash of every example's content; equal exactly for equal examples."""
    if isinstance(inputs, Tensor):
        rows = inputs.contiguous().numpy()
        return [_key(row.tobytes(), salt) for row in rows]
    columns = [content_keys(inputs[name], f"{name}{salt}"[-16:]) for name in sorted(inputs)]
    return [_key(b"".join(parts), salt) for parts in zip(*columns)]


def _key(content: bytes, salt: str) -> bytes:
    return hashlib.blake2b(content, digest_size=16, salt=salt.encode()[:16]).digest()


def refuse_overlap(public: Inputs, private: Inputs, *, kind: str = "shadow") -> None:
    """Raise if an example of public data, of this kind, is also private; of texts, whatever they are padded with."""
    common = set(_meanings(public, private)) & set(_meanings(private, public))
    if common:
        raise ValueError(
            f"{len(common)} examples are in both the {kind} data and the private data. {kind.capitalize()} data must "
            f"be public and disjoint from private data, or what is made of them leaks. Remove them from {kind} data."
        )


def _meanings(inputs: Inputs, others: Inputs) -> list[bytes]:
    """Keys of examples by what both kinds of them have, as plain numbers, without padding."""
    if isinstance(inputs, Tensor) or isinstance(others, Tensor):
        return content_keys(each_tensor(inputs, Tensor.float)) if shapes(inputs) == shapes(others) else []
    names = sorted(set(inputs) & set(others) - {MASK, *LABELS})
    rows = [content_keys(inputs[name].float()) for name in names if MASK not in inputs]
    if MASK in inputs:
        mask = inputs[MASK].bool()
        rows = [_unpadded(inputs[name].float(), mask) for name in names]
    return [_key(b"".join(parts), "") for parts in zip(*rows)]


def _unpadded(rows: Tensor, mask: Tensor) -> list[bytes]:
    along = rows.shape[: mask.dim()] == mask.shape
    return [_key((row[kept] if along else row).numpy().tobytes(), "") for row, kept in zip(rows, mask)]


def members_and_nonmembers(members: Any, nonmembers: Any, *, seed: int) -> Examples:
    """Both groups as one, balanced by leaving out some of the larger, in an order that ignores how they were given.

    An example that occurs in both groups says nothing about membership and is dropped from both.
    """
    inside, outside = (_opened(data, str(seed)) for data in (members, nonmembers))
    if inside.shape != outside.shape:
        raise ValueError(f"members have shape {inside.shape} and non-members {outside.shape}")
    both = set(inside.keys) & set(outside.keys)
    pick_in, pick_out = (
        [i for i in sorted(range(len(group.keys)), key=group.keys.__getitem__) if group.keys[i] not in both]
        for group in (inside, outside)
    )
    size = min(len(pick_in), len(pick_out))
    if size == 0:
        raise ValueError(
            f"of {len(inside.keys)} members and {len(outside.keys)} non-members, {len(both)} occur in both groups, and "
            "none is left to compare. Non-members must be examples that were not trained on."
        )
    pick_in, pick_out = pick_in[:size], pick_out[:size]
    keys = [inside.keys[i] for i in pick_in] + [outside.keys[i] for i in pick_out]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    labelled = inside.labels is not None and outside.labels is not None
    return Examples(
        _in_order(inside.inputs, outside.inputs, pick_in, pick_out, order),
        torch.cat([inside.labels[pick_in], outside.labels[pick_out]])[order] if labelled else None,  # type: ignore[index]
        np.array([True] * size + [False] * size)[order],
        len(inside.keys) + len(outside.keys) - 2 * size,
        np.array([*pick_in, *(len(inside.keys) + i for i in pick_out)])[order],
        (len(inside.keys), len(outside.keys)),
    )


@dataclass(frozen=True)
class _Group:
    inputs: Inputs | Read
    labels: Tensor | None
    keys: list[bytes]
    shape: Any


def _opened(data: Any, salt: str) -> _Group:
    """A dataset is read through once, for its keys and labels, and is left where it is."""
    in_memory = isinstance(data, TensorDataset | Tensor | np.ndarray | Mapping | tuple | list)
    if in_memory or not (isinstance(data, Dataset) or (isinstance(data, Sized) and hasattr(data, "__getitem__"))):
        inputs, labels = gather(data)
        return _Group(inputs, labels, content_keys(inputs, salt), shapes(inputs))

    def read(index: Any) -> tuple[Inputs, Tensor | None]:
        return _on_host(*_stack([data[i] for i in index]))

    size = len(data)  # type: ignore[arg-type]
    keys: list[bytes] = []
    labels_read: list[Tensor | None] = []
    shape: Any = None
    for start in range(0, max(1, size), CHUNK):
        inputs, labels = read(range(start, min(start + CHUNK, size)))
        keys += content_keys(inputs, salt)
        labels_read.append(labels)
        shape = shapes(inputs) if start == 0 else shape
        if shapes(inputs) != shape:
            raise ValueError(f"examples from number {start} on have shape {shapes(inputs)}, those before {shape}")
    given = [labels for labels in labels_read if labels is not None]
    return _Group(lambda index: read(index)[0], torch.cat(given) if given else None, keys, shape)


def _in_order(
    inside: Inputs | Read, outside: Inputs | Read, pick_in: list[int], pick_out: list[int], order: list[int]
) -> Stored:
    """Both groups as one; in memory if both are."""
    if not callable(inside) and not callable(outside):
        return take(_joined(take(inside, pick_in), take(outside, pick_out)), order)
    reads = tuple(group if callable(group) else partial(take, group) for group in (inside, outside))
    which = np.repeat([0, 1], [len(pick_in), len(pick_out)])[order]
    return Lazy(reads, which, np.array([*pick_in, *pick_out])[order])


def _joined(first: Inputs, second: Inputs) -> Inputs:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.cat([first, second])  # type: ignore[list-item]
    return {name: torch.cat([rows, second[name]]) for name, rows in first.items()}


def _stack(items: list[Any]) -> tuple[Any, Tensor | None]:
    if not items:
        raise ValueError("the dataset is empty")
    first = items[0]
    if isinstance(first, tuple | list):
        labels = torch.tensor([int(item[1]) for item in items]) if len(first) > 1 else None
        return _rows([item[0] for item in items]), labels
    return _rows(items), None


def _rows(items: list[Any]) -> Inputs:
    """One tensor of all examples; of examples by name, one for every name."""
    if isinstance(items[0], Mapping):
        return {name: _column(name, [item[name] for item in items]) for name in items[0]}
    return torch.stack([torch.as_tensor(item) for item in items])


def _column(name: str, values: list[Any]) -> Tensor:
    rows = [torch.as_tensor(value) for value in values]
    if lengths := {tuple(row.shape) for row in rows if row.shape != rows[0].shape}:
        raise ValueError(
            f"examples have {name!r} of shapes {tuple(rows[0].shape)} and {sorted(lengths)[0]}; they must be of one "
            "length. Pad them, with an attention_mask that is 0 there."
        )
    return torch.stack(rows)
