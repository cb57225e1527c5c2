"""What "layer l" means, the same everywhere: in risk profiles, in private training, in audits.

By module, a layer is one module that owns trainable parameters, together with the normalisation modules that follow
it. By block, it is one of the modules of one class that stand in an `nn.ModuleList` or `nn.Sequential`, each with
modules inside (of lists within lists the outermost counts); what the same tower holds before its blocks is one layer
more, and all else is taken by module. In both, what an adapter (LoRA, DoRA, IA3) adds belongs to the module it adapts.

Layers come in execution order, so that the l-th number of a risk profile belongs to the l-th layer of the model.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, overload

import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

ROOT = "(root)"
"""Name of the layer made of parameters that the outermost module itself owns."""

CONTAINERS = (list, dict, set, deque, OrderedDict)
"""Attributes of a module to which a forward pass may add."""

HOLDERS = (nn.ParameterList, nn.ParameterDict)
NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

GROUPINGS = MODULE, BLOCK = "module", "block"
CUSTOM = "custom"
"""How the layers of a map that somebody put together are grouped."""


@dataclass(frozen=True)
class Layer:
    """One row of the layer map: who owns the parameters, and where the representation is read.

    That is what the module `tap` gives out, or what it is given (`reads`).
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    tap: str
    reads: Literal["output", "input"] = "output"


@dataclass(frozen=True)
class LayerMap:
    """The layers of a model in execution order; every trainable parameter is in exactly one of them."""

    layers: tuple[Layer, ...]
    by: str = CUSTOM

    @classmethod
    def of(cls, model: nn.Module, by: str = MODULE, *, frozen: bool = False) -> LayerMap:
        """Read the layers off a model without running it on data.

        by       "module", or "block": see above. A model without blocks has the same layers either way
        frozen   whether frozen parameters count too: an audit looks at every layer that computes

        Execution order is found by symbolic tracing; a model that cannot be traced (data-dependent control flow)
        keeps the order in which its modules were registered. A parameter tied between two modules belongs to the first
        that uses it.
        """
        if by not in GROUPINGS:
            raise ValueError(f"layers are grouped by {by!r}; it must be one of {', '.join(GROUPINGS)}")
        order = _execution_order(model)
        homes = _Homes(model, order, blocks=by == BLOCK)
        groups: dict[str, Layer] = {}
        last: str | None = None  # the layer that a normalisation module would join
        seen: set[int] = set()
        for module_name in order:
            module = model.get_submodule(module_name)
            names = _fresh_parameters(module_name, module, seen, frozen)
            if not names:
                continue
            home = homes.of(module_name)
            if home is None and isinstance(module, NORMS) and last is not None:
                groups[last] = replace(_join(groups[last], module_name, names), tap=module_name)
                continue
            home = home or Layer(module_name or ROOT, (), (), module_name)
            groups[home.name] = _join(groups.get(home.name, home), module_name, names)
            last = None if homes.is_whole(home) else home.name
        return cls(tuple(groups.values()), by)

    @classmethod
    def chosen(cls, model: nn.Module, layers: str | LayerMap) -> LayerMap:
        """What a user asked for: a grouping by its name, or a map of the user's, which must be one of this model."""
        if isinstance(layers, str):
            return cls.of(model, layers)
        if not isinstance(layers, LayerMap):
            raise TypeError(f"layers is a {type(layers).__name__}; pass {' or '.join(GROUPINGS)}, or a LayerMap")
        layers.check(model)
        return layers

    def check(self, model: nn.Module) -> None:
        """Refuse a map that does not have every trainable parameter of the model in exactly one layer."""
        remedy = "Begin with LayerMap.of(model), and join layers of it."
        if len(set(self.names)) < len(self.layers):
            raise ValueError(f"the layer map has two layers of the same name among {list(self.names)}. Rename one.")
        if empty := [layer.name for layer in self.layers if not layer.parameters]:
            raise ValueError(f"layers {empty} of the layer map have 0 parameters; each needs at least 1. {remedy}")
        modules = dict(model.named_modules(remove_duplicate=False))
        if unknown := [layer.tap for layer in self.layers if layer.tap not in modules]:
            raise ValueError(f"the layer map reads modules {unknown}, which the model does not have. {remedy}")
        trained = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        listed = Counter(trained.get(name) for layer in self.layers for name in layer.parameters)
        wrong = {
            "has parameters that the model does not have or train": [n for n in self.index if n not in trained],
            "lacks parameters that are trained": [n for n, p in trained.items() if not listed[p]],
            "has parameters more than once": [n for n, p in trained.items() if listed[p] > 1],
            "divides modules whose parameters are measured together": self._divided(model, trained),
        }
        if said := [f"{what}: {', '.join(names[:5])}" for what, names in wrong.items() if names]:
            raise ValueError(f"the layer map is not one of this model; it {'; it '.join(said)}. {remedy}")

    def _divided(self, model: nn.Module, trained: Mapping[str, int]) -> list[str]:
        """Modules with parameters in two layers. Tied ones are measured one by one, and may be anywhere."""
        at = {trained.get(name): i for name, i in self.index.items()}
        mine = {n: [id(p) for _, p in owned_parameters(m) if p.requires_grad] for n, m in model.named_modules()}
        uses = Counter(p for parameters in mine.values() for p in parameters)
        lone = {n: parameters for n, parameters in mine.items() if all(uses[p] == 1 for p in parameters)}
        return [n or ROOT for n, parameters in lone.items() if len({at.get(p) for p in parameters}) > 1]

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
    """Error rates in layer order, from a profile, a {layer: rate} mapping, a sequence, or None (all alike).

    A profile decides itself how far what it measured is to be believed, and its note is passed on.
    """
    rates = getattr(risk, "weight_rates", getattr(risk, "error_rates", risk))
    if rates is None:
        return [UNKNOWN] * len(layers)
    if isinstance(rates, Mapping):
        missing = [name for name in layers.names if name not in rates]
        unknown = [name for name in rates if name not in layers.names]
        if missing or unknown:
            refuse_other_grouping(getattr(risk, "by", layers.by), layers.by)
            raise ValueError(
                f"the risk profile belongs to another architecture: it lacks layers {missing} and has layers {unknown} "
                f"that the model does not ({len(layers) - len(missing)} of {len(layers)} match). Estimate it on the "
                "same architecture."
            )
        if note := getattr(risk, "note", ""):
            warnings.warn(note, stacklevel=3)
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


