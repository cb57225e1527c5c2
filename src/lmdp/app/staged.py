"""What a model's first stage makes of the examples, where nothing is learnt in it: computed once, and not in each step.

The transform of `models.scattering` is a fixed function of one image. Training on what it gives makes the model that
training on the images would (the model takes either), and costs the same privacy: neighbours that differ in an image
differ in its features. Elsewhere (audits, `lmdp.load`, `lmdp embed`) the model gets images. With `augment` every view
is another image, and the transform is made in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmdp.app.config import Config
from lmdp.data import Images
from lmdp.models import Staged, device_of
from lmdp.models.scattering import STRIDE

AT_ONCE = 50
"""Images. The last ones are filled up to as many, so that nobody's features depend on how many there are."""


def computed(config: Config, model: nn.Module, examples: Any) -> Any:
    """The same examples as the first stage gives them out, in memory; those of other models as they are."""
    if not isinstance(model, Staged) or not isinstance(examples, Images) or config.augment is not None:
        return examples
    if not len(examples) or len(examples.shape) != 3 or examples.shape[0] == model.width:
        return examples
    kept: Tensor | None = None
    for at in torch.arange(len(examples)).split(AT_ONCE):
        features = _features(model, examples, at)
        kept = features.new_empty(len(examples), *features.shape[1:]) if kept is None else kept
        kept[at] = features
    assert kept is not None
    return Images(kept, examples.labels)


@torch.no_grad()
def _features(model: Staged, examples: Images, at: Tensor) -> Tensor:
    filled = torch.cat([at, at[-1:].expand(AT_ONCE - len(at))])
    images = examples.take(filled).tensors()[0].to(device_of(model))
    features: Tensor = model.stage(images)
    return features[: len(at)].cpu()


def said_of_stage(config: Config, model: nn.Module, examples: Any) -> str:
    """A line for the beginning of a training; "" where there is nothing to say."""
    if not isinstance(model, Staged) or not isinstance(examples, Images):
        return ""
    if config.augment is not None:
        return f"the first stage of {config.model} is made of every view, in every step: augment = {config.augment}"
    each = 4 * model.width * -(-examples.shape[1] // STRIDE) * -(-examples.shape[2] // STRIDE)
    return (
        f"the first stage of {config.model}, in which nothing is learnt, is made of every image once, and kept in "
        f"memory ({len(examples) * each >> 20} MB); the model takes images as before"
    )
