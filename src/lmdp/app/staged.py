"""What a model's first stage makes of the examples, where nothing is learnt in it: computed once, and not in each step.

The transform of `models.scattering` is a fixed function of one image, a row of `models.tuned` of one text. Training on
them costs the same privacy: neighbours that differ in an example differ in what is made of it. It makes the model that
training on the examples would (of `tune = tangent`: to first order); the model takes either. Elsewhere (audits,
`lmdp.load`, `lmdp embed`) it gets images and texts. With `augment` every view is another image, and the transform is
made in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.app.config import Config
from lmdp.app.network import shortened
from lmdp.data import Images, Texts
from lmdp.models import Inputs, Probe, Staged, device_of
from lmdp.models.scattering import STRIDE

AT_ONCE = 50
"""Examples. The last ones are filled up to as many, so that nothing here depends on how many there are."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows(Images):
    """What was made of texts, and whose each is."""

    users: tuple[str, ...] = ()

    def take(self, indices: Sequence[int] | Tensor) -> Rows:
        at = torch.as_tensor(indices, dtype=torch.long)
        users = tuple(self.users[i] for i in at.tolist()) if self.users else ()
        return Rows(self.pixels[at], self.labels[at], users)


def computed(config: Config, model: nn.Module, examples: Any, *, exactly: bool = False) -> Any:
    """The same examples as the first stage gives them out, in memory; those of other models as they are.

    `exactly`: as they are, too, where the model makes of texts what it makes of rows to first order alone.
    """
    if config.augment is not None or not _has_stage(model, examples) or not len(examples):
        return examples
    if isinstance(model, Probe):
        if exactly and not model.exact:
            return examples
        with contextlib.nullcontext() if exactly else shortened(config):
            return Rows(_every(model, examples), examples.labels, examples.users)
    return Images(_every(model, examples), examples.labels)


def staged_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """What a step would be made on, of inputs as a dataset hands them out."""
    return model.stage(inputs) if isinstance(model, Probe) and isinstance(inputs, Mapping) else inputs


def _has_stage(model: nn.Module, examples: Any) -> bool:
    if isinstance(model, Probe):
        return isinstance(examples, Texts)
    if not isinstance(model, Staged) or not isinstance(examples, Images):
        return False
    return len(examples.shape) == 3 and examples.shape[0] != model.width


@torch.no_grad()
def _every(model: Any, examples: Images | Texts) -> Tensor:
    kept: Tensor | None = None
    for at in torch.arange(len(examples)).split(AT_ONCE):
        filled = torch.cat([at, at[-1:].expand(AT_ONCE - len(at))])
        features = model.stage(moved(examples.take(filled).tensors()[0], device_of(model)))[: len(at)].cpu()
        kept = features.new_empty(len(examples), *features.shape[1:]) if kept is None else kept
        kept[at] = features
    assert kept is not None
    return kept


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    return inputs.to(device) if isinstance(inputs, Tensor) else {name: rows.to(device) for name, rows in inputs.items()}


def said_of_stage(config: Config, model: nn.Module, examples: Any) -> str:
    """A line for the beginning of a training; "" where there is nothing to say."""
    if isinstance(model, Probe) and isinstance(examples, Texts):
        return (
            f"each text goes through {config.model} once; what training needs of it is kept in memory "
            f"({len(examples) * 4 * model.width >> 20} MB), and the model takes texts as before"
        )
    if not isinstance(model, Staged) or not isinstance(examples, Images):
        return ""
    if config.augment is not None:
        return f"the first stage of {config.model} is made of every view, in every step: augment = {config.augment}"
    each = 4 * model.width * -(-examples.shape[1] // STRIDE) * -(-examples.shape[2] // STRIDE)
    return (
        f"the first stage of {config.model}, in which nothing is learnt, is made of every image once, and kept in "
        f"memory ({len(examples) * each >> 20} MB); the model takes images as before"
    )
