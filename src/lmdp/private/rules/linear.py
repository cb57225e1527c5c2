"""Linear layers, with any number of dimensions between the batch and the features."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdp.private.rules.pieces import Factored, Piece, Rows, Stored, Use, gram_squared_norms, prefer_gram


def piece(use: Use) -> Piece:
    """Gradient of example i: G_iᵀ X_i over its positions t, with X_i [T, in] and G_i [T, out]."""
    x, g = _positions(use.input), _positions(use.output_grad)
    batch, positions, inputs = x.shape
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
            rows["weight"] = Rows.of(torch.bmm(g.transpose(1, 2), x))
        if bias:
            rows["bias"] = Rows.of(g.sum(1))
        return Stored(rows)

    outputs = g.shape[-1]
    sizes = {"positions": positions, "inputs": inputs, "outputs": outputs, "weights": inputs * outputs}
    if positions != 1 and weight and not prefer_gram(**sizes, batch_size=batch):
        return expand(x, g)
    norms = g.sum(1).square().sum(1) if bias else g.new_zeros(batch)
    if weight and positions == 1:
        norms = norms + x[:, 0].square().sum(1) * g[:, 0].square().sum(1)
    elif weight:
        norms = norms + gram_squared_norms(torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2)))
    return Factored(norms, x, g, contract, expand)


def _positions(tensor: Tensor) -> Tensor:
    """[B, ..., F] → [B, T, F]."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])
