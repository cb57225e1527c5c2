"""What is done with a model of any kind: build it from a seed, run it in evaluation mode, count what it gets right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def fresh(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new model whose parameters follow from the seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of examples, in batches of (inputs, labels), to whose label the model gives the highest score."""
    right = total = 0
    with evaluation(model), torch.no_grad():
        for inputs, labels in batches:
            right += int((model(inputs).argmax(1) == labels).sum())
            total += len(labels)
    return right / max(1, total)
