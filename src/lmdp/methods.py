"""One table of methods and one of weight sources: everything that is said of a method stands in its record.

A method turns the norms n [B, L] of every example's gradient in every layer into scales s [B, L]. The step is then, for
each layer, `sum_i s_il g_il`, plus noise. Beside the formula stands how far one example can move that sum, in units of
the clip norm C, and under which neighbouring relation.

Configuration, command line, report, bench and docs read these records too, so torch is not imported here: formulas are
written in the methods of the tensors that they are given. To add a method, add a record; tests find it by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ADD_OR_REMOVE = "add or remove one example"
STABILISER = 0.01
"""The gamma of Auto-S and DP-PSAC."""
LEAST_SHARE = 2.0**-14
"""Of an example's whole gradient. A layer that has less is not raised to its full share by `lm`: it may be rounding, as
that of key biases in attention is, and rounding follows from who else is in the batch."""


@dataclass(frozen=True)
class Method:
    """How the gradients of examples are bounded and combined.

    label        as reports name it
    scales       (norms [B, L], C) → scales [B, L]; None: nothing is bounded, and nothing is promised
    sensitivity  number of layers → how far one example can move the sum, in units of C
    sources      where layer weights may come from, the default first; () if layers are not reweighted. A reweighted
                 method keeps its bound only once weights of norm 1, fixed before the batch is seen, are applied
    optimal      whether those weights minimise the bias of the step, instead of following norms and risk
    relation     the neighbours for which the sensitivity holds
    """

    name: str
    label: str
    scales: Callable[[Tensor, float], Tensor] | None
    sensitivity: Callable[[int], float] = lambda layers: 1.0
    sources: tuple[str, ...] = ()
    optimal: bool = False
    relation: str = ADD_OR_REMOVE

    @property
    def private(self) -> bool:
        return self.scales is not None

    @property
    def reweighted(self) -> bool:
        return bool(self.sources)

    def source(self, wanted: str) -> str:
        """The wanted source where this method can have it, else the method's own default."""
        return wanted if wanted in self.sources or not self.sources else self.sources[0]


@dataclass(frozen=True)
class WeightSource:
    """Where the layer weights w come from. `refuted` says why a run with them is not certified, if it is not.

    measure  number of a measurement, of layers → weights, of a source that somebody added (`lmdp.extending`)
    """

    name: str
    help: str
    needs_public_data: bool = False
    refuted: str = ""
    measure: Callable[[int, int], Tensor] | None = None


# -- the vocabulary of the formulas -----------------------------------------------------------------------------------


def total(norms: Tensor) -> Tensor:
    """Norm of each example's whole gradient, as a column."""
    column: Tensor = norms.norm(dim=1, keepdim=True)
    return column


def clipped_norm(norms: Tensor, clip_norm: float) -> Tensor:
    """C_i = min(C, ||G_i||), as a column."""
    return total(norms).clamp(max=clip_norm)


def over(numerator: Tensor, norms: Tensor) -> Tensor:
    """numerator / norms, and 0 where the norm is 0: a zero gradient contributes zero."""
    return (numerator / norms).where(norms > 0, norms.new_zeros(()))


# -- the formulas -----------------------------------------------------------------------------------------------------


def _dpsgd(n: Tensor, C: float) -> Tensor:
    return (C / total(n)).clamp(max=1.0).expand_as(n)


def _autos(n: Tensor, C: float) -> Tensor:
    return (C / (total(n) + STABILISER)).expand_as(n)


def _psac(n: Tensor, C: float) -> Tensor:
    G = total(n)
    return (C / (G + STABILISER / (G + STABILISER))).expand_as(n)


def _perlayer(n: Tensor, C: float) -> Tensor:
    return _naive_perlayer(n, C / math.sqrt(n.shape[1]))


def _naive_perlayer(n: Tensor, C: float) -> Tensor:
    return (C / n).clamp(max=1.0)


def _lm(n: Tensor, C: float) -> Tensor:
    """Of U_l = sum_i (C_i / n_il) g_il; the step is w_l U_l. A layer with next to no gradient has less than that."""
    return over(clipped_norm(n, C), n.maximum(LEAST_SHARE * total(n)))


def _by_name(*records: Any) -> dict[str, Any]:
    return {record.name: record for record in records}


SOURCES: dict[str, WeightSource] = _by_name(
    WeightSource("private", "from a noisy statistic of earlier steps, released jointly with the gradient"),
    WeightSource("public", "from a public batch at the current, already released, parameters", needs_public_data=True),
    WeightSource("fixed", "from the risk alone"),
    WeightSource(
        "batch",
        "from the private batch itself, as in the paper",
        refuted="the layer weights are computed from the private batch without noise (weights='batch'): one example "
        "can change the weight of every other example's gradient, so the sensitivity is not the clip norm",
    ),
)

METHODS: dict[str, Method] = _by_name(
    Method("sgd", "SGD (not private)", None),
    Method("dpsgd", "DP-SGD", _dpsgd),
    Method("autos", "Auto-S", _autos),
    Method("psac", "DP-PSAC", _psac),
    Method("perlayer", "Per-layer clipping", _perlayer),
    Method("naive-perlayer", "Naive per-layer clipping", _naive_perlayer, math.sqrt),
    Method("lm", "LM-DP-SGD", _lm, sources=("private", "public", "fixed", "batch")),
    Method("lm-optimal", "LM-DP-SGD, bias-optimal", _lm, sources=("public", "batch"), optimal=True),
)


def check_source(name: str, method: Method, public_data: Any, common: int) -> None:
    """Refuse a source that does not exist, that the method cannot have, or that lacks its public data.

    `common`: how many examples of the public data are private ones.
    """
    if name not in SOURCES:
        raise ValueError(f"weights is {name!r}; it must be one of {', '.join(SOURCES)}")
    if method.reweighted and name not in method.sources:
        verdicts = {each: "not certified" if SOURCES[each].refuted else "certified" for each in method.sources}
        raise ValueError(
            f"method {method.name!r} with weights={name!r}: such weights are computed from gradients. Use "
            f"{' or '.join(f'weights={each!r} ({verdict})' for each, verdict in verdicts.items())}."
        )
    if SOURCES[name].needs_public_data and public_data is None:
        raise ValueError(f"weights={name!r} needs public_data: (inputs, targets), a dataset or a data loader")
    if public_data is not None and common:
        raise ValueError(
            f"public_data has {common} examples of the private dataset itself (the same dataset, a part of it, or the "
            "same tensors). Pass examples that are public and not in it."
        )


def check_unit_gain(method: Method, source: str) -> None:
    """Refuse it for a method without such weights, and for weights that are private."""
    if not method.reweighted or method.optimal:
        raise ValueError(
            f"unit_gain divides by layer weights that follow the risk, and method {method.name!r} has none. Use method "
            "lm, or leave unit_gain out."
        )
    if SOURCES[source].refuted:
        raise ValueError(
            f"unit_gain divides by the layer weights, which are private with weights {source!r}. Use weights private, "
            "public or fixed, or leave unit_gain out."
        )
