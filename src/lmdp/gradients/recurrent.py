"""Recurrent layers, in any number of layers and directions, on batches that are padded or packed.

At time t, example i has an input x_it and the state h_it before it, and the gradients A_it and B_it at what these two
bring to the gates (the same but in a GRU). Every direction of every layer is a linear layer whose positions are times:

    weight_ih, bias_ih   sum_t A_it [x_it, 1]ᵀ
    weight_hh, bias_hh   sum_t B_it [h_it, 1]ᵀ
    weight_hr            sum_t P_it u_itᵀ           P the gradient at a state that was projected from u

so that norms and sums are those of `linear`. The gates are computed once more, from what the module gave out, and the
gradients at them by going back in time (`cells`). That gives the gradients at the inputs as well: torch's own backward
of the module is left out. What a layer gave to the one above it was not given out: torch runs it once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients import linear
from lmdp.gradients.cells import Direction, Order, product
from lmdp.gradients.contract import Example, Piece, Rule, Sizes, Use, argument
from lmdp.gradients.randomness import undrawn
from lmdp.gradients.rows import chunks, gram_squared_norms, joined, zero_rows

_OTHER_DROPOUT = (
    "a {kind} with dropout between its layers gave other outputs when it was run again: what it dropped could not be "
    "drawn once more. Construct it with dropout=0, or put nn.Dropout between modules of one layer each."
)


@dataclass(frozen=True)
class Sequences:
    """What a recurrent module took in, with the times first and the longest example first, and how that was made.

    x        [T, B, features]
    sizes    how many examples have something at each time
    packed   [T, B], which of them, if the sequences were packed
    sorting, unsorting  the order of the examples in a packed batch, if it is not that of the batch
    """

    x: Tensor
    sizes: list[int]
    batch_first: bool
    packed: Tensor | None = None
    sorting: Tensor | None = None
    unsorting: Tensor | None = None

    @classmethod
    def of(cls, module: nn.RNNBase, given: Any) -> Sequences:
        if isinstance(given, Tensor):
            x = given.transpose(0, 1) if module.batch_first else given
            return cls(x, [x.shape[1]] * len(x), module.batch_first)
        data, sizes, sorting, unsorting = given
        places = (torch.arange(int(sizes[0])) < sizes[:, None]).to(data.device)
        return cls(_padded(data, places), sizes.tolist(), False, places, sorting, unsorting)

    def arranged(self, given: Tensor) -> Tensor:
        """Something that was given out, or its gradient, as x is."""
        if self.packed is not None:
            return _padded(given, self.packed)
        return given.transpose(0, 1) if self.batch_first else given

    def as_given(self, arranged: Tensor) -> Tensor:
        """The other way round."""
        if self.packed is not None:
            return arranged[self.packed]
        return arranged.transpose(0, 1) if self.batch_first else arranged

    def sorted(self, states: Tensor) -> Tensor:
        """States [layers, B, width], in the order of x."""
        return states if self.sorting is None else states.index_select(1, self.sorting)

    def unsorted(self, rows: Tensor) -> Tensor:
        """[·, B, width], in the order of the batch."""
        return rows if self.unsorting is None else rows.index_select(1, self.unsorting)

    def dropout(self, like: Tensor, chance: float) -> Tensor:
        """What is multiplied with between layers, drawn as torch draws it."""
        kept = F.dropout(torch.ones_like(like if self.packed is None else like[self.packed]).contiguous(), chance)
        return kept if self.packed is None else _padded(kept, self.packed)

    def run(self, module: nn.RNNBase, weights: Sequence[Tensor], x: Tensor, starts: Sequence[Tensor]) -> Tensor:
        """What one layer of these weights gives out [T, B, ·], by torch's own operation. `starts` [directions, B, ·]"""
        function = getattr(torch, module.mode.lower())
        state = starts if module.mode == "LSTM" else starts[0]
        options = (list(weights), module.bias, 1, 0.0, False, module.bidirectional)
        if self.packed is None:
            whole: Tensor = function(x, state, *options, False)[0]
            return whole
        return _padded(function(x[self.packed], torch.tensor(self.sizes), state, *options)[0], self.packed)


