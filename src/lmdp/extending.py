"""Your own pieces: one decorator or call for each table. What is added is known wherever the table is read.

    method         how gradients of examples are bounded: norms [B, L] → scales [B, L]
    weight_source  where the layer weights of `lm` come from: number of a measurement → one weight for each layer
    rule           per-example gradients of a kind of module: a use → {parameter: [B, *shape]}
    attack         numbers in which members may differ: evidence → [n, numbers]
    reader         a kind of data that a SPEC can name: a request → a source

A recipe is a TOML file of your own, and needs no call: `lmdp train --recipe mine.toml`.

A piece is tried when it is added, as far as that is possible, and refused where it breaks its contract. An error inside
it is raised as `YourPieceFailed`, with its name and where it stands. `removed` takes a piece out of its table again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.plan import RULES
from lmdp.gradients.rows import Rows, Stored
from lmdp.layers import LayerMap
from lmdp.membership.attacks import ATTACKS, Attack
from lmdp.methods import METHODS, SOURCES, Method, WeightSource

if TYPE_CHECKING:
    from lmdp.data.images import Source
    from lmdp.data.request import Request
    from lmdp.membership.attacks.summary import Measure
    from lmdp.membership.evidence import Array, Evidence

Function = Callable[..., Any]
EXACT = 1e-6
"""Relative, in double precision: how far a rule may be from one example at a time."""
SPREAD = 1e6
"""Norms on which a method is tried differ by up to this factor, either way."""


PARTS = ("labels", "views", "outputs")
"""What evidence has beside representations, where there is such a thing."""


class YourPieceFailed(RuntimeError):
    """An error inside a piece that was added, or a result that breaks its contract: not one of the library."""


def method(name: str, *, label: str = "", sensitivity: Callable[[int], float] = lambda layers: 1.0) -> Function:
    """Decorate (norms [B, L], C) → scales [B, L]. `sensitivity`: the bound for so many layers, in units of C.

    Each example is scaled by itself, and what would pass the bound is scaled down to it: whatever the function gives,
    the sensitivity holds.
    """

    def add(function: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
        called = Called("method", name, function)
        bounded = functools.partial(_bounded, called, sensitivity)
        for layers in (1, 5):
            bounded(torch.rand(8, layers, dtype=torch.float64).mul_(SPREAD).add_(1 / SPREAD), 1.0)
        _add(METHODS, name, Method(name, label or name, bounded, sensitivity), "method")
        return function

    return add


def _bounded(called: Called, sensitivity: Callable[[int], float], norms: Tensor, clip: float) -> Tensor:
    rows = [called(row[None], clip) for row in norms]
    for row in rows:
        if not isinstance(row, Tensor) or row.shape != (1, norms.shape[1]):
            shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise called.broken(f"{shape} for norms of shape {(1, norms.shape[1])}")
    scales = torch.cat([row.to(norms) for row in rows]) if rows else norms.clone()
    scales = scales.where(torch.isfinite(scales) & (scales >= 0), scales.new_zeros(()))
    most = sensitivity(norms.shape[1]) * clip
    length = (scales * norms).norm(dim=1, keepdim=True)
    within: Tensor = scales * (most * (1 - 1e-12) / length).clamp(max=1.0).where(length > 0, length.new_ones(()))
    return within


def weight_source(name: str, *, help: str = "") -> Function:
    """Decorate: number of the measurement → weights of the layers, above 0. For method `lm`, with weights=NAME.

    It is asked every `public_every` steps. Whether it reads private data is not known here: such runs are not
    certified.
    """

    def add(function: Callable[[int], Sequence[float] | Tensor]) -> Callable[[int], Sequence[float] | Tensor]:
        called = Called("weight source", name, function)

        def measure(number: int, layers: int) -> Tensor:
            given = called(number)
            try:
                weights = torch.as_tensor(given, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                weights = torch.empty(0)
            if weights.shape != (layers,) or not bool((torch.isfinite(weights) & (weights > 0)).all()):
                raise called.broken(f"{given!r}; the model has {layers} layers: a number above 0 for each")
            return weights

        unknown = f"the layer weights come from {name!r}, of your own: whether it reads private data is not known here"
        _add(SOURCES, name, WeightSource(name, help or name, refuted=unknown, measure=measure), "weight source")
        METHODS["lm"] = replace(METHODS["lm"], sources=(*METHODS["lm"].sources, name))
        return function

    return add


def rule(name: str, *kinds: type[nn.Module], examples: Sequence[Example]) -> Function:
    """Decorate: a use of such a module → {parameter: gradients [B, *shape]}. Tried on `examples` at once."""

    def add(function: Callable[[Use], Mapping[str, Tensor]]) -> Callable[[Use], Mapping[str, Tensor]]:
        called = Called("rule", name, function)

        def piece(use: Use) -> Piece:
            gradients = called(use)
            shapes = {each: tuple(use.module.get_parameter(each).shape) for each in sorted(use.trainable)}
            wanted = {each: (use.batch_size, *shape) for each, shape in shapes.items()}
            if (gave := _shapes(gradients)) != wanted:
                raise called.broken(f"{gave}; it must give {wanted}")
            return Stored({each: Rows.of(g.reshape(use.batch_size, -1)) for each, g in gradients.items()})

        record = Rule(
            name, kinds, piece, lambda _: ("formed", "by a rule of your own"), tuple(examples), is_plain=lambda _: True
        )
        _add(RULES, name, record, "rule")
        RULES["generic"] = RULES.pop("generic")  # the one for any module comes last
        try:
            for example in examples:
                _try_rule(name, example)
        except BaseException:
            del RULES[name]
            _ADDED.discard(("rule", name))
            raise
        return function

    return add


def _shapes(gradients: Any) -> Any:
    """Shapes by name, in the order of names; of anything else what it is."""
    if not isinstance(gradients, Mapping):
        return type(gradients).__name__
    return {each: tuple(getattr(gradients[each], "shape", ())) for each in sorted(gradients)}


def _try_rule(name: str, example: Example) -> None:
    """Against one example at a time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = example.make().double()
        limit = example.indices
        x = torch.randint(0, limit, (4, *example.shape)) if limit else torch.randn(4, *example.shape).double()

    def loss(batch: Tensor) -> Tensor:
        flat = module(batch).reshape(len(batch), -1)
        weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
        total: Tensor = (flat.square() * weights).sum()
        return total

    layers = LayerMap.of(module)
    capture = Capture(module, layers)
    try:
        loss(x).backward()
        norms = capture.take().squared_norms(layers).double()
    finally:
        capture.detach()
    expected = torch.stack([_squared_norms(module, loss(x[i : i + 1]), layers) for i in range(len(x))])
    worst = float(((norms.detach() - expected).abs() / expected.clamp(min=1e-12)).max())
    if not worst <= EXACT:
        raise YourPieceFailed(f"your rule {name!r} is not exact: squared norms differ by {worst:.1e} of the true ones")


