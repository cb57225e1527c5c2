"""Norms and weighted sums of per-example gradients equal those of one example at a time, for every kind of module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmdp.gradients import conv, generic
from lmdp.gradients import plan as choice
from lmdp.gradients import rows as pieces
from lmdp.gradients.contract import Use
from lmdp.gradients.plan import rule_for
from tests.gradients.reference import captured, compare, quadratic, split

DOUBLE, SINGLE = 1e-8, 1e-4
pytestmark = [
    pytest.mark.usefixtures("loops"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),  # torch's, of a kind
]


class Scale(nn.Module):
    """A module of no known kind, with a bare parameter and a scalar one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain + self.shift)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask)[0]


class Recurrent(nn.Module):
    """Without an initial state, which torch cannot vectorise: the rule goes through the examples one by one."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class LastOfGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, last = self.gru(x, torch.ones(2, len(x), 5, dtype=x.dtype) / 2)
        return outputs.sum(1) + last[-1] * 3


class Tokens(nn.Module):
    """A vision-transformer stem: bare parameters beside children with exact rules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(1, 4, 6) * 0.1)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        return self.mix(torch.tanh(x + self.position))


class Residual(nn.Module):
    """In-place activation and in-place addition, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.GroupNorm(3, 3)
        self.b = nn.Conv2d(3, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        out = self.b(self.relu(self.norm(x)))
        out += x
        return self.relu(out)


class Twice(nn.Module):
    """The same convolution and the same linear layer called twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        return self.linear(torch.tanh(self.linear(x)))


class Tied(nn.Module):
    """A language model whose output layer shares its weight with the embedding, and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11)
        self.embedding = nn.Embedding(11, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


class Head(nn.Module):
    """A parameter under two names: the parent's, and its child's."""

    def __init__(self, *, uses_it: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.decoder = nn.Linear(5, 3)
        self.decoder.bias = self.bias
        self.gain = nn.Parameter(torch.ones(3))
        self.uses_it = uses_it

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.decoder(x) * self.gain
        return outputs + self.bias if self.uses_it else outputs


class FunctionalTied(nn.Module):
    """The same, by reading the embedding's weight directly: exact only if the whole is taken as one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.embedding(x)), self.embedding.weight)


