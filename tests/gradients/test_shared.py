"""Tables shared by all examples: each gets its own gradient, whatever is done with them, or the use is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmdp.gradients import Capture
from lmdp.gradients.leading import ASTRAY, ROWS, SHARED, kind_of
from lmdp.layers import LayerMap
from tests.gradients.reference import captured, compare, layer_norms, one_by_one, quadratic, split

DOUBLE = 1e-8
WORDS, LONGEST, WIDTH = 11, 9, 6
Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Positions(nn.Module):
    """Words [B, T, H] and a table of positions [T, H]; `use` says how they come together."""

    def __init__(self, use: Forward, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.use = use
        self.words, self.table = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        together = self.use(self, self.words(x), self.table(torch.arange(x.shape[1])))
        return self.head(torch.tanh(self.linear(self.norm(together))))


def scores(x: Tensor) -> Tensor:
    return x @ x.transpose(1, 2)


def mask(x: Tensor) -> Tensor:
    """Of the examples, and without a gradient."""
    return (x.detach().sum(2, keepdim=True) > 0).to(x)


USES: dict[str, Forward] = {
    "added": lambda m, x, p: x + p,
    "added to": lambda m, x, p: p + x,
    "added in place": lambda m, x, p: x.mul(1).add_(p),
    "added by assignment": lambda m, x, p: add_to(x * 1, p),
    "subtracted": lambda m, x, p: p - x,
    "multiplied": lambda m, x, p: x * p[None],
    "divided by": lambda m, x, p: x / (2 + p.square()),
    "chosen": lambda m, x, p: torch.where(x > 0, x, p),
    "with a dimension": lambda m, x, p: x + p.unsqueeze(0),
    "twice": lambda m, x, p: (x + p) * p,
    "in two ways": lambda m, x, p: x + p + p.flip(0).tanh(),
    "through its modules": lambda m, x, p: x + m.linear(m.norm(p)),
    "through its modules, with a dimension": lambda m, x, p: x + m.linear(m.norm(p[None]).tanh()),
    "under dropout": lambda m, x, p: x + m.dropout(p),
    "under a mask of its own": lambda m, x, p: x + p * (torch.arange(len(p)) % 2).to(p)[:, None],
    "under a mask of the examples": lambda m, x, p: x + p * mask(x),
    "two shared ones": lambda m, x, p: x + (p + m.table(torch.arange(len(p)).flip(0))),
    "expanded": lambda m, x, p: m.linear(p[None].expand(len(x), -1, -1)) + x,
    "expanded like": lambda m, x, p: p.expand_as(x) * x,
    "repeated": lambda m, x, p: x + p[None].repeat(len(x), 1, 1),
    "concatenated": lambda m, x, p: torch.cat([x, p[None].expand(len(x), -1, -1)], dim=1),
    "a product": lambda m, x, p: x + (p @ p.T) @ x,
    "a product from the left": lambda m, x, p: torch.matmul(scores(x), p),
    "scores": lambda m, x, p: (scores(x) + (p @ p.T)).softmax(-1) @ x,
    "scores under a mask": lambda m, x, p: (scores(x) + ((p @ p.T)[None] + mask(x).transpose(1, 2))).softmax(-1) @ x,
    "fused attention": lambda m, x, p: F.scaled_dot_product_attention(x, x, x, attn_mask=p @ p.T),
    "heads": lambda m, x, p: fused_heads(x, p),
    "rows of it by index": lambda m, x, p: x + p[(x.detach().sum(2) > 0).long() * (len(p) - 1)],
    "as another type": lambda m, x, p: x + p.float().to(x),
    "a part of it": lambda m, x, p: x + p[:1] + p[-1],
    "learned queries": lambda m, x, p: F.softmax(p @ x.transpose(1, 2), dim=-1) @ x,
}


def add_to(x: Tensor, p: Tensor) -> Tensor:
    x += p
    return x


def fused_heads(x: Tensor, p: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 3)).transpose(1, 2)
    bias = (p[:, None] * p).unflatten(2, (2, 3)).sum(3).permute(2, 0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)


def positions(use: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Positions(USES[use], **options).double()


def words(size: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (size, length), generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize(("size", "length"), [(3, 5), (5, 5), (2, 2), (2, 1), (1, 4), (1, 1), (2, 3)])
@pytest.mark.parametrize("use", USES)
def test_a_table_shared_by_all_examples_gives_each_its_own_gradient(use: str, size: int, length: int) -> None:
    batch = words(size, length)
    assert compare(positions(use), quadratic, batch, split(batch)).worst <= (1e-4 if "type" in use else DOUBLE)


def test_dropout_of_a_shared_tensor_has_one_mask_for_all_examples_and_draws_as_the_model_alone_would() -> None:
    model, batch = positions("under dropout", dropout=0.5), words(4, 4)
    torch.manual_seed(7)
    expected, after = model(batch), torch.get_rng_state()
    capture = Capture(model, LayerMap.of(model))
    for _ in range(2):
        torch.manual_seed(7)
        outputs = model(batch)
        torch.testing.assert_close(outputs, expected)
        assert torch.equal(torch.get_rng_state(), after)
        quadratic_of(outputs).backward()
        gradients = capture.take()
        torch.manual_seed(7)
        (alone,) = one_by_one(model_without(capture), lambda m, x: quadratic(seeded(m), x), [batch])
        sums = gradients.weighted_sums([torch.ones(4, len(capture.layers)).double()], capture.layers)[0]
        for name, value in sums.items():
            torch.testing.assert_close(value, alone[name])
    capture.detach()


def quadratic_of(outputs: Tensor) -> Tensor:
    return quadratic(lambda _: outputs, outputs)  # type: ignore[arg-type]


def model_without(capture: Capture) -> nn.Module:
    return copy.deepcopy(capture.model)


def seeded(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return model


def penalty(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + torch.einsum("td,bsd->bts", p, x).sum(2, keepdim=True)


REFUSED: dict[str, tuple[Forward, str]] = {
    "an operation that is not in the tables": (penalty, "einsum"),
    "written into a batch": (lambda m, x, p: write_into(x * 1, p), "setitem"),
    "changed in place": (lambda m, x, p: x + p.mul_(2), "changed in place by 'mul_'"),
    "changed by assignment": (lambda m, x, p: x + scale(p * 1), "changed in place by 'mul_'"),
    "joined as if it were examples": (lambda m, x, p: torch.cat([x, p[None]], dim=0)[: len(x)], "cat"),
    "a product with two dimensions": (lambda m, x, p: x + (x.sum(1) @ p.T @ p)[:, None], "matmul"),
    "seen by nobody": (lambda m, x, p: x + Hidden.apply(p), "cannot be followed"),
    "batch second": (lambda m, x, p: (x.transpose(0, 1) + p[:, None]).transpose(0, 1), "first dimension"),
}


class Hidden(torch.autograd.Function):
    """Code of others, into which torch does not let us look."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return p * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def write_into(x: Tensor, p: Tensor) -> Tensor:
    x[:, : len(p)] = p
    return x


