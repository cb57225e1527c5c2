"""ResNet-18 with GroupNorm, with a stem for small (CIFAR) or large (ImageNet) images."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from lmdp.models.parts import RELU, Parts


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, parts: Parts = RELU) -> None:
        super().__init__()
        self.conv1 = parts.conv(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = parts.conv(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.act = parts.act(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(parts.conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        activated: Tensor = self.act(out)
        return activated


class ResNet18(nn.Module):
    """Seventeen convolutions on the main path, three on shortcuts, one linear head."""

    def __init__(
        self,
        channels: int = 3,
        classes: int = 100,
        stem: Literal["cifar", "imagenet"] = "cifar",
        width: int = 64,
        parts: Parts = RELU,
    ) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"stem is {stem!r}; it must be 'cifar' or 'imagenet'")
        large = stem == "imagenet"
        self.conv1 = parts.conv(channels, width, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False)
        self.norm1 = norm(width)
        self.act = parts.act(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for i, (a, b) in enumerate(pairwise(widths)):
            blocks += [Block(a, b, 1 if i == 0 else 2, parts), Block(b, b, 1, parts)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.norm1(self.conv1(x))))
        out: Tensor = self.fc(self.blocks(x).mean(dim=(2, 3)))
        return out
