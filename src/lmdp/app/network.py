"""The model of a run: built, begun with given weights, frozen where asked, put on its device, and tried out."""

from __future__ import annotations

import contextlib
import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.app.config import HF, Config
from lmdp.app.rules import HEAD, TANGENT
from lmdp.app.runs import digest, read_weights
from lmdp.data import Examples, Source, Texts, load
from lmdp.data.request import Say
from lmdp.layers import LayerMap
from lmdp.models import Inputs, Probe, Tangent, accuracy, build, evaluation, fresh, main_tensor, run

EVALUATED_AT_ONCE = 500
AIMED_BY = 500
"""Public texts, at most, that say where adapters write (tune = tangent)."""


@dataclass(frozen=True)
class Network:
    """How the model of a run is made: by its configuration, for examples of this shape and so many classes."""

    config: Config
    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None

    @classmethod
    def of(cls, config: Config, source: Source) -> Network:
        words = None if source.tokenizer is None else source.tokenizer.vocabulary
        return cls(config, source.train.shape, len(source.classes), words)

    def untrained(self, say: Say = lambda _: None) -> nn.Module:
        """With the weights that training begins with; what is random in them comes from torch's generator.

        It is said which of them come from a file.
        """
        config = self.config
        options = config.model_options | ({"tune": HEAD} if config.tune == TANGENT else {})
        model = build(config.model, self.shape, self.classes, vocabulary=self.vocabulary, **options)
        if config.init is not None:
            say(_fill(model, weights_file(config.init), say))
        if config.tune == TANGENT and isinstance(model, Probe):
            model = self._aimed(Tangent(model))
        if config.freeze is not None:
            freeze(model, config.freeze)
        return placed(model, config.device)

    def _aimed(self, model: Tangent) -> Tangent:
        model.aim(public_texts(self.config))
        return model

    def fresh(self, say: Say = lambda _: None) -> nn.Module:
        """The same parameters for the same seed, whatever the method, so that methods compare fairly."""
        return fresh(lambda: self.untrained(say), self.config.seed or 0)


def public_texts(config: Config) -> dict[str, Tensor]:
    """Those that say where adapters write."""
    texts = load(_aimed_by(config), say=lambda _: None, **config.data_options).train
    if not isinstance(texts, Texts):
        raise ValueError(f"public is {config.public!r}, which holds no texts; tune = {TANGENT} needs public texts")
    return texts.take(torch.arange(min(AIMED_BY, len(texts)))).tensors()[0]


def _aimed_by(config: Config) -> str:
    return config.public or "sklearn-docs"


def fresh_model(config: Config, source: Source, say: Say = lambda _: None) -> nn.Module:
    """Untrained, and tried out before anything long begins."""
    model = Network.of(config, source).fresh(say)
    LayerMap.of(model)  # refuses a model without trainable layers
    _try_out(model, config.model, source)
    return model


def blank(like: Examples) -> Inputs:
    """One made-up example of the same kind."""
    if isinstance(like, Texts):
        zeros = torch.zeros(1, *like.shape, dtype=torch.int64)
        return Texts(zeros, torch.ones_like(zeros), torch.zeros(1, dtype=torch.int64)).tensors()[0]
    return torch.zeros(1, *like.shape)


def _try_out(model: nn.Module, name: str, source: Source) -> None:
    """One made-up example, before anything is written: the model must give one score per class."""
    shape = source.train.shape
    try:
        with evaluation(model), torch.no_grad():
            output = run(model, laid_out(blank(source.train), model))
    except Exception as error:
        raise ValueError(f"model {name!r} does not take examples of shape {shape}: {error}") from error
    scores = main_tensor(output)
    if scores is None or scores.dim() != 2 or scores.shape[1] < len(source.classes):
        given = tuple(scores.shape) if scores is not None else type(output).__name__
        raise ValueError(f"model {name!r} gives {given} for 1 example; it must give (1, {len(source.classes)}) scores")


def pooling_of(examples: Examples) -> str | None:
    """What attacks keep of what a layer gives out: of texts, the mean over their words."""
    return "mean" if isinstance(examples, Texts) else None