def refuse_other_grouping(of_profile: str, of_training: str) -> None:
    """Say so if it is the grouping that differs, and not the architecture."""
    if of_profile != of_training:
        remedy = "the same layer map" if of_profile == CUSTOM else f'layers="{of_profile}"'
        raise ValueError(
            f"the risk profile has layers by {of_profile}, and the training by {of_training}. Pass {remedy} to "
            f"make_private (lmdp train --layers {of_profile}), or estimate the risk by {of_training}."
        )


def is_opaque(module: nn.Module) -> bool:
    """Whether a module reads the parameters of its children itself, so that it must be taken as one piece."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) or parametrize.is_parametrized(module)


def owned_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters a module answers for: its whole subtree's if it is opaque, otherwise those of no module inside it.

    A parameter that a module shares with one inside it, under two names, is the inner one's: it would count twice. A
    list or dictionary of parameters computes nothing: what it holds is read by the module that it is in.
    """
    if is_opaque(module):
        yield from module.named_parameters()
        return
    if isinstance(module, HOLDERS):
        return
    children = dict(module.named_children())
    inside = {id(p) for child in children.values() if not isinstance(child, HOLDERS) for p in child.parameters()}
    held = ((f"{at}.{name}", p) for at, c in children.items() if isinstance(c, HOLDERS) for name, p in _all_of(c))
    mine = (*module.named_parameters(recurse=False), *held)
    yield from ((name, p) for name, p in mine if id(p) not in inside)