def scale(p: Tensor) -> Tensor:
    p *= 2
    return p


@pytest.mark.parametrize(("size", "length"), [(3, 5), (5, 5), (2, 2)])
@pytest.mark.parametrize("use", REFUSED)
def test_a_use_that_cannot_be_followed_is_refused_by_name_with_a_remedy(use: str, size: int, length: int) -> None:
    forward, why = REFUSED[use]
    torch.manual_seed(0)
    model = Positions(forward).double()
    with pytest.raises((RuntimeError, ValueError), match=f"(?s)table.*{why}.*index.expand.*generic="):
        captured(model, quadratic, words(size, length))


class PenaltyOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(LONGEST, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.double()[:, :, None]), self.table(torch.arange(x.shape[1])).square().sum()


def test_a_penalty_on_the_table_is_refused() -> None:
    """It belongs to no example."""
    with pytest.raises(RuntimeError, match=r"'table'.*meets the examples in 'add'"):
        captured(PenaltyOnly().double(), lambda m, x: sum(part.sum() for part in m(x)), words(5, 5))
    with pytest.raises(RuntimeError, match=r"'table'.*reaches the loss without meeting the examples"):
        captured(PenaltyOnly().double(), lambda m, x: m(x)[1], words(5, 5))


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).transpose(0, 1)).transpose(0, 1)


