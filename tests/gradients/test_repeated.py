"""Parameters that are used more than once: every way is exact, no norm too small, no table formed for every example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.gradients import plan as choice
from lmdp.gradients.contract import Use
from lmdp.gradients.tied import join
from lmdp.layers import LayerMap
from tests.gradients.reference import captured, compare, layer_norms, one_by_one

pytestmark = pytest.mark.usefixtures("widest_loops")
DOUBLE = 1e-8


class Towers(nn.Module):
    """One encoder on two sequences of different lengths."""

    def __init__(self, size: int = 13, width: int = 6, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=padding)
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.PReLU()

    def encode(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.table(tokens))
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.down(self.act(self.up(h))).mean(1)

    def forward(self, pair: Tensor) -> Tensor:
        return F.cosine_similarity(self.encode(pair[:, :5]), self.encode(pair[:, 5:]), dim=1)


class Recurrence(nn.Module):
    """A cell that is called at every step of a sequence, and shares its weight with the output layer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.cell, self.inner, self.gru = nn.Linear(width, width), nn.Linear(width, width), nn.GRUCell(width, width)
        self.out = nn.Linear(width, width)
        self.out.weight = self.cell.weight

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in x.unbind(1):
            state = self.gru(torch.tanh(self.cell(step) + self.inner(state)), state)
        return self.out(state)


class Language(nn.Module):
    """A table that is looked up by both of two stacks and multiplied by at the end, as in T5."""

    def __init__(self, size: int = 12, width: int = 6, *, bias: bool = True, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=padding)
        self.second = nn.Embedding(size, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, size, bias=bias)
        self.head.weight = self.second.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.mix(torch.tanh(self.table(tokens))) + torch.tanh(self.second(tokens.flip(1)))
        return self.head(torch.tanh(h))


class Strides(nn.Module):
    """One weight in two convolutions of different strides, which share a bias with a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 3, stride=2)
        self.c = nn.Conv2d(3, 3, 1)
        self.b.weight = self.a.weight
        self.c.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x))).flatten(1).sum(1, keepdim=True) + self.b(x).flatten(1)


class Sizes(nn.Module):
    """One convolution on images of two sizes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x).flatten(1), self.conv(x[:, :, 1:, :-1]).flatten(1)], dim=1)


class InGeneric(nn.Module):
    """A weight that a linear layer shares with a module that no rule computes."""

    class Odd(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.gain = weight, nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = self.Odd(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.linear(x))


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 12, shape)


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=torch.float64)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "towers": (Towers, tokens(5, 12)),
    "towers, padding": (lambda: Towers(padding=3), tokens(5, 12)),
    "towers, a small table": (lambda: Towers(size=12, padding=2), tokens(4, 40)),
    "recurrence": (Recurrence, numbers(4, 7, 5)),
    "tied": (Language, tokens(5, 4)),
    "tied, no bias, padding": (lambda: Language(bias=False, padding=2), tokens(5, 6)),
    "tied, a small table": (lambda: Language(width=3), tokens(3, 40)),
    "tied, one position": (Language, tokens(4, 1)),
    "strides": (Strides, numbers(4, 2, 7, 6)),
    "sizes": (lambda: Sizes(kernel_size=3, padding=1), numbers(4, 3, 5, 6)),
    "sizes, stride": (lambda: Sizes(kernel_size=3, stride=2, padding=1, dilation=2), numbers(4, 3, 9, 8)),
    "sizes, reflect": (lambda: Sizes(kernel_size=2, padding=1, padding_mode="reflect"), numbers(3, 3, 5, 6)),
    "in a module without a rule": (InGeneric, numbers(4, 3, 4)),
}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    flat = model(batch).reshape(len(batch), -1)
    return (flat.square() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).sum() / 2


