"""Canaries: examples made to be recognised, and the model on which any gradient at all can be set by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lmdp.audit.neighbours.training import Train
from lmdp.membership.examples import each_tensor
from lmdp.models import run, scores_of
from lmdp.private.engine import PrivacyEngine


class Slate(nn.Module):
    """A model whose gradient at an example *is* the example: layer l sees x[:, l] and gives its product with a row.

    With `loss = model(x).sum()`, `loss_reduction="sum"` and SGD, what the parameters moved by is what was released.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x[:, i]) for i, part in enumerate(self.parts)], dim=1).sum(1)

    @property
    def written(self) -> Tensor:
        """All released gradients so far, summed, as [layers, width] (for SGD with learning rate 1)."""
        return -torch.cat([parameter.detach() for parameter in self.parameters()])


def slate_training(*, batch_size: int, noise_multiplier: float, epochs: int = 1, **options: Any) -> Train:
    """Private steps on a slate, with clip norm 1; returns the slate. `options` are those of `make_private`."""

    def train(engine: PrivacyEngine, dataset: Dataset[Any]) -> Slate:
        layers, width = dataset[0][0].shape
        public: dict[str, Any] = {
            "public_data": (torch.ones(8, layers, width), torch.zeros(8)),
            "criterion": lambda output, _: output.mean(),
            "public_every": 1,
        }
        slate = Slate(layers, width)
        _, optimizer, loader = engine.make_private(
            module=slate,
            optimizer=torch.optim.SGD(slate.parameters(), lr=float(batch_size)),
            data_loader=DataLoader(dataset, batch_size=batch_size),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            loss_reduction="sum",
            **(public | options),
        )
        for _ in range(epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                slate(x).sum().backward()
                optimizer.step()
        return slate

    return train


def crowd(size: int, layers: int, width: int) -> tuple[Tensor]:
    """Examples whose gradients all point along the last coordinate of every layer, leaving the others to canaries."""
    gradients = torch.zeros(size, layers, width)
    gradients[:, :, -1] = 1.0
    return (gradients,)


def dirac(layers: int, width: int, number: int, *, size: float = 10.0) -> list[tuple[Tensor]]:
    """Gradients that are zero but for one coordinate of each layer, another for each canary: mutually orthogonal."""
    if number >= width:
        raise ValueError(
            f"{number} canaries do not fit into layers of width {width}: the crowd has the last coordinate"
        )
    gradients = torch.zeros(number, layers, width)
    gradients[torch.arange(number), :, torch.arange(number)] = size
    return [(gradient,) for gradient in gradients]


def tipping(layers: int, width: int, *, size: float = 1e6) -> tuple[Tensor]:
    """One of the crowd, but huge in the first layer: if weights follow the batch, it takes them all for that layer."""
    (gradient,) = crowd(1, layers, width)
    gradient[0, 0] *= size
    return (gradient[0],)


def along(slate: Slate, canary: tuple[Tensor]) -> float:
    """The score of a Dirac canary: how much was written in its direction."""
    (gradient,) = canary
    return float((slate.written * gradient).sum() / gradient.norm())


def tipped(slate: Slate, canary: tuple[Tensor]) -> float:
    """The score of a tipping canary: how much more of the crowd was written in the first layer than in the last."""
    return float(slate.written[0, -1] - slate.written[-1, -1])


def mislabelled(dataset: Any, number: int, classes: int) -> list[tuple[Any, Tensor]]:
    """The first examples of a dataset, each with the label that follows its own."""
    examples = (dataset[i] for i in range(number))
    return [
        (x if isinstance(x, Mapping) else torch.as_tensor(x), (torch.as_tensor(y) + 1) % classes) for x, y in examples
    ]


def noise_images(like: Tensor, number: int, classes: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Noise of the shape of one example, with labels drawn at random."""
    x = torch.randn(number, *like.shape, generator=generator, dtype=like.dtype)
    return list(zip(x, torch.randint(0, classes, (number,), generator=generator)))


def lower_loss(criterion: Callable[[Any, Any], Tensor] = F.cross_entropy) -> Callable[[nn.Module, Any], float]:
    """The score of a canary that needs no access to gradients: how small the trained model's loss on it is."""

    def score(model: nn.Module, canary: Any) -> float:
        x, y = canary
        with torch.no_grad():
            output = run(model, each_tensor(x, lambda rows: rows[None]))
            scores = output if isinstance(output, Tensor) else scores_of(output)
            return -float(criterion(scores, torch.as_tensor(y)[None].to(scores.device)))

    return score
