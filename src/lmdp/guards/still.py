"""Randomness held still: what is drawn does not depend on how many numbers are drawn, nor on who is beside whom.

An example whose company is larger has other dropout, because the generator has moved on. To tell whether the number of
examples matters, random tensors are therefore the same for every row: dropout keeps everything, a coin is its chance,
noise is one number (in three dimensions or more, one for each place in the last: a norm after it does not undo it).

Where all rows have the same numbers, dividing by their sum over the batch would not show. A tensor with a row for each
example has therefore other numbers in the rows of those who do not stay (`Held`): nobody whose numbers are its own
notices that.

What a generator of the user's own draws is left alone. One that is seeded in every call draws by place, and shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmdp.gradients.randomness import remember_torch

COINS = frozenset({"bernoulli", "bernoulli_"})
NORMAL = frozenset({"randn", "randn_like", "normal_"})
UNIFORM = frozenset({"rand", "rand_like", "uniform_"})
ONE_NUMBER = frozenset({"randint", "randint_like", "random_", "exponential_"})
"""Whose first number does not depend on how many are drawn."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, modulo 1, are spread evenly; no example's own numbers are likely to be the same."""


Shape = tuple[str, tuple[int, ...]]
"""What was drawn, and its shape."""


@dataclass
class Held:
    """A part of a look in which randomness is held still.

    rows       of its batch
    stay       the rows of those whom another part has too
    shift      by how much of its range the number of all others is another
    accidents  what has as many rows as the batch, and not for that reason: it is the same for all
    drawn      what was drawn, in that order, and whether it was taken to have a row for each example
    """

    rows: int
    stay: Sequence[int]
    shift: float = GOLDEN
    accidents: set[Shape] = field(default_factory=set)
    drawn: list[tuple[Shape, bool]] = field(default_factory=list)

    def of_units(self, each: int) -> Held:
        """The same where so many rows, following each other, are one example; what is drawn is noted anew."""
        stay = [each * at + row for at in self.stay for row in range(each)]
        return Held(each * self.rows, stay, self.shift, self.accidents)

    def others(self, name: str, drawn: Tensor) -> Tensor | None:
        """Of a tensor with a row for each example, the rows of those who do not stay; None where there are none."""
        shape = (name, tuple(drawn.shape))
        by_rows = drawn.shape[:1] == (self.rows,) and shape not in self.accidents
        self.drawn.append((shape, by_rows))
        rows = torch.ones(self.rows, dtype=torch.bool)
        rows[list(self.stay)] = False
        return rows.to(drawn.device) if by_rows and bool(rows.any()) else None


def shift_of(steps: int) -> float:
    """Another one in every look, and the same in all its parts."""
    return (1 + steps) * GOLDEN % 1


def drew_alike(one: Sequence[tuple[Shape, bool]], other: Sequence[tuple[Shape, bool]], accidents: set[Shape]) -> bool:
    """Whether what had a row for each example in one part had as few as there are in another; what had not is an
    accident. How many are drawn may follow from the number of examples: some rules run a module for each."""
    as_long = {(name, len(shape), *shape[:1]) for (name, shape), by_rows in other if not by_rows}
    wrong = {(name, shape) for (name, shape), by_rows in one if by_rows and (name, len(shape), *shape[:1]) in as_long}
    accidents |= wrong
    return not wrong


class Still(TorchDispatchMode):
    """Inside, torch's random tensors are constant, and its generator does not move. Any other draw moves it as ever."""

    def __init__(self, held: Held | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held or Held(0, ())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return args[0] / (1 - args[1] if args[2] else 1), torch.ones_like(args[0], dtype=torch.bool)
        if name not in COINS | NORMAL | UNIFORM | ONE_NUMBER or _has_own_generator(args, kwargs):
            return func(*args, **kwargs)
        put_back = remember_torch()
        drawn: Tensor = func(*args, **kwargs)
        put_back()
        if not drawn.numel() or drawn.is_meta:
            return drawn
        others = self._held.others(name, drawn)
        if name in COINS:
            chance = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5)
            return _but(_coins(drawn, chance), others, torch.zeros((), device=drawn.device))
        if name in ONE_NUMBER:
            first, *rest = torch.unique_consecutive(drawn.reshape(-1)[:64])
            return _but(drawn.fill_(first.item()), others, *rest[:1])
        noise = _noise(name, drawn, args, kwargs, 0.0), _noise(name, drawn, args, kwargs, self._held.shift)
        return _but(drawn.copy_(noise[0]), others, noise[1].to(drawn.dtype))


def _but(drawn: Tensor, rows: Tensor | None, *value: Tensor) -> Tensor:
    """The same, with another value in these rows, if there is one."""
    if rows is not None and value:
        drawn[rows] = value[0].to(drawn.dtype)
    return drawn


def _noise(name: str, drawn: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], shift: float) -> Tensor:
    """[F], or one number. Uniform numbers begin with the first that was drawn, and so are others in every look."""
    numbers = {"uniform_": ("from", "to"), "normal_": ("mean", "std")}.get(name)
    low, width = _pair(args, kwargs, *numbers) if numbers else (0.0, 1.0)
    width -= low if name == "uniform_" else 0.0
    last = torch.arange(drawn.shape[-1] if drawn.dim() > 2 else 1, device=drawn.device, dtype=torch.float64)
    places = last if drawn.dim() > 2 else last[0]
    first = (drawn.reshape(-1)[0].double() - low) / (width or 1.0) if name in UNIFORM else GOLDEN
    return low + width * (first + shift + places * GOLDEN).frac()


def _has_own_generator(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    return any(each is not torch.default_generator for each in given)


def _coins(drawn: Tensor, chances: Any) -> Tensor:
    """In the place of a coin, its chance: dropout that divides by it keeps everything, and a chance that follows from
    the batch shows. Of whole numbers, 1 where there is a chance."""
    if drawn.is_floating_point():
        return drawn.copy_(chances) if isinstance(chances, Tensor) else drawn.fill_(chances)
    return drawn.copy_(chances > 0) if isinstance(chances, Tensor) else drawn.fill_(chances > 0)


def _pair(args: tuple[Any, ...], kwargs: Mapping[str, Any], first: str, second: str) -> tuple[float, float]:
    """The two numbers of a distribution, after the tensor: by place, by name, or 0 and 1."""
    low, high = ({0: 0.0, 1: 1.0} | dict(enumerate(args[1:3]))).values()
    return float(kwargs.get(first, low)), float(kwargs.get(second, high))
