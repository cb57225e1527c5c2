"""Nobody reads off the last bits of a released gradient who took part: an attack that did, and now sees chance.

A rare token's row of an embedding table is touched by one example only. Noise that was rounded to floating point before
the sum was added left a mark there: where both nearly cancel, the result lies on the coarse grid of what it was made
of, instead of on the fine grid of numbers of its size. One step told presence, whatever the noise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp

pytestmark = pytest.mark.usefixtures("widest_loops")

COMMON, WIDTH, OTHERS, TARGETS, STEPS = 10, 1024, 50, 40, 6
SIZE = 64
"""Of a batch, as expected: a power of two, so that dividing by it hides no bits."""


class Bag(nn.Module):
    """Every example is a bag of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(COMMON + TARGETS, WIDTH)
        self.head = nn.Linear(WIDTH, 2).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens).mean(1))
        return logits


def released(secure: bool, dtype: torch.dtype) -> tuple[Tensor, np.ndarray, float]:
    """Rows [STEPS · TARGETS, WIDTH] of rare tokens, each held by one example; whether it took part; size of an entry.

    Half of the examples with a rare token take part in a step, by lot, beside all the others.
    """
    torch.manual_seed(0)
    model = Bag().to(dtype)
    common = torch.randint(0, COMMON, (OTHERS, 3))
    rare = torch.stack([torch.arange(COMMON, COMMON + TARGETS)] * 3, 1)
    tokens, labels = torch.cat([common, rare]), torch.randint(0, 2, (OTHERS + TARGETS,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = lmdp.PrivacyEngine(secure_mode=secure)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(tokens, labels), batch_size=SIZE),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        method="dpsgd",
        poisson_sampling=False,
    )
    rows, present = [], []
    for _ in range(STEPS):
        here = torch.rand(TARGETS) < 0.5
        drawn = torch.cat([torch.ones(OTHERS, dtype=torch.bool), here])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[drawn]), labels[drawn]).backward()
        optimizer.step()
        assert model.table.weight.grad is not None
        rows.append(model.table.weight.grad[COMMON:].clone())
        present.append(here)
    return torch.cat(rows), torch.cat(present).numpy(), 0.5 / math.sqrt(WIDTH) / SIZE


def trailing_zeros(values: Tensor) -> np.ndarray:
    """Of each number's significand."""
    whole, bits = (np.int32, 23) if values.dtype == torch.float32 else (np.int64, 52)
    significand = values.numpy().view(whole) & ((1 << bits) - 1) | (1 << bits)
    return np.log2((significand & -significand).astype(float))


def marks(rows: Tensor, entry: float) -> np.ndarray:
    """Of each row: the trailing zeros of its small entries, where noise and a member's gradient would nearly cancel."""
    small, zeros = (rows.abs() < entry / 4).numpy(), trailing_zeros(rows)
    return np.array([zeros[row][small[row]].mean() if small[row].any() else 0.0 for row in range(len(rows))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("secure", [False, True])
def test_the_grid_of_a_released_row_does_not_tell_whose_example_took_part(
    secure: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmdp.private.noise.fresh_key", lambda: bytes(range(32)))
    rows, present, entry = released(secure, dtype)
    score = marks(rows, entry)
    assert stats.mannwhitneyu(score[present], score[~present]).pvalue > 1e-4


def test_the_attack_finds_the_mark_that_rounded_noise_leaves() -> None:
    """What the engine used to do: noise rounded first, then the sum added in the parameter's type."""
    torch.manual_seed(1)
    entry = 0.5 / math.sqrt(WIDTH)
    present = np.arange(240) % 2 == 0
    signs = torch.sign(torch.randn(240, WIDTH))
    sums = entry * (1 + 0.1 * torch.rand(240, WIDTH)) * signs * torch.tensor(present)[:, None]
    noise = (0.5 * torch.randn(240, WIDTH, dtype=torch.float64)).float()
    score = marks(noise + sums, entry)
    assert np.mean((score > np.median(score)) == present) > 0.9
