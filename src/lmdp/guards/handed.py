"""What the data loader handed out: is it what the model was given, and did collating keep its examples apart?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

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


def by_units(tensors: Iterable[Tensor], units: int, rows_each: int) -> list[Tensor]:
    """Those with a row for each unit, as they are, and those with `rows_each` for each, as [units, rows_each, …]."""
    sized = [tensor for tensor in tensors if tensor.dim() and len(tensor) in (units, units * rows_each)]
    return [tensor if len(tensor) == units else tensor.unflatten(0, (units, rows_each)) for tensor in sized]


def kept_apart(first: Any, second: Any, shared: Sequence[int], size: int, rows_each: int) -> bool | None:
    """Whether the same examples came out of collating the same beside others; None where that cannot be told.

    `first`, `second`: batches of `size` units of so many rows, of which those in the places `shared` are the same.
    """
    counted = [by_units(tensors_of(batch), size, rows_each) for batch in (first, second)]
    if not counted[0] or shapes(first) != shapes(second) or len(counted[0]) < len(shapes(first)):
        return None
    pairs = zip(*counted)
    return all(torch.equal(_bits(a[list(shared)]), _bits(b[list(shared)])) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """So that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


class Handed:
    """The tensors of the newest batch, as they were."""

    def __init__(self, batch: Any) -> None:
        self.tensors = [tensor for tensor in tensors_of(batch) if tensor.numel()]
        near = [tensor for tensor in self.tensors if tensor.is_cpu]  # to compare others would hold up their device
        self._at = {t.untyped_storage().data_ptr(): (t, sum_of_bits(t)) for t in near}

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether this is one of them, or a view whose rows are its rows, and nobody has changed it."""
        if not tensor.is_cpu or tensor.untyped_storage().data_ptr() not in self._at:
            return False
        whole, bits = self._at[tensor.untyped_storage().data_ptr()]
        if not torch.equal(sum_of_bits(whole), bits):
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


@dataclass
class CollateWithEmpty:
    """The user's collate function, and the first example in the place of an empty batch."""

    collate: Callable[[list[Any]], Any]
    dataset: Dataset[Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.collate(examples or [self.dataset[0]])


def refuse_repeated(dataset: Any) -> None:
    """Raise where one example is in a dataset more than once: it would be drawn, and count, as often."""
    rows = _examples(dataset, {})
    again = max(len(numbers) - len(np.unique(numbers)) for numbers in rows)
    if again:
        raise ValueError(
            f"the dataset holds {again} of its {len(rows[0])} examples again (a Subset that names one more than once, "
            "a list with one item in several places, a ConcatDataset of parts that overlap; select, "
            "interleave_datasets or concatenate_datasets of what was in it): removing an example would remove several. "
            "Take each once; train for more epochs instead."
        )


def common_examples(public: Any, private: Any) -> int:
    """How many of `public` (a dataset, a data loader, tensors) are read from where `private` is read from."""
    starts: Starts = {}
    theirs, mine = (_examples(_rows_of(data), starts, _each_in_memory) for data in (public, private))
    return max((int(np.isin(a, b).sum()) for a in theirs for b in mine), default=0)


def _rows_of(data: Any) -> Any:
    """Where its rows are read: in a dataset that it wraps; of a part of what is wrapped (users), in all of it."""
    whole = data
    while isinstance(whole, Subset):
        whole = whole.dataset
    if hasattr(whole, "dataset") and not hasattr(whole, "__lmdp_examples_of__"):
        return _rows_of(whole.dataset)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        same_length = all(part.dim() and len(part) == len(data[0]) for part in data)
        return TensorDataset(*data) if same_length else data
    return data if hasattr(data, "__len__") else ()


Starts = dict[Any, int]
"""What is read → the number of its first row."""
Places = Callable[[Sequence[Tensor]], list[NDArray[np.int64]]]
"""Tensors → numbers of their rows, by where they are in memory."""


def _together_in_memory(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    return [_places_in_memory(tensors)]


def _each_in_memory(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Of inputs: the first, and those with several numbers in a row. A constant that is stored once is none."""
    inputs = [tensor for at, tensor in enumerate(tensors) if (at == 0 or tensor.dim() > 1) and tensor.stride(0)]
    return [_places_in_memory([tensor]) for tensor in inputs]


def _examples(dataset: Any, starts: Starts, places: Places = _together_in_memory) -> list[NDArray[np.int64]]:
    """Numbers for each example, the same where the same is read: by its place in a dataset, or in memory.

    More than one number where it has parts that are kept apart; an example is there again if one of them is.
    """
    if isinstance(dataset, Subset):
        whole = _examples(dataset.dataset, starts, places)
        try:
            at = np.array([int(i) for i in dataset.indices], np.int64)  # of tensors, no two are equal in a set
            return [numbers[at] for numbers in whole]
        except (TypeError, ValueError, IndexError):  # of a dataset that is not indexed by numbers
            pass
    elif hasattr(dataset, "__lmdp_examples_of__"):
        return _examples(dataset.__lmdp_examples_of__, starts, places)
    elif isinstance(dataset, ConcatDataset):
        parts = [_examples(part, starts, places) for part in dataset.datasets]
        return [np.concatenate(numbers) for numbers in zip(*parts)]
    elif type(dataset) is TensorDataset and all(tensor.layout == torch.strided for tensor in dataset.tensors):
        return places(dataset.tensors)
    elif isinstance(dataset, list | tuple):  # equal words may be one object, and numbers; tensors are only if it is one
        of_tensors = [any(isinstance(leaf, Tensor | np.ndarray) for leaf in tree_leaves(item)) for item in dataset]
        every = _start(id(dataset), starts) + np.arange(len(dataset), dtype=np.int64)
        places_of = [_start(("item", id(item)), starts) if held else -1 for item, held in zip(dataset, of_tensors)]
        return [np.where(of_tensors, np.array(places_of, np.int64), every)]
    elif type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "data"):  # of Hugging Face
        return _rows_in_memory(dataset, starts) or [np.arange(len(dataset), dtype=np.int64)]
    return [_start(id(dataset), starts) + np.arange(len(dataset), dtype=np.int64)]


def _start(of: Any, starts: Starts) -> int:
    return starts.setdefault(of, len(starts) << 40)


def _places_in_memory(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """A number for each row that follows from where it is in all of them: a constant may be one place for all rows."""
    numbers = np.zeros(len(tensors[0]), np.uint64)
    for tensor in tensors:
        step = tensor.stride(0) * tensor.element_size()
        places = np.arange(len(tensor), dtype=np.uint64) * np.uint64(step) + np.uint64(tensor.data_ptr())
        numbers = numbers * np.uint64(_ODD) + places
    return numbers.astype(np.int64)


_ODD = 0x9E3779B97F4A7C15
"""Multiplied with it, places in several tensors make one number, and no two make the same by accident."""


def _rows_in_memory(dataset: Any, starts: Starts) -> list[NDArray[np.int64]]:
    """A number for each row of a table of Hugging Face, of every column: the same where the same memory is read."""
    chosen = getattr(dataset, "_indices", None)
    columns = []
    for column in dataset.data.columns if dataset.data.num_columns else ():
        parts = [np.empty(0, np.int64)]
        for chunk in column.chunks:
            where = tuple(buffer.address for buffer in chunk.buffers() if buffer is not None)
            start = _start(where or object(), starts)  # what is missing everywhere has no memory
            parts.append(start + chunk.offset + np.arange(len(chunk), dtype=np.int64))
        rows = np.concatenate(parts)
        columns.append(rows if chosen is None else rows[chosen.column(0).to_numpy()])
    return columns
