"""An exponential moving average of the weights that a training releases.

    average ← d_t · average + (1 − d_t) · weights,     d_t = min(decay, (1 + t) / (10 + t))

It is a function of released weights only, so it is post-processing: it costs no privacy, whatever is done with it. The
noise of single steps averages out in it. The decay begins low, so that the weights before training do not linger.
A training that begins with an average costs what the averaged one has cost, like one that begins with its last weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lmdp.lineage import Noted, noted_of

UPDATES, WEIGHTS = "updates", "weights/"


class WeightAverage:
    """Of the trainable parameters of one model. Call `update` after each `optimizer.step()`.

    Everything else that the model saves (frozen parameters, buffers) is taken as it is. Parameters of less than 32 bits
    are averaged in float32, so that small changes are not lost.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; it must lie strictly between 0 and 1 (0.99 to 0.9999 is usual)")
        self.decay, self.updates = decay, 0
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ValueError("the model has 0 trainable parameters; there is nothing to average")
        if any(hasattr(p, "_local_tensor") for p in self._trained.values()):
            raise ValueError(
                "the model is under fully_shard: its average would be in parts, which nobody knows again as weights of "
                "this training. Average the whole weights of checkpoints instead, or train without fully_shard."
            )
        self._average = {name: _widened(p.detach()).clone() for name, p in self._trained.items()}
        self._training: Noted | None = None

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        self._training = self._training or noted_of(self._trained.values())
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, p in self._trained.items():
            self._average[name].lerp_(p.detach().to(self._average[name].dtype), 1 - decay)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name → the average, in the type of the parameter."""
        weights = {name: self._average[name].to(p.dtype) for name, p in self._trained.items()}
        if self._training is not None:
            self._training.made(weights)
        return weights

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own, bit for bit. Make no step inside."""
        before = {name: p.detach().clone() for name, p in self._trained.items()}
        self._write(self.weights)
        try:
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, p in self._trained.items():
            p.copy_(weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed training needs; from it, it goes on bit for bit."""
        if self._training is not None:
            self._training.made(self._average)
        return {UPDATES: torch.tensor(self.updates), **{WEIGHTS + name: t for name, t in self._average.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Refuses the state of another model."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if wrong := sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)):
            first = wrong[0]
            raise ValueError(
                f"this is the average of another model: {first!r} is {theirs.get(first, 'absent')} there and "
                f"{mine.get(first, 'absent')} here"
            )
        self.updates = int(state[UPDATES])
        for name, tensor in self._average.items():
            tensor.copy_(state[WEIGHTS + name])


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor
