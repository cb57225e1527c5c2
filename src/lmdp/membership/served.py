"""What a service would give out of a layer: one vector for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.membership.compaction import BATCH, CHANNELS_FIRST, pooled, require_pooling
from lmdp.membership.examples import count, take
from lmdp.membership.representations import Tap, listening, rows_of, tap_modules
from lmdp.models import Inputs, evaluation, run


def embed(model: nn.Module, inputs: Inputs, layer: str, *, pooling: str = "mean") -> NDArray[np.float32]:
    """[n, d]: the layer's representation of each input. Of feature maps the mean over places, of texts as `pooling`
    says: the mean over the attention mask, the first position (cls), or the last of the mask."""
    require_pooling(pooling)
    if not count(inputs):
        raise ValueError("there are 0 inputs to embed; give at least 1")
    taps = tap_modules(model, [layer])
    caught: dict[str, Any] = {}
    parts = []
    with evaluation(model), torch.no_grad(), listening(taps, caught):
        for start in range(0, count(inputs), BATCH):
            batch = take(inputs, slice(start, start + BATCH))
            run(model, batch)
            tensor = rows_of(layer, caught.pop(layer, None), count(batch))
            parts.append(_one_vector(tensor, taps[layer], batch, pooling, layer).float().cpu().numpy())
    return np.concatenate(parts)


def _one_vector(tensor: Tensor, tap: Tap, batch: Inputs, pooling: str, layer: str) -> Tensor:
    tensor = pooled(tensor, tap.module, batch, pooling, layer, in_decoder=tap.in_decoder)
    if tensor.dim() <= 2:
        return tensor.flatten(1) if tensor.dim() == 2 else tensor.unsqueeze(1)
    inside = tap.module.modules() if tensor.dim() > 3 else [tap.module]
    channels_first = any(isinstance(module, CHANNELS_FIRST) for module in inside)
    return tensor.flatten(2).mean(2) if channels_first else tensor.flatten(1, -2).mean(1)