class DataSequenceFirst(SequenceFirst):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.transpose(0, 1)))).transpose(0, 1)


@pytest.mark.parametrize("kind", [SequenceFirst, DataSequenceFirst])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_positions_are_not_taken_for_examples_when_there_are_as_many_of_them(kind: type[nn.Module], size: int) -> None:
    with pytest.raises(ValueError, match="first dimension must be the example"):
        captured(kind().double(), quadratic, torch.randn(size, 4, 3).double())


class Pairs(nn.Module):
    """Two views of every example, as rows of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).unflatten(0, (len(x), 2)).sum(1)


def test_rows_that_follow_the_batch_without_being_its_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="module 'linear'"):
        captured(Pairs().double(), quadratic, torch.randn(4, 2, 3).double())


@pytest.mark.parametrize(
    ("shape", "other", "kind"),
    [
        ((8, 5), (2, 5), ROWS),
        ((8, 8), (2, 8), ROWS),
        ((1, 8), (1, 8), SHARED),
        ((8, 3), (8, 3), SHARED),
        ((16, 3), (4, 3), ASTRAY),
        ((5, 8, 3), (5, 2, 3), ASTRAY),
        ((8, 3), (2, 1, 3), ASTRAY),
        ((7, 3), (6, 3), SHARED),  # cut to the longest of the batch
    ],
    ids=str,
)
def test_what_follows_the_number_of_examples_counts_them(shape: Any, other: Any, kind: str) -> None:
    assert kind_of(shape, 8, other, 2) == kind


# -- how it is established --------------------------------------------------------------------------------------------


def steps(model: nn.Module, *batches: Tensor) -> Capture:
    capture = Capture(model, LayerMap.of(model))
    for batch in batches:
        quadratic(model, batch).backward()
        capture.take()
    capture.detach()
    return capture


class Optional(nn.Module):
    """Positions are given for every example, or counted for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        return torch.tanh(self.words(x) + self.table(torch.arange(x.shape[1]) if places is None else places))


def test_a_table_that_was_looked_up_for_every_example_may_later_be_shared() -> None:
    torch.manual_seed(0)
    model, x = Optional().double(), words(5, 5)
    expected = layer_norms(one_by_one(model, quadratic, split(x)), LayerMap.of(model))
    capture = Capture(model, LayerMap.of(model))
    for places in (torch.arange(5).expand(5, 5), None, torch.arange(5).expand(5, 5)):
        quadratic(lambda batch, places=places: model(batch, places), x).backward()  # type: ignore[arg-type, misc]
        norms = capture.take().squared_norms(capture.layers).sqrt()
        torch.testing.assert_close(norms, expected)
        assert capture.rows_doubt is None
    capture.detach()


def test_hooks_of_the_user_see_the_activations_that_the_loss_was_computed_from_last() -> None:
    for use in ("added", "expanded"):
        model, kept = positions(use), {}
        model.linear.register_forward_hook(lambda _, __, output, kept=kept: kept.update(last=output))
        capture = Capture(model, LayerMap.of(model))
        (model(words(5, 5)).sum() + kept["last"].square().sum()).backward()
        assert capture.take().batch_size == 5
        assert len(model.linear._forward_hooks) == 1
        capture.detach()


def test_one_batch_establishes_whose_rows_are_the_examples_and_nothing_is_run_twice_after_it() -> None:
    model, calls = positions("added"), []
    model.words.register_forward_hook(lambda *_: calls.append(1))
    capture = Capture(model, LayerMap.of(model))
    assert capture.rows_established is None
    assert "not been called" in str(capture.rows_doubt)
    runs = []
    for batch in (words(5, 5), words(4, 3), words(3, 3), words(1, 1), words(6, 7)):
        quadratic(model, batch).backward()
        capture.take()
        runs.append(len(calls))
        calls.clear()
        assert capture.rows_doubt is None
        assert "a run on a few rows" in str(capture.rows_established)
    capture.detach()
    assert runs[0] == 2  # as rows, and again as what they are
    assert runs[1:] == [1] * 4


