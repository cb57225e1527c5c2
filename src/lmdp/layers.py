"""What "layer l" means, the same everywhere: in risk profiles, in private training, in audits.

A layer is one module that owns trainable parameters, together with the normalisation modules that follow it.
Layers come in execution order, so that the l-th number of a risk profile belongs to the l-th layer of the model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

ROOT = "(root)"
"""Name of the layer made of parameters that the outermost module itself owns."""

CONTAINERS = (list, dict, set, deque, OrderedDict)
"""Attributes of a module to which a forward pass may add."""

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Layer:
    """One row of the layer map: who owns the parameters, and where the representation is read."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    tap: str


@dataclass(frozen=True)
class LayerMap:
    """The layers of a model in execution order; every trainable parameter is in exactly one of them."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, model: nn.Module, *, frozen: bool = False) -> LayerMap:
        """Read the layers off a model without running it on data.

        Execution order is found by symbolic tracing; a model that cannot be traced (data-dependent control flow)
        keeps the order in which its modules were registered. Frozen parameters belong to no layer,
        unless `frozen` says that they count (an audit looks at every layer that computes).
        A parameter tied between two modules belongs to the first that uses it.
        """
        groups: list[Layer] = []
        seen: set[int] = set()
        for module_name in _execution_order(model):
            module = model.get_submodule(module_name)
            names = _fresh_parameters(module_name, module, seen, frozen)
            if not names:
                continue
            if isinstance(module, NORMS) and groups:
                groups[-1] = _join(groups[-1], module_name, names)
            else:
                groups.append(Layer(module_name or ROOT, (module_name,), names, module_name))
        return cls(tuple(groups))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Parameter name → position of its layer."""
        return {name: i for i, layer in enumerate(self.layers) for name in layer.parameters}

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @overload
    def __getitem__(self, at: int) -> Layer: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, at: int | slice) -> Layer | tuple[Layer, ...]:
        return self.layers[at]


UNKNOWN = 0.5
"""The error rate of guessing: a layer about which nothing is known."""


def error_rates_for(risk: Any, layers: LayerMap) -> list[float]:
    """Error rates in layer order, from a profile, a {layer: rate} mapping, a sequence, or None (all alike)."""
    rates = getattr(risk, "error_rates", risk)
    if rates is None:
        return [UNKNOWN] * len(layers)
    if isinstance(rates, Mapping):
        missing = [name for name in layers.names if name not in rates]
        unknown = [name for name in rates if name not in layers.names]
        if missing or unknown:
            raise ValueError(
                f"the risk profile belongs to another architecture: it lacks layers {missing} and has layers {unknown} "
                f"that the model does not ({len(layers) - len(missing)} of {len(layers)} match). Estimate it on the "
                "same architecture."
            )
        return [float(rates[name]) for name in layers.names]
    if isinstance(rates, Sequence) or hasattr(rates, "tolist"):
        values = [float(rate) for rate in rates]
        if len(values) != len(layers):
            raise ValueError(
                f"risk has {len(values)} error rates, but the model has {len(layers)} layers: {', '.join(layers.names)}"
            )
        return values
    raise TypeError(
        f"risk is a {type(risk).__name__}; pass a RiskProfile, a {{layer name: error rate}} mapping or a sequence"
    )


def is_opaque(module: nn.Module) -> bool:
    """Whether a module reads the parameters of its children itself, so that it must be taken as one piece."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) or parametrize.is_parametrized(module)


def owned_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters a module answers for: its whole subtree's if it is opaque, otherwise those of no module inside it.

    A parameter that a module shares with one inside it, under two names, is the inner one's: it would count twice.
    """
    if is_opaque(module):
        yield from module.named_parameters()
        return
    inside = {id(p) for child in module.children() for p in child.parameters()}
    yield from ((name, p) for name, p in module.named_parameters(recurse=False) if id(p) not in inside)


def _join(layer: Layer, module_name: str, names: tuple[str, ...]) -> Layer:
    return Layer(layer.name, (*layer.modules, module_name), layer.parameters + names, module_name)


def _fresh_parameters(module_name: str, module: nn.Module, seen: set[int], frozen: bool) -> tuple[str, ...]:
    names = []
    for name, parameter in owned_parameters(module):
        if (parameter.requires_grad or frozen) and id(parameter) not in seen:
            seen.add(id(parameter))
            names.append(f"{module_name}.{name}" if module_name else name)
    return tuple(names)


def _execution_order(model: nn.Module) -> list[str]:
    """Names of all modules, those that symbolic tracing reaches first, in the order it reaches them."""
    registered = [name for name, _ in model.named_modules()]
    traced = [name for name in _traced_order(model) if name in set(registered)]
    return list(dict.fromkeys([*traced, *registered]))


def _traced_order(model: nn.Module) -> list[str]:
    if is_opaque(model) or not any(True for _ in model.children()):
        return []
    try:
        graph = _OrderTracer().trace(model)
    except Exception:  # any model may refuse to be traced, for any reason: registration order is the documented answer
        return []
    order = []
    for node in graph.nodes:
        if node.op == "call_module":
            order.append(str(node.target))
        elif node.op == "get_attr":
            order.append(str(node.target).rpartition(".")[0])
    return order


class _OrderTracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        childless = not any(True for _ in m.children())
        return bool(childless or is_opaque(m) or super().is_leaf_module(m, module_qualified_name))

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> torch.fx.Graph:
        """Tracing runs the model's forward on symbols; whatever that assigns to a module is put back afterwards."""
        before = Attributes(root)
        try:
            return super().trace(root, concrete_args)
        finally:
            before.restore()


class Attributes:
    """What the modules of a model hold, to be put back after a run that nobody is to notice.

    Of a list, dict, set or deque the contents too, and of a tensor that is not trained the values; not what an object
    of another class holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(vars(module))) for module in model.modules()]
        values = [value for _, attributes in self._modules for value in attributes.values()]
        self._contents = [(value, copy.copy(value)) for value in values if type(value) in CONTAINERS]
        tensors = [*model.buffers(), *(value for value in values if isinstance(value, Tensor))]
        self._tensors = [(t, t._version, t.detach().clone()) for t in tensors if not t.requires_grad]

    def restore(self) -> None:
        for module, attributes in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
        for container, contents in self._contents:
            container.clear()
            container.extend(contents) if isinstance(container, list | deque) else container.update(contents)
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                tensor.data.copy_(value)
