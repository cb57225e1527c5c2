"""LSTM, GRU and RNN by a rule of their own: each example has the gradient that it has alone, however it is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lmdp.gradients import Capture, cells
from lmdp.gradients.attach import look
from lmdp.gradients.plan import RULES, rule_for
from lmdp.layers import LayerMap
from tests.certified import sequences
from tests.certified.case import REFUSED, Case, private
from tests.certified.parts import Texts
from tests.gradients.reference import captured, compare

INPUTS, WIDTH, TIMES, BATCH = 3, 4, 5, 4
LENGTHS = {"no": [TIMES] * BATCH, "sorted": [5, 4, 4, 1], "unsorted": [2, 5, 1, 4]}
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu rnn": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}


class Reader(nn.Module):
    """A recurrent layer behind linear ones, which see whether the gradients at its inputs and states are right.

    Gives out all that the layer does, a row for every example.
    """

    def __init__(self, layer: nn.RNNBase, *, packed: str = "no", states: bool = False) -> None:
        super().__init__()
        self.layer, self.packed, self.states = layer, packed, states
        self.first = nn.Linear(INPUTS, layer.input_size)
        self.h, self.c = nn.Linear(2, layer.proj_size or layer.hidden_size), nn.Linear(2, layer.hidden_size)
        self.names = ("input", "hx")

    def forward(self, x: Tensor, lengths: Tensor, start: Tensor) -> Tensor:
        """x [B, T, inputs], start [B, layers, 2]"""
        given: Any = self.first(x)
        if self.packed != "no":
            given = pack_padded_sequence(given, lengths, batch_first=True, enforce_sorted=self.packed == "sorted")
        elif not self.layer.batch_first:
            given = given.transpose(0, 1)
        h, c = (make(start).transpose(0, 1).contiguous() for make in (self.h, self.c))
        hx = (h, c) if isinstance(self.layer, nn.LSTM) else h
        output, last = self.layer(given, hx) if self.states else self.layer(input=given)
        if isinstance(output, PackedSequence):
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        elif not self.layer.batch_first:
            output = output.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        return torch.cat([output.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], 1)


Batch = tuple[Tensor, Tensor, Tensor]


def batch_for(layer: nn.RNNBase, lengths: list[int], dtype: torch.dtype = torch.float64, times: int = TIMES) -> Batch:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(len(lengths), times, INPUTS, generator=g, dtype=dtype)
    start = torch.randn(len(lengths), layer.num_layers * (1 + layer.bidirectional), 2, generator=g, dtype=dtype)
    return x, torch.tensor(lengths), start


def each(batch: Batch) -> list[Batch]:
    return [(x[None], length[None], start[None]) for x, length, start in zip(*batch)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum()


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(*batch)
    weights = torch.linspace(0.5, 1.5, output.shape[1], dtype=output.dtype)
    losses: Tensor = (output.square() * weights).sum(1)
    return losses


def made(kind: str, *, packed: str = "no", states: bool = False, **options: Any) -> Reader:
    torch.manual_seed(0)
    return Reader(KINDS[kind](INPUTS, WIDTH, **options), packed=packed, states=states).double()


READINGS = [("no", True), ("no", False), ("sorted", False), ("unsorted", True)]


@pytest.mark.parametrize(("packed", "batch_first"), READINGS, ids=["batch first", "batch second", "sorted", "unsorted"])
@pytest.mark.parametrize(("states", "bias"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(("layers", "both_ways"), list(itertools.product([1, 2], [False, True])))
@pytest.mark.parametrize("kind", KINDS)
def test_every_example_has_the_gradient_that_it_has_alone(
    kind: str, layers: int, both_ways: bool, states: bool, bias: bool, packed: str, batch_first: bool
) -> None:
    options = {"num_layers": layers, "bidirectional": both_ways, "bias": bias, "batch_first": batch_first}
    model = made(kind, packed=packed, states=states, **options)
    assert rule_for(model.layer) is RULES["recurrent"]
    if not states:
        model.h.requires_grad_(False)
        model.c.requires_grad_(False)
    elif not isinstance(model.layer, nn.LSTM):
        model.c.requires_grad_(False)
    batch = batch_for(model.layer, LENGTHS[packed])
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8


def without_states(kind: str, **options: Any) -> Reader:
    model = made(kind, **options)
    model.h.requires_grad_(False)
    model.c.requires_grad_(False)
    return model


@pytest.mark.parametrize("frozen", [["weight_ih"], ["weight_hh", "bias_ih"], ["bias"], ["weight"], ["_l0"]])
@pytest.mark.parametrize("kind", ["lstm", "gru", "projected lstm"])
def test_frozen_parameters_are_left_out(kind: str, frozen: list[str]) -> None:
    model = without_states(kind, num_layers=2, batch_first=True)
    for name, parameter in model.layer.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    batch = batch_for(model.layer, LENGTHS["no"])
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8


@pytest.mark.parametrize("packed", ["no", "unsorted"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_layer_that_is_used_twice_adds_both_uses_up(kind: str, packed: str) -> None:
    class Twice(Reader):
        def forward(self, x: Tensor, lengths: Tensor, start: Tensor) -> Tensor:
            return super().forward(x, lengths, start) + super().forward(x.flip(2), lengths, start)

    torch.manual_seed(0)
    model = Twice(KINDS[kind](INPUTS, WIDTH, batch_first=True), packed=packed, states=True).double()
    model.c.requires_grad_(kind == "lstm")
    batch = batch_for(model.layer, LENGTHS[packed])
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8


def test_a_batch_as_large_as_its_texts_are_long_is_not_taken_for_its_times() -> None:
    model = without_states("lstm", batch_first=False)
    batch = batch_for(model.layer, [TIMES] * TIMES)
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", LENGTHS)
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_what_was_dropped_between_layers_is_dropped_again(kind: str, packed: str) -> None:
    """Alone, an example is dropped otherwise; the loss of one example of the batch tells its gradient."""
    for dtype, bound in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        model = without_states(kind, packed=packed, num_layers=3, dropout=0.5, bidirectional=True, batch_first=True).to(
            dtype
        )
        batch = batch_for(model.layer, LENGTHS[packed], dtype)

        def seeded(model: nn.Module, batch: Batch) -> Tensor:
            torch.manual_seed(7)
            return losses_of(model, batch).sum()

        gradients, layers = captured(model, seeded, batch)
        moved = torch.rand(1)
        for i in range(BATCH):
            model.zero_grad()
            torch.manual_seed(7)
            losses_of(model, batch)[i].backward()  # type: ignore[no-untyped-call]
            only = F.one_hot(torch.tensor(i), BATCH).to(dtype)[:, None].expand(-1, len(layers.layers))
            (sums,) = gradients.weighted_sums([only], layers)
            for name, total in sums.items():
                assert (total - model.get_parameter(name).grad).abs().max() <= bound, name
        torch.manual_seed(7)
        losses_of(model, batch)
        assert torch.equal(torch.rand(1), moved)  # nobody else's draws have changed


def test_dropout_that_is_not_the_same_again_is_refused() -> None:
    model = without_states("lstm", num_layers=2, dropout=0.5, batch_first=True)
    capture = Capture(model, LayerMap.of(model))
    loss = loss_of(model, batch_for(model.layer, LENGTHS["no"]))
    model.layer.dropout = 0.3
    with pytest.raises(RuntimeError, match=r"LSTM with dropout between its layers gave other outputs.*dropout=0"):
        loss.backward()  # type: ignore[no-untyped-call]
    capture.detach()


def test_a_mode_that_is_changed_after_the_forward_pass_changes_nothing() -> None:
    model = without_states("gru", num_layers=2, dropout=0.5, batch_first=True)
    batch = batch_for(model.layer, LENGTHS["no"])

    def sums(mode: Callable[[], Any]) -> dict[str, Tensor]:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            torch.manual_seed(3)
            total = loss_of(model.train(), batch)
            mode()
            return total

        gradients, layers = captured(model, loss, batch)
        return gradients.weighted_sums([torch.ones(BATCH, len(layers.layers), dtype=torch.float64)], layers)[0]

    expected = sums(model.train)
    assert all(torch.equal(total, expected[name]) for name, total in sums(model.eval).items())


# -- memory and rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "way"), [(2, "gram"), (14, "formed")])
@pytest.mark.parametrize("kind", ["lstm", "gru", "projected lstm"])
def test_both_ways_of_keeping_gradients_are_exact_and_planned(kind: str, times: int, way: str) -> None:
    torch.manual_seed(0)
    model = Reader(KINDS[kind](INPUTS, 40, batch_first=True)).double().requires_grad_(False)
    model.layer.requires_grad_(True)
    batch = batch_for(model.layer, [times] * 3, times=times)
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8
    capture = Capture(model, LayerMap.of(model))
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    (planned,) = capture.plan(numbers=True).modules
    (without_numbers,) = capture.plan().modules
    capture.detach()
    assert way in planned.rule
    assert planned.kept_bytes
    assert without_numbers.rule == "gates"


def test_a_memory_budget_counts_every_part_of_a_module() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(30, 40, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(4, 20, 30)
    kept = {}
    for budget in (10**9, 800_000):
        capture = Capture(model, LayerMap.of(model), memory_budget=budget)
        for _ in range(2):
            model(x)[0].square().sum().backward()
            gradients = capture.take()
        kept[budget] = sum(t.numel() * t.element_size() for named in gradients.pieces for t in named.piece.kept)
        assert len(capture.choices.by_name) == 4
        assert kept[budget] == capture.choices.kept
        capture.detach()
    assert kept[800_000] < kept[10**9]


@pytest.mark.parametrize("times", [2, 40])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_what_is_summed_is_never_longer_than_its_norm(kind: str, times: int) -> None:
    """Also where what one time contributes cancels what another does, and rounding is all that is left."""
    torch.manual_seed(0)
    layer = KINDS[kind](INPUTS, 30, batch_first=True)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").mul_(1e-3)  # times hardly depend on each other
    x = torch.randn(6, 1, INPUTS).expand(-1, times, -1).clone()
    signs = torch.tensor([1.0, -1.0]).repeat(times // 2)[:, None]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = (1e3 * signs * model(x)[0]).sum()
        return total

    gradients, layers = captured(layer, loss, x)
    norms = gradients.squared_norms(layers).sqrt()[:, 0]
    for i in range(len(x)):
        only = F.one_hot(torch.tensor(i), len(x)).float()[:, None]
        (sums,) = gradients.weighted_sums([only], layers)
        length = torch.cat([total.flatten().double() for total in sums.values()]).norm()
        assert length <= norms[i] * (1 + 1e-6)


def test_products_by_onednn_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for shape in ((7, 5), (3, 7, 5), (0, 5)):
        x, weight, bias = torch.randn(shape), torch.randn(4, 5), torch.randn(4)
        assert torch.allclose(cells.product(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)
        assert torch.allclose(cells.product(x, weight.T.contiguous().T), F.linear(x, weight), atol=1e-5)


def test_an_empty_batch_reaches_everybody_and_gives_nothing() -> None:
    model = without_states("lstm", batch_first=True)
    gradients, _ = captured(model, loss_of, tuple(part[:0] for part in batch_for(model.layer, [3])))
    assert (gradients.batch_size, gradients.pieces, gradients.unreached) == (0, [], [])


@pytest.mark.parametrize("packed", ["no", "unsorted"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_under_autocast_gradients_are_computed_in_full_precision(kind: str, packed: str) -> None:
    model = without_states(kind, packed=packed, num_layers=2, dropout=0.5, batch_first=True).float()
    batch = batch_for(model.layer, LENGTHS[packed], torch.float32)

    def norms(enabled: bool) -> Tensor:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            torch.manual_seed(3)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                return losses_of(model, batch).float().sum()

        gradients, layers = captured(model, loss, batch)
        return gradients.squared_norms(layers).sqrt()

    assert torch.allclose(norms(True), norms(False), rtol=0.05)


# -- whose rows are whose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [BATCH, TIMES])
def test_times_that_come_first_in_what_the_model_is_given_are_refused(size: int) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(INPUTS, WIDTH)
    capture = Capture(model, LayerMap.of(model))
    with pytest.raises(ValueError, match="tensors with the batch first"):
        model(torch.randn(TIMES, size, INPUTS))[0].square().sum().backward()
    capture.detach()


class Documents(nn.Module):
    """Reads every sentence of every document as a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(INPUTS, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        sentences: Tensor = self.layer(x.flatten(0, 1))[1][-1]
        return sentences.unflatten(0, x.shape[:2]).sum(1)


def test_rows_that_are_parts_of_examples_are_refused_and_the_remedy_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Documents(), nn.Linear(WIDTH, 2)).double()
    x = torch.randn(4, 3, TIMES, INPUTS, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(x).square().sum()
        return total

    with pytest.raises(ValueError, match=r"'0.layer' \(GRU\).*generic=\['0'\]"):
        captured(model, loss, x)
    assert compare(model, loss, x, list(x.split(1)), generic_modules=["0"]).worst <= 1e-8


def test_a_shared_initial_state_is_refused_or_exact() -> None:
    """A state that is looked up once for all examples: its gradient must not be lost."""

    class Looked(nn.Module):
        def __init__(self, spread: bool) -> None:
            super().__init__()
            self.table, self.layer, self.spread = (
                nn.Embedding(1, WIDTH),
                nn.GRU(INPUTS, WIDTH, batch_first=True),
                spread,
            )

        def forward(self, x: Tensor) -> Tensor:
            start = self.table(torch.zeros(len(x) if self.spread else 1, dtype=torch.long))[None]
            output: Tensor = self.layer(x, start if self.spread else start.repeat(1, len(x), 1))[0]
            return output

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(x).square().sum()
        return total

    x = torch.randn(BATCH, TIMES, INPUTS, dtype=torch.float64)
    assert compare(Looked(True).double(), loss, x, list(x.split(1))).worst <= 1e-8
    with pytest.raises((RuntimeError, ValueError), match="every example"):
        captured(Looked(False).double(), loss, x)


class Wider(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(2 * input, hx)


def tied() -> nn.RNNBase:
    layer = nn.RNN(WIDTH, WIDTH, num_layers=2, batch_first=True)
    layer.weight_hh_l1 = layer.weight_hh_l0
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wider(INPUTS, WIDTH, batch_first=True),
        lambda: weight_norm(nn.LSTM(INPUTS, WIDTH, batch_first=True), "weight_hh_l0"),
        tied,
    ],
)
def test_layers_that_compute_something_else_go_to_the_generic_rule(make: Callable[[], nn.Module]) -> None:
    assert rule_for(make()) is RULES["generic"]


