"""What is done with a model of any kind: build it from a seed, run it where it lives, count what it gets right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor]
"""What a model takes in: one tensor, or several by name."""
OUTPUTS = ("logits", "last_hidden_state", "sentence_embedding", "token_embeddings")
"""What outputs with names call what one looks at, first of all."""


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


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: on the device of its first parameter."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for inputs from any device.

    Inputs by name become keyword arguments; a model whose `forward` does not take them so is given the mapping.
    """
    device = device_of(model)
    if isinstance(inputs, Tensor):
        return model(inputs.to(device))
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    try:
        inspect.signature(model.forward).bind(**moved)
    except TypeError:
        return model(moved)
    return model(**moved)


def main_tensor(output: Any) -> Tensor | None:
    """The tensor that one looks at in what a module gives out: itself, the first of several, the usual one by name."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = [output[name] for name in OUTPUTS if name in output]
        floating = [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]
        output = [*named, *floating]
    several = output if isinstance(output, tuple | list) else ()
    return next((value for value in several if isinstance(value, Tensor)), None)


def scores_of(output: Any) -> Tensor:
    """[B, classes], out of whatever a classifier gives out."""
    scores = main_tensor(output)
    if scores is None or scores.dim() != 2:
        given = type(output).__name__ if scores is None else f"a tensor of shape {tuple(scores.shape)}"
        raise ValueError(f"the model gives out {given}; it must give one score per class for each example")
    return scores


def accuracy(model: nn.Module, batches: Iterable[tuple[Inputs, Tensor]]) -> float:
    """The share of examples, in batches of (inputs, labels), to whose label the model gives the highest score."""
    right = total = 0
    with evaluation(model), torch.no_grad():
        for inputs, labels in batches:
            right += int((scores_of(run(model, inputs)).argmax(1) == labels.to(device_of(model))).sum())
            total += len(labels)
    return right / max(1, total)
