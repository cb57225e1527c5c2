"""How pieces are held, and how norms and sums of rows are formed so that rounding never hides a norm.

    Stored    the per-example gradients themselves, as `Rows`, or what they are `FormedAgain` from
    Factored  only the layer's input x and output gradient g, of each of its uses

B examples, T positions, D numbers of one example's gradient, S sums at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
"""Layer input and output gradient of one use."""


@dataclass(frozen=True)
class Rows:
    """Per-example gradients of one parameter, their entries in whatever order was cheap to make.

    `blocks` [b, D] hold successive examples. Each is measured when it is made, while it is in cache, and is small
    enough to be made of memory that freed activations gave back. `restore` turns [..., D] into [..., *shape].
    """

    blocks: tuple[Tensor, ...]
    squared_norms: Tensor
    restore: Callable[[Tensor], Tensor]

    @classmethod
    def gather(cls, blocks: Iterable[Tensor], restore: Callable[[Tensor], Tensor]) -> Rows:
        kept, norms = [], []
        for block in blocks:
            kept.append(block)
            norms.append(squared_row_norms(block))
        return cls(tuple(kept), joined(norms), restore)

    @classmethod
    def of(cls, gradients: Tensor) -> Rows:
        """From gradients [B, *shape] of a parameter that is small."""
        shape = gradients.shape[1:]
        return cls.gather(
            [gradients.reshape(len(gradients), -1)], lambda flat: flat.reshape((*flat.shape[:-1], *shape))
        )

    def weighted_sums(self, scales: Tensor) -> tuple[Tensor, ...]:
        """Under each row of `scales` [S, B]; all in one pass, which takes as long as reading the gradients."""
        return self.restore(_block_sums(self.blocks, self._split(scales.to(self.blocks[0].dtype), 1))).unbind()

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.blocks

    def all(self) -> Tensor:
        return self.restore(torch.cat(self.blocks))

    def without(self, dropped: Tensor) -> Rows:
        blocks = tuple(zero_rows(block, gone) for block, gone in zip(self.blocks, self._split(dropped)))
        return Rows(blocks, zero_rows(self.squared_norms, dropped), self.restore)

    def _split(self, values: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        if len(self.blocks) == 1:
            return (values,)
        split: tuple[Tensor, ...] = values.split([len(block) for block in self.blocks], dim)
        return split


@dataclass(frozen=True)
class FormedAgain:
    """The same rows, of which x and g are kept: each block is formed once to be measured, and once to be added up.

    Both times the numbers are the same, bit for bit. `form` turns x and g of some examples into their block [b, D].
    """

    pair: Pair
    slices: Sequence[slice]
    form: Callable[[Tensor, Tensor], Tensor]
    squared_norms: Tensor
    restore: Callable[[Tensor], Tensor]

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.pair

    @property
    def blocks(self) -> Iterator[Tensor]:
        x, g = self.pair
        return (self.form(x[block], g[block]) for block in self.slices)

    def weighted_sums(self, scales: Tensor) -> tuple[Tensor, ...]:
        scales = scales.to(self.pair[0].dtype)
        return self.restore(_block_sums(self.blocks, [scales[:, block] for block in self.slices])).unbind()

    def all(self) -> Tensor:
        return self.restore(torch.cat(list(self.blocks)))

    def without(self, dropped: Tensor) -> FormedAgain:
        x, g = (zero_rows(side, dropped) for side in self.pair)
        return replace(self, pair=(x, g), squared_norms=zero_rows(self.squared_norms, dropped))


def _block_sums(blocks: Iterable[Tensor], scales: Iterable[Tensor]) -> Tensor:
    """[S, D] from blocks [b, D] and their scales [S, b]."""
    total: Tensor | None = None
    for block, scale in zip(blocks, scales):
        width = block.shape[1]
        run = even_run(width, LONG)
        if run == width:
            total = scale @ block if total is None else total.addmm_(scale, block)
            continue
        # In runs, which are shared among threads; a product with so few rows would be left to one.
        scale, cut = scale.expand((width // run, -1, -1)), _cut(block, run)
        total = torch.bmm(scale, cut) if total is None else total.baddbmm_(scale, cut)  # [runs, S, run]
    assert total is not None
    return total if total.dim() == 2 else total.transpose(0, 1).flatten(1)


def _cut(block: Tensor, run: int) -> Tensor:
    """[b, D] → [runs, b, run]."""
    cut: Tensor = block.unflatten(1, (-1, run))
    return cut.transpose(0, 1)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def chunks(batch_size: int, numbers_per_example: int) -> Iterator[slice]:
    """The batch in runs of examples of about CHUNK numbers per thread, as many examples for each thread."""
    threads = min(torch.get_num_threads(), 4)
    step = threads * max(1, round(CHUNK / max(1, numbers_per_example)))
    return (slice(start, min(start + step, batch_size)) for start in range(0, batch_size, step))


CHUNK = 2**20
"""What is worked on at a time stays in cache."""


def kept_blocks(batch_size: int, width: int) -> list[slice]:
    """The batch in even runs of examples whose gradients, of `width` numbers each, are kept in one block."""
    threads = torch.get_num_threads()
    step = max(FEW, SMALL // max(1, width))
    step = -(-batch_size // max(1, batch_size // step))
    step += -step % threads
    return [slice(start, min(start + step, batch_size)) for start in range(0, batch_size, step)]


FEW, SMALL = 4, 2**19
"""Examples, and numbers, that a block of kept gradients has at least. Larger ones would not fit the gaps that freed
activations leave, and cost a third more memory; in smaller ones the sum is read and written as often as the gradients.
"""


class Held(Protocol):
    """Per-example gradients of one parameter, however they are held."""

    @property
    def squared_norms(self) -> Tensor: ...

    @property
    def kept(self) -> tuple[Tensor, ...]: ...

    def weighted_sums(self, scales: Tensor) -> tuple[Tensor, ...]: ...

    def all(self) -> Tensor: ...

    def without(self, dropped: Tensor) -> Self: ...


@dataclass(frozen=True)
class Stored:
    """Per-example gradients, kept or formed again. The norm and the sum are taken of the very same numbers."""

    rows: Mapping[str, Held]

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {name: rows.squared_norms for name, rows in self.rows.items()}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return tuple(tensor for rows in self.rows.values() for tensor in rows.kept)

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        sums = [rows.weighted_sums(scales[name]) for name, rows in self.rows.items()]
        return [dict(zip(self.rows, each)) for each in zip(*sums)]

    def per_example(self) -> dict[str, Tensor]:
        return {name: rows.all() for name, rows in self.rows.items()}

    def without(self, dropped: Tensor) -> Stored:
        return Stored({name: rows.without(dropped) for name, rows in self.rows.items()})


@dataclass(frozen=True)
class Factored:
    """Layer input and output gradient of every use, kept; the gradients are never formed.

    `norms` were computed by a rule that does not form them either; `contract(pairs, scales)` gives the sums of the
    gradients under each row of `scales` [S, B]; `expand(pairs)` gives the per-example gradients, for the rare parameter
    that is also used in another way.
    """

    norms: Tensor
    pairs: tuple[Pair, ...]
    contract: Callable[[Sequence[Pair], Tensor], list[dict[str, Tensor]]]
    expand: Callable[[Sequence[Pair]], Stored]

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {"": self.norms}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return tuple(tensor for pair in self.pairs for tensor in pair)

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        one_layer = next(iter(scales.values()))  # a plain module's parameters are in one layer
        return self.contract(self.pairs, one_layer.to(self.pairs[0][0].dtype))

    def per_example(self) -> dict[str, Tensor]:
        return self.expand(self.pairs).per_example()

    def without(self, dropped: Tensor) -> Factored:
        pairs = tuple((zero_rows(x, dropped), zero_rows(g, dropped)) for x, g in self.pairs)
        return Factored(self.norms, pairs, self.contract, self.expand)


def added(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of equal names, added; into those of the first."""
    first, *others = parts
    total = dict(first)
    for part in others:
        for name, value in part.items():
            total[name] = total[name].add_(value) if name in total else value
    return total


