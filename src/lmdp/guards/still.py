"""Randomness held still: what is drawn does not depend on how many numbers are drawn, nor on who is beside whom.

An example whose company is larger has other dropout, because the generator has moved on. To tell whether the number of
examples matters, random tensors are therefore all one number: dropout keeps everything, noise is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmdp.gradients.randomness import remember_torch

KEPT = frozenset({"bernoulli", "bernoulli_"})
NORMAL = frozenset({"randn", "randn_like", "normal_"})
ONE_NUMBER = frozenset({"rand", "rand_like", "uniform_", "randint", "randint_like", "random_", "exponential_"})
"""Whose first number does not depend on how many are drawn."""


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
        if name not in KEPT | NORMAL | ONE_NUMBER:
            return func(*args, **kwargs)
        put_back = remember_torch()
        drawn: Tensor = func(*args, **kwargs)
        put_back()
        if not drawn.numel() or drawn.is_meta:
            return drawn
        if name in KEPT:
            chances = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5)
            return drawn.copy_(chances > 0) if isinstance(chances, Tensor) else drawn.fill_(1.0)
        if name == "normal_":
            mean, std = ({0: 0.0, 1: 1.0} | dict(enumerate(args[1:]))).values()
            return drawn.fill_(kwargs.get("mean", mean) + kwargs.get("std", std) / 2)
        return drawn.fill_(0.5 if name in NORMAL else drawn.reshape(-1)[0].item())
