"""Public data, of whatever kind it was given: number of a measurement → a batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

PUBLIC_BATCH = 256


def beside(outputs: Any, targets: Any) -> Any:
    """The targets on the device of the outputs, where a model that is spread over several ends."""
    first = next((leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)), None)
    return targets if first is None else pytree.tree_map_only(Tensor, lambda t: t.to(first.device), targets)


def batches(data: Any) -> Callable[[int], Any]:
    """Number of a measurement → (inputs, targets)."""
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        data = TensorDataset(*data)
    if not isinstance(data, DataLoader | Dataset):
        raise TypeError(
            f"public_data is a {type(data).__name__}; pass (inputs, targets) tensors, a dataset or a data loader"
        )
    size = len(data)  # type: ignore[arg-type]
    if size == 0:
        raise ValueError("public_data is empty; it needs at least 1 example")
    if isinstance(data, DataLoader):
        endless = _endless(data)
        return lambda _: next(endless)

    def batch(number: int) -> Any:
        chosen = np.random.default_rng(number).permutation(size)[:PUBLIC_BATCH]
        return default_collate([data[int(i)] for i in chosen])

    return batch


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader
