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
TRIED = 4
"""Texts whose rows are also made in the company of copies of themselves."""
SAME, SHORTENED = 1e-4, 5e-2
"""How much of its length rounding may move a row; of products that are shortened."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows(Images):
    """What was made of texts, and whose each is."""

    users: tuple[str, ...] = ()

    def take(self, indices: Sequence[int] | Tensor) -> Rows:
        at = torch.as_tensor(indices, dtype=torch.long)
        users = tuple(self.users[i] for i in at.tolist()) if self.users else ()
        return Rows(self.pixels[at], self.labels[at], users=users)


def computed(config: Config, model: nn.Module, examples: Any, *, exactly: bool = False) -> Any:
    """The same examples as the first stage gives them out, in memory; those of other models as they are.

    `exactly`: as they are, too, where the model makes of texts what it makes of rows to first order alone.
    """
    if config.augment is not None or not _has_stage(model, examples) or not len(examples):
        return examples
    if isinstance(model, Probe):
        if exactly and not model.exact:
            return examples
        _refuse_meeting(config, model, examples)
        with contextlib.nullcontext() if exactly else shortened(config):
            return Rows(_every(model, examples), examples.labels, users=examples.users)
    return Images(_every(model, examples), examples.labels)


@torch.no_grad()
def _refuse_meeting(config: Config, model: Probe, texts: Texts) -> None:
    """Raise where a text's row depends on who goes through the encoder with it: steps, which are made on rows, do not
    show it."""
    at = torch.arange(AT_ONCE) % len(texts)
    tolerance = SAME if torch.get_float32_matmul_precision() == "highest" else SHORTENED
    inputs = moved(texts.take(at).tensors()[0], device_of(model))
    assert isinstance(inputs, Mapping)
    rows = model.stage(inputs)
    for place in range(0, AT_ONCE, AT_ONCE // TRIED):
        copies = {name: row[place : place + 1].expand(AT_ONCE, -1) for name, row in inputs.items()}
        alone = model.stage(copies)[place]
        if (rows[place] - alone).norm() > tolerance * alone.norm():
            raise ValueError(
                f"tune is {config.tune!r}, and {config.model} lets the texts of a batch meet, or draws at random: "
                "beside others it makes another row of a text than beside its copies. One text could then change what "
                "all others contribute, and no epsilon would hold. Choose another encoder"
            )


def taken_over(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load what a checkpoint holds into the model that rows were made by; refused where those were other rows.

    Rows follow from all that is not trained: other ones (of another released head, or along directions of other public
    texts) are not what the steps so far were made on, nor what the account knows of.
    """
    if isinstance(model, Probe):
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        fixed = {name: t for name, t in model.state_dict().items() if name not in trained and name in saved}
        other = [
            name
            for name, t in fixed.items()
            if t.shape == saved[name].shape and not torch.allclose(t.cpu(), saved[name].cpu(), rtol=1e-3, atol=1e-4)
        ]
        if other:
            raise ValueError(
                f"the run was begun with other weights or other public texts: {', '.join(other[:3])} differ from its "
                "checkpoint. Restore what init, model and public name, or start a new run in another folder"
            )
    model.load_state_dict(dict(saved))


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
