"""Gaussian noise, and the generator it is drawn from.

By default the generator's whole state (624 words) comes from the operating system. Seeding PyTorch's CPU generator
with an integer keeps 32 bits of it, few enough for an attacker to try them all.
"""

from __future__ import annotations

import secrets

import torch

_STATE_BYTES = 5056
_WORDS = 624
_FIRST_WORD = 24  # the words follow initial seed (8 bytes), words left (4), seeded flag (4), next word (8)


def entropy_generator() -> torch.Generator:
    """A generator that cannot be guessed: its state is filled with the operating system's entropy."""
    generator = torch.Generator()
    generator.seed()
    state = generator.get_state()
    if state.numel() != _STATE_BYTES:
        raise RuntimeError(
            f"torch {torch.__version__} stores its generator in {state.numel()} bytes, not {_STATE_BYTES}: "
            "lmdp cannot fill it with entropy. Use a torch version that lmdp supports."
        )
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(torch.int64)
    words.copy_(torch.tensor([secrets.randbits(32) for _ in range(_WORDS)]))
    generator.set_state(state)
    return generator


def make_generator(seed: int | None) -> torch.Generator:
    """From entropy by default; reproducible, and therefore not certified, from a seed."""
    if seed is None:
        return entropy_generator()
    return torch.Generator().manual_seed(seed)


class GaussianNoise:
    """Independent normal draws. Each call draws anew; nothing is cached or reused."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def like(self, tensor: torch.Tensor, std: float) -> torch.Tensor:
        """Noise of the shape, type and device of `tensor`, with this standard deviation."""
        noise = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if std > 0:
            noise.normal_(0.0, std, generator=self._generator)
        return noise.to(tensor.device)
