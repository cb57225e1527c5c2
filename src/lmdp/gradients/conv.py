"""Convolutions in one, two and three dimensions, with any stride, padding mode, dilation and groups.

A convolution is a linear layer on patches. With patches P_i [T, k·C] and output gradients G_i [T, out] of example i
over T output positions, the rule computes

    norm²  ||G_iᵀ P_i||² + ||sum_t G_it||²               (weight, bias)
    sums   sum_i s_i G_iᵀ P_i,  sum_i s_i sum_t G_it

in one of two ways; the plan chooses:

    formed  by a compiled loop; where there is none, patches are unfolded a few examples at a time into one buffer and
            multiplied. The gradients are kept.
    gram    norms from Gram matrices of positions. The Gram matrix of patches is a sum of shifted copies of the Gram
            matrix of pixels, so patches are never written; the sum is the native weight-gradient kernel.

The patches of several uses of the same weight, on images of any sizes, are patches of one example.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.gradients import compiled
from lmdp.gradients.contract import Example, Piece, Rule, Sizes, Use
from lmdp.gradients.rows import (
    Factored,
    Pair,
    Rows,
    Stored,
    added,
    chunks,
    joined,
    joint_squared_norms,
    kept_blocks,
    per_example_scales,
)

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def piece(use: Use) -> Piece:
    return join([use])


def join(uses: Sequence[Use]) -> Piece:
    """By forming, or by Gram matrices where all uses have the same geometry."""
    pairs = tuple((use.input, use.output_grad) for use in uses)
    every = [Geometry.of(cast(Conv, use.module), use.trainable) for use in uses]
    geometry = every[0]
    for x, _ in pairs:
        if x.dim() != 2 + len(geometry.kernel):
            raise ValueError(
                f"a convolution got an input of shape {tuple(x.shape)}; it must have a batch dimension first"
            )
    if not geometry.weight:
        return Stored({"bias": Rows.of(_bias_rows(pairs))})
    alike = all(each.numbers == geometry.numbers for each in every)
    if geometry.groups > 1 or not alike or not uses[0].prefers_gram(geometry.sizes(pairs)):
        return _formed(every, pairs)
    stride = math.prod(geometry.stride)
    pixels = sum(max(x.shape[2:].numel() // stride, g.shape[2:].numel()) for x, g in pairs)
    norms = joined(
        [geometry.gram_norms([(x[chunk], g[chunk]) for x, g in pairs]) for chunk in chunks(len(pairs[0][0]), pixels**2)]
    )
    if geometry.bias:
        norms = norms + _bias_rows(pairs).double().square().sum(1)

    def contract(pairs: Sequence[Pair], scales: Tensor) -> list[dict[str, Tensor]]:
        return [added(each) for each in zip(*(geometry.contract(x, g, scales) for x, g in pairs))]

    kept = tuple((x.clone() if use.is_data else x, g) for use, (x, g) in zip(uses, pairs))
    return Factored(norms, kept, contract, lambda pairs: _formed(every, pairs))


def _formed(every: Sequence[Geometry], pairs: Sequence[Pair]) -> Stored:
    """Per-example gradients, kept; of several uses, added."""
    forms = [geometry.form(x, g) for geometry, (x, g) in zip(every, pairs)]
    if len(forms) == 1:
        return forms[0]
    return Stored({name: Rows.of(rows) for name, rows in added([form.per_example() for form in forms]).items()})


def _bias_rows(pairs: Sequence[Pair]) -> Tensor:
    """[B, out]"""
    return added([{"": g.flatten(2).sum(2)} for _, g in pairs])[""]


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

    @property
    def numbers(self) -> tuple[object, ...]:
        """All that two convolutions with the same weight may differ in."""
        return self.kernel, self.stride, self.dilation, self.padding, self.mode, self.groups

    def sizes(self, pairs: Sequence[Pair]) -> Sizes:
        """For the choice of a rule. A strided convolution has a Gram matrix of pixels for every phase of its stride."""
        return Sizes(
            positions=sum(g.shape[2:].numel() for _, g in pairs),
            features=self.channels * math.prod(self.stride) + len(self.weights),
            weights=self.weights.numel(),
            factors=sum(x[0].numel() + g[0].numel() for x, g in pairs),
            batch_size=len(pairs[0][0]),
            bytes_each=pairs[0][0].element_size(),
        )

    def padded(self, x: Tensor) -> Tensor:
        flat = [side for pair in reversed(self.padding) for side in pair]
        if not any(flat):
            return x
        return F.pad(x, flat, mode="constant" if self.mode == "zeros" else self.mode)

    def contract(self, x: Tensor, g: Tensor, scales: Tensor) -> list[dict[str, Tensor]]:
        """Sums of the gradients of a batch under each row of `scales` [S, B]."""
        if len(scales) == 2 and self.weight and self.groups == 1 and compiled.applies(x, g):
            return self._both_sums(x, g, scales)
        return [self._summed(x, g * per_example_scales(column, g)) for column in scales.unbind()]

    def _both_sums(self, x: Tensor, g: Tensor, scales: Tensor) -> list[dict[str, Tensor]]:
        """Every gradient is formed once, and added to both."""
        weights = compiled.patch_sums(*self._walked(x, g), scales).view(2, *self.weights.shape)  # [2, out, C, *k]
        biases = scales @ g.flatten(2).sum(2) if self.bias else weights  # [2, out]
        return [dict(zip(("weight", "bias"), pair[: 1 + self.bias])) for pair in zip(weights, biases)]

    def _summed(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
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
        return {name: sums for name, sums in (("weight", weight), ("bias", bias)) if name in self.trained}

    @property
    def trained(self) -> set[str]:
        return {name for name, yes in (("weight", self.weight), ("bias", self.bias)) if yes}

    def form(self, x: Tensor, g: Tensor) -> Stored:
        """Per-example gradients, kept."""
        if self.weight and compiled.applies(x, g):
            return Stored(self._compiled_rows(x, g))
        rows = {}
        if self.weight:
            rows["weight"] = Rows.gather(self._unfolded(x, g), self._restore_unfolded)
        if self.bias:
            rows["bias"] = Rows.of(g.flatten(2).sum(2))
        return Stored(rows)

    def _compiled_rows(self, x: Tensor, g: Tensor) -> dict[str, Rows]:
        """By the compiled loop, to which every group of an example is an example: [B · groups, C · k · out]."""
        batch, groups = len(x), self.groups
        blocks = kept_blocks(batch, self.weights.numel())
        formed = compiled.patch_rows(
            *self._walked(x, g),
            [slice(groups * block.start, groups * block.stop) for block in blocks],
            bias=self.bias,
        )
        norms = formed.squared_norms.view(batch, groups).sum(1)  # [B]
        kept = tuple(block.view(-1, self.weights.numel()) for block in formed.blocks)  # [b, groups · C · k · out] each
        rows = {"weight": Rows(kept, norms, self._restore_compiled)}
        return rows if formed.bias is None else {**rows, "bias": Rows.of(formed.bias.view(batch, -1))}

    def _walked(self, x: Tensor, g: Tensor) -> tuple[compiled.Walk, Tensor, Tensor]:
        """How the compiled loops read the images; images and output gradients [B · groups, …] as they read them."""
        x, padding = (x, self.padding) if self.mode == "zeros" else (self.padded(x), ((0, 0),) * len(self.kernel))
        x, g = (t if self.groups == 1 and compiled.channels_last(t) else t.contiguous() for t in (x, g))
        x, g = (t if self.groups == 1 else t.view(len(t) * self.groups, -1, *t.shape[2:]) for t in (x, g))
        first = x.is_contiguous()
        return _walk(self.kernel, self.stride, self.dilation, padding, x.shape[1:], g.shape[2:], first), x, g

    def _restore_compiled(self, rows: Tensor) -> Tensor:
        shaped: Tensor = rows.unflatten(-1, (self.groups, self.channels, *self.kernel, -1))
        return shaped.movedim(-1, rows.dim()).flatten(rows.dim() - 1, rows.dim())

    def _unfolded(self, x: Tensor, g: Tensor) -> Iterator[Tensor]:
        """Weight gradients [b, groups · out · k · C] of a few examples at a time, by PyTorch."""
        room, positions = None, g.shape[2:].numel()
        for chunk in chunks(len(x), self.groups * self.weights[0].numel() * positions):
            image = self.padded(x[chunk]).movedim(1, -1).contiguous().unflatten(-1, (self.groups, self.channels))
            view = image.movedim(-2, 1)  # [b, groups, *in, C]
            for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation)):
                view = view.unfold(2 + axis, (k - 1) * d + 1, s)[..., ::d]
            view = view.movedim(2 + len(self.kernel), -1)  # [b, groups, *out, *k, C]
            room = view.new_empty(view.shape) if room is None else room[: len(view)]
            patches = room.copy_(view).view(len(view) * self.groups, positions, -1)  # [b · groups, T, k · C]
            outputs = g[chunk].reshape(len(view) * self.groups, -1, positions)  # [b · groups, out, T]
            yield torch.bmm(outputs, patches).view(len(view), -1)

    def _restore_unfolded(self, rows: Tensor) -> Tensor:
        shaped: Tensor = rows.unflatten(-1, (len(self.weights), *self.kernel, self.channels))
        return shaped.movedim(-1, rows.dim())

    def gram_norms(self, pairs: Sequence[Pair]) -> Tensor:
        """Squared norms of the weight gradients of a convolution without groups."""
        gradient = joined([g.flatten(2) for _, g in pairs], dim=2)  # [B, out, T]
        gram_g = torch.bmm(gradient.transpose(1, 2), gradient)  # [B, T, T]
        uses = [(pair, pair[1].shape[2:].numel()) for pair in pairs]
        return joint_squared_norms(uses, self._patch_gram(pairs), gram_g)

    def _patch_gram(self, pairs: Sequence[Pair]) -> Tensor:
        """Gram matrices [B, T, T] of the patches of all uses."""
        images = [(x if self.mode == "zeros" else self.padded(x), g.shape[2:]) for x, g in pairs]
        blocks: dict[tuple[int, int], Tensor] = {}
        for i, j in itertools.combinations_with_replacement(range(len(images)), 2):
            blocks[i, j] = self._patch_products(images[i], images[j])
            blocks[j, i] = blocks[i, j].transpose(1, 2)
        every = range(len(images))
        return joined([joined([blocks[i, j] for j in every], dim=2) for i in every], dim=1)

    def _patch_products(self, one: Image, other: Image) -> Tensor:
        """[B, T, T']: shifted copies of the products of pixels, one axis after the other.

        Of a strided convolution, each position of the kernel reads pixels of one phase only: those that are a multiple
        of the stride apart.
        """
        (a, out_a), (b, out_b) = one, other
        before = [side if self.mode == "zeros" else 0 for side, _ in self.padding]
        shape = (len(a), out_a.numel(), out_b.numel())
        total: Tensor | None = None
        for phase in itertools.product(*map(range, self.stride)):
            starts = [
                [at // s for at in (k * d - p0 for k in range(size)) if at % s == p]
                for size, d, s, p0, p in zip(self.kernel, self.dilation, self.stride, before, phase)
            ]
            every = tuple(slice(p, None, s) for p, s in zip(phase, self.stride))
            pixels = a[:, :, *every], b[:, :, *every]
            if all(starts) and all(t.numel() for t in pixels):
                products = _shifted_products(pixels, starts, (out_a, out_b))
                total = products if total is None else total.add_(products)
        return a.new_zeros(shape) if total is None else total.reshape(shape)


Image = tuple[Tensor, torch.Size]
"""What a use took in, padded where zeros would not do, and the size of what it gave out."""


@functools.lru_cache(maxsize=1024)
def _walk(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    image: torch.Size,
    out: torch.Size,
    channels_first: bool,
) -> compiled.Walk:
    """Where a convolution reads its image [C, …]: the same for every example."""
    channels, *sizes = image
    framed = [size + sum(pair) for size, pair in zip(sizes, padding)]
    strides, of_frame = (_strides(channels, inner, channels_first) for inner in (sizes, framed))
    steps = [s * at for s, at in zip(stride, of_frame[1:])]
    pixels = _offsets([channels, *kernel], [of_frame[0], *(d * at for d, at in zip(dilation, of_frame[1:]))])
    corner = sum(before * at for (before, _), at in zip(padding, of_frame[1:]))
    counts, width = ([channels, *sizes[:-1]], sizes[-1]) if channels_first else ([1, *sizes[:-1]], sizes[-1] * channels)
    rows = [_offsets(counts if any(map(any, padding)) else [0], each[: len(sizes)]) for each in (strides, of_frame)]
    return compiled.Walk(
        pixels=pixels,
        starts=_offsets(out[:-1], steps[:-1]),
        length=out[-1],
        step=steps[-1],
        image=image.numel(),
        frame=channels * math.prod(framed),
        rows_from=rows[0],
        rows_to=rows[1] + corner,
        width=width,
    )


def _strides(channels: int, sizes: Sequence[int], channels_first: bool) -> list[int]:
    """Of the channels and of each further dimension, in numbers."""
    inner = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return [math.prod(sizes), *inner] if channels_first else [1, *(channels * at for at in inner)]


def _offsets(counts: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Of all positions in a grid, the last dimension running fastest."""
    total = torch.zeros(1, dtype=torch.int64, device="cpu")
    for count, stride in zip(counts, strides):
        total = (total.unsqueeze(1) + torch.arange(count, device="cpu") * stride).flatten()
    return total


def _shifted_products(pixels: Pair, starts: Sequence[Sequence[int]], outs: tuple[torch.Size, torch.Size]) -> Tensor:
    """Products of pixels with pixels, summed over all shifts: [B, *out, *out']."""
    a, b = pixels
    dims = len(starts)
    products = torch.bmm(a.flatten(2).transpose(1, 2), b.flatten(2)).view(len(a), *a.shape[2:], *b.shape[2:])
    for axis, sizes in enumerate(zip(*outs)):
        products = _sum_shifts(products, (1 + axis, 1 + dims + axis), starts[axis], sizes)
    return products


def _sum_shifts(products: Tensor, axes: tuple[int, int], starts: Sequence[int], sizes: tuple[int, int]) -> Tensor:
    """Both axes read from a start on (as many entries as `sizes`; zero outside), summed over the starts."""
    shape = list(products.shape)
    for axis, size in zip(axes, sizes):
        shape[axis] = size
    total = products.new_zeros(shape)
    for start in starts:
        read, write = [slice(None)] * products.dim(), [slice(None)] * products.dim()
        for axis, size in zip(axes, sizes):
            first, last = max(0, -start), min(size, products.shape[axis] - start)  # of positions that read inside
            write[axis] = slice(first, max(first, last))
            read[axis] = slice(start + first, start + max(first, last))
        total[tuple(write)] += products[tuple(read)]
    return total


def _explain(trainable: frozenset[str]) -> tuple[str, str]:
    if "weight" not in trainable:
        return "formed", "only its bias is trained"
    return "formed", "a grouped convolution"


def _features(module: Conv) -> int | None:
    geometry = Geometry.of(module, frozenset())
    return None if geometry.groups > 1 else geometry.channels * math.prod(geometry.stride) + len(geometry.weights)


RULE = Rule(
    "convolution",
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    piece,
    _explain,
    (
        Example(lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 7)),
        Example(lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), (3, 6, 5)),
        Example(lambda: nn.Conv2d(4, 6, 2, groups=2, dilation=2), (4, 6, 5)),
        Example(lambda: nn.Conv2d(16, 24, 3, padding=1, padding_mode="reflect"), (16, 3, 3)),
        Example(lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 3)),
    ),
    features=_features,
    join=join,
    sizes=lambda use: Geometry.of(cast(Conv, use.module), use.trainable).sizes([(use.input, use.output_grad)]),
)
