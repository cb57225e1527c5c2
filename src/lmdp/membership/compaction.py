"""From what a layer gives out to a row of bounded width for each example, by a rule that sees no other example.

Feature maps are averaged over a coarse grid and, where still too wide, projected by a fixed seeded random matrix. Of a
sequence one may keep the mean over its attention mask, its first or its last position instead.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.membership.examples import LABELS, MASK, Stored, count, take
from lmdp.membership.leak import POOLINGS
from lmdp.models import Inputs

WIDTH = 192
BAGS = 4096
"""Words are counted modulo this number."""
BATCH = 256
CHANNELS_FIRST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def require_pooling(pooling: str | None) -> None:
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}, or None")


def pooled(
    tensor: Tensor, module: nn.Module, inputs: Inputs, pooling: str | None, name: str, *, in_decoder: bool = False
) -> Tensor:
    """Of a sequence [B, T, d] the mean over the attention mask, the first ("cls") or the last position of it.

    The mask is the `attention_mask` among the inputs (in the decoder of a model that has both, `decoder_…`); without
    one every position counts. Whatever is not such a sequence is left as it is, and so is everything without pooling.
    """
    if pooling is None or tensor.dim() != 3 or isinstance(module, CHANNELS_FIRST):
        return tensor
    tensor = tensor.detach().float()
    if pooling == "cls":
        return tensor[:, 0]
    mask = _mask_for(tensor, in_decoder, inputs, pooling, name)
    if mask is None:
        return tensor.mean(1) if pooling == "mean" else tensor[:, -1]
    if pooling == "mean":
        weights = mask.to(tensor.dtype).unsqueeze(2)
        # A product would keep what is not a number at masked positions.
        return tensor.masked_fill(weights == 0, 0.0).sum(1) / weights.sum(1).clamp(min=1)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * places).argmax(1)  # also where the padding comes first
    return tensor[torch.arange(len(tensor), device=mask.device), last]


def _mask_for(tensor: Tensor, in_decoder: bool, inputs: Inputs, pooling: str, name: str) -> Tensor | None:
    """[B, T] of zeros and ones; None if every position counts."""
    if isinstance(inputs, Tensor):
        return None
    both = in_decoder and any(key.startswith("decoder_") or key in LABELS for key in inputs)
    mask = inputs.get(f"decoder_{MASK}" if both else MASK)
    if mask is None:
        return None
    mask = (mask != 0).to(tensor.device, torch.long)
    if mask.shape == tensor.shape[:2]:
        return mask
    if bool(mask.all()):
        return None
    raise ValueError(
        f"layer '{name}' has {tensor.shape[1]} positions and the attention mask {mask.shape[-1]}: which of them are "
        f"padding is not established, so that pooling={pooling!r} cannot leave it out. Use pooling='cls' or None, or "
        "name the layers to be read, without this one: layers=[…]."
    )


def compact(output: Any, module: nn.Module, width: int, key: str, *, pool: bool = True) -> Tensor:
    """[B, ...] → [B, at most width] on the host, by a rule that depends on the layer's shape and `key` only."""
    tensor = output[0] if isinstance(output, tuple | list) else output
    rows: Tensor = tensor.detach().float()
    if not pool:
        rows = rows.flatten(1)
    if rows.dim() > 2:
        rows = rows.flatten(2) if _channels_first(module, rows) else rows.flatten(1, -2).transpose(1, 2)
        channels = rows.shape[1]
        cells = max(1, min(rows.shape[2], 4 * width // channels))
        rows = torch.cat([F.adaptive_avg_pool1d(rows, cells).flatten(1), rows.amax(2)], dim=1)
    rows = rows.cpu()
    if rows.shape[1] > width:
        rows = rows @ _projection(rows.shape[1], width, key)
    return rows


@lru_cache(maxsize=64)
def _projection(wide: int, width: int, key: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}:{wide}".encode()))
    matrix: Tensor = torch.randn(wide, width, generator=generator) / width**0.5
    return matrix


def _channels_first(module: nn.Module, rows: Tensor) -> bool:
    """Of a module of modules (a block), feature maps are those of the convolutions inside."""
    composed = rows.dim() > 3 and any(True for _ in module.children())
    return any(isinstance(m, CHANNELS_FIRST) for m in (module.modules() if composed else [module]))


def compact_inputs(inputs: Stored, *, width: int = WIDTH, seed: int = 0) -> NDArray[np.float32]:
    """The raw inputs, brought to the same width: what an adversary sees that sees no network at all.

    Of inputs by name, each one; and of words besides, how often each occurs (their bag, projected at random).
    """
    batches = (take(inputs, slice(start, start + BATCH)) for start in range(0, count(inputs), BATCH))
    return np.concatenate([_compact_batch(batch, width, seed) for batch in batches])


def _compact_batch(inputs: Inputs, width: int, seed: int) -> NDArray[np.float32]:
    named = {"input": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    mask = named.get(MASK)
    columns = []
    for name, tensor in named.items():
        rows = tensor.masked_fill(mask == 0, 0) if mask is not None and mask.shape == tensor.shape else tensor
        columns.append(compact(rows.float().flatten(1), nn.Identity(), width, f"{seed}:{name}").numpy())
        if not isinstance(inputs, Tensor) and rows.dim() == 2 and not rows.is_floating_point() and name != MASK:
            columns.append(_bag(rows, width, f"{seed}:{name}:words").numpy())
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def _bag(words: Tensor, width: int, key: str) -> Tensor:
    """How often each word occurs, in a table of bounded size, projected."""
    counts = torch.zeros(len(words), BAGS).scatter_add_(1, words.long() % BAGS, torch.ones(words.shape))
    counts[:, 0] = 0  # padding
    return compact(counts, nn.Identity(), width, key)
