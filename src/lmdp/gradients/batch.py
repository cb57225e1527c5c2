"""The per-example gradients of one batch, held as cheaply as possible: never as one [B, parameters] matrix."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lmdp.gradients.contract import Owner, Piece, Use
from lmdp.gradients.leading import RootCall
from lmdp.gradients.randomness import PutBack
from lmdp.gradients.repeated import Target, Waiting, versions
from lmdp.gradients.units import Make, folded, uses_of
from lmdp.layers import LayerMap


@dataclass(frozen=True)
class NamedPiece:
    """The piece of one target. `names`: of its parameters, as the piece calls them → in the model."""

    names: dict[str, str]
    piece: Piece

    @property
    def device(self) -> torch.device:
        """Where the piece is: a model may be spread over several."""
        return next(iter(self.piece.squared_norms.values())).device


@dataclass
class Arrived:
    """What a backward pass has delivered so far. `task`: the number that autograd gave the pass.

    rows_each  how many rows of the batch are one example
    waiting    what is used more than once, until all uses have arrived
    versions   of the tensors that a piece keeps
    repeated   what was used more than once
    """

    batch_size: int | None = None
    rows_each: int = 1
    sent: float = 1.0
    pieces: dict[Target, NamedPiece] = field(default_factory=dict)
    waiting: dict[Target, Waiting] = field(default_factory=dict)
    versions: dict[Target, list[int]] = field(default_factory=dict)
    repeated: set[Target] = field(default_factory=set)
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

    def set_size(self, rows: int) -> None:
        size, rest = divmod(rows, self.rows_each)
        if rest:  # and without their number: the size of a batch is private
            raise ValueError(
                f"the model was run on a number of rows that is no multiple of {self.rows_each}, the rows of one unit. "
                "Pass all rows of every unit to the model, those of one unit after each other."
            )
        if self.batch_size not in (None, size):
            raise ValueError(
                "one loss was computed from batches of different sizes. All calls of the model that feed one loss must "
                "see the same examples, in the same order."
            )
        self.batch_size = size

    def take_in(
        self,
        owner: Owner,
        use: Use,
        pulled: Make | None,
        targets: Sequence[Target],
        calls: Counter[Owner],
    ) -> None:
        """A use of the parameters of these targets. `calls`: how many of each module the forward pass made.

        `pulled` gives the piece of this use alone, of all parameters, where its rule has made that already.
        """
        for part, make in folded(use, owner.rule, pulled, self.rows_each):
            self._take_in(owner, part, make, targets, calls)

    def _take_in(self, owner: Owner, use: Use, make: Make, targets: Sequence[Target], calls: Counter[Owner]) -> None:
        alone = [target for target in targets if self._is_alone(target, calls)]
        if len(targets) == 1 and alone:
            self._hold(targets[0], make(), targets[0].names[owner])
            return
        formed = make() if owner.rule.join is None else None  # once, for all targets
        for target in targets:
            part, expected = target.part_of(use, owner), self._expected(target, calls)
            waiting = self.waiting.setdefault(target, Waiting())
            if (before := self.pieces.pop(target, None)) is not None:  # of a call that nobody has counted
                waiting.add(before.piece, before.names)
            if formed is None and not waiting.rows and (target in alone or target.can_wait(part, owner, expected)):
                waiting.keep(owner, part)
            else:
                waiting.add(formed or owner.rule.piece(part), target.names[owner])
            waiting.count += 1
            if waiting.count >= expected:
                self._join(target)

    def join_rest(self) -> None:
        """No further use will arrive."""
        for target in list(self.waiting):
            self._join(target)

    def _join(self, target: Target) -> None:
        waiting = self.waiting.pop(target)
        if (owner := waiting.changed()) is not None:
            raise RuntimeError(_CHANGED.format(owner=owner))
        if waiting.count > uses_of(target.owner.rule, self.rows_each):
            self.repeated.add(target)
        self._hold(target, *waiting.piece(target))

    def _hold(self, target: Target, piece: Piece, names: dict[str, str]) -> None:
        self.pieces[target] = NamedPiece(names, piece)
        self.versions[target] = versions(*piece.kept)

    def _is_alone(self, target: Target, calls: Counter[Owner]) -> bool:
        return self._expected(target, calls) <= 1 and target not in self.pieces and target not in self.waiting

    def _expected(self, target: Target, calls: Counter[Owner]) -> int:
        return sum(calls[owner] * uses_of(owner.rule, self.rows_each) for owner in target.names)

    def refuse_changed(self) -> None:
        """Norms were taken when a gradient arrived. Sums of something else than was measured have no bound."""
        for target, named in self.pieces.items():
            if self.versions[target] != versions(*named.piece.kept):
                raise RuntimeError(_CHANGED.format(owner=target.owner))


_CHANGED = (
    "what {owner} took in, or its gradient, was changed in place between backward() and optimizer.step(). Change a "
    "copy (x * std instead of x.mul_(std)), or change it after the step."
)


@dataclass
class Pass:
    """Everything between two steps: forward passes that may still be differentiated, and what has arrived of them.

    calls   of each module, in all calls of the model that count; `before`: the last of these
    """

    arrived: Arrived = field(default_factory=Arrived)
    root: RootCall | None = None
    calls: Counter[Owner] = field(default_factory=Counter)
    before: Counter[Owner] = field(default_factory=Counter)
    muted: Counter[nn.Parameter] = field(default_factory=Counter)
    randomness: dict[Owner, PutBack] = field(default_factory=dict)
    held: int = 0  # bytes that modules took in and gave out, in the newest call of the model
    busy: bool = False  # a rule is running, which may run its module again
    unrecorded: bool = False  # a module is running of which torch records nothing

    def begin(self, root: RootCall, *, again: bool = False) -> None:
        """The model is called; `again`: in the place of the last call."""
        self.calls, self.before = (self.before.copy(), self.before) if again else (self.calls, self.calls.copy())
        self.held = 0
        self.root = root

    def count(self, owner: Owner) -> None:
        """A call that may hand over a gradient, and not one that a checkpoint makes again."""
        if torch._C._current_graph_task_id() == -1:
            self.calls[owner] += 1

    def discard(self) -> None:
        """Throw away what has arrived, and undo what an interrupted forward pass left behind."""
        self.record()
        for parameter, depth in self.muted.items():
            if depth > 0:
                parameter.requires_grad_(True)
        self.muted.clear()
        self.root = None
        if self.arrived.task is not None:
            self.calls.clear()  # of a backward pass that is now over
        self.arrived = Arrived(rows_each=self.arrived.rows_each)

    def record(self) -> None:
        """Let torch record again what is computed."""
        if self.unrecorded:
            self.unrecorded = False
            torch.set_grad_enabled(True)


@dataclass(frozen=True)
class PerExampleGradients:
    """Of one backward pass, on `batch_size` = B examples.

    pieces     of every parameter that it reached, one
    unreached  parameters that it did not reach
    device     where norms and scales are; sums are where their parameters are
    sent       what the backward pass was multiplied by
    rows_each  how many rows of the batch an example has; their gradients are added
    """

    batch_size: int
    pieces: list[NamedPiece]
    unreached: list[str]
    device: torch.device
    sent: float = 1.0
    rows_each: int = 1

    def factor(self, *, mean_loss: bool) -> float:
        """What multiplies each gradient to be its example's own: the mean over its rows.

        A mean over all rows has divided it by their number.
        """
        rows = self.batch_size * self.rows_each if mean_loss else 1.0
        return rows / self.sent / self.rows_each

    def squared_norms(self, layers: LayerMap) -> Tensor:
        """[B, L], in float64."""
        columns: list[Tensor | None] = [None] * len(layers.layers)

        def add(name: str, column: Tensor) -> None:
            at, column = layers.index[name], column.to(self.device)
            before = columns[at]
            columns[at] = column.double() if before is None else before + column

        for named in self.pieces:
            for name, column in named.piece.squared_norms.items():
                add(named.names[name] if name else next(iter(named.names.values())), column)
        none = torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)
        return torch.stack([none if c is None else c for c in columns], dim=1)

    def without(self, dropped: Tensor) -> PerExampleGradients:
        """The same with the gradients of the examples where `dropped` is true exactly zero."""
        kept = [NamedPiece(named.names, named.piece.without(dropped.to(named.device))) for named in self.pieces]
        return dataclasses.replace(self, pieces=kept)

    def weighted_sums(self, scales: Sequence[Tensor], layers: LayerMap) -> list[dict[str, Tensor]]:
        """For each of the `scales` [B, L] and every parameter: the sum of scale[i, its layer] times the gradient."""
        return gathered(len(scales), self.each_sum(scales, layers))

    def last_sums(self, scales: Sequence[Tensor], layers: LayerMap) -> list[dict[str, Tensor]]:
        """The same, once and for all: a piece is let go as soon as it is added up, and makes room for the sums."""
        return gathered(len(scales), self.each_sum(scales, layers, last=True))

    def each_sum(
        self, scales: Sequence[Tensor], layers: LayerMap, *, last: bool = False
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """The same, one parameter after the other, each with a sum for each of the `scales`."""
        by_layer = torch.stack(list(scales)).permute(2, 0, 1).contiguous().unbind()  # [S, B] of each layer
        pieces = self.pieces if last else self.pieces.copy()
        pieces.reverse()
        while pieces:
            yield from _piece_sums(pieces.pop(), by_layer, layers)


def _piece_sums(named: NamedPiece, by_layer: Sequence[Tensor], layers: LayerMap) -> list[tuple[str, list[Tensor]]]:
    columns = {name: by_layer[layers.index[full]].to(named.device) for name, full in named.names.items()}
    sums = named.piece.weighted_sums(columns)
    return [(full, [of_scale[name] for of_scale in sums]) for name, full in named.names.items() if name in sums[0]]


def gathered(count: int, sums: Iterable[tuple[str, list[Tensor]]]) -> list[dict[str, Tensor]]:
    """One for each of so many scales."""
    gathered: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, values in sums:
        for total, value in zip(gathered, values):
            total[name] = value
    return gathered
