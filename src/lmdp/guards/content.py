"""What is saved with a model but never noised: buffers and frozen parameters, known by their content.

A change of one of them during training would publish private data without noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def unnoised(module: nn.Module) -> dict[str, str]:
    """Name → fingerprint, of everything that training should leave as it is."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return fingerprints([*module.named_buffers(), *frozen])


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Equal exactly where bits are."""

    def digest(tensor: Tensor) -> str:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()

    return {name: digest(tensor) if tensor.numel() else "" for name, tensor in tensors}