def per_example_scales(scales: Tensor, like: Tensor) -> Tensor:
    """[B] → [B, 1, …], with as many dimensions."""
    return scales.view(-1, *[1] * (like.dim() - 1))


def squared_row_norms(rows: Tensor) -> Tensor:
    """Squared norm of every row of [B, D]: of runs of its entries first.

    torch's norm adds up a float32 row one term after the other: at two million entries it is off by 1e-4. A norm that
    is too small lets a contribution exceed its bound by as much.
    """
    width = rows.shape[1]
    if width <= SHORT:
        short: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return short.square()
    run = even_run(width, SHORT)
    if run < width and rows.is_contiguous():
        runs = rows.view(-1, 1, run)
        return torch.bmm(runs, runs.transpose(1, 2)).view(len(rows), -1).sum(1)
    whole = width - width % SHORT
    norms: Tensor = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, SHORT)), dim=2)
    rest: Tensor = torch.linalg.vector_norm(rows[:, whole:], dim=1)
    return norms.square().sum(1) + rest.square()


def dot_product(a: Tensor, b: Tensor) -> Tensor:
    """Of two tensors of one shape, in float64: of runs of their entries first."""
    runs = [t.flatten().to(torch.promote_types(t.dtype, torch.float32)).split(LONG) for t in (a, b)]
    return torch.stack([torch.dot(*pair) for pair in zip(*runs)]).double().sum()


