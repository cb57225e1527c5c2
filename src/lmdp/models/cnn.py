"""The shallow and the deep convolutional network of the paper's MNIST and CIFAR-10 experiments.

And a deep one that ends in two linear layers, which is common in work on private training.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from lmdp.models.parts import RELU, TANH, Parts

GAIN = 1.5
"""With which the seven standardised convolutions of D-CNN, tanh and pools keep signals about as loud as they were."""


class SCNN(nn.Module):
    """conv 16@8x8 stride 2, pool, conv 32@4x4 stride 2, pool, 32 units, classes. Four layers with parameters.

    from_zero  images in [−1, 1] are read as in [0, 1]: what is black has then no part in a gradient, and clipping cuts
               less of what is drawn
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        size: int | tuple[int, ...] = 28,
        parts: Parts = RELU,
        *,
        from_zero: bool = False,
    ) -> None:
        super().__init__()
        self.from_zero = from_zero
        height, width = (size, size) if isinstance(size, int) else size
        self.conv1 = parts.conv(channels, 16, 8, stride=2, padding=3)
        self.conv2 = parts.conv(16, 32, 4, stride=2)
        self.pool = nn.MaxPool2d(2, stride=1)
        self.act = parts.act()
        if min(height, width) < 14:
            raise ValueError(f"S-CNN needs images of at least 14x14 pixels; they are {height}x{width}. Resize them.")
        self.fc1 = nn.Linear(32 * _last_side(height) * _last_side(width), 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 1) / 2 if self.from_zero else x
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        x = self.act(self.fc1(torch.flatten(x, 1)))
        out: Tensor = self.fc2(x)
        return out


def _last_side(side: int) -> int:
    """What two convolutions and two pools leave of a side."""
    side = ((side - 2) // 2 + 1) - 1
    return ((side - 4) // 2 + 1) - 1


class DCNN(nn.Module):
    """Eight 3x3 convolutions (32, 32, 64, 64, 128, 128, 256, classes), three average pools, spatial mean.

    With tanh its weights begin so large that a convolution keeps what tells images apart about as loud as it was: with
    torch's own it is a hundred times fainter after seven of them, since there are no norms between. Standardised
    filters have length one and cannot: what they give out is made louder by GAIN, and the last ones, which give
    scores, are plain.
    """

    def __init__(self, channels: int = 3, classes: int = 10, parts: Parts = RELU) -> None:
        super().__init__()
        widths = [channels, 32, 32, 64, 64, 128, 128, 256]
        self.convs = nn.ModuleList(parts.conv(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.head = nn.Conv2d(256, classes, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.act = parts.act()
        self.gain = GAIN if parts.standardised and parts.activation == "tanh" else 1.0
        if parts.activation == "tanh":
            for conv in (*self.convs, self.head):
                as_loud(conv)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = self.act(self.gain * conv(x) if self.gain != 1.0 else conv(x))
            if i in (1, 3, 5):
                x = self.pool(x)
        out: Tensor = self.head(x).mean(dim=(2, 3))
        return out


def as_loud(conv: nn.Module) -> None:
    """Weights of variance 1 / inputs of a filter, and no bias."""
    assert isinstance(conv, nn.Conv2d)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]


class DeepCNN(nn.Module):
    """Six 3x3 convolutions (32, 32, 64, 64, 128, 128) with a max pool after every second, 128 units, classes."""

    def __init__(
        self, channels: int = 3, classes: int = 10, size: int | tuple[int, ...] = 32, parts: Parts = TANH
    ) -> None:
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 8:
            raise ValueError(f"DeepCNN needs images of at least 8x8 pixels; they are {height}x{width}. Resize them.")
        widths = [channels, 32, 32, 64, 64, 128, 128]
        self.convs = nn.ModuleList(parts.conv(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        self.act = parts.act()
        self.fc1 = nn.Linear(128 * (height // 8) * (width // 8), 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = self.act(conv(x))
            if i % 2:
                x = self.pool(x)
        out: Tensor = self.fc2(self.act(self.fc1(torch.flatten(x, 1))))
        return out
