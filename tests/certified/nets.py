"""Small networks of the kinds that people train, written out: blocks as in torchvision and timm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.certified.parts import CLASSES, FEATURES, LENGTH, VOCABULARY, WIDTH

CHANNELS = 8


class Block(nn.Module):
    """Applies `inner` and adds its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def conv(inputs: int, outputs: int, size: int = 3, **options: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(layer, nn.GroupNorm(4, outputs), nn.SiLU())


def classifier(*body: nn.Module, channels: int = CHANNELS) -> nn.Sequential:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def resnet() -> nn.Module:
    residual = Block(nn.Sequential(conv(CHANNELS, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)))
    return classifier(conv(3, CHANNELS), residual, nn.ReLU(inplace=True))


def mobilenet() -> nn.Module:
    inner = nn.Sequential(
        conv(CHANNELS, 2 * CHANNELS, 1),
        conv(2 * CHANNELS, 2 * CHANNELS, groups=2 * CHANNELS),
        nn.Conv2d(2 * CHANNELS, CHANNELS, 1),
    )
    return classifier(conv(3, CHANNELS, stride=2), Block(inner), nn.Hardswish())


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(CHANNELS, 2, 1), nn.Conv2d(2, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.up(F.silu(self.down(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


def efficientnet() -> nn.Module:
    return classifier(conv(3, CHANNELS), Block(nn.Sequential(conv(CHANNELS, CHANNELS), SqueezeExcite())))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, CHANNELS), conv(3 + CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x)], dim=1)
        return torch.cat([x, self.second(x)], dim=1)


def densenet() -> nn.Module:
    return classifier(Dense(), channels=3 + 2 * CHANNELS)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, a LayerNorm over channels that come last, and a scale for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.norm, self.up = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS)
        self.down, self.gamma = nn.Linear(2 * CHANNELS, CHANNELS), nn.Parameter(torch.full((CHANNELS,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        scaled: Tensor = self.gamma * self.down(F.gelu(self.up(hidden)))
        return x + scaled.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return classifier(nn.Conv2d(3, CHANNELS, 4, stride=4), ConvNeXtBlock())


class VisionTransformer(nn.Module):
    """A class token and a table of positions, parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.encoder = encoder_layer()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.place
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


def encoder_layer(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=dropout, batch_first=True)


class WindowAttention(nn.Module):
    """Attention inside windows of 2 x 2 patches, which stand beside each other in a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(b, -1, 4, c)
        q, k, v = self.qkv(self.norm(windows)).chunk(3, dim=-1)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + mixed.view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.attention, self.head = nn.Conv2d(3, WIDTH, 2, 2), WindowAttention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patch(x).permute(0, 2, 3, 1)
        logits: Tensor = self.head(self.attention(hidden.roll((-1, -1), (1, 2))).mean((1, 2)))
        return logits


class Mixer(nn.Module):
    """Mixes patches by one perceptron and channels by another."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.tokens, self.channels = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(4, 4), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patch(x).flatten(2)
        hidden = (hidden + self.tokens(hidden).relu()).transpose(1, 2)
        logits: Tensor = self.head((hidden + self.channels(hidden).relu()).mean(1))
        return logits


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.cell = kind(WIDTH, WIDTH, batch_first=True)  # type: ignore[call-arg]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.embed(tokens))[0][:, -1])
        return logits


class TextTransformer(nn.Module):
    """Positions are looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder, self.head = encoder_layer(dropout=0.1), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        hidden = self.encoder(hidden, src_key_padding_mask=mask == 0)
        weights = mask[:, :, None].to(hidden)
        logits: Tensor = self.head((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))
        return logits


class Tied(nn.Module):
    """Tells the next token by the table that it looks tokens up in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embed(tokens)).tanh())
        return logits


class Autoencoder(nn.Module):
    """Variational if `chance`: the code is drawn, and told with its mean and spread."""

    def __init__(self, *, chance: bool) -> None:
        super().__init__()
        self.chance, self.encode, self.decode = chance, nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp() if self.chance else mean
        return self.decode(code), mean, spread


class UNet(nn.Module):
    """A class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = conv(3, CHANNELS), conv(CHANNELS, CHANNELS)
        self.up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2)
        self.head = nn.Conv2d(2 * CHANNELS, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        logits: Tensor = self.head(torch.cat([fine, self.up(self.middle(F.max_pool2d(fine, 2)))], dim=1))
        return logits