class Doubled(nn.Linear):
    """A subclass with its own forward must not get the rule of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + self.bias


def images(channels: int, *size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(5, channels, *size)


def indices(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 11, (5, *size))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), images(4)),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), images(4)),
    "linear on sequences": (lambda: nn.Linear(4, 3), images(7, 4)),
    "linear on short sequences of wide features": (lambda: nn.Linear(64, 48), images(3, 64)),
    "linear, three leading dimensions": (lambda: nn.Linear(4, 3), images(2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), images(4, 9)),
    "conv1d, causal dilation": (lambda: nn.Conv1d(2, 3, 3, dilation=2), images(2, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 5, 3, padding=1), images(3, 7, 6)),
    "conv2d, stride 2": (lambda: nn.Conv2d(3, 5, 3, stride=2), images(3, 8, 9)),
    "conv2d, uneven stride, padding, dilation": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        images(2, 7, 8),
    ),
    "conv2d, same padding": (lambda: nn.Conv2d(2, 3, 4, padding="same"), images(2, 6, 6)),
    "conv2d, valid padding": (lambda: nn.Conv2d(2, 3, 2, padding="valid"), images(2, 5, 5)),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), images(2, 5, 5)),
    "conv2d, replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), images(2, 5, 5)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"), images(2, 5, 5)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), images(4, 6, 6)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), images(4, 6, 6)),
    "conv2d, full vectors of channels": (lambda: nn.Conv2d(16, 32, 3, padding=1), images(16, 9, 9)),
    "conv2d, full vectors of channels, stride and same padding": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 4, padding="same"), nn.Conv2d(16, 16, 3, stride=2)),
        images(16, 8, 8),
    ),
    "conv2d, pointwise": (lambda: nn.Conv2d(4, 6, 1, groups=2), images(4, 5, 5)),
    "conv2d, pointwise, stride 2": (lambda: nn.Conv2d(4, 6, 1, stride=2), images(4, 7, 6)),
    "conv2d, long rows, stride 2": (lambda: nn.Conv2d(1, 4, 8, stride=2, padding=3), images(1, 28, 28)),
    "conv2d, many channels on few pixels": (lambda: nn.Conv2d(64, 32, 3, padding=1), images(64, 3, 3)),
    "conv2d, many channels, stride and reflect": (
        lambda: nn.Conv2d(64, 32, 3, stride=2, padding=1, padding_mode="reflect"),
        images(64, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 1)), images(2, 4, 5, 3)),
    "conv3d, many channels": (lambda: nn.Conv3d(32, 32, 3, padding=1), images(32, 2, 2, 2)),
    "embedding": (lambda: nn.Embedding(11, 4), indices(6)),
    "embedding, padding index": (lambda: nn.Embedding(11, 4, padding_idx=3), indices(9)),
    "embedding, one index": (lambda: nn.Embedding(11, 4), indices()),
    "embedding, two index dimensions": (lambda: nn.Embedding(11, 4), indices(3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), images(3, 4)),
    "layer norm, two dimensions": (lambda: nn.LayerNorm((3, 4)), images(3, 4)),
    "layer norm, no bias": (lambda: nn.LayerNorm(4, bias=False), images(2, 3, 4)),
    "layer norm, eps": (lambda: nn.LayerNorm(4, eps=0.1), images(3, 4)),
    "group norm, eps": (lambda: nn.GroupNorm(2, 4, eps=0.1), images(4, 3, 3)),
    "instance norm, eps": (lambda: nn.InstanceNorm2d(3, affine=True, eps=0.1), images(3, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), images(4, 3, 3)),
    "group norm without positions": (lambda: nn.GroupNorm(2, 6), images(6)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), images(3, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), images(3, 4, 4)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(3, affine=True), images(3, 2, 3, 2)),
    "rms norm": (lambda: nn.RMSNorm(4), images(3, 4)),
    "rms norm, eps": (lambda: nn.RMSNorm((2, 4), eps=0.1), images(3, 2, 4)),
    "bare parameters": (lambda: Scale(4), images(3, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), images(3, 4, 4)),
    "attention": (lambda: SelfAttention(8, 2), images(5, 8)),
    "gru": (lambda: LastOfGRU(), images(3, 4)),
    "gru without a state": (lambda: Recurrent(nn.GRU), images(3, 4)),
    "lstm without a state": (lambda: Recurrent(nn.LSTM), images(3, 4)),
    "bilinear": (lambda: nn.Sequential(nn.Linear(4, 4), Scale(4)), images(4)),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3)), images(2, 4, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), images(4)),
    "a subclass with its own forward": (lambda: Doubled(4, 4), images(4)),
    "vision-transformer stem": (lambda: Tokens(), images(3, 4)),
    "in-place residual": (lambda: Residual(), images(3, 5, 5)),
    "called twice": (lambda: Twice(), images(3, 5)),
    "tied weights": (lambda: Tied(), indices(4)),
    "one parameter under two names": (lambda: Head(), images(5)),
    "one parameter under two names, inside": (lambda: nn.Sequential(nn.Linear(5, 5), Head()), images(5)),
    "transformer block": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        images(4, 8),
    ),
}


def made(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(7)
    make, data = KINDS[kind]
    model, batch = make(), data()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.to(dtype), batch.to(dtype) if batch.is_floating_point() else batch


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_agrees_with_one_example_at_a_time_in_double(kind: str) -> None:
    model, batch = made(kind, torch.float64)
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_agrees_with_one_example_at_a_time_in_single(kind: str) -> None:
    model, batch = made(kind, torch.float32)
    assert compare(model, quadratic, batch, split(batch)).worst <= SINGLE


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith(("linear", "conv"))])
def test_both_rules_of_a_layer_are_exact_whatever_the_cost_model_prefers(
    kind: str, gram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "by_cost", lambda _: gram)
    model, batch = made(kind, torch.float64)
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["linear on sequences", "conv2d", "conv2d, groups", "layer norm", "group norm"])
def test_a_frozen_parameter_of_a_module_is_not_counted(kind: str, frozen: str) -> None:
    model, batch = made(kind, torch.float64)
    model.get_parameter(frozen).requires_grad_(False)
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


def test_a_parent_that_reads_its_childs_weight_is_exact_when_taken_as_a_whole() -> None:
    torch.manual_seed(0)
    model, batch = FunctionalTied().double(), torch.randint(0, 11, (5, 4))
    assert compare(model, quadratic, batch, split(batch), generic_modules=[""]).worst <= DOUBLE


def test_a_parent_that_uses_the_parameter_that_it_shares_with_its_child_is_refused_or_taken_as_a_whole() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(5, 5), Head(uses_it=True)).double(), torch.randn(4, 5).double()
    with pytest.raises(RuntimeError, match=r"'1.decoder.bias' was used outside .* generic=\['1'\]"):
        captured(model, quadratic, batch)
    assert compare(model, quadratic, batch, split(batch), generic_modules=["1"]).worst <= DOUBLE


def test_dropout_inside_a_generic_module_is_replayed() -> None:
    """The generic rule runs the module again; it must see the same mask as the forward pass did."""

    class Dropping(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) * self.gain + self.shift

    torch.manual_seed(3)
    model, batch = Dropping(4).double(), torch.randn(6, 4, dtype=torch.float64)
    from tests.gradients.reference import captured

    with torch.random.fork_rng():
        torch.manual_seed(11)
        gradients, layers = captured(model, quadratic, batch)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        quadratic(model, batch).backward()
    ones = torch.ones(len(batch), len(layers), dtype=torch.float64)
    torch.testing.assert_close(gradients.weighted_sums([ones], layers)[0]["gain"], model.gain.grad)


def test_subclasses_with_their_own_computation_get_the_generic_rule() -> None:
    class Own(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight * 2, bias)

    assert rule_for(Doubled(2, 2)) is generic.RULE
    assert rule_for(Own(1, 1, 1)) is generic.RULE
    assert rule_for(nn.Conv2d(1, 1, 1)) is conv.RULE


@settings(max_examples=120, deadline=None)
@given(
    batch=st.integers(1, 4),
    channels=st.integers(1, 3),
    outputs=st.sampled_from([1, 2, 3, 9, 17, 35]),
    groups=st.integers(1, 2),
    size=st.tuples(st.integers(5, 7), st.integers(5, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    gram=st.booleans(),
    chunk=st.sampled_from([1, 2**20]),
    channels_last=st.tuples(st.booleans(), st.booleans()),
)
def test_any_geometry_of_convolution_is_exact(
    batch: int,
    channels: int,
    outputs: int,
    groups: int,
    gram: bool,
    mode: str,
    chunk: int,
    channels_last: tuple[bool, bool],
    **shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    size = shape.pop("size")
    kernel = shape.pop("kernel")
    model = nn.Conv2d(channels * groups, outputs * groups, kernel, groups=groups, padding_mode=mode, **shape).double()
    x = torch.randn(batch, channels * groups, *size, dtype=torch.float64)
    x, model = (t.to(memory_format=torch.channels_last) if yes else t for t, yes in zip((x, model), channels_last))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "by_cost", lambda _: gram)
        patch.setattr(pieces, "CHUNK", chunk)  # one example at a time, or all
        patch.setattr(pieces, "SMALL", chunk)
        assert compare(model, quadratic, x, split(x)).worst <= DOUBLE


def test_cancelling_positions_never_make_a_gram_norm_too_small() -> None:
    """Rounding in the Gram rule may raise a norm, never hide one: a hidden norm would break the clipping bound."""
    torch.manual_seed(0)
    x = torch.randn(200, 8, 16)
    g = torch.randn(200, 8, 4)
    x[:, 4:], g[:, 4:] = x[:, :4] * (1 + 1e-6 * torch.randn(200, 4, 1)), -g[:, :4]
    exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    formed = torch.bmm(g.transpose(1, 2), x).flatten(1).norm(dim=1)
    assert exact.max() < 1e-3
    assert (gram_norms(x, g) >= exact).all()
    assert (gram_norms(x, g) >= formed).all()


def gram_norms(x: Tensor, g: Tensor) -> Tensor:
    grams = [torch.bmm(t, t.transpose(1, 2)) for t in (x, g)]
    return pieces.gram_squared_norms(x, g, *grams).sqrt()


@pytest.mark.parametrize("positions", [16, 64, 512])
def test_repeated_positions_never_make_a_gram_norm_too_small(positions: int) -> None:
    """Rounding errors of equal terms add up instead of averaging out."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        few = torch.rand(20, 2, 8, generator=generator)
        x = few[:, torch.randint(0, 2, (positions,), generator=generator)]
        sign = torch.tensor([1.0, -1.0]).repeat(positions // 2)
        g = torch.rand(20, 1, 4, generator=generator) * sign[None, :, None]
        exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
        assert (gram_norms(x, g) >= exact).all()


@pytest.mark.parametrize("positions", [1, 6])
def test_a_tiny_input_and_a_huge_gradient_are_measured_or_removed(positions: int) -> None:
    """Their squares leave float32 although their product, the gradient, does not."""
    x, g = torch.full((3, positions, 8), 2.6e-23), torch.full((3, positions, 4), 2e22)
    use = Use(nn.Linear(8, 4), frozenset({"weight"}), x, g, 3, (x,), {}, (), (g,), prefers_gram=lambda _: True)
    norms = rule_for(use.module).piece(use).squared_norms[""].sqrt()
    exact = positions * float(x[0, 0].double().norm() * g[0, 0].double().norm())
    assert ((norms >= exact * (1 - 1e-6)) | norms.isinf()).all()
