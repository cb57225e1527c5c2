"""How pieces are held, and how norms and sums of rows are formed so that rounding never hides a norm.

    Stored    the per-example gradients themselves, as `Rows`
    Factored  only the layer's input x and output gradient g

B examples, T positions, D numbers of one example's gradient, S sums at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
        first, *others = self.blocks  # [b, D] each
        scale, *rest = self._split(scales.to(first.dtype), 1)  # [S, b] each
        width = first.shape[1]
        run = even_run(width, LONG)
        if run == width:
            total = scale @ first  # [S, D]
            for block, scale in zip(others, rest):
                total.addmm_(scale, block)
        else:  # in runs, which are shared among threads; a product with so few rows would be left to one
            runs = (width // run, -1, -1)
            total = torch.bmm(scale.expand(runs), _cut(first, run))  # [runs, S, run]
            for block, scale in zip(others, rest):
                total.baddbmm_(scale.expand(runs), _cut(block, run))
            total = total.transpose(0, 1).flatten(1)  # [S, D]
        sums: tuple[Tensor, ...] = self.restore(total).unbind()
        return sums

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


def _cut(block: Tensor, run: int) -> Tensor:
    """[b, D] → [runs, b, run]."""
    cut: Tensor = block.unflatten(1, (-1, run))
    return cut.transpose(0, 1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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


@dataclass(frozen=True)
class Stored:
    """Per-example gradients, kept. The norm and the sum are taken of the very same numbers."""

    rows: dict[str, Rows]

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {name: rows.squared_norms for name, rows in self.rows.items()}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return tuple(block for rows in self.rows.values() for block in rows.blocks)

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        sums = [rows.weighted_sums(scales[name]) for name, rows in self.rows.items()]
        return [dict(zip(self.rows, each)) for each in zip(*sums)]

    def per_example(self) -> dict[str, Tensor]:
        return {name: rows.all() for name, rows in self.rows.items()}

    def without(self, dropped: Tensor) -> Stored:
        return Stored({name: rows.without(dropped) for name, rows in self.rows.items()})


@dataclass(frozen=True)
class Factored:
    """Layer input and output gradient, kept; the gradients are never formed.

    `norms` were computed by a rule that does not form them either; `contract(x, g, scales)` gives the sums of the
    gradients under each row of `scales` [S, B]; `expand(x, g)` gives the per-example gradients, for the rare parameter
    that is used twice.
    """

    norms: Tensor
    x: Tensor
    g: Tensor
    contract: Callable[[Tensor, Tensor, Tensor], list[dict[str, Tensor]]]
    expand: Callable[[Tensor, Tensor], Stored]

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {"": self.norms}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        one_layer = next(iter(scales.values()))  # a plain module's parameters are in one layer
        return self.contract(self.x, self.g, one_layer.to(self.g.dtype))

    def per_example(self) -> dict[str, Tensor]:
        return self.expand(self.x, self.g).per_example()

    def without(self, dropped: Tensor) -> Factored:
        x, g = zero_rows(self.x, dropped), zero_rows(self.g, dropped)
        return Factored(self.norms, x, g, self.contract, self.expand)


def natively(
    summed: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> Callable[[Tensor, Tensor, Tensor], list[dict[str, Tensor]]]:
    """From the gradient of a batch, summed, to sums under scales: the output gradient is scaled."""

    def contract(x: Tensor, g: Tensor, scales: Tensor) -> list[dict[str, Tensor]]:
        columns = scales.view(*scales.shape, *[1] * (g.dim() - 1))
        return [summed(x, g * column) for column in columns.unbind()]

    return contract


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
    """||sum_t g_t x_tᵀ||² = sum_tu (x_t·x_u)(g_t·g_u) for each example, from [B, T, T] Gram matrices; never too low.

    The terms can cancel, and the rounding of large ones could then hide a norm, which would break the bound on the
    example's contribution. Adding 8 eps (sum_t |x_t||g_t|)² rounds the norm up: by a few units in the last place unless
    terms cancel. (Errors are not independent where positions repeat, so a sum of squares will not do; with a factor of
    2 there are cases that fail.)

    Squares of x or g below 1e-22 (float32) may have lost terms to underflow although the product, the gradient, is not
    small. Such an example cannot be measured; an infinite norm removes it.
    """
    products = (gram_x * gram_g).sum(dim=(1, 2)).double().clamp(min=0)  # [B]
    squares_x, squares_g = (gram.diagonal(dim1=1, dim2=2).double().clamp(min=0) for gram in (gram_x, gram_g))  # [B, T]
    reach = (squares_x * squares_g).sqrt().sum(1)  # [B]
    info = torch.finfo(gram_x.dtype)
    norms = products + 8 * info.eps * reach.square()
    faint = (squares_x.sum(1) < 1e16 * info.tiny) | (squares_g.sum(1) < 1e16 * info.tiny)
    if faint.any():
        norms = torch.where(faint & ~_negligible(x, g), torch.full_like(norms, math.inf), norms)
    return norms


def _negligible(x: Tensor, g: Tensor) -> Tensor:
    """Examples whose gradient is below the floor under which norms count as zero, whatever was lost."""
    largest = [t.flatten(1).double().abs().amax(1) * math.sqrt(t[0].numel()) for t in (x, g)]
    return largest[0] * largest[1] < norm_floor(x.dtype)


def norm_floor(dtype: torch.dtype) -> float:
    """Norms below this count as zero: the sums of squares behind them may have lost terms to underflow."""
    return 1e4 * math.sqrt(torch.finfo(dtype).tiny)
