"""Randomness held still: what is drawn does not depend on how many numbers are drawn, nor on who is beside whom.

An example whose company is larger has other dropout, because the generator has moved on. To tell whether the number of
examples matters, random tensors are therefore the same for every row: dropout keeps everything, a coin is its chance,
noise is one number (in three dimensions or more, one for each place in the last: a norm after it does not undo it).

What a generator of the user's own draws is left alone. One that is seeded in every call draws by place, and shows.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class Still(TorchDispatchMode):
    """Inside, torch's random tensors are constant, and its generator does not move. Any other draw moves it as ever."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

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
        if name in COINS:
            return _coins(drawn, args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5))
        if name in ONE_NUMBER:
            return drawn.fill_(drawn.reshape(-1)[0].item())
        return drawn.copy_(_noise(name, drawn, args, kwargs))


def _noise(name: str, drawn: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """[F], or one number. Uniform numbers begin with the first that was drawn, and so are others in every look."""
    numbers = {"uniform_": ("from", "to"), "normal_": ("mean", "std")}.get(name)
    low, width = _pair(args, kwargs, *numbers) if numbers else (0.0, 1.0)
    width -= low if name == "uniform_" else 0.0
    last = torch.arange(drawn.shape[-1] if drawn.dim() > 2 else 1, device=drawn.device, dtype=torch.float64)
    places = last if drawn.dim() > 2 else last[0]
    first = (drawn.reshape(-1)[0].double() - low) / (width or 1.0) if name in UNIFORM else GOLDEN
    return low + width * (first + places * GOLDEN).frac()


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
