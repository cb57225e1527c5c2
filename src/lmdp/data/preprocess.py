"""Images of one kind made into images of another: what a shadow set needs to stand in for the private one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lmdp.data.images import Images

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green, blue (ITU-R 601)
CHUNK = 1024


def fit(images: Images, *, size: int | None, channels: int | None) -> Images:
    """The same images, size×size and with `channels` channels; untouched where they already are."""
    wanted = (channels or images.shape[0], *((size, size) if size else images.shape[1:]))
    if images.shape == wanted:
        return images
    if len(images.shape) != 3 or images.shape[0] not in (1, 3):
        raise ValueError(f"examples of shape {images.shape} are no images [C, H, W]; leave size and channels out")
    parts = [_fit(part, size, channels) for part in images.pixels.split(CHUNK)]
    return replace(images, pixels=torch.cat(parts))


def _fit(pixels: Tensor, size: int | None, channels: int | None) -> Tensor:
    x = pixels.float()
    if channels == 1 and x.shape[1] == 3:
        x = (x * x.new_tensor(LUMINANCE).view(3, 1, 1)).sum(1, keepdim=True)
    if size is not None and x.shape[2:] != (size, size):
        x = interpolate(x, (size, size), mode="bilinear", antialias=True)
    if pixels.dtype == torch.uint8:
        x = x.round_().clamp_(0, 255).to(torch.uint8)
    return x.expand(-1, 3, -1, -1).contiguous() if channels == 3 else x