def drawn(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    make, data = KINDS[kind]
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, data()


@pytest.mark.parametrize("gram", [None, False, True], ids=["as planned", "formed", "gram"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_using_a_parameter_again_agrees_with_one_example_at_a_time(
    kind: str, gram: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gram is not None:
        monkeypatch.setattr(choice, "by_cost", lambda _: gram)
    model, batch = drawn(kind)
    assert compare(model, loss, batch, list(batch.split(1))).worst <= DOUBLE


@pytest.mark.parametrize("budget", [1, 10**9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:memory_budget is")
def test_a_memory_budget_changes_nothing_step_after_step(kind: str, budget: int) -> None:
    model, batch = drawn(kind)
    layers = LayerMap.of(model)
    expected = layer_norms(one_by_one(model, loss, list(batch.split(1))), layers)
    capture = Capture(model, layers, memory_budget=budget)
    for size in (len(batch), 2, len(batch), 1):
        loss(model, batch[:size]).backward()
        norms = capture.take().squared_norms(layers).sqrt()
        torch.testing.assert_close(norms, expected[:size], rtol=1e-7, atol=1e-9 * float(expected.max()))
    capture.detach()


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    size=st.integers(1, 40),
    width=st.integers(1, 9),
    length=st.integers(1, 12),
    padding=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_tied_table_of_any_shape_is_exact(
    batch: int, size: int, width: int, length: int, padding: bool, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Language(size, width, bias=bias, padding=0 if padding else None).double()
    nn.init.normal_(model.table.weight)
    data = torch.randint(0, size, (batch, length))
    assert compare(model, loss, data, list(data.split(1))).worst <= DOUBLE


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    size=st.integers(1, 30),
    width=st.integers(1, 12),
    gram=st.booleans(),
)
def test_any_number_of_calls_on_any_lengths_is_exact(
    lengths: list[int], batch: int, size: int, width: int, gram: bool
) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(size, width), nn.Linear(width, 3)
            self.conv = nn.Conv1d(3, 2, 2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            parts = (torch.tanh(self.linear(self.table(part))) for part in x.split(lengths, dim=1))
            return torch.cat([self.conv(part.transpose(1, 2)).flatten(1) for part in parts], dim=1)

    torch.manual_seed(0)
    model, data = Calls().double(), torch.randint(0, size, (batch, sum(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "by_cost", lambda _: gram)
        assert compare(model, loss, data, list(data.split(1))).worst <= DOUBLE


# -- norms ------------------------------------------------------------------------------------------------------------


def tied_norms(x: Tensor, g: Tensor, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of a tied table in single precision, and as they are."""
    size, width = g.shape[2], x.shape[2]
    head, table = nn.Linear(width, size, bias=False), nn.Embedding(size, width)
    uses = [
        Use(module, frozenset({"weight"}), given, gradient, len(x), (), {}, (), (), prefers_gram=lambda _: True)
        for module, given, gradient in ((head, x, g), (table, index, rows))
    ]
    exact = torch.bmm(g.double().transpose(1, 2), x.double())
    exact = exact.scatter_add(1, index.unsqueeze(2).expand_as(rows), rows.double())
    return join(uses).squared_norms[""].sqrt(), exact.flatten(1).norm(dim=1)


@pytest.mark.parametrize("positions", [4, 32, 200])
def test_uses_that_cancel_never_make_the_norm_of_a_tied_table_too_small(positions: int) -> None:
    """What the linear layer gives each row of the table, the embedding takes away again but for rounding."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, 7, (8, positions), generator=generator)
        x = torch.rand(8, positions, 96, generator=generator)
        g = F.one_hot(index, 1000).float()
        rows = -x * (1 + 1e-6 * torch.randn(8, positions, 1, generator=generator))
        norms, exact = tied_norms(x, g, index, rows)
        assert (norms >= exact).all()
        norms, exact = tied_norms(x, g * torch.rand(8, positions, 1, generator=generator), index, rows)
        assert (norms >= exact * (1 - 1e-6)).all()
        assert (norms <= exact * (1 + 1e-3)).all()


@pytest.mark.parametrize(("tiny", "huge"), [(2.6e-23, 2e22), (1e-15, 1e-2), (1e-30, 1e15)])
def test_a_tiny_factor_beside_an_embedding_is_measured_or_removed(tiny: float, huge: float) -> None:
    """An embedding's vectors of zeros and a one are never faint: they must not hide that a linear layer's are."""
    index, rows = torch.zeros(3, 4, dtype=torch.long), torch.full((3, 4, 8), 1e-14)
    for scales in ((tiny, huge), (huge, tiny)):
        norms, exact = tied_norms(torch.full((3, 4, 8), scales[0]), torch.full((3, 4, 90), scales[1]), index, rows)
        assert ((norms >= exact * (1 - 1e-6)) | norms.isinf()).all()


def test_small_gradients_of_the_embedding_are_measured_and_not_removed() -> None:
    index, rows = torch.ones(3, 4, dtype=torch.long), torch.full((3, 4, 8), 1e-13)
    norms, exact = tied_norms(torch.zeros(3, 4, 8), torch.zeros(3, 4, 90), index, rows)
    torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_norm_is_too_small_in_single_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "by_cost", lambda _: True)
    model, batch = drawn(kind)
    model, batch = model.float(), batch.float() if batch.is_floating_point() else batch
    gradients, layers = captured(model, loss, batch)
    measured = gradients.squared_norms(layers).sqrt()
    for i, scales in enumerate(torch.eye(len(batch)).unbind()):
        (alone,) = gradients.weighted_sums([scales.unsqueeze(1).expand(-1, len(layers.layers)).contiguous()], layers)
        norms = layer_norms([alone], layers)[0]
        assert (measured[i] >= norms * (1 - 2e-6)).all()


# -- memory -----------------------------------------------------------------------------------------------------------


def peak_of(model: nn.Module, batch: Tensor) -> int:
    """The most bytes that were allocated at once, beyond what was there, until the sums are computed."""
    capture = Capture(model, LayerMap.of(model))
    model(batch).square().sum().backward()
    capture.take()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(batch).square().sum().backward()
        gradients = capture.take()
        norms = gradients.squared_norms(capture.layers)
        gradients.weighted_sums([torch.ones_like(norms)], capture.layers)
    capture.detach()
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def test_two_towers_with_a_table_take_far_less_than_a_table_for_every_example() -> None:
    torch.manual_seed(0)
    batch, size, width = 16, 20_000, 32
    peak = peak_of(Towers(size, width), torch.randint(0, size, (batch, 12)))
    table = 4 * size * width
    assert table <= peak < 3 * table  # one table is the sum; one for every example would be 16


def test_a_tied_vocabulary_takes_far_less_than_a_table_for_every_example() -> None:
    torch.manual_seed(0)
    batch, size, width, length = 16, 20_000, 64, 4
    peak = peak_of(Language(size, width), torch.randint(0, size, (batch, length)))
    table, outputs = 4 * size * width, 4 * batch * length * size
    assert table <= peak < 3 * table + 5 * outputs < 0.7 * batch * table


def test_what_is_kept_of_a_tied_table_is_what_its_uses_took_in_and_their_gradients() -> None:
    torch.manual_seed(0)
    model, batch = Language(500, 8, bias=False), torch.randint(0, 500, (6, 3))
    gradients, _ = captured(model, loss, batch)
    (kept,) = [named.piece.kept for named in gradients.pieces if "table.weight" in named.names.values()]
    assert sum(t.numel() for t in kept) == 6 * 3 * (500 + 8) + 2 * 6 * 3 * (8 + 1)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_use_that_is_changed_while_it_waits_or_afterwards_is_refused_by_name() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(30, 30)

        def forward(self, x: Tensor) -> Tensor:
            self.inner = torch.tanh(self.linear(x))
            return self.linear(self.inner)

    torch.manual_seed(0)
    model, x = Waits(), torch.randn(4, 30)
    capture = Capture(model, LayerMap.of(model))
    model(x).square().sum().backward()
    with torch.no_grad():
        model.inner.mul_(2)
    with pytest.raises(RuntimeError, match=r"module 'linear' \(Linear\).*changed in place"):
        capture.take()
    capture.discard()

    output, gradients = model(x), []

    def write(_: Tensor) -> None:
        assert capture._pass.arrived.waiting
        gradients[0].mul_(2)

    output.register_hook(gradients.append)
    model.inner.register_hook(write)
    with pytest.raises(RuntimeError, match=r"module 'linear' \(Linear\).*changed in place"):
        output.square().sum().backward()
    capture.discard()
    capture.detach()


def test_a_batch_that_is_written_to_while_its_use_waits_does_not_move_the_sum() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    capture = Capture(model, LayerMap.of(model))

    def sums(*, write: bool) -> Tensor:
        x, y = torch.ones(3, 40), torch.full((3, 40), 2.0)
        first, second = model(x), model(y)
        if write:
            first.register_hook(lambda _: y.numpy().fill(100))  # after the gradient of the second has arrived
        (first * second).sum().backward()
        x.data.fill_(7)
        return capture.take().weighted_sums([torch.ones(3, 1)], capture.layers)[0]["weight"]

    assert torch.equal(sums(write=False), sums(write=True))
    capture.detach()


def test_calls_that_no_loss_follows_and_checkpoints_neither_change_nor_keep_anything_back() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), numbers(6, 9, 4)()
    layers = LayerMap.of(model)
    expected = layer_norms(one_by_one(model, loss, list(x.split(1))), layers)
    capture = Capture(model, layers)
    for way in ("plainly", "beside another", "by a checkpoint", "after a pass that was discarded"):
        if way == "beside another":
            model(x)
        if way == "after a pass that was discarded":
            loss(model, x).backward()
            capture.discard()
        if way == "by a checkpoint":
            output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            loss(lambda _, output=output: output, x).backward()  # type: ignore[arg-type]
        else:
            loss(model, x).backward()
        assert bool(capture._pass.arrived.waiting) == (way == "beside another")
        torch.testing.assert_close(capture.take().squared_norms(layers).sqrt(), expected, rtol=1e-9, atol=0.0)
    assert not capture._repeated
    capture.detach()


def test_a_use_that_nobody_counted_is_added_all_the_same() -> None:
    model, batch = drawn("towers")
    layers = LayerMap.of(model)
    expected = layer_norms(one_by_one(model, loss, list(batch.split(1))), layers)
    capture = Capture(model, layers)
    value = loss(model, batch)
    capture._pass.calls.clear()
    value.backward()
    torch.testing.assert_close(capture.take().squared_norms(layers).sqrt(), expected, rtol=1e-7, atol=1e-9)
    capture.detach()


def test_examples_that_are_dropped_leave_nothing_behind() -> None:
    for kind in KINDS:
        model, batch = drawn(kind)
        expected, _ = captured(model, loss, batch[1:])
        gradients, layers = captured(model, loss, batch)
        dropped = torch.zeros(len(batch), dtype=torch.bool)
        dropped[0] = True
        left = gradients.without(dropped).weighted_sums([torch.ones(len(batch), len(layers))], layers)[0]
        wanted = expected.weighted_sums([torch.ones(len(batch) - 1, len(layers))], layers)[0]
        for name, value in wanted.items():
            torch.testing.assert_close(left[name], value, rtol=1e-8, atol=1e-10)


def test_the_plan_says_what_becomes_of_parameters_that_are_used_again() -> None:
    lines = {}
    for kind in ("towers", "tied", "in a module without a rule"):
        model, batch = drawn(kind)
        capture = Capture(model, LayerMap.of(model))
        loss(model, batch).backward()
        capture.take()
        for numbers in (False, True):
            lines |= {(kind, m.name, numbers): m for m in capture.plan(numbers=numbers).modules}
        capture.detach()
    for at in ("table", "conv", "up", "norm"):
        assert "used more than once" in lines["towers", at, False].reason
    assert "gram for up to" in lines["towers", "up", False].reason
    assert lines["towers", "up", True].kept_bytes
    assert lines["towers", "act", True].rule == "formed"
    assert {lines["tied", at, True].rule for at in ("table", "second", "head")} == {"gram"}
    assert "share" in lines["tied", "head", False].reason
    assert lines["in a module without a rule", "linear", True].rule == "formed"
