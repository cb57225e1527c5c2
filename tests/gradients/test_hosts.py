"""Modules that are the same for every example whatever they are given, and rows that are not examples."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.layers import LayerMap
from tests.gradients.reference import captured, compare, quadratic, split

DOUBLE = 1e-8
WIDTH, LONGEST = 6, 9


# -- the same for every example ---------------------------------------------------------------------------------------


class Unasked(nn.Module):
    """A table that is read without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LONGEST, WIDTH))

    def forward(self) -> Tensor:
        return self.table.tanh()[None]


class Counting(nn.Module):
    """Takes the examples in, and reads nothing off them but how long they are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LONGEST, WIDTH))

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.table[start : start + x.shape[1]].unsqueeze(0)


class Hadamard(torch.autograd.Function):
    """Code of others that `torch.func` cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class Held(nn.Module):
    """Parameters in a dictionary and a list, and a product that only ordinary autograd knows."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH, WIDTH)})
        self.listed = nn.ParameterList([torch.randn(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ Hadamard.apply(self.named["a"], self.named["b"]) + self.listed[0]  # type: ignore[no-untyped-call]


class Model(nn.Module):
    def __init__(self, part: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.use = part, use
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.use(self.part, self.first(x))))  # type: ignore[no-any-return]


USES: dict[str, tuple[type[nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "read without an argument": (Unasked, lambda part, x: x + part()[:, : x.shape[1]]),
    "read twice": (Unasked, lambda part, x: x * part()[:, : x.shape[1]] + part()[:, : x.shape[1]].flip(1)),
    "given the examples": (Counting, lambda part, x: x + part(x.detach())),
    "given the examples and a number": (Counting, lambda part, x: x + part(x.detach(), start=1)),
    "in a dictionary": (Held, lambda part, x: x + part(x)),
}


@pytest.mark.parametrize(("size", "length"), [(3, 5), (5, 5), (2, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("use", USES)
def test_every_example_gets_its_own_gradient(use: str, size: int, length: int) -> None:
    torch.manual_seed(0)
    kind, function = USES[use]
    batch = torch.randn(size, length, 3).double()
    assert compare(Model(kind(), function).double(), quadratic, batch, split(batch)).worst <= DOUBLE


def test_parameters_of_a_list_or_dictionary_are_a_layer_of_the_module_that_reads_them() -> None:
    model = Model(Held(), lambda part, x: x + part(x))
    layers = LayerMap.of(model)
    assert ("part.named.a", "part.named.b", "part.listed.0") in {layer.parameters for layer in layers}
    capture = Capture(model, layers)
    capture.detach()
    assert {o.name: set(o.parameters) for o in capture.owners}["part"] == {"named.a", "named.b", "listed.0"}


# -- rows that are not examples ---------------------------------------------------------------------------------------


class Flat(nn.Module):
    """All tokens of a batch one after the other, as in OPT."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x.flatten(0, 1)))).view(x.shape)  # type: ignore[no-any-return]


class Beams(Flat):
    """Every example three times, side by side."""

    def forward(self, x: Tensor) -> Tensor:
        beams = x.repeat_interleave(3, dim=0) * torch.arange(1, 4).to(x).repeat(len(x))[:, None, None]
        return self.two(torch.tanh(self.one(beams))).unflatten(0, (len(x), 3)).sum(1)  # type: ignore[no-any-return]


class SequenceFirst(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.transpose(0, 1)))).transpose(0, 1)  # type: ignore[no-any-return]


class Cache:
    """An object that torch cannot look into."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Cached(nn.Module):
    """Its part puts what it is given into an object that is passed through, so that it cannot be run on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Remembering()

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        output: Tensor = self.inner(self.inner(x, cache), cache)
        return output


class Remembering(Flat):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        cache.kept.append(super().forward(x))
        return torch.stack(cache.kept).sum(0)


class Shifted(nn.Module):
    """A shared table meets rows that are not examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Unasked()

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x.flip(1)], dim=0) + self.table()[:, : x.shape[1]]
        return both[: len(x)] * both[len(x) :]


ASTRAY: dict[str, tuple[type[nn.Module], list[str]]] = {
    "tokens one after the other": (Flat, ["part"]),
    "every example three times": (Beams, ["part"]),
    "sequence first": (SequenceFirst, ["part"]),
    "a cache of keys": (Cached, ["part"]),
    "a table and other rows": (Shifted, ["part"]),
}


@pytest.mark.parametrize(("size", "length"), [(3, 5), (5, 5), (2, 2)])
@pytest.mark.parametrize("name", ASTRAY)
def test_rows_that_are_not_examples_are_refused_and_what_the_refusal_says_works(
    name: str, size: int, length: int
) -> None:
    torch.manual_seed(0)
    kind, hosts = ASTRAY[name]
    model, batch = Model(kind(), lambda part, x: part(x)).double(), torch.randn(size, length, 3).double()
    with pytest.raises((RuntimeError, ValueError), match="generic=") as refusal:
        captured(model, quadratic, batch)
    told = ast.literal_eval(re.findall(r"generic=(\[.*?\])", str(refusal.value))[0])
    assert told == hosts
    assert compare(model, quadratic, batch, split(batch), generic_modules=told).worst <= DOUBLE


def test_the_whole_model_is_named_where_no_module_has_a_row_for_every_example() -> None:
    torch.manual_seed(0)
    model, batch = SequenceFirst().double(), torch.randn(3, 5, WIDTH).double()
    with pytest.raises(ValueError, match=re.escape("generic=['']")):
        captured(model, quadratic, batch)
    assert compare(model, quadratic, batch, split(batch), generic_modules=[""]).worst <= DOUBLE


# -- shortened precision ----------------------------------------------------------------------------------------------


class Leaning(nn.Module):
    """Its output leans, a little, on the mean of the batch."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.part = part
        self.gain, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain + self.part * x.mean(0, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", [0.0, 0.02, 1.0])
def test_autocast_hides_no_meeting_of_examples(part: float) -> None:
    torch.manual_seed(0)
    model, batch = Leaning(part), torch.randn(4, 5, WIDTH)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return quadratic(module, x)

    if part:
        with pytest.raises(RuntimeError, match="mixes the examples"):
            captured(model, loss, batch, generic_modules=[""])
    else:
        assert captured(model, loss, batch, generic_modules=[""])[0].batch_size == 4


def test_dropout_is_replayed_under_autocast() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, 2)), torch.randn(8, WIDTH)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            return quadratic(module, x)

    norms = []
    for whole in ([], [""]):
        gradients, layers = captured(model, loss, batch, generic_modules=whole)
        norms.append(gradients.squared_norms(layers))
    torch.testing.assert_close(*norms, rtol=0.02, atol=0)
