"""Features of images that nobody has learnt: a scattering transform of two orders, and two small models on top of it.

A wavelet ψ_{j,θ} answers to detail of size 2^j in direction θ; the modulus of its answer says how much there is of it,
and a window φ of size 4 averages that, so that little changes when an image moves a little. With * for convolution and
↓ for keeping every fourth position,

    (x * φ)↓    (|x * ψ_{j,θ}| * φ)↓    (||x * ψ_{0,θ}| * ψ_{1,θ'}| * φ)↓        j = 0, 1; eight directions each

are 1 + 16 + 64 = 81 channels for every colour. All of it follows from formulas and from one image: no parameter, no
other image, nothing that is counted over data. So it costs no privacy, and can be computed once for all of a training.

After J. Bruna and S. Mallat, Invariant scattering convolution networks (2013); as the first stage of private models
after F. Tramèr and D. Boneh, Differentially private learning needs better features (2021).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.models.parts import TANH, Parts

DIRECTIONS, STRIDE, BORDER = 8, 4, 4
PER_COLOUR = 1 + 2 * DIRECTIONS + DIRECTIONS**2
WIDTH, FREQUENCY, SLANT = 0.8, 3 * math.pi / 4, 4 / DIRECTIONS
"""Of the finest wavelet: the deviation of its envelope in pixels, how fast it waves, and how round it is."""
WINDOW = 2 * WIDTH


class Scattering(nn.Module):
    """Images [B, C, H, W] → [B, 81·C, ⌈H/4⌉, ⌈W/4⌉]: the transform, each kind of path with mean 0 and variance 1.

    Kinds are the averages, the two sizes of first order, and each first direction of second order. What is normalised
    together is one example's alone. An image is mirrored at its border, and filled up to sides of a multiple of four.
    """

    fine: Tensor
    coarse: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Reaches of 3 and 7 pixels hold 99.8 % of a wavelet's energy, at least.
        self.register_buffer("fine", wavelets(0, torch.arange(-3.0, 4.0)), persistent=False)
        self.register_buffer("coarse", wavelets(1, torch.arange(-6.5, 7.0)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([normalised(kind) for kind in self.kinds(x)], dim=1)

    def kinds(self, x: Tensor) -> list[Tensor]:
        """Before anything is normalised: [B, C, …], [B, 8·C, …] twice, and [B, 8·C, …] for each first direction."""
        c, sides = x.shape[1], x.shape[2:]
        right, below = (BORDER + -side % STRIDE for side in reversed(sides))
        x = F.pad(x, (BORDER, right, BORDER, below), mode="reflect")
        fine = self._waves(x, self.fine, 1)  # [B, C·8, H, W], the direction last
        coarse = self._waves(x, self.coarse, 2)  # [B, C·8, H/2, W/2]
        second = self._waves(fine, self.coarse, 2)  # [B, C·8·8, H/2, W/2]
        both = averaged(second, 2).unflatten(1, (c, DIRECTIONS, DIRECTIONS)).transpose(1, 2)
        return [averaged(x, 1), averaged(fine, 1), averaged(coarse, 2), *both.flatten(2, 3).unbind(1)]

    def _waves(self, x: Tensor, filters: Tensor, stride: int) -> Tensor:
        """[B, M, h, w] → [B, M·8, h / stride, w / stride]: how much there is of a size, in every direction."""
        alone = x.reshape(-1, 1, *x.shape[2:])
        real, imaginary = F.conv2d(alone, filters, stride=stride, padding=(len(filters[0, 0]) - 1) // 2).chunk(2, 1)
        lengths = (real.square() + imaginary.square()).sqrt()
        return lengths.reshape(len(x), -1, *lengths.shape[2:])


def wavelets(j: int, at: Tensor) -> Tensor:
    """[16, 1, k, k]: real, then imaginary parts of the eight wavelets of size 2^j, where they are looked `at`.

    A wave under a Gaussian envelope, less so much of the envelope that an even image has no answer.
    """
    x, y = torch.meshgrid(at.double(), at.double(), indexing="xy")
    width, frequency = WIDTH * 2**j, FREQUENCY / 2**j
    filters = []
    for angle in torch.arange(DIRECTIONS, dtype=torch.float64) * math.pi / DIRECTIONS:
        along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        envelope = (-(along.square() + SLANT**2 * across.square()) / (2 * width**2)).exp()
        envelope = envelope * SLANT / (2 * math.pi * width**2)
        wave = torch.polar(envelope, frequency * along)
        filters.append(wave - envelope * (wave.sum() / envelope.sum()))
    both = torch.stack([each.real for each in filters] + [each.imag for each in filters])
    return both.unsqueeze(1).float()


def averaged(x: Tensor, stride: int) -> Tensor:
    """By the window, around the middle of every four by four pixels; `stride`: how many pixels apart x's positions are.

    Without the border that was added to the image.
    """
    rows, columns = (_window(side, stride).to(x) for side in x.shape[2:])
    return rows @ x @ columns.t()


def _window(side: int, stride: int) -> Tensor:
    """[side of what comes out, side]: weights of a Gaussian, which add up to 1."""
    out = (side * stride - 2 * BORDER) // STRIDE
    middles = BORDER + STRIDE * torch.arange(out) + (STRIDE - 1) / 2
    places = torch.arange(side) * stride + (stride - 1) / 2
    weights = (-((middles[:, None] - places) / WINDOW).square() / 2).exp()
    return weights / weights.sum(1, keepdim=True)


def normalised(kind: Tensor) -> Tensor:
    return F.group_norm(kind, 1)


class Staged(nn.Module):
    """A model whose first stage is the transform. It takes images, or what the transform has made of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stage = Scattering()
        self.width = PER_COLOUR * channels

    def features(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == self.width else self.stage(x)


class ScatterLinear(Staged):
    """The transform, and one linear layer."""

    def __init__(self, channels: int, classes: int, size: tuple[int, ...]) -> None:
        super().__init__(channels)
        self.fc = nn.Linear(self.width * math.prod(_sides(size)), classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x).flatten(1))
        return out


class ScatterCNN(Staged):
    """The transform, two 3x3 convolutions (64, 64), a pool after the first, and one linear layer."""

    def __init__(self, channels: int, classes: int, size: tuple[int, ...], parts: Parts = TANH) -> None:
        super().__init__(channels)
        self.conv1 = parts.conv(self.width, 64, 3, padding=1)
        self.conv2 = parts.conv(64, 64, 3, padding=1)
        self.act = parts.act()
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        height, width = (math.ceil(side / 2) for side in _sides(size))
        self.fc = nn.Linear(64 * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.conv1(self.features(x))))
        x = self.act(self.conv2(x))
        out: Tensor = self.fc(x.flatten(1))
        return out


def _sides(size: tuple[int, ...]) -> list[int]:
    return [math.ceil(side / STRIDE) for side in size]