def _squared_norms(module: nn.Module, loss: Tensor, layers: LayerMap) -> Tensor:
    names = [name for layer in layers for name in layer.parameters]
    parameters = dict(module.named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(loss, [parameters[name] for name in names])))
    return torch.stack([torch.stack([gradients[n].square().sum() for n in each.parameters]).sum() for each in layers])


def attack(name: str, *, help: str = "", needs: Sequence[str] = ()) -> Function:
    """Decorate: evidence of n examples → numbers [n, k] of each by itself. A likelihood ratio is fitted on them.

    `needs` are parts of the evidence that must be there: "labels", "views", "outputs".
    """
    if unknown := [part for part in needs if part not in PARTS]:
        raise ValueError(f"attack {name!r} needs {unknown[0]!r}; evidence can have {', '.join(PARTS)}")

    def add(function: Callable[[Evidence], Array]) -> Callable[[Evidence], Array]:
        called = Called("attack", name, function)

        def numbers(evidence: Evidence) -> Array:
            table: Array = called(evidence)
            shape: tuple[int, ...] = getattr(table, "shape", ())
            if len(shape) != 2 or shape[0] != len(evidence) or not np.issubdtype(table.dtype, np.number):
                raise called.broken(f"{type(table).__name__} {shape}; it must give numbers [{len(evidence)}, k]")
            if not np.isfinite(table).all():
                raise called.broken("numbers that are not finite")
            return table

        def summary(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
            return numbers(evidence), numbers

        _add(ATTACKS, name, Attack(name, help or name, summary=summary, needs=tuple(needs)), "attack")
        return function

    return add


def reader(name: str, *, help: str = "", path: str = "", options: Sequence[str] = ()) -> Function:
    """Decorate: a request → a source. `path`: what stands after a colon in a SPEC; "PATH" for a file or folder."""
    from lmdp.data.images import Source
    from lmdp.data.readers import READERS, Reader

    def add(function: Callable[[Request], Source]) -> Callable[[Request], Source]:
        called = Called("data reader", name, function)

        def read(request: Request) -> Source:
            source = called(request)
            if not isinstance(source, Source):
                raise called.broken(f"{type(source).__name__}; it must give an lmdp.data.Source")
            return source

        _add(READERS, name, Reader(name, help or name, read, path=path, options=tuple(options)), "data reader")
        return function

    return add


def removed(name: str) -> bool:
    """Take the pieces of your own that have this name out of their tables; says whether there was one.

    What came with the library stays, also where a piece of your own in another table has its name.
    """
    from lmdp.data.readers import READERS

    tables: dict[str, dict[str, Any]] = {
        "method": METHODS,
        "weight source": SOURCES,
        "rule": RULES,
        "attack": ATTACKS,
        "data reader": READERS,
    }
    taken = [kind for kind in tables if (kind, name) in _ADDED]
    for kind in taken:
        tables[kind].pop(name, None)
        _ADDED.discard((kind, name))
    METHODS["lm"] = replace(METHODS["lm"], sources=tuple(s for s in METHODS["lm"].sources if s in SOURCES))
    return bool(taken)


_ADDED: set[tuple[str, str]] = set()
"""(kind of piece, name)."""


def _add(table: dict[str, Any], name: str, record: Any, kind: str) -> None:
    if name in table:
        remove = f", or lmdp.extending.removed({name!r})" if (kind, name) in _ADDED else ""
        raise ValueError(f"{kind} {name!r} is there already; choose another name{remove}")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{kind} is called {name!r}; a name is made of letters, digits, - and _")
    table[name] = record
    _ADDED.add((kind, name))


class Called:
    """A function of yours, whose errors say whose they are."""

    def __init__(self, kind: str, name: str, function: Function) -> None:
        code = getattr(function, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        self._function, self._whose = function, f"your {kind} {name!r}{where}"

    def __call__(self, *args: Any) -> Any:
        try:
            return self._function(*args)
        except YourPieceFailed:
            raise
        except Exception as error:
            raise YourPieceFailed(f"{self._whose} failed: {type(error).__name__}: {error}") from error

    def broken(self, gave: str) -> YourPieceFailed:
        """For a result that breaks the contract."""
        return YourPieceFailed(f"{self._whose} gave {gave}")