class Counting(nn.Module):
    """Keeps everything that a module can keep, and draws from every source of chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[Any] = []
        self.notes: dict[str, Any] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.last = x
        self.seen.append(x)
        self.notes["rows"] = x
        return self.linear(x) * (1 + torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002


def test_the_run_on_a_few_rows_leaves_no_trace() -> None:
    def run(attach: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model, batch = Counting(), torch.randn(5, 3)
        capture = Capture(model, LayerMap.of(model)) if attach else None
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        output = model(batch)
        chance = (torch.rand(()).item(), random.random(), float(np.random.rand()))  # noqa: NPY002
        if capture is not None:
            quadratic_of(output).backward()
            assert capture.take().batch_size == 5
            assert capture.rows_doubt is None
            capture.detach()
        kept = [model.last, *model.seen, *model.notes.values()]
        return output.detach().tolist(), chance, int(model.count), model.calls, [len(t) for t in kept]

    assert run(attach=True) == run(attach=False)


class FixedSize(nn.Module):
    """Takes batches of the sizes that it has seen before."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.sizes:
            raise AssertionError("another size")
        return self.linear(x)


def test_a_model_that_cannot_run_on_other_rows_stays_in_doubt_until_batches_differ_in_size() -> None:
    model = FixedSize(4, 7)
    doubt = steps(model, *[torch.randn(4, 3)] * 5)
    assert doubt.rows_established is None
    assert "'linear'" in str(doubt.rows_doubt)
    assert "AssertionError" in str(doubt.rows_doubt)
    assert not any(character.isdigit() for character in str(doubt.rows_doubt))
    later = steps(model, torch.randn(4, 3), torch.randn(7, 3))
    assert later.rows_doubt is None
    assert "batches of different sizes" in str(later.rows_established)


def test_a_table_of_a_model_that_cannot_run_on_other_rows_is_refused() -> None:
    class Fixed(Positions):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) == 4
            return super().forward(x)

    with pytest.raises(ValueError, match="module 'table'"):
        captured(Fixed(USES["added"]).double(), quadratic, words(4, 3))


def test_a_module_called_outside_the_model_is_in_doubt() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    capture = Capture(model, LayerMap.of(model))
    quadratic(lambda x: model[1](model[0](x)), torch.randn(4, 3)).backward()  # type: ignore[arg-type]
    assert capture.take().batch_size == 4
    assert "outside a call of the whole model" in str(capture.rows_doubt)
    capture.detach()


class Masked(nn.Module):
    """A bias for every pair of positions beside bare parameters; given by position, as a tensor like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2) + pairs).softmax(-1) @ (x * self.gain)


class GivesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.masked = nn.Linear(3, 3), Masked()

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.arange(x.shape[1] ** 2).to(x).view(x.shape[1], -1).sin()
        return self.masked(self.linear(x), pairs)


@pytest.mark.parametrize("size", [2, 4, 5])
def test_an_argument_with_as_many_rows_as_examples_is_not_taken_for_examples(size: int) -> None:
    torch.manual_seed(0)
    model, batch = GivesMask().double(), torch.randn(size, 4, 3).double()
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


# -- with the rest of torch -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.inner = Positions(USES[use])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("use", ["added", "through its modules", "scores under a mask", "expanded"])
def test_a_shared_table_under_gradient_checkpointing_is_exact(use: str, size: int) -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed(use).double(), words(size, 5)
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


def test_a_shared_table_under_autocast_is_measured_in_full_precision() -> None:
    model, batch = positions("through its modules").float(), words(4, 4)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return quadratic(module, x)

    expected = layer_norms(one_by_one(model, loss, split(batch)), LayerMap.of(model))
    gradients, layers = captured(model, loss, batch)
    torch.testing.assert_close(gradients.squared_norms(layers).sqrt(), expected, rtol=0.05, atol=0.05)
