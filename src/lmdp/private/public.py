"""Gradients of public examples at the current parameters: they cost no privacy, since the parameters are released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from lmdp.gradients import Capture
from lmdp.private.clipping import Clipping
from lmdp.private.step import batch_view, measure
from lmdp.private.weights import BatchView
from lmdp.processes import Group
from lmdp.public_data import batches, beside


class PublicProbe:
    """Runs the model on a public batch and reports its norms (and, for optimal weights, u and the mean).

    Which examples measurement k takes follows from k alone: public data needs no secrecy, and a resumed run finds the
    same ones. Only a data loader of the user's own is read in its own order.
    """

    def __init__(
        self,
        capture: Capture,
        data: Any,
        criterion: Callable[[Any, Any], Tensor] | None,
        clipping: Clipping,
        group: Group,
    ) -> None:
        self._capture, self._group = capture, group
        self._batch = batches(data)
        self._criterion = criterion if criterion is not None else F.cross_entropy
        self._clipping = clipping

    def __call__(self, number: int) -> BatchView:
        """What the first process measures: dropout may differ from process to process."""
        view: BatchView = self._group.same(self._measured(number))
        return view

    def _measured(self, number: int) -> BatchView:
        capture, clip_norm = self._capture, self._clipping.clip_norm
        inputs, targets = pytree.tree_map_only(Tensor, lambda t: t.to(capture.device), self._batch(number))
        with torch.enable_grad(), capture.aside():
            outputs = capture.model(**inputs) if isinstance(inputs, Mapping) else capture.model(inputs)
            self._criterion(outputs, beside(outputs, targets)).backward()
            public = measure(capture.take(), capture, mean_loss=True)
        if not self._clipping.method.optimal:
            return BatchView(public.norms, clip_norm)
        public = replace(public, gradients=public.gradients.without(public.bad))  # whether there are any is not asked
        clipped, raw = public.sums(self._clipping.scales(public.norms), torch.ones_like(public.norms))
        return batch_view(public.norms, clip_norm, clipped, raw, len(public.norms), capture)
