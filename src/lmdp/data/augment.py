"""Views of images: each is made of one image and of uniform numbers that are its own, so that no two images meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 8
"""A crop moves an image by up to an eighth of its side."""


def flip(images: Tensor, uniforms: Tensor) -> Tensor:
    """Mirrored left to right, every other one. [R, C, H, W] and [R, 1]."""
    return torch.where((uniforms[:, 0] < 0.5).view(-1, 1, 1, 1), images.flip(3), images)


def crop(images: Tensor, uniforms: Tensor) -> Tensor:
    """Moved by whole pixels; what comes in at the border is the image, mirrored. [R, C, H, W] and [R, 2]."""
    for axis in (0, 1):
        side = images.shape[2 + axis]
        reach = max(1, side // SHIFT) if side > 1 else 0
        by = (uniforms[:, axis] * (2 * reach + 1)).long().clamp_(max=2 * reach)  # [R], 0 to 2 · reach
        pad = (0, 0, reach, reach) if axis == 0 else (reach, reach, 0, 0)
        at = by[:, None] + torch.arange(side)  # [R, side]
        shape = (len(images), 1, side, 1) if axis == 0 else (len(images), 1, 1, side)
        padded = F.pad(images, pad, mode="reflect") if reach else images
        like = [*images.shape]
        images = padded.gather(2 + axis, at.view(shape).expand(like))
    return images


AUGMENTATIONS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {"flip": (1, flip), "crop": (2, crop)}
"""Name → how many uniform numbers it takes, and what it does."""


def augmentation(names: Sequence[str]) -> Callable[[Tensor, Tensor], Tensor]:
    """All of these, one after the other, each with uniform numbers of its own."""
    if unknown := [name for name in names if name not in AUGMENTATIONS]:
        raise ValueError(f"augment names {unknown[0]!r}; it must be among {', '.join(AUGMENTATIONS)}")

    def augmented(images: Tensor, uniforms: Tensor) -> Tensor:
        if images.dim() != 4:
            raise ValueError(f"augment takes images [C, H, W]; the examples have shape {tuple(images.shape[1:])}")
        begin = 0
        for name in names:
            width, change = AUGMENTATIONS[name]
            images, begin = change(images, uniforms[:, begin : begin + width]), begin + width
        return images

    return augmented
