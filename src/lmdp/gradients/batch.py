"""The per-example gradients of one batch, held as cheaply as possible: never as one [B, parameters] matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lmdp.gradients.contract import Owner, Piece
from lmdp.gradients.leading import RootCall
from lmdp.gradients.rows import squared_row_norms, zero_rows
from lmdp.layers import LayerMap


@dataclass(frozen=True)
class NamedPiece:
    """The piece of one module. `names`: of its parameters, relative to the module → in the model."""

    names: dict[str, str]
    piece: Piece


@dataclass
class Arrived:
    """What a backward pass has delivered so far. `task`: the number that autograd gave the pass.

    versions  of the tensors that a piece keeps: torch counts how often each was written to
    """

    batch_size: int | None = None
    pieces: dict[Owner, NamedPiece] = field(default_factory=dict)
    versions: dict[Owner, list[int]] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    repeated: set[Owner] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    task: int | None = None
    complete: bool = False

    def admit(self, owner: Owner) -> None:
        """A gradient may come in if it belongs to the one backward pass of this step."""
        if self.complete:
            raise RuntimeError(
                "backward() was called a second time before optimizer.step(): one example could then count twice. "
                "Add the losses and call backward() once; for batches too large for memory set "
                "max_physical_batch_size in make_private; to throw gradients away call optimizer.zero_grad()."
            )
        task = torch._C._current_graph_task_id()
        if self.task not in (None, task):
            raise RuntimeError(
                f"backward() reached {owner} while another backward pass was unfinished: one that raised (call "
                "optimizer.zero_grad() before going on), or one that it is nested in (use "
                "torch.utils.checkpoint with use_reentrant=False)."
            )
        if self.task is None:
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(self, "complete", True))

    def set_size(self, size: int) -> None:
        if self.batch_size not in (None, size):
            raise ValueError(
                "one loss was computed from batches of different sizes. All calls of the model that feed one loss must "
                "see the same examples, in the same order."
            )
        self.batch_size = size

    def take_in(self, owner: Owner, piece: Piece, names: dict[str, str], *, tied: bool) -> bool:
        """As it is; the gradients themselves (and False) where a parameter is used twice, in this module or another."""
        before = self.pieces.pop(owner, None)
        if before is None and not tied and owner not in self.repeated:
            self.pieces[owner] = NamedPiece(names, piece)
            self.versions[owner] = [tensor._version for tensor in piece.kept]
            return True
        self.repeated.add(owner)
        for each in (piece,) if before is None else (before.piece, piece):
            for relative, rows in each.per_example().items():
                name = names[relative]
                self.shared[name] = self.shared[name] + rows if name in self.shared else rows
        return False

    def refuse_changed(self) -> None:
        """Norms were taken when a gradient arrived. Sums of something else than was measured have no bound."""
        for owner, named in self.pieces.items():
            if self.versions[owner] != [tensor._version for tensor in named.piece.kept]:
                raise RuntimeError(
                    f"what {owner} took in, or its gradient, was changed in place between backward() and "
                    "optimizer.step(). Change a copy (x * std instead of x.mul_(std)), or change it after the step."
                )


@dataclass
class Pass:
    """Everything between two steps: forward passes that may still be differentiated, and what has arrived of them."""

    arrived: Arrived = field(default_factory=Arrived)
    root: RootCall | None = None
    muted: Counter[nn.Parameter] = field(default_factory=Counter)
    rng_states: dict[Owner, Tensor] = field(default_factory=dict)
    busy: bool = False  # a rule is running, which may run its module again

    def discard(self) -> None:
        """Throw away what has arrived, and undo what an interrupted forward pass left behind."""
        for parameter, depth in self.muted.items():
            if depth > 0:
                parameter.requires_grad_(True)
        self.muted.clear()
        self.root = None
        self.arrived = Arrived()


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