def _padded(data: Tensor, places: Tensor) -> Tensor:
    """[N, width] → [T, B, width]."""
    rows = data.new_zeros(*places.shape, data.shape[1])
    rows[places] = data
    return rows


def pull(use: Use) -> tuple[Callable[[], Piece], tuple[Tensor | None, ...]]:
    """What makes the piece, and the gradients at the tensors among the arguments."""
    module = use.module
    assert isinstance(module, nn.RNNBase)
    given, states = argument(use.args, use.kwargs, 0, "input"), argument(use.args, use.kwargs, 1, "hx")
    first: Sequence[Tensor] = () if states is None else (states,) if isinstance(states, Tensor) else states
    sequences = Sequences.of(module, given)
    with torch.no_grad():
        stack = _Stack(use, module, sequences, first)
        at_x = stack.back(use.output_grads)
    at = {id(given if isinstance(given, Tensor) else given[0]): sequences.as_given(at_x)}
    at |= {id(state): gradient for state, gradient in zip(first, stack.at_first())}
    leaves = pytree.tree_leaves((use.args, use.kwargs))
    gradients = tuple(at.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
    return stack.piece, gradients


class _Stack:
    """All layers of a module, with what each gave out: of the last it was kept, the others are run once more."""

    def __init__(self, use: Use, module: nn.RNNBase, sequences: Sequences, first: Sequence[Tensor]) -> None:
        self._use, self._module, self._sequences = use, module, sequences
        self._layers: list[list[Direction]] = []
        self._kept: list[Tensor | None] = []  # what dropout before each layer multiplied with
        self._suffixes = ("", "_reverse") if module.bidirectional else ("",)
        starts = [sequences.sorted(state) for state in first]
        x, given_out = sequences.x, sequences.arranged(use.outputs[0])
        with undrawn():
            use.as_before()
            for depth in range(module.num_layers):
                kept = sequences.dropout(x, module.dropout) if use.drew and depth else None
                x = x if kept is None else x * kept
                self._kept.append(kept)
                x = self._add_layer(depth, x, starts, given_out)

    def _add_layer(self, depth: int, x: Tensor, starts: list[Tensor], given_out: Tensor) -> Tensor:
        """Gives what the layer gave out."""
        module, sequences, count = self._module, self._sequences, len(self._suffixes)
        weights = [
            {kind: p.detach() for kind, p in weights_of(module, f"l{depth}{suffix}").items()}
            for suffix in self._suffixes
        ]
        mine = [state[depth * count : (depth + 1) * count] for state in starts]
        is_last, drew, h = depth + 1 == module.num_layers, self._use.drew, given_out
        # What was given out in a shorter type is not what full precision gives.
        if not is_last or drew or h.dtype != x.dtype:
            flat = [weight for direction in weights for weight in direction.values()]
            h = sequences.run(module, flat, x, mine or _zeros(weights[0], x, count))
        if is_last and drew:
            _check_replay(self._use, sequences.as_given(h))
        directions = zip(self._suffixes, weights, h.chunk(count, 2))
        self._layers.append(
            [
                Direction(module.mode, w, x, part, [state[i] for state in mine], Order(sequences.sizes, bool(suffix)))
                for i, (suffix, w, part) in enumerate(directions)
            ]
        )
        return h

    def back(self, output_grads: Sequence[Tensor]) -> Tensor:
        """The gradient at what the first layer took in."""
        at_last = [self._sequences.sorted(gradient) for gradient in output_grads[1:]]
        at_output = self._sequences.arranged(output_grads[0])
        for depth in reversed(range(len(self._layers))):
            layer = self._layers[depth]
            parts = at_output.chunk(len(layer), 2)
            ends = [[each[depth * len(layer) + i] for each in at_last] for i in range(len(layer))]
            at_x = [direction.back(part, end) for direction, part, end in zip(layer, parts, ends)]
            kept, at_output = self._kept[depth], sum_of(at_x)
            at_output = at_output if kept is None else at_output * kept
        return at_output

    def at_first(self) -> list[Tensor]:
        """The gradients at the first states."""
        by_direction = [direction.states for layer in self._layers for direction in layer]
        return [self._sequences.unsorted(torch.stack(each)) for each in zip(*by_direction)]

    def piece(self) -> Piece:
        parts = []
        for depth, layer in enumerate(self._layers):
            for suffix, direction in zip(self._suffixes, layer):
                parts += _parts(self._use, f"l{depth}{suffix}", direction, self._sequences.unsorted)
        return Parts(tuple(parts))


def weights_of(module: nn.RNNBase, suffix: str) -> dict[str, nn.Parameter]:
    """Of one direction of one layer: weight_ih, weight_hh, bias_ih, … → the parameter."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return {kind: p for kind in kinds if (p := getattr(module, f"{kind}_{suffix}", None)) is not None}


def _zeros(weights: Mapping[str, Tensor], x: Tensor, directions: int) -> list[Tensor]:
    """The first h and c of a module that is given none."""
    widths = weights["weight_hh"].shape[1], len(weights["weight_hh"]) // 4
    return [x.new_zeros(directions, x.shape[1], width) for width in widths]


def _check_replay(use: Use, again: Tensor) -> None:
    """Refuse unless the module gave the same outputs; what was dropped differently differs by far."""
    before = use.outputs[0]
    tolerance = 1e-3 if before.dtype in (torch.float32, torch.float64) else 0.1
    finite = torch.isfinite(before) & torch.isfinite(again)
    off = torch.where(finite, (before - again).abs(), torch.zeros_like(again))

    def refuse() -> None:
        raise RuntimeError(_OTHER_DROPOUT.format(kind=type(use.module).__name__))

    use.when([(off > tolerance * (1 + before.abs())).any()], refuse)


# -- its gradients are those of linear layers -------------------------------------------------------------------------


def _parts(use: Use, suffix: str, direction: Direction, unsorted: Callable[[Tensor], Tensor]) -> list[Part]:
    """Of one direction, as far as it is trained."""
    parts = []
    for layer in direction.layers:
        widths = {f"{kind}_{suffix}": width for kind, width in layer.widths.items()}
        trained = {name: width for name, width in widths.items() if name in use.trainable}
        x = layer.x
        if 0 < len(trained) < len(widths):
            columns = zip(widths, x.split(list(widths.values()), 2))
            x = torch.cat([column for name, column in columns if name in trained], 2)
        if trained:
            x, g = (unsorted(side).transpose(0, 1) for side in (x, layer.g))  # [B, T, ·]
            parts.append(Part(_linear(use, next(iter(trained)), x, g), trained))
    return parts


def _linear(use: Use, name: str, x: Tensor, g: Tensor) -> Piece:
    batch, times = x.shape[:2]
    features, weights = x.shape[2] + g.shape[2], x.shape[2] * g.shape[2]
    sizes = Sizes(times, features, weights, times * features, batch, x.element_size(), part=name)
    plain = replace(use, input=x, output_grad=g, trainable=frozenset({"weight"}), is_data=False)
    plain = replace(plain, args=(x,), kwargs={}, outputs=(), output_grads=(g,), forms_again=lambda sizes: False)
    if times == 1 or not use.prefers_gram(sizes):
        return linear.piece(replace(plain, prefers_gram=lambda sizes: False))
    norms = [_gram_norms(x[chunk], g[chunk]) for chunk in chunks(batch, times**2)]
    return Held(joined(norms), x, g, plain)


def _gram_norms(x: Tensor, g: Tensor) -> Tensor:
    return gram_squared_norms(x, g, torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2)))


@dataclass(frozen=True)
class Held:
    """A linear layer without a bias, of which x and g are kept; its norms came from Gram matrices."""

    norms: Tensor
    x: Tensor
    g: Tensor
    use: Use

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {"": self.norms}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        columns = scales["weight"].to(self.g.dtype)[..., None, None].unbind()
        return [{"weight": self._sum(column)} for column in columns]

    def _sum(self, scales: Tensor) -> Tensor:
        """[out, in]. By time first, which is how they are in memory."""
        x, g = (side.transpose(0, 1).flatten(0, 1) for side in (self.x * scales, self.g))
        return product(x.T, g.T).T

    def per_example(self) -> dict[str, Tensor]:
        return linear.piece(replace(self.use, prefers_gram=lambda sizes: False)).per_example()

    def without(self, dropped: Tensor) -> Held:
        x, g = zero_rows(self.x, dropped), zero_rows(self.g, dropped)
        return Held(self.norms, x, g, replace(self.use, input=x, output_grad=g, args=(x,), output_grads=(g,)))


@dataclass(frozen=True)
class Part:
    """One linear layer without a bias. `widths`: of the parameters that its columns are; a bias is one column."""

    piece: Piece
    widths: Mapping[str, int]

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """[..., out, columns] → each parameter's."""
        columns = weight.split(list(self.widths.values()), -1)
        named = zip(self.widths, columns)
        return {n: (c.squeeze(-1) if n.startswith("bias") else c).contiguous() for n, c in named}


@dataclass(frozen=True)
class Parts:
    """Several linear layers that are one module."""

    parts: tuple[Part, ...]

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        each = [norms.double() for part in self.parts for norms in part.piece.squared_norms.values()]
        return {"": torch.stack(each).sum(0)}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.piece.kept)

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        one_layer = {"weight": next(iter(scales.values()))}  # a module's parameters are in one layer
        sums: list[dict[str, Tensor]] = [{} for _ in one_layer["weight"]]
        for part in self.parts:
            for total, of_part in zip(sums, part.piece.weighted_sums(one_layer)):
                total.update(part.split(of_part["weight"]))
        return sums

    def per_example(self) -> dict[str, Tensor]:
        gradients = [part.split(part.piece.per_example()["weight"]) for part in self.parts]
        return {name: rows for of_part in gradients for name, rows in of_part.items()}

    def without(self, dropped: Tensor) -> Parts:
        return Parts(tuple(Part(part.piece.without(dropped), part.widths) for part in self.parts))


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """In the place of the first."""
    total: Tensor = functools.reduce(Tensor.add_, tensors)
    return total


