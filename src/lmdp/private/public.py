"""Gradients of public examples at the current parameters: they cost no privacy, since the parameters are released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lmdp.private.clipping import Clipping
from lmdp.private.step import batch_view, measure
from lmdp.private.tape import Tape
from lmdp.private.weights import BatchView

PUBLIC_BATCH = 256


class PublicProbe:
    """Runs the model on the next public batch and reports its norms (and, for optimal weights, u and the mean)."""

    def __init__(
        self,
        tape: Tape,
        data: Any,
        criterion: Callable[[Any, Any], Tensor] | None,
        clipping: Clipping,
        optimal: bool,
    ) -> None:
        self._tape = tape
        self._batches = _endless(_as_loader(data))
        self._criterion = criterion if criterion is not None else F.cross_entropy
        self._clipping = clipping
        self._optimal = optimal

    def __call__(self) -> BatchView:
        inputs, targets = next(self._batches)
        with torch.enable_grad(), self._tape.unjudged():
            loss = self._criterion(self._tape.model(inputs), targets)
            loss.backward()
        found = measure(self._tape.take(), self._tape, mean_loss=True)
        if not self._optimal:
            return BatchView(found.norms, self._clipping.clip_norm)
        clipped = found.sums(self._clipping.scales(found.norms))
        raw = found.sums(torch.ones_like(found.norms))
        return batch_view(found.norms, self._clipping.clip_norm, clipped, raw, len(found.norms), self._tape)


def _as_loader(data: Any) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        loader = data
    elif isinstance(data, Dataset):
        loader = DataLoader(data, batch_size=PUBLIC_BATCH, shuffle=True)
    elif isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        loader = DataLoader(TensorDataset(*data), batch_size=PUBLIC_BATCH, shuffle=True)
    else:
        raise TypeError(
            f"public_data is a {type(data).__name__}; pass (inputs, targets) tensors, a dataset or a data loader"
        )
    if len(loader) == 0:
        raise ValueError("public_data is empty; it needs at least 1 example")
    return loader


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader
