"""Which rule every module gets, which of its two ways a rule takes, and why: the table, the choice, the report.

    formed  per-example gradients are formed, measured and kept
    gram    norms come from Gram matrices of the positions; the layer's input and output gradient are kept

Both cost one pass of the size of the weight gradient (forming it, or summing at the end). What differs is the rest, and
what stays in memory until the step. Neither changes a result beyond rounding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.utils import parametrize

from lmdp.gradients import bag, compiled, conv, embedding, generic, linear, norm, recurrent, standardised, transposed
from lmdp.gradients.contract import Owner, Rule, Sizes
from lmdp.layers import is_opaque, owned_parameters

RULES: dict[str, Rule] = {
    rule.name: rule  # the one for any module comes last
    for rule in (
        *(linear.RULE, transposed.RULE, conv.RULE, standardised.RULE, embedding.RULE, bag.RULE),
        *(*norm.RULES, recurrent.RULE, generic.RULE),
    )
}
IN_CACHE = 2**15
"""Weights of a layer whose gradients for a usual batch are not written to memory and read back."""

LONG = 2**17
"""Weights of a layer whose gradients, of a few examples, are much to keep."""

MOST_STORED = 2**27
"""Above this many numbers, per-example gradients of one layer are not formed if there is a leaner way."""


def rule_for(module: nn.Module) -> Rule:
    """The exact rule where the module computes what its class computes, otherwise the generic one.

    A subclass with a forward of its own, or with further parameters, goes to the generic rule.
    """
    if not parametrize.is_parametrized(module) and "forward" not in vars(module):
        for rule in RULES.values():
            alike = any(isinstance(module, kind) and _computes_like(type(module), kind) for kind in rule.kinds)
            if alike and rule.is_plain(module):
                return rule
            if rule.like(module):
                return rule
    return generic.RULE


def _computes_like(mine: type[nn.Module], kind: type[nn.Module]) -> bool:
    names = ("forward", "_conv_forward", "permute_hidden")
    return all(getattr(mine, name, None) is getattr(kind, name, None) for name in names)


def owners_of(model: nn.Module, whole: frozenset[str]) -> list[Owner]:
    """One owner for each module with trainable parameters; a module taken as a whole answers for its subtree."""
    modules = dict(model.named_modules())
    if unknown := sorted(whole - set(modules)):
        raise ValueError(f"generic names {unknown}, which are not modules of the model. It has {sorted(modules)}.")
    owners: list[Owner] = []
    inside: list[str] = []
    for name, module in modules.items():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        as_whole = name in whole or is_opaque(module)
        if as_whole:
            inside.append(f"{name}." if name else "")
        named = module.named_parameters() if as_whole else owned_parameters(module)
        parameters = {relative: p for relative, p in named if p.requires_grad}
        if parameters:
            owners.append(Owner(name, module, parameters, generic.RULE if name in whole else rule_for(module)))
    return owners


def by_cost(sizes: Sizes) -> bool:
    """Whether the Gram rule is the cheaper one; above a size that no layer should take, the leaner one."""
    huge = sizes.batch_size * sizes.weights > MOST_STORED and _gram_is_lean(sizes)
    return huge or _gram_work(sizes) < _formed_work(sizes)


def _gram_work(sizes: Sizes) -> int:
    """Two T x T Gram matrices and a few passes over them. Constants fitted on CPU, in multiply-adds."""
    return sizes.positions**2 * (sizes.features + 300)


def _formed_work(sizes: Sizes) -> int:
    return _weights_work(sizes.weights)


def _weights_work(weights: int) -> int:
    """Every per-example weight is written, read for the norm and read again for the sum: little while in cache."""
    return (60 if weights > IN_CACHE else 5) * weights


def gram_limit(features: int, weights: int) -> int:
    """The largest number of positions for which the Gram rule is the cheaper one."""
    return math.isqrt((_weights_work(weights) - 1) // (features + 300))


def _gram_is_lean(sizes: Sizes) -> bool:
    return sizes.factors < sizes.weights


def forms_again(sizes: Sizes) -> bool:
    """Whether formed gradients are formed once more for the sum: if they are long, and much longer than x and g.

    That takes T · weights multiply-adds, a third of what the layer takes anyway, to save weights − factors numbers.
    """
    return sizes.can_form_again and sizes.weights > LONG and 5 * sizes.weights >= 8 * sizes.factors


def _kept(sizes: Sizes, lean: bool) -> int:
    """Bytes that stay until the step: of x and g, or of gradients."""
    return sizes.batch_size * sizes.bytes_each * (sizes.factors if lean else sizes.weights)


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """Of one layer, and why. `again`: what is formed is not kept, but formed again."""

    sizes: Sizes
    gram: bool
    reason: str
    again: bool = False

    @classmethod
    def by_cost(cls, sizes: Sizes) -> Choice:
        gram, work = by_cost(sizes), (_gram_work(sizes) / 1e6, _formed_work(sizes) / 1e6)
        if gram and work[0] >= work[1]:
            return cls(sizes, gram, f"{sizes.weights} weights for every example of a batch are too many to keep")
        sign = "<" if gram else ">="
        why = f"T = {sizes.positions}: Gram {work[0]:.3g}M {sign} forming {work[1]:.3g}M per example"
        return cls(sizes, gram, why)

    @property
    def way(self) -> str:
        return "gram" if self.gram else "formed twice" if self.again else "formed"

    @property
    def kept(self) -> int:
        return _kept(self.sizes, self.gram or self.again)

    @property
    def saving(self) -> int:
        """Bytes that the other way would save."""
        return self.kept - _kept(self.sizes, not self.gram)

    @property
    def extra_work(self) -> int:
        """Of the dearer rule over the cheaper one."""
        return abs(_gram_work(self.sizes) - _formed_work(self.sizes))

    def is_for(self, sizes: Sizes) -> bool:
        """Whether these are the sizes that it was made for, but for the batch."""
        mine = (self.sizes.positions, self.sizes.features, self.sizes.weights, self.sizes.factors)
        return mine == (sizes.positions, sizes.features, sizes.weights, sizes.factors)


@dataclass
class Choices:
    """Remembers every layer's choice. With a memory budget, layers move to their lean rule until the sum fits.

    The sizes of a layer are known when its first gradient arrives. Until then, and until a batch has passed that was as
    large as the present one, a layer under a budget takes its lean rule.
    """

    memory_budget: int | None = None
    by_name: dict[str, Choice] = field(default_factory=dict)
    _settled_for: int = 0
    _warned: bool = False

    def __post_init__(self) -> None:
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ValueError(f"memory_budget is {self.memory_budget}; it is a number of bytes and must be 1 or more")

    def begin(self, batch_size: int) -> None:
        """A backward pass starts to deliver gradients of this many examples."""
        if self.memory_budget is not None and batch_size > self._settled_for and self.by_name:
            self._settle(batch_size, self.memory_budget)

    def prefers_gram(self, name: str, sizes: Sizes) -> bool:
        name = f"{name} {sizes.part}" if sizes.part else name
        before = self.by_name.get(name)
        if before is None or not before.is_for(sizes):
            self._settled_for = 0
        elif self.memory_budget is not None or before.sizes.batch_size == sizes.batch_size:
            return before.gram
        if self.memory_budget is not None:
            choice = Choice(sizes, _gram_is_lean(sizes), "the lean rule, until all layers have been seen")
        else:
            choice = Choice.by_cost(sizes)
            choice.again = not choice.gram and forms_again(sizes)
        self.by_name[name] = choice
        return choice.gram

    def forms_again(self, sizes: Sizes) -> bool:
        """Where gradients are formed. Within a budget they are kept."""
        return self.memory_budget is None and forms_again(sizes)

    def _settle(self, batch_size: int, budget: int) -> None:
        """Every layer on its cheaper rule; then, where that is not lean, by work per byte saved until the sum fits."""
        for name, choice in self.by_name.items():
            self.by_name[name] = Choice.by_cost(replace(choice.sizes, batch_size=batch_size))
        movable = [c for c in self.by_name.values() if c.gram != _gram_is_lean(c.sizes)]
        movable.sort(key=lambda c: c.extra_work / max(1, c.saving))
        for choice in movable:
            if self.kept <= budget:
                break
            sizes, saved = choice.sizes, choice.saving / 2**10 / batch_size
            # Of the cheaper rule, with forward, input gradient and weight gradient.
            whole = min(_gram_work(sizes), _formed_work(sizes)) + 3 * sizes.positions * sizes.weights
            more = 100 * choice.extra_work / max(1, whole)
            choice.gram = not choice.gram
            choice.reason = (
                f"memory budget: saves {saved:.1f} kB an example for about {more:.0f} % more work in this layer"
            )
        self._settled_for = batch_size
        if self.kept > budget and not self._warned:
            self._warned = True
            # Without numbers of the batch: its size is private.
            warnings.warn(
                f"memory_budget is {budget} bytes, and the leanest rules keep more for a batch of this "
                "size. Set max_physical_batch_size to split batches.",
                stacklevel=2,
            )

    @property
    def kept(self) -> int:
        """Bytes that all layers with a choice keep until the step."""
        return sum(choice.kept for choice in self.by_name.values())


# -- the report -------------------------------------------------------------------------------------------------------


Repeated = Mapping[str, tuple[str | None, str]]
"""Modules whose parameters were used more than once in a pass → how that is dealt with, unless by rule, and why."""


@dataclass(frozen=True)
class PlannedModule:
    """One module of the plan. `kept_bytes` of one example stay in memory until the step, where there is a choice."""

    name: str
    kind: str
    rule: str
    reason: str
    kept_bytes: int | None = None

    @classmethod
    def of(cls, owner: Owner, choices: Choices, *, numbers: bool) -> PlannedModule:
        name, kind = owner.name, type(owner.module).__name__
        mine = [choice for at, choice in choices.by_name.items() if at == name or at.startswith(f"{name} ")]
        if numbers and mine:
            kept = sum(choice.kept // choice.sizes.batch_size for choice in mine)
            ways = sorted({choice.way for choice in mine})
            return cls(name, kind, " and ".join(ways), "; ".join(dict.fromkeys(c.reason for c in mine)), kept)
        features = owner.rule.features(owner.module) if "weight" in owner.trainable else None
        if features is None:
            return cls(name, kind, *owner.rule.explain(owner.trainable))
        if choices.memory_budget is not None:
            return cls(name, kind, "either", "gram or formed, by cost and by what the memory budget leaves")
        limit = gram_limit(features, owner.parameters["weight"].numel())
        return cls(name, kind, "either", f"gram for up to {limit} positions of an example, formed for more")

    def used_again(self, rule: str | None, reason: str) -> PlannedModule:
        """The same of a module whose parameters are used more than once."""
        if rule is None:
            return replace(self, reason=f"{reason}; {self.reason}")
        return replace(self, rule=rule, reason=reason, kept_bytes=None)


@dataclass(frozen=True)
class Plan:
    """One line per module; printing it gives a table.

    It follows from the modules alone, unless it has `numbers`: those are of the last batch (the length of its
    sequences, the rule that this led to, what was kept of an example), and they are not private.
    """

    modules: tuple[PlannedModule, ...]
    memory_budget: int | None
    kept_bytes: int | None
    loops: str

    @classmethod
    def of(cls, owners: Iterable[Owner], choices: Choices, repeated: Repeated, *, numbers: bool) -> Plan:
        every = (PlannedModule.of(owner, choices, numbers=numbers) for owner in owners)
        modules = tuple(m.used_again(*repeated[m.name]) if m.name in repeated else m for m in every)
        kept = sum(m.kept_bytes or 0 for m in modules) if numbers else None
        return cls(modules, choices.memory_budget, kept, compiled.description())

    def __str__(self) -> str:
        width = max((len(m.name) for m in self.modules), default=0)
        lines = [
            f"{m.name:{width}s}  {m.kind:12s}  {m.rule:12s}  {_kilobytes(m.kept_bytes):>9s}  {m.reason}"
            for m in self.modules
        ]
        budget = "no memory budget" if self.memory_budget is None else f"budget {self.memory_budget / 2**20:.1f} MB"
        if self.kept_bytes is None:
            return "\n".join([*lines, budget, self.loops])
        kept = f"kept between backward and step: {_kilobytes(self.kept_bytes)} an example ({budget})"
        return "\n".join([*lines, kept, "numbers of the last batch: not private", self.loops])


def _kilobytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**10:.1f} kB"
