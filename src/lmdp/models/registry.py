"""Models by name: the paper's four, two with tanh, two on fixed features, and `module:factory` for a user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from lmdp.models.cnn import DCNN, SCNN, DeepCNN
from lmdp.models.encoder import TinyEncoder
from lmdp.models.hub import CLASSIFY, PREFIXES, Wanted, check_there, from_library
from lmdp.models.parts import Parts
from lmdp.models.resnet import ResNet18
from lmdp.models.scattering import ScatterCNN, ScatterLinear
from lmdp.models.tuned import ALL
from lmdp.models.vgg import VGG16
from lmdp.models.yours import place, told

Shape = tuple[int, ...]
Builder = Callable[[Shape, int, Parts], nn.Module]


def _s_cnn(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    return SCNN(shape[0], classes, shape[1:], parts)


def _tanh_cnn(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    return SCNN(shape[0], classes, shape[1:], parts, from_zero=True)


def _d_cnn(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    _require_side("d-cnn", shape, 8)
    return DCNN(shape[0], classes, parts)


def _resnet18(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    return ResNet18(shape[0], classes, "cifar", parts=parts)


def _resnet18_imagenet(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    return ResNet18(shape[0], classes, "imagenet", parts=parts)


def _vgg16(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    _require_side("vgg16", shape, 16)
    return VGG16(shape[0], classes, parts=parts)


def _deep_cnn(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    return DeepCNN(shape[0], classes, shape[1:], parts)


def _scatter_linear(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    _require_side("scatter-linear", shape, 8)
    return ScatterLinear(shape[0], classes, shape[1:])


def _scatter_cnn(shape: Shape, classes: int, parts: Parts) -> nn.Module:
    _require_side("scatter-cnn", shape, 8)
    return ScatterCNN(shape[0], classes, shape[1:], parts)


MODELS: dict[str, Builder] = {
    "s-cnn": _s_cnn,
    "d-cnn": _d_cnn,
    "resnet18": _resnet18,
    "resnet18-imagenet": _resnet18_imagenet,
    "vgg16": _vgg16,
    "tanh-cnn": _tanh_cnn,
    "tanh-cnn-deep": _deep_cnn,
    "scatter-linear": _scatter_linear,
    "scatter-cnn": _scatter_cnn,
}
TEXT_MODELS: dict[str, Callable[[int, int], nn.Module]] = {"tiny-encoder": TinyEncoder}
"""Of texts: by the number of words that there are, and of classes."""
WITH_TANH = ("tanh-cnn", "tanh-cnn-deep", "scatter-cnn")
"""Models whose activation is tanh unless another is asked for."""
LINEAR = ("scatter-linear",)
"""Models without an activation or a convolution to choose."""


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    activation: str | None = None,
    standardised: bool = False,
    vocabulary: int | None = None,
    task: str = CLASSIFY,
    lora: int | None = None,
    tune: str = ALL,
) -> nn.Module:
    """An untrained model for examples of this shape; of texts, which have `vocabulary` words.

    `name` is one of `MODELS` or `TEXT_MODELS`, hf:FOLDER, hf-config:FILE or timm:NAME, or `module:factory`: a callable
    of your own, found from the current folder. It is given those of `shape`, `channels`, `size`, `classes`,
    `vocabulary` that it has parameters for. `activation` (the model's own unless given) and `standardised` filters are
    for `MODELS`, and for a factory that has parameters of these names; `task`, `lora`, `tune` are for hf: and
    hf-config:.
    """
    if classes < 1:
        raise ValueError(f"classes is {classes}; a model needs at least 1 class")
    check_name(name)
    chosen = ({"activation": activation} if activation else {}) | ({"standardised": True} if standardised else {})
    for_texts = {"task": (task, CLASSIFY), "lora": (lora, None), "tune": (tune, ALL)}
    if name.startswith(PREFIXES) or name in (*TEXT_MODELS, *LINEAR):
        _refuse_options(name, chosen)
    if not name.startswith(PREFIXES[:2]):
        _refuse_options(name, {key: value for key, (value, unsaid) in for_texts.items() if value != unsaid})
    if name.startswith(PREFIXES):
        return from_library(name, Wanted(shape, classes, vocabulary, task, lora, tune))
    if ":" in name:
        return _from_factory(name, shape, classes, chosen, vocabulary)
    if name in TEXT_MODELS:
        if vocabulary is None:
            raise ValueError(f"model {name!r} takes texts; the examples have shape {shape}. Choose data of texts.")
        return TEXT_MODELS[name](vocabulary, classes)
    if len(shape) != 3:
        raise ValueError(f"model {name!r} takes images (channels, height, width); the examples have shape {shape}")
    # Channels last in memory: faster. A user's own model may rely on the usual layout, in view() for example.
    parts = Parts(activation or ("tanh" if name in WITH_TANH else "relu"), standardised)
    return MODELS[name](shape, classes, parts).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def check_name(name: str) -> None:
    """Refuse a name that nothing can be built by, before any data are read; the module of a factory is imported."""
    if name.startswith(PREFIXES):
        check_there(name)
    elif ":" in name:
        _factory(name)
    elif name not in MODELS and name not in TEXT_MODELS:
        every = [*MODELS, *TEXT_MODELS]
        near = difflib.get_close_matches(name, every, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"model is {name!r}; it must be one of {', '.join(every)}, hf:FOLDER, hf-config:FILE, timm:NAME, or "
            f"module:factory.{hint}"
        )


def module_folder(name: str) -> str | None:
    """Where the module of a `module:factory` was imported from; None of other models."""
    if ":" not in name or name.startswith(PREFIXES):
        return None
    module = name.partition(":")[0]
    file = getattr(_import(module), "__file__", None)
    if file is None:
        return None
    path = Path(file).absolute()
    above = module.count(".") + (path.name == "__init__.py")
    return str(path.parents[above])


def can_import(name: str) -> bool:
    """Whether the module of a `module:factory` can be imported from here."""
    try:
        module_folder(name)
    except Exception:  # of the user's own code
        return False
    return True


def _refuse_options(name: str, options: Mapping[str, object]) -> None:
    for key, value in options.items():
        raise ValueError(f"{key} is {value!r}, which is not for model {name!r}; leave it out")


def _factory(name: str) -> Callable[..., object]:
    module_name, _, factory_name = name.partition(":")
    factory: Callable[..., object] | None = getattr(_import(module_name), factory_name, None)
    if not callable(factory):
        raise ValueError(f"model is {name!r}, but module {module_name!r} has no callable {factory_name!r}")
    return factory


def _from_factory(
    name: str, shape: Shape, classes: int, chosen: Mapping[str, object], vocabulary: int | None
) -> nn.Module:
    factory = _factory(name)
    offered: dict[str, object] = {"shape": shape, "channels": shape[0], "size": shape[-1], "classes": classes}
    offered |= {} if vocabulary is None else {"vocabulary": vocabulary}
    parameters = _parameters(factory)
    if untaken := [key for key in chosen if key not in parameters]:
        raise ValueError(
            f"{untaken[0]} is {chosen[untaken[0]]!r}, which model {name!r} has no parameter for. Leave it out, or give "
            f"the factory a parameter {untaken[0]!r}."
        )
    taken = {key: value for key, value in (offered | dict(chosen)).items() if key in parameters}
    try:
        model = factory(**taken)
    except Exception as error:
        at = f" ({where})" if (where := place(error)) else ""
        raise ValueError(f"model {name!r}{at} failed when called with {taken}: {told(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} made a {type(model).__name__}; a factory must return a torch.nn.Module")
    return model


def _parameters(factory: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:  # some built-in types do not tell
        return set()


def _import(name: str) -> object:
    """Import from the current folder too, as `python -m` would."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.split(".")[0] == error.name.split(".")[0]:
            raise ValueError(f"model names the module {name!r}, which is not in {here} and not installed") from None
        raise ValueError(f"model names the module {name!r}, which needs {error.name!r}, which is missing") from None
    except Exception as error:
        at = f" ({where})" if (where := place(error)) else ""
        raise ValueError(f"your module {name!r}{at} failed when it was imported: {told(error)}") from error
    finally:
        if added:
            sys.path.remove(here)


def _require_side(name: str, shape: Shape, least: int) -> None:
    if min(shape[1:]) < least:
        raise ValueError(
            f"model {name!r} needs images of at least {least}x{least} pixels; the examples are "
            f"{shape[1]}x{shape[2]}. Resize them (size = {least} or more)."
        )
