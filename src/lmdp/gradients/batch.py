"""The per-example gradients of one batch, held as cheaply as possible: never as one [B, parameters] matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.gradients.rows import squared_row_norms, zero_rows
from lmdp.gradients.rules import Piece
from lmdp.layers import LayerMap


@dataclass(frozen=True)
class Part:
    """The piece of one module. `names`: the module's own parameter names → names in the model."""

    names: dict[str, str]
    piece: Piece


@dataclass(frozen=True)
class Gradients:
    """All parts of one backward pass. `shared`: gradients [B, *shape] of parameters that were used more than once."""

    batch_size: int
    parts: list[Part]
    shared: dict[str, Tensor]
    unreached: list[str]

    def squared_norms(self, layers: LayerMap) -> Tensor:
        """[B, L], in float64."""
        columns: list[Tensor | None] = [None] * len(layers)

        def add(name: str, column: Tensor) -> None:
            at = layers.index[name]
            before = columns[at]
            columns[at] = column.double() if before is None else before + column

        for part in self.parts:
            for own, column in part.piece.squared_norms.items():
                add(part.names[own] if own else next(iter(part.names.values())), column)
        for name, rows in self.shared.items():
            add(name, squared_row_norms(rows.reshape(len(rows), -1)))
        none = torch.zeros(self.batch_size, dtype=torch.float64)
        return torch.stack([none if c is None else c for c in columns], dim=1)

    def without(self, dropped: Tensor) -> Gradients:
        """The same with these examples' gradients exactly zero."""
        kept = [Part(part.names, part.piece.without(dropped)) for part in self.parts]
        shared = {name: zero_rows(rows, dropped) for name, rows in self.shared.items()}
        return Gradients(self.batch_size, kept, shared, self.unreached)

    def weighted_sums(self, scales: Sequence[Tensor], layers: LayerMap) -> list[dict[str, Tensor]]:
        """For each of the `scales` [B, L] and every parameter: the sum of scale[i, its layer] times the gradient."""
        index, by_layer = layers.index, torch.stack(list(scales)).permute(2, 0, 1).contiguous().unbind()
        sums: list[dict[str, Tensor]] = [{} for _ in scales]
        for part in self.parts:
            found = part.piece.weighted_sums({own: by_layer[index[name]] for own, name in part.names.items()})
            for total, mine in zip(sums, found):
                for own, value in mine.items():
                    total[part.names[own]] = value
        for name, rows in self.shared.items():
            for total, column in zip(sums, by_layer[index[name]].to(rows.dtype)):
                total[name] = torch.tensordot(column, rows, dims=1)
        return sums
