"""Models of other people's libraries: `hf:FOLDER`, `hf-config:FILE` (transformers) and `timm:NAME`.

Nothing is downloaded, and no code of a folder is run. `hf:FOLDER` begins with the weights that are there, the others
with random ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmdp.models.tuned import ALL, KINDS, Embedder

HF, HF_CONFIG, TIMM = "hf:", "hf-config:", "timm:"
PREFIXES = (HF, HF_CONFIG, TIMM)
TASKS = CLASSIFY, EMBED = "classify", "embed"


@dataclass(frozen=True)
class Wanted:
    """What a model is to be: for `classes` classes, examples of `shape`, texts of `vocabulary` words.

    task   classify: the library's own model with a head; embed: its encoder, the mean over the words of a text, and a
           linear head that is for training only
    lora   the rank of low-rank adapters, which are then trained with the head instead of the encoder; None: all is
    tune   of an encoder to embed: all of it, a head alone, or in the tangent of a head (`models.tuned`)
    """

    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None
    task: str = CLASSIFY
    lora: int | None = None
    tune: str = ALL


def from_library(name: str, wanted: Wanted) -> nn.Module:
    if name.startswith(TIMM):
        return _timm(name.removeprefix(TIMM), wanted)
    if wanted.tune != ALL and (wanted.task != EMBED or wanted.lora is not None):
        beside = f"task {wanted.task}" if wanted.lora is None else f"lora {wanted.lora}"
        raise ValueError(f"tune is {wanted.tune!r}, which is for task {EMBED} without lora; it was asked for {beside}")
    model = _transformer(name, wanted)
    return model if wanted.lora is None else _adapted(model, wanted.lora)


def check_there(name: str) -> Path:
    """What a name leads to; refused where there is nothing. Models of timm are known when they are made."""
    path, folder = Path(name.partition(":")[2]).expanduser(), name.startswith(HF)
    if not name.startswith(TIMM) and not (path.is_dir() if folder else path.is_file()):
        what = "a folder with config.json and weights" if folder else "a config.json"
        raise ValueError(f"model is {name!r}; {path} is not there: it must be {what} of transformers")
    return path


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The transformer without its head; None of a model that is none."""
    if isinstance(model, Embedder):
        return model.encoder
    inner = getattr(model, "base_model", None)
    return inner if isinstance(inner, nn.Module) and inner is not model else None


def _transformer(name: str, wanted: Wanted) -> nn.Module:
    transformers: Any = _library("transformers", name, "lmdp[hf]")
    trained, path = name.startswith(HF), check_there(name)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, num_labels=wanted.classes)
    except Exception as error:  # whatever a broken file makes the library stumble over
        raise ValueError(f"{path} holds no configuration that transformers can read: {_told(error)}") from error
    _check(config, name, wanted)
    kind = transformers.AutoModel if wanted.task == EMBED else transformers.AutoModelForSequenceClassification
    try:
        with without_its_words(transformers):
            model = _made(kind, path if trained else None, config, wanted)
    except Exception as error:
        raise ValueError(f"model {name!r} could not be made for task {wanted.task}: {_told(error)}") from error
    return KINDS[wanted.tune](model, wanted.classes) if wanted.task == EMBED else model


def _made(kind: Any, folder: Path | None, config: Any, wanted: Wanted) -> nn.Module:
    """In single precision; an encoder without the pooling layer of its own, which nothing would reach."""
    options: list[dict[str, Any]] = [{"add_pooling_layer": False}, {}] if wanted.task == EMBED else [{}]
    for rest in options:
        try:
            if folder is None:
                model: nn.Module = kind.from_config(config, **rest)
            else:
                given = {"config": config, "local_files_only": True, "ignore_mismatched_sizes": True}
                model = kind.from_pretrained(str(folder), dtype=torch.float32, **given, **rest)
        except TypeError:
            if not rest:
                raise
            continue
        break
    return model.float()


def _check(config: Any, name: str, wanted: Wanted) -> None:
    """Refuse texts that the model has no words or no places for, before they become errors of an index."""
    if wanted.vocabulary is None:
        raise ValueError(f"model {name!r} takes texts; the examples have shape {wanted.shape}. Choose data of texts.")
    words, places = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if isinstance(words, int) and words < wanted.vocabulary:
        raise ValueError(
            f"model {name!r} has {words} words and the tokenizer {wanted.vocabulary}; use the tokenizer that belongs "
            "to the model (--tokenizer FOLDER)"
        )
    if isinstance(places, int) and places < wanted.shape[0]:
        raise ValueError(
            f"model {name!r} takes texts of at most {places} words; max_length is {wanted.shape[0]}. Lower it."
        )


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    """Low-rank adapters in place, where peft puts them in this kind of model; the head stays trainable."""
    peft: Any = _library("peft", "--lora", "lmdp[hf]")
    encoder = encoder_of(model) or model
    inside = {id(parameter) for parameter in encoder.parameters()}
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank), encoder)
    except ValueError as error:
        raise ValueError(f"lora is {rank}, but peft does not know where to adapt this model: {_told(error)}") from error
    for parameter in model.parameters():
        if id(parameter) in inside:
            parameter.requires_grad = False
    return model


def merged(model: nn.Module) -> nn.Module:
    """The same model with its adapters, ours or peft's, added into the weights that they adapt, and gone."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "get_delta_weight") and hasattr(module, "get_base_layer"):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    return model


def _timm(name: str, wanted: Wanted) -> nn.Module:
    timm: Any = _library("timm", f"timm:{name}", "lmdp[timm]")
    if len(wanted.shape) != 3:
        raise ValueError(f"model 'timm:{name}' takes images; the examples have shape {wanted.shape}")
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=wanted.classes, in_chans=wanted.shape[0]
        )
    except Exception as error:
        raise ValueError(f"model 'timm:{name}' could not be made: {_told(error)}") from error
    return model


def _library(name: str, asked: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{asked} needs the package {name}, which is missing: pip install '{extra}'") from error


@contextmanager
def without_its_words(transformers: Any) -> Iterator[None]:
    """Without what the library says of weights that are new: that there are some is known."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
