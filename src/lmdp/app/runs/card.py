"""How the model of a run is used: what it takes in, what its numbers mean, and which layers it has.

    model.json    classes, inputs, layers, and how the model is built
    network/      the configuration of a model of transformers
    tokenizer/    of texts, one that was read from a folder

Nothing in it is read off private examples but what the model shows in its shape. With it and `model.safetensors` a run
is used without the data that it was trained on.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lmdp.app.runs.files import write_json
from lmdp.data.records import MAY_BE_MISSING, Count, Must, decoded, encoded, one_of, read_object
from lmdp.models import can_import

FILE, NETWORK, TOKENIZER = "model.json", "network", "tokenizer"
FORMAT = 1
KINDS = IMAGES, NUMBERS, TEXTS = "images", "numbers", "texts"


@dataclass(frozen=True)
class Options:
    """What `lmdp.models.build` takes besides name, shape, classes and vocabulary."""

    activation: str | None = None
    standardised: Annotated[bool, MAY_BE_MISSING] = False
    task: Annotated[str, MAY_BE_MISSING, one_of("classify", "embed")] = "classify"
    lora: Annotated[int, Must("a whole number of at least 1", lambda n: n > 0)] | None = None
    tune: Annotated[str, MAY_BE_MISSING, one_of("all", "head", "tangent")] = "all"


@dataclass(frozen=True)
class Card:
    """What a run keeps of its model besides the weights.

    kind       what the inputs are: images (bytes), numbers (arrays as they are), or texts
    shape      of one input
    crop       of images: whether their largest central square is taken before they are resized
    tokenizer  of texts: a built-in one by name, or the folder beside this file
    options    how the model is built
    module_at  of a `module:factory`: the folder that its module was imported from, for who looks for it elsewhere
    layers     names of the layers, grouped `by` module or block
    """

    format: int
    model: str
    kind: Annotated[str, one_of(*KINDS)]
    shape: tuple[Count, ...]
    classes: tuple[str, ...]
    layers: tuple[str, ...]
    by: str
    options: Options = Options()
    crop: Annotated[bool, MAY_BE_MISSING] = False
    tokenizer: str | None = None
    vocabulary: Annotated[int, Must("a whole number of at least 1", lambda n: n > 0)] | None = None
    module_at: str | None = None

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, encoded(self))

    @classmethod
    def read(cls, folder: Path) -> Card | None:
        """None of a run by an earlier version, which kept none."""
        path = folder / FILE
        return decoded(cls, read_object(path, "a model card"), str(path), version=FORMAT) if path.exists() else None

    def at(self, folder: Path) -> Card:
        """The same, with what lies beside it named by where it lies now."""
        model = f"hf-config:{folder / NETWORK / 'config.json'}" if (folder / NETWORK).is_dir() else self.model
        tokenizer = str(folder / TOKENIZER) if self.tokenizer == TOKENIZER else self.tokenizer
        return replace(self, model=model, tokenizer=tokenizer)


def found_elsewhere(folder: Path) -> str:
    """Where the module of a run's `module:factory` was, if it cannot be imported from here; "" otherwise."""
    try:
        card = Card.read(folder)
    except (ValueError, OSError):
        return ""
    if card is None or not card.module_at or can_import(card.model):
        return ""
    where = f"run there, or set PYTHONPATH={shlex.quote(card.module_at)}"
    return f"; trained with {card.model} from {card.module_at}: {where}"
