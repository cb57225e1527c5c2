"""What the built-in models are made of, where there is a choice: the activation, and the kind of convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lmdp.standardised import StandardisedConv2d

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Parts:
    """activation: of ACTIVATIONS. standardised: whether the filters of convolutions are standardised."""

    activation: str = "relu"
    standardised: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")

    def act(self, *, inplace: bool = False) -> nn.Module:
        """In place where that is asked for and can be done."""
        kind = ACTIVATIONS[self.activation]
        return kind(inplace=True) if inplace and kind is nn.ReLU else kind()

    def conv(self, *args: Any, **kwargs: Any) -> nn.Conv2d:
        """With the arguments of `nn.Conv2d`."""
        return (StandardisedConv2d if self.standardised else nn.Conv2d)(*args, **kwargs)


RELU, TANH = Parts(), Parts("tanh")