# -- the rule ---------------------------------------------------------------------------------------------------------


def taken_in(module: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The shape of what it took in, with the examples first; none for a single sequence without a batch."""
    given = argument(args, kwargs, 0, "input")
    if not isinstance(given, Tensor):
        data, sizes = given[:2]
        return int(sizes[0]), data.shape[1]
    if given.dim() != 3:
        return ()
    batch, times = given.shape[:2] if module.batch_first else given.shape[1::-1]
    return batch, times, given.shape[2]


def _drops(module: nn.RNNBase) -> bool:
    return module.training and module.dropout > 0 and module.num_layers > 1


def is_plain(module: nn.Module) -> bool:
    """Whether its parameters are those of its class, each of them another."""
    if not isinstance(module, nn.RNNBase):
        return False
    names = {name for names in module._all_weights for name in names}
    return {name for name, _ in module.named_parameters()} == names


RULE = Rule(
    "recurrent",
    (nn.LSTM, nn.GRU, nn.RNN),
    lambda use: pull(use)[0](),
    lambda trainable: ("gates", "linear layers over its times: formed or Gram, whichever is cheaper"),
    (
        Example(lambda: nn.LSTM(4, 5, batch_first=True), (3, 4)),
        Example(lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), (3, 4)),
        Example(lambda: nn.GRU(4, 5, 2, batch_first=True, bias=False), (3, 4)),
        Example(lambda: nn.GRU(4, 5, batch_first=True, bidirectional=True), (3, 4)),
        Example(lambda: nn.RNN(4, 5, 2, batch_first=True), (1, 4)),
        Example(lambda: nn.RNN(4, 5, batch_first=True, nonlinearity="relu"), (3, 4)),
    ),
    pull=pull,
    taken_in=taken_in,
    is_plain=is_plain,
    keeps_outputs=True,
    draws=_drops,
    remedy="Give the model tensors with the batch first, and pack them in its forward with enforce_sorted=False",
)
