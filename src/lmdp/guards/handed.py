"""What the data loader handed out: is it what the model was given, and did collating keep its examples apart?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lmdp.guards.content import sum_of_bits


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, whatever they are wrapped in."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_of(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for each in fields(batch):
            yield from tensors_of(getattr(batch, each.name))


def shapes(batch: Any) -> list[tuple[int, ...]]:
    """Of its tensors: two batches of the same shapes draw the same randomness."""
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def kept_apart(first: Any, second: Any, shared: Sequence[int], size: int) -> bool | None:
    """Whether the same examples came out of collating the same beside others; None where that cannot be told.

    `first`, `second`: batches of `size` examples, of which those in the places `shared` are the same.
    """
    pairs = list(zip(tensors_of(first), tensors_of(second)))
    if not pairs or shapes(first) != shapes(second) or any(not a.dim() or len(a) != size for a, _ in pairs):
        return None
    return all(torch.equal(_bits(a[list(shared)]), _bits(b[list(shared)])) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """So that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


class Handed:
    """The tensors of the newest batch, as they were."""

    def __init__(self, batch: Any) -> None:
        self.tensors = [tensor for tensor in tensors_of(batch) if tensor.numel()]
        self._at = {t.untyped_storage().data_ptr(): (t, sum_of_bits(t)) for t in self.tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether this is one of them, or a view whose rows are its rows, and nobody has changed it."""
        whole, bits = self._at.get(tensor.untyped_storage().data_ptr(), (None, 0))
        if whole is None or sum_of_bits(whole) != bits:
            return False
        same_numbers = tensor.numel() == whole.numel() and tensor.is_contiguous() and whole.is_contiguous()
        if same_numbers and tensor.data_ptr() == whole.data_ptr():
            return True
        offset = tensor.storage_offset() - whole.storage_offset()
        rows = tensor.dim() > 0 and whole.dim() > 0 and len(tensor) == len(whole)
        return rows and tensor.stride(0) == whole.stride(0) and 0 <= offset < whole.stride(0)


class Read:
    """Lists of examples, read as a data loader reads them.

    Each is read once, so that an augmentation which is drawn in reading is the same again; but a dataset that gives
    whole lists by itself is asked for each list, because examples may meet there.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, whole = dataset, dataset
        while type(whole) is Subset:
            whole = whole.dataset
        self._by_lists = getattr(whole, "__getitems__", None) is not None
        self._read: dict[int, Any] = {}

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        if self._by_lists:
            return list(self._dataset.__getitems__(list(indices)))
        for i in indices:
            if i not in self._read:
                self._read[i] = self._dataset[i]
        return [self._read[i] for i in indices]


def refuse_repeated(dataset: Any) -> None:
    """Raise where one example is in a dataset more than once: it would be drawn, and count, as often."""
    if isinstance(dataset, Subset):
        indices = list(dataset.indices)
        if len(set(indices)) < len(indices):
            raise ValueError(
                "the dataset is a Subset that names an example more than once: removing it would remove several. Name "
                "each index once."
            )
        refuse_repeated(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        if len({id(part) for part in dataset.datasets}) < len(dataset.datasets):
            raise ValueError(
                "the dataset is a ConcatDataset that holds a dataset more than once: removing an example would remove "
                "several. Train for more epochs instead."
            )
        for part in dataset.datasets:
            refuse_repeated(part)
