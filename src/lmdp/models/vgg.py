"""VGG-16 with GroupNorm: thirteen convolutions, spatial mean, one linear head."""

from __future__ import annotations

from torch import Tensor, nn

from lmdp.models.parts import RELU, Parts
from lmdp.models.resnet import norm

PLAN = (1, 1, "pool", 2, 2, "pool", 4, 4, 4, "pool", 8, 8, 8, "pool", 8, 8, 8)


class VGG16(nn.Module):
    """Any image of at least 16x16 pixels; `width` 64 is the original."""

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64, parts: Parts = RELU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for step in PLAN:
            if isinstance(step, str):
                layers.append(nn.MaxPool2d(2))
                continue
            outputs = step * width
            layers += [
                parts.conv(inputs, outputs, 3, padding=1, bias=False),
                norm(outputs),
                parts.act(inplace=True),
            ]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return out
