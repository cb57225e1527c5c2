"""Gradients of public examples at the current parameters: they cost no privacy, since the parameters are released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lmdp.gradients import Capture
from lmdp.private.clipping import Clipping
from lmdp.private.step import batch_view, measure
from lmdp.private.weights import BatchView

PUBLIC_BATCH = 256


class PublicProbe:
    """Runs the model on a public batch and reports its norms (and, for optimal weights, u and the mean).

    Which examples measurement k takes follows from k alone: public data needs no secrecy, and a resumed run finds the
    same ones. Only a data loader of the user's own is read in its own order.
    """

    def __init__(
        self, capture: Capture, data: Any, criterion: Callable[[Any, Any], Tensor] | None, clipping: Clipping
    ) -> None:
        self._capture = capture
        self._batch = _batches(data)
        self._criterion = criterion if criterion is not None else F.cross_entropy
        self._clipping = clipping

    def __call__(self, number: int) -> BatchView:
        capture, clip_norm = self._capture, self._clipping.clip_norm
        inputs, targets = pytree.tree_map_only(Tensor, lambda t: t.to(capture.device), self._batch(number))
        with torch.enable_grad(), capture.aside():
            outputs = capture.model(**inputs) if isinstance(inputs, Mapping) else capture.model(inputs)
            self._criterion(outputs, _beside(outputs, targets)).backward()
            public = measure(capture.take(), capture, mean_loss=True)
        if not self._clipping.method.optimal:
            return BatchView(public.norms, clip_norm)
        public = replace(public, gradients=public.gradients.without(public.bad))  # whether there are any is not asked
        clipped, raw = public.sums(self._clipping.scales(public.norms), torch.ones_like(public.norms))
        return batch_view(public.norms, clip_norm, clipped, raw, len(public.norms), capture)


def _beside(outputs: Any, targets: Any) -> Any:
    """The targets on the device of the outputs, where a model that is spread over several ends."""
    first = next((leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)), None)
    return targets if first is None else pytree.tree_map_only(Tensor, lambda t: t.to(first.device), targets)


def _batches(data: Any) -> Callable[[int], Any]:
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