def laid_out(inputs: Inputs, model: nn.Module) -> Inputs:
    """Images in the memory format of the model: poolings and convolutions can be twice as fast with channels last."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4:
        return inputs
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Conv2d))
    last = any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)
    return inputs.contiguous(memory_format=torch.channels_last) if last else inputs


def test_accuracy(model: nn.Module, inputs: Inputs, labels: Tensor) -> float:
    parts = zip(_parts(inputs), labels.split(EVALUATED_AT_ONCE))
    return accuracy(model, ((laid_out(x, model), y) for x, y in parts))


def _parts(inputs: Inputs) -> list[Any]:
    if isinstance(inputs, Tensor):
        return list(inputs.split(EVALUATED_AT_ONCE))
    columns = {name: rows.split(EVALUATED_AT_ONCE) for name, rows in inputs.items()}
    return [dict(zip(columns, rows)) for rows in zip(*columns.values())]


def shortened(config: Config) -> contextlib.AbstractContextManager[Any]:
    """The precision of the forward pass, and with it of the backward pass."""
    kind = torch.device(config.device).type
    return torch.autocast(kind, torch.bfloat16) if config.precision == "bf16" else contextlib.nullcontext()


def begun_with(config: Config) -> tuple[str, ...]:
    """What a statement says of weights that were there before the run."""
    aimed = (
        f"the adapters write where the released head and {AIMED_BY} texts of {_aimed_by(config)} say, which are taken "
        "to be public",
    )
    return (aimed if config.tune == TANGENT else ()) + tuple(
        f"the model began with the weights of {name} (SHA-256 {digest(weights_file(name))[:16]}): what they were "
        "trained on is covered by this epsilon only as far as private trainings are known to have released them, and "
        "is taken to be public otherwise"
        for name in weights_named(config)
    )


def weights_named(config: Config) -> list[str]:
    """Files and folders of weights that a run begins with."""
    named = [config.init] if config.init is not None else []
    return named + ([config.model.removeprefix(HF)] if config.model.startswith(HF) else [])


def weights_file(name: str) -> Path:
    """A file of weights, or the one in a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = [path / end for end in ("model.safetensors", "pytorch_model.bin")]
        path = next((file for file in inside if file.is_file()), inside[0])
    if not path.is_file():
        raise ValueError(f"init is {name!r}, but {path} is not there; name a .safetensors file, or a folder with one")
    return path


def _fill(model: nn.Module, path: Path, say: Say) -> str:
    """Those of the weights that fit by name and shape; the others stay as they are. Refused where none fit."""
    mine, given = model.state_dict(), read_weights(path, say)
    fitting = {name: tensor for name, tensor in given.items() if name in mine and mine[name].shape == tensor.shape}
    if not fitting:
        raise ValueError(
            f"init is {path}, but none of its {len(given)} tensors fits the model by name and shape: it has "
            f"{', '.join(list(given)[:3])}, the model {', '.join(list(mine)[:3])}"
        )
    model.load_state_dict(fitting, strict=False)
    rest = [name for name in mine if name not in fitting]
    more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
    begun = f"; begun as without it: {', '.join(rest[:5])}{more}" if rest else ""
    return f"init: {len(fitting)} of {len(mine)} tensors of the model are taken from {path}{begun}"


def freeze(model: nn.Module, patterns: str) -> None:
    """Parameters whose names match one of the patterns are not trained."""
    parameters = dict(model.named_parameters())
    for pattern in (pattern.strip() for pattern in patterns.split(",")):
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ValueError(
                f"freeze is {pattern!r}, which matches none of {len(parameters)} parameters such as "
                f"{', '.join(list(parameters)[:3])}"
            )
        for name in names:
            parameters[name].requires_grad = False


def placed(model: nn.Module, device: str) -> nn.Module:
    """On the device; refused by name where there is no such device."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device is {device!r}, which cannot be used here: {' '.join(str(error).split())}") from error


def trainable(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
