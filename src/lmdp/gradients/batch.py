"""The per-example gradients of one batch, held as cheaply as possible: never as one [B, parameters] matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.gradients.contract import Piece
from lmdp.gradients.rows import squared_row_norms, zero_rows
from lmdp.layers import LayerMap


@dataclass(frozen=True)
class NamedPiece:
    """The piece of one module. `names`: of its parameters, relative to the module → in the model."""

    names: dict[str, str]
    piece: Piece


@dataclass(frozen=True)
class PerExampleGradients:
    """Of one backward pass, on `batch_size` = B examples.

    pieces     of modules that were called once
    shared     gradients [B, *shape] of parameters that were used more than once
    unreached  parameters that the pass did not reach
    """

    batch_size: int
    pieces: list[NamedPiece]
    shared: dict[str, Tensor]
    unreached: list[str]

    def squared_norms(self, layers: LayerMap) -> Tensor:
        """[B, L], in float64."""
        columns: list[Tensor | None] = [None] * len(layers.layers)

        def add(name: str, column: Tensor) -> None:
            at = layers.index[name]
            before = columns[at]
            columns[at] = column.double() if before is None else before + column

        for named in self.pieces:
            for name, column in named.piece.squared_norms.items():
                add(named.names[name] if name else next(iter(named.names.values())), column)
        for name, rows in self.shared.items():
            add(name, squared_row_norms(rows.reshape(len(rows), -1)))
        none = torch.zeros(self.batch_size, dtype=torch.float64)
        return torch.stack([none if c is None else c for c in columns], dim=1)

    def without(self, dropped: Tensor) -> PerExampleGradients:
        """The same with the gradients of the examples where `dropped` is true exactly zero."""
        kept = [NamedPiece(named.names, named.piece.without(dropped)) for named in self.pieces]
        shared = {name: zero_rows(rows, dropped) for name, rows in self.shared.items()}
        return PerExampleGradients(self.batch_size, kept, shared, self.unreached)

    def weighted_sums(self, scales: Sequence[Tensor], layers: LayerMap) -> list[dict[str, Tensor]]:
        """For each of the `scales` [B, L] and every parameter: the sum of scale[i, its layer] times the gradient."""
        by_layer = torch.stack(list(scales)).permute(2, 0, 1).contiguous().unbind()  # [S, B] of each layer
        sums: list[dict[str, Tensor]] = [{} for _ in scales]
        for named in self.pieces:
            columns = {name: by_layer[layers.index[full]] for name, full in named.names.items()}
            for total, of_module in zip(sums, named.piece.weighted_sums(columns)):
                for name, value in of_module.items():
                    total[named.names[name]] = value
        for name, rows in self.shared.items():
            for total, column in zip(sums, by_layer[layers.index[name]].to(rows.dtype)):
                total[name] = torch.tensordot(column, rows, dims=1)
        return sums
