"""`secure_mode=True`: noise whose last bits do not give it away.

    noise      (g1 + g2 + g3 + g4) / 2, rounded to the parameter's type     (arXiv 2107.10138)

A single normal number in floating point has few enough pre-images that the values it cannot take reveal what it was
added to; a sum of four has too many to search.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from lmdp.private.keystream import KeyStream
from lmdp.private.noise import Entropy, GaussianNoise, Room


class Secure(Entropy):
    """Chance with the countermeasure. One engine, one key: it cannot be copied."""

    source = "AES-256-CTR keyed by the operating system, sum of four Gaussians"

    def _made(self, stream: KeyStream) -> GaussianNoise:
        return SummedNoise(stream)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cryptographic generator cannot be copied or saved: its stream would be used twice")


class SummedNoise(GaussianNoise):
    """Every number is half the sum of four normal ones."""

    def _fill(self, part: Tensor, std: float, room: Room) -> None:
        """Both of a pair go into different sums: they share a radius."""
        total = torch.zeros_like(part, dtype=torch.float64)
        cosine, sine = torch.empty(2, part.numel(), dtype=torch.float64, device=part.device)
        for _ in range(2):
            self.pairs(std / 2, cosine, sine, room)
            total.add_(cosine).add_(sine.roll(1))
        part.copy_(total)