@functools.cache
def even_run(width: int, longest: int) -> int:
    """The largest divisor of `width` up to `longest`; all of it if there is only a small one."""
    run = next(run for run in range(min(width, longest), 0, -1) if width % run == 0)
    return run if 8 * run >= longest else width


SHORT, LONG = 2**11, 2**14
"""Entries of a row that are added up at a time, for a norm; that one thread works on at a time, for a sum."""


def output_batch_dim(module: nn.Module, position: int) -> int:
    """Which dimension of a module's output is the example: the first, except for the states of a recurrent layer."""
    return 1 if isinstance(module, nn.RNNBase) and position > 0 else 0


def zero_rows(tensor: Tensor, dropped: Tensor) -> Tensor:
    """A copy with the dropped examples exactly zero (a product with 0 would keep NaN and infinity)."""
    return tensor.masked_fill(dropped.view(-1, *[1] * (tensor.dim() - 1)), 0)


def gram_squared_norms(x: Tensor, g: Tensor, gram_x: Tensor, gram_g: Tensor) -> Tensor:
    """||sum_t g_t x_tᵀ||² = sum_tu (x_t·x_u)(g_t·g_u) for each example, from [B, T, T] Gram matrices; never too low."""
    return joint_squared_norms([((x, g), gram_g.shape[1])], gram_x, gram_g)


def joint_squared_norms(uses: Sequence[tuple[Pair, int]], gram_x: Tensor, gram_g: Tensor) -> Tensor:
    """The same of several uses of one weight, each with its number of positions: these are positions of one example.

    The terms can cancel, and the rounding of large ones could then hide a norm, which would break the bound on the
    example's contribution. Adding 8 eps (sum_t |x_t||g_t|)² rounds the norm up: by a few units in the last place unless
    terms cancel. (Errors are not independent where positions repeat, so a sum of squares will not do; with a factor of
    2 there are cases that fail.) Products of more than 2^15 features are off by as many times more as there are more.

    Squares of x or g below 1e-22 (float32) may have lost terms to underflow although the product, the gradient, is not
    small. Such an example cannot be measured; an infinite norm removes it. Not so where g is an index, which stands for
    a vector of zeros and a one: what x alone loses is below the floor of norms.
    """
    products = (gram_x * gram_g).sum(dim=(1, 2)).double().clamp(min=0)  # [B]
    squares = [gram.diagonal(dim1=1, dim2=2).double().clamp(min=0) for gram in (gram_x, gram_g)]  # [B, T]
    reach = (squares[0] * squares[1]).sqrt().sum(1)  # [B]
    info = torch.finfo(gram_x.dtype)
    features = max(side[0].numel() // max(1, count) for pair, count in uses for side in pair) if len(products) else 0
    norms = products + 8 * max(1.0, features / WIDE) * info.eps * reach.square()
    begin = 0
    for pair, positions in uses:
        mine = slice(begin, begin := begin + positions)
        if not pair[1].is_floating_point():
            continue
        faint = (squares[0][:, mine].sum(1) < 1e16 * info.tiny) | (squares[1][:, mine].sum(1) < 1e16 * info.tiny)
        if not faint.is_cpu or faint.any():  # a device is not waited for
            norms = torch.where(faint & ~_negligible(*pair), torch.full_like(norms, math.inf), norms)
    return norms


WIDE = 2**15
EXTREME = {torch.float32: 1e25, torch.float64: 1e154}


def one_position_norms(squares_x: Tensor, squares_g: Tensor, dtype: torch.dtype, *, bias: bool) -> Tensor:
    """||g xᵀ||² and, for a bias, ||g||², from squared norms [B], in float64, of inputs and output gradients of a type.

    One side is scaled before they are multiplied. Where a side is so long that it might overflow then, or so short that
    it might lose bits although the product is not small, the example cannot be summed; an infinite norm removes it.
    """
    most, floor = EXTREME[dtype] ** 2, norm_floor(dtype) ** 2
    norms = squares_x * squares_g
    long = torch.maximum(squares_x, squares_g) > most
    short = ((squares_x > 0) & (squares_x < 1 / most)) | ((squares_g > 0) & (squares_g < 1 / most))
    return torch.where(long | (short & (norms >= floor)), math.inf, norms + squares_g * bias)


def _negligible(x: Tensor, g: Tensor) -> Tensor:
    """Examples whose gradient is below the floor under which norms count as zero, whatever was lost."""
    largest = [t.flatten(1).abs().amax(1).double() * math.sqrt(t[0].numel()) for t in (x, g)]
    return largest[0] * largest[1] < norm_floor(x.dtype)


def norm_floor(dtype: torch.dtype) -> float:
    """Norms below this count as zero: the sums of squares behind them may have lost terms to underflow."""
    return 1e4 * math.sqrt(torch.finfo(dtype).tiny)