def test_a_look_sees_the_gradients_at_the_inputs_and_delivers_nothing() -> None:
    model = without_states("lstm", packed="unsorted", batch_first=True)
    x, *rest = batch_for(model.layer, LENGTHS["unsorted"])
    x.requires_grad_(True)
    (expected,) = torch.autograd.grad(loss_of(model, (x, *rest)), x)
    capture = Capture(model, LayerMap.of(model))
    loss = loss_of(model, (x, *rest))
    with look(loss):
        (at_x,) = torch.autograd.grad(loss, x)
    assert torch.allclose(at_x, expected, atol=1e-10)
    assert capture.batch_size is None
    capture.detach()


# -- torch records nothing while a layer runs -------------------------------------------------------------------------


def test_what_a_hook_does_to_the_input_is_differentiated() -> None:
    model = without_states("gru", batch_first=True)
    model.layer.register_forward_pre_hook(lambda _, args: (args[0] * 3,), with_kwargs=False)

    class Positional(Reader):
        def forward(self, x: Tensor, lengths: Tensor, start: Tensor) -> Tensor:
            output: Tensor = self.layer(self.first(x))[0]
            return output.flatten(1)

    model.__class__ = Positional
    batch = batch_for(model.layer, LENGTHS["no"])
    assert compare(model, loss_of, batch, each(batch)).worst <= 1e-8


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_pass_that_is_interrupted_leaves_torch_recording(error: type[BaseException]) -> None:
    class Interrupted(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "gru":
                assert not torch.is_grad_enabled()
                raise error
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.GRU(INPUTS, WIDTH, batch_first=True)
    capture = Capture(model, LayerMap.of(model))
    with pytest.raises(error):
        model(torch.randn(BATCH, TIMES, INPUTS).as_subclass(Interrupted))
    capture.discard()
    assert torch.is_grad_enabled()
    assert all(p.requires_grad for p in model.parameters())
    model(torch.randn(BATCH, TIMES, INPUTS))[0].sum().backward()
    assert capture.take().batch_size == BATCH
    capture.detach()


# -- through the engine -----------------------------------------------------------------------------------------------


ENGINE: dict[str, Callable[[], nn.Module]] = {
    "packed lstm": sequences.Packed,
    "packed gru": lambda: sequences.PackedMean(nn.GRU),
    "two layers both ways": lambda: sequences.Packed(num_layers=2, bidirectional=True),
    "bags with offsets": sequences.Offsets,
}
CLIP = 0.05
"""Below the norm of every gradient here, so that every example is scaled."""


@pytest.mark.parametrize("make", ENGINE.values(), ids=list(ENGINE))
def test_a_step_is_the_mean_of_clipped_gradients_each_of_an_example_alone(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = make(), Texts(12)
    tokens, lengths, labels = sequences.ragged([data[i] for i in range(12)])
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one, length, y in zip(tokens.split(1), lengths.split(1), labels.split(1)):
        model.zero_grad()
        F.cross_entropy(model(one, length), y).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        assert norm > CLIP
        for name, g in grads.items():
            expected[name] += g * CLIP / norm / 12
    model.zero_grad()
    training = private(
        model,
        data,
        batch_size=12,
        noise_multiplier=0.0,
        poisson_sampling=False,
        max_grad_norm=CLIP,
        loading={"collate_fn": sequences.ragged},
    )
    training.optimizer.zero_grad()
    F.cross_entropy(model(tokens, lengths), labels).backward()
    training.optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name
    training.engine.detach()


def test_dropout_of_packed_layers_is_refused_by_name(tmp_path: Path) -> None:
    """Which numbers are dropped in a packed batch follows from how long everybody's text is."""
    run = sequences.by_length(lambda: sequences.Packed(num_layers=2, dropout=0.5))
    outcome = Case("", "", run).outcome(tmp_path)
    assert outcome.kind == REFUSED
    assert "dropout between layers that read packed sequences" in outcome.text