def _all_of(holder: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return holder.named_parameters(remove_duplicate=False)


class _Homes:
    """Which layer the modules belong to that are not layers of their own: in blocks, before blocks, in adapters."""

    def __init__(self, model: nn.Module, order: Sequence[str], *, blocks: bool) -> None:
        self._hosts: set[str] = set()
        self._blocks: dict[str, str] = {}  # each with the list it stands in
        self._stems: dict[str, Layer] = {}  # by the modules before blocks
        whole: set[str] = set()  # what is not looked into
        for name, module in model.named_modules():
            if not whole.isdisjoint(_around(name)):
                continue
            if is_opaque(module):
                whole.add(name)
            elif _is_host(module):
                self._hosts.add(name)
                whole.add(name)
            elif blocks and _holds_blocks(module):
                self._blocks |= {_within(name, child): name for child in module._modules}
                whole.add(name)
        if self._blocks:
            self._find_stems(model, order)

    def of(self, name: str) -> Layer | None:
        """The layer that a module is part of, still without its parameters; None if it is one by itself."""
        if name in self._stems:
            return self._stems[name]
        at = self._block(name) or next((around for around in _around(name) if around in self._hosts), None)
        return None if at is None else Layer(at or ROOT, (), (), at)

    def is_whole(self, layer: Layer) -> bool:
        """Whether a layer is complete without the normalisation that follows it."""
        return layer.name in self._blocks or layer.reads == "input"

    def _block(self, name: str) -> str | None:
        return next((around for around in _around(name) if around in self._blocks), None)

    def _find_stems(self, model: nn.Module, order: Sequence[str]) -> None:
        """A tower is the largest module around a list of blocks that holds no other; its stem is what precedes them."""
        lists = dict.fromkeys(self._blocks.values())
        holding = Counter(around for name in lists for around in _around(name))
        place = {name: i for i, name in enumerate(order)}
        for name in lists:
            tower = next(around for around in _around(name) if holding[around] == 1)
            first = min((n for n in order if name in _around(n) and n != name), key=place.__getitem__)
            before = {n: model.get_submodule(n) for n in order[: place[first]] if tower in _around(n)}
            before = {n: m for n, m in before.items() if any(_owned(model, n))}
            if before:
                stem = Layer(_stem_name(before, lists), (), (), self._block(first) or first, "input")
                self._stems |= dict.fromkeys(before, stem)
        # A table that stems share may be registered beside them, in a module that is never called (T5's).
        shared = {id(p): stem for n, stem in [*self._stems.items()][::-1] for _, p in _owned(model, n)}
        for n in (n for n in order if self.of(n) is None):
            owned = [shared.get(id(p)) for _, p in _owned(model, n)]
            if owned and owned[0] is not None and all(stem is owned[0] for stem in owned):
                self._stems[n] = owned[0]


def _stem_name(modules: Mapping[str, nn.Module], lists: Iterable[str]) -> str:
    """After the module that holds them all and no blocks; where there is none, "embeddings" of what holds both."""
    names = [name for name, module in modules.items() if not isinstance(module, NORMS)] or list(modules)
    common = [around for around in _around(names[0]) if all(around in _around(name) for name in names)][-1]
    if len(names) == 1 or not any(common in _around(name) for name in lists):
        return common or ROOT
    return _within(common, "embeddings")


def _owned(model: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    return list(owned_parameters(model.get_submodule(name)))


def _around(name: str) -> list[str]:
    """Names of the modules around a module, from the outermost, and its own."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _within(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _is_host(module: nn.Module) -> bool:
    """Whether a module is another one together with what adapts or replaces it, as peft wraps modules."""
    return "base_layer" in module._modules or {"original_module", "modules_to_save"} <= module._modules.keys()


def _holds_blocks(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    inside = [child._modules.get("base_layer") or child for child in module.children()]
    if len(inside) < (1 if isinstance(module, nn.ModuleList) else 2) or len({type(child) for child in inside}) > 1:
        return False
    composed = all(any(True for _ in child.children()) and not is_opaque(child) for child in inside)
    return composed and any(True for _ in module.parameters())


def _join(layer: Layer, module_name: str, names: tuple[str, ...]) -> Layer:
    return replace(layer, modules=(*layer.modules, module_name), parameters=layer.parameters + names)


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
        for module in root.modules():  # nobody's hooks are for symbols
            module._forward_pre_hooks.clear(), module._forward_hooks.clear()
        try:
            return super().trace(root, concrete_args)
        finally:
            before.restore()


class Attributes:
    """What the modules of a model hold, to be put back after a run that nobody is to notice.

    Of a list, dict, set or deque the contents too, and of a tensor that is not trained the values; not what an object
    of another class holds, nor which parameters a module has under `fully_shard`: they come and go as it runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(vars(module))) for module in model.modules()]
        values = [value for _, attributes in self._modules for value in attributes.values()]
        sharded = {id(m._parameters) for m in model.modules() if "FSDPModule" in str(type(model).__mro__)}
        self._contents = [(v, copy.copy(v)) for v in values if type(v) in CONTAINERS and id(v) not in sharded]
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
