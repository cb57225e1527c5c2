"""In how many parts a batch is handed out, where nobody says: by the model and the shape of an example alone.

Results are the same whatever the parts, up to rounding and to what dropout draws. Nothing here looks at an example, so
that the parts give nothing away, and nothing at the machine, so that a run that goes on elsewhere has the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmdp.app.config import Config
from lmdp.app.network import blank, laid_out, shortened
from lmdp.app.staged import staged_inputs
from lmdp.data import Images, Texts
from lmdp.data.examples import units
from lmdp.models import Inputs, evaluation, run

ROOM = 2**30
"""Bytes that a forward pass may keep for the backward pass. The peak of a process is two or three times as much."""


def parts_of(config: Config, model: nn.Module, private: Any) -> int | None:
    """The most examples that are in memory at once: as configured, else what fits; None where the batch does."""
    if config.max_physical_batch_size is not None or not isinstance(private, Images | Texts):
        return config.max_physical_batch_size
    rows = config.user_rows if config.unit is not None else config.views
    kept = rows * kept_of_one(config, model, staged_inputs(model, blank(private)))
    fitting = 1 << max(0, (ROOM // max(1, kept)).bit_length() - 1)
    return fitting if fitting < 1.5 * config.batch_for(units(private)) else None  # draws vary: some are larger


def said_of_parts(config: Config, model: nn.Module, private: Any) -> str:
    """A line for the beginning of a training; "" where there is nothing to say."""
    parts = parts_of(config, model, private)
    if parts is None or parts == config.max_physical_batch_size:
        return ""
    what = "example" if config.unit is None else "user"
    return (
        f"batches are handed out in parts of at most {parts} {what}s, to keep {ROOM >> 20} MB at a time for the "
        "backward pass; the result does not depend on it (max_physical_batch_size says another number)"
    )


def kept_of_one(config: Config, model: nn.Module, one: Inputs) -> int:
    """Bytes that one more example adds to what the forward pass keeps for the backward pass."""
    with evaluation(model), torch.random.fork_rng(devices=[]):
        return max(0, _kept(config, model, one, 2) - _kept(config, model, one, 1))


def _kept(config: Config, model: nn.Module, one: Inputs, times: int) -> int:
    storages: dict[int, int] = {}
    alive = []  # a place that is free again would be counted once for two

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), shortened(config):
        alive.append(run(model, laid_out(_repeated(one, times), model)))
    return sum(storages.values())


def _repeated(one: Inputs, times: int) -> Inputs:
    if isinstance(one, Tensor):
        return torch.cat([one] * times)
    return {name: torch.cat([rows] * times) for name, rows in one.items()}
