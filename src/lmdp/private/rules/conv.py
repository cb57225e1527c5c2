"""Convolutions in one, two and three dimensions, with any stride, padding mode, dilation and groups.

A convolution is a linear layer on patches. Example i's weight gradient is G_iᵀ P_i, with patches P_i [T, k·C] and
output gradient G_i [T, out] over T output positions. Two rules, chosen by `prefer_gram`:

    formed  patches are written a few examples at a time into one buffer and multiplied; the gradients are kept.
    gram    norms from Gram matrices of positions. The Gram matrix of patches is a sum of shifted copies of the Gram
            matrix of pixels, so patches are never written; the sum is the native weight-gradient kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.private.rules.pieces import Factored, Piece, Rows, Stored, Use, gram_squared_norms, prefer_gram

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
CHUNK = 2**20
"""Patches are written in chunks of about this many numbers, to stay in cache."""


def piece(use: Use) -> Piece:
    geometry = Geometry.of(cast(Conv, use.module), use.trainable)
    x, g = use.input, use.output_grad
    if x.dim() != 2 + len(geometry.kernel):
        raise ValueError(f"a convolution got an input of shape {tuple(x.shape)}; it must have a batch dimension first")
    positions = g.shape[2:].numel()
    sizes = {
        "positions": positions,
        "inputs": geometry.channels * math.prod(geometry.stride),
        "outputs": g.shape[1],
        "weights": geometry.weights.numel(),
    }
    if geometry.weight and (geometry.groups > 1 or not prefer_gram(**sizes, batch_size=len(x))):
        return geometry.form(x, g)
    norms = g.flatten(2).sum(2).double().square().sum(1) if geometry.bias else torch.zeros(len(g), dtype=torch.float64)
    if geometry.weight:
        norms = norms + geometry.gram_norms(x, g)
    return Factored(norms, x, g, geometry.contract, geometry.form)


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution, and what they imply."""

    weights: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str
    groups: int
    weight: bool
    bias: bool

    @classmethod
    def of(cls, module: Conv, trainable: frozenset[str]) -> Geometry:
        dilation, kernel = tuple(module.dilation), tuple(module.kernel_size)
        if module.padding == "same":
            reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
            padding = tuple((r // 2, r - r // 2) for r in reach)
        elif module.padding == "valid":
            padding = tuple((0, 0) for _ in kernel)
        else:
            padding = tuple((int(p), int(p)) for p in module.padding)
        return cls(
            module.weight.detach(),
            kernel,
            tuple(module.stride),
            dilation,
            padding,
            module.padding_mode,
            module.groups,
            "weight" in trainable,
            "bias" in trainable,
        )

    @property
    def channels(self) -> int:
        """Input channels per group."""
        return self.weights.shape[1]

    def padded(self, x: Tensor) -> Tensor:
        flat = [side for pair in reversed(self.padding) for side in pair]
        if not any(flat):
            return x
        return F.pad(x, flat, mode="constant" if self.mode == "zeros" else self.mode)

    def contract(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Summed gradient of a whole batch, by the native kernel."""
        symmetric = self.mode == "zeros" and all(a == b for a, b in self.padding)
        _, weight, bias = torch.ops.aten.convolution_backward(
            g,
            x if symmetric else self.padded(x),
            self.weights,
            [len(self.weights)],
            self.stride,
            [a for a, _ in self.padding] if symmetric else [0] * len(self.kernel),
            self.dilation,
            False,
            [0] * len(self.kernel),
            self.groups,
            [False, self.weight, self.bias],
        )
        sums = {"weight": weight, "bias": bias}
        return {name: value for name, value in sums.items() if value is not None and name in self.trained}

    @property
    def trained(self) -> set[str]:
        return {name for name, yes in (("weight", self.weight), ("bias", self.bias)) if yes}

    def form(self, x: Tensor, g: Tensor) -> Stored:
        """Per-example gradients, kept."""
        rows = {}
        if self.weight:
            rows["weight"] = Rows(self._form_weight(x, g), self.restore)
        if self.bias:
            rows["bias"] = Rows.of(g.flatten(2).sum(2))
        return Stored(rows)

    def restore(self, rows: Tensor) -> Tensor:
        """[..., out · k · C] → [..., out, C, *k]."""
        shaped: Tensor = rows.unflatten(-1, (len(self.weights), *self.kernel, self.channels))
        return shaped.movedim(-1, -1 - len(self.kernel))

    def _form_weight(self, x: Tensor, g: Tensor) -> Tensor:
        batch, groups, patch = len(x), self.groups, self.channels * math.prod(self.kernel)
        outputs, positions = g.shape[1] // groups, g.shape[2:].numel()
        windows = self.windows(self._channels_last(x))
        gradient = g.reshape(batch * groups, outputs, positions)
        formed = g.new_empty(batch * groups, outputs, patch)
        chunk = max(1, min(batch, CHUNK // max(1, groups * positions * patch)))
        patches = g.new_empty(chunk, *windows.shape[1:])
        for start in range(0, batch, chunk):
            some = windows[start : start + chunk]
            flat = patches[: len(some)].copy_(some).view(-1, positions, patch)
            many = slice(start * groups, (start + len(some)) * groups)
            torch.bmm(gradient[many], flat, out=formed[many])
        return formed.view(batch, groups * outputs * patch)

    def _channels_last(self, x: Tensor) -> Tensor:
        """The padded input as [B, *size, C]: patches are then long contiguous runs, several times faster to copy."""
        if self.mode != "zeros":
            return self.padded(x).movedim(1, -1).contiguous()
        sizes = [n + a + b for n, (a, b) in zip(x.shape[2:], self.padding)]
        padded = x.new_zeros(len(x), *sizes, x.shape[1])
        inner = [slice(a, a + n) for n, (a, _) in zip(x.shape[2:], self.padding)]
        padded[(slice(None), *inner)] = x.movedim(1, -1)
        return padded

    def windows(self, x: Tensor) -> Tensor:
        """A view [B, groups, *out, *k, C] of a padded input [B, *size, C]: the patch under every output position."""
        view: Tensor = x.unflatten(-1, (self.groups, self.channels)).movedim(-2, 1)  # [B, groups, *size, C]
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation)):
            view = view.unfold(2 + axis, (k - 1) * d + 1, s)[..., ::d]
        return view.movedim(2 + len(self.kernel), -1)

    def gram_norms(self, x: Tensor, g: Tensor) -> Tensor:
        """Squared norms of the weight gradients of a convolution without groups."""
        gradient = g.flatten(2)
        gram_g = torch.bmm(gradient.transpose(1, 2), gradient)
        return gram_squared_norms(x, g, self._patch_gram(self.padded(x), g.shape[2:]), gram_g)

    def _patch_gram(self, x: Tensor, out: torch.Size) -> Tensor:
        """Gram matrices [B, T, T] of patches, as shifted copies of those of pixels, one axis after the other."""
        pixels = x.flatten(2)
        gram = torch.bmm(pixels.transpose(1, 2), pixels).view(len(x), *x.shape[2:], *x.shape[2:])
        dims = len(self.kernel)
        for axis, (k, s, d, size) in enumerate(zip(self.kernel, self.stride, self.dilation, out)):
            gram = _sum_shifts(gram, (1 + axis, 1 + dims + axis), [offset * d for offset in range(k)], s, size)
        return gram.reshape(len(x), out.numel(), out.numel())


def _sum_shifts(gram: Tensor, axes: tuple[int, int], offsets: list[int], stride: int, size: int) -> Tensor:
    """Both axes read at offset, offset + stride, … (size of them), summed over the offsets."""
    total: Tensor | None = None
    for offset in offsets:
        index = [slice(None)] * gram.dim()
        for axis in axes:
            index[axis] = slice(offset, offset + (size - 1) * stride + 1, stride)
        total = gram[tuple(index)].clone() if total is None else total.add_(gram[tuple(index)])
    assert total is not None
    return total
