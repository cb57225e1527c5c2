"""Linear layers, with any number of dimensions between the batch and the features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmdp.private.rules.choice import Sizes
from lmdp.private.rules.pieces import Factored, Piece, Rows, Stored, Use, chunks, gram_squared_norms, joined

SMALL = 4
"""Blocks that are kept must fit the gaps that freed activations leave; large ones would cost a third more memory."""


def piece(use: Use) -> Piece:
    """Gradient of example i: G_iᵀ X_i over its positions t, with X_i [T, in] and G_i [T, out]."""
    x, g = _positions(use.input), _positions(use.output_grad)
    weight, bias = "weight" in use.trainable, "bias" in use.trainable

    def contract(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        sums = {}
        if weight:
            sums["weight"] = g.flatten(0, 1).T @ x.flatten(0, 1)
        if bias:
            sums["bias"] = g.sum(dim=(0, 1))
        return sums

    def expand(x: Tensor, g: Tensor) -> Stored:
        rows = {}
        if weight:
            shape = (g.shape[2], x.shape[2])
            rows["weight"] = Rows.gather(_formed(x, g), lambda flat: flat.unflatten(-1, shape))
        if bias:
            rows["bias"] = Rows.of(g.sum(1))
        return Stored(rows)

    batch, positions = x.shape[:2]
    if weight and positions != 1 and not use.prefers_gram(_sizes(x, g)):
        return expand(x, g)
    if positions == 1:  # the outer product of g and x, with a 1 beside x for the bias
        inputs = _squares(x[:, 0]) + bias if weight else 1.0
        return Factored(_squares(g[:, 0]) * inputs, x, g, contract, expand)
    norms = _squares(g.sum(1)) if bias else torch.zeros(batch, dtype=torch.float64)
    if weight:
        norms = norms + joined([_gram_norms(x[some], g[some]) for some in chunks(batch, positions**2)])
    return Factored(norms, x, g, contract, expand)


def _sizes(x: Tensor, g: Tensor) -> Sizes:
    batch, positions, inputs = x.shape
    features = inputs + g.shape[2]
    return Sizes(positions, features, inputs * g.shape[2], positions * features, batch, x.element_size())


def _formed(x: Tensor, g: Tensor) -> Iterator[Tensor]:
    for some in chunks(len(x), SMALL * x.shape[2] * g.shape[2]):
        yield torch.bmm(g[some].transpose(1, 2), x[some]).flatten(1)


def _gram_norms(x: Tensor, g: Tensor) -> Tensor:
    return gram_squared_norms(x, g, torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2)))


def _squares(rows: Tensor) -> Tensor:
    """Squared norms in float64: of two factors, one may be as small as the other is large."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square()


def _positions(tensor: Tensor) -> Tensor:
    """[B, ..., F] → [B, T, F]."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])
