"""Datasets are read a batch at a time: what is kept of an example is bounded, and inputs are never all in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lmdp
from lmdp.membership.crossfit import MOST_FITTED, splits
from lmdp.membership.examples import Lazy, members_and_nonmembers
from lmdp.membership.representations import record

WIDE = 20_000


class Made(Dataset[Any]):
    """Examples that exist only while somebody looks at them, and count how many are looked at."""

    def __init__(self, seed: int, size: int, width: int = 6, *, named: bool = False) -> None:
        self.seed, self.size, self.width, self.named = seed, size, width, named
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.size:
            raise IndexError(i)
        self.read += 1
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(1_000_003 * self.seed + i))
        return {"x": x, "labels": i % 3} if self.named else (x, i % 3)


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(width, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def in_memory(data: Made) -> tuple[Tensor, Tensor]:
    items = [Made(data.seed, data.size, data.width)[i] for i in range(len(data))]
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def result(*sides: Any) -> dict[str, Any]:
    return lmdp.audit(Net(), *sides, controls=False).to_dict() | {"seconds": 0}


def test_a_dataset_that_is_read_gives_the_same_audit_as_its_examples_in_memory() -> None:
    sides = [Made(1, 150), Made(2, 130)]
    expected = result(*(in_memory(side) for side in sides))
    assert result(*sides) == expected
    assert result(sides[0], in_memory(sides[1])) == expected
    named = [Made(1, 150, named=True), Made(2, 130, named=True)]
    assert result(*named) == result(*({"x": x, "labels": y} for x, y in (in_memory(side) for side in sides)))


def test_each_example_is_read_once_for_its_key_and_once_for_the_model_and_all_its_copies() -> None:
    sides = [Made(1, 150), Made(2, 150)]
    lmdp.audit(Net(), *sides, controls=False)
    assert sum(side.read for side in sides) <= 2 * 300 + 2 * 300  # the few that are tried first, and those for scale
    examples = members_and_nonmembers(*sides, seed=0)
    assert isinstance(examples.inputs, Lazy)
    before = sum(side.read for side in sides)
    record(Net(), examples.inputs, alters=[lambda batch: batch] * 4)
    assert sum(side.read for side in sides) - before == 300 + 2


CAPPED = """
import resource
from lmdp.membership.examples import members_and_nonmembers
from lmdp.membership.representations import record
from tests.membership.test_streaming import WIDE, Made, Net

def read(size):
    examples = members_and_nonmembers(Made(1, size, WIDE), Made(2, size, WIDE), seed=0)
    recorded = record(Net(WIDE), examples.inputs)
    assert all(len(rows) == 2 * size for rows in recorded.layers.values())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

print(-read(300) + read(1200))
"""


def test_memory_does_not_grow_by_the_inputs_of_the_examples() -> None:
    """Of 80 kB an example: three quarters of 192 MB would be held if all were read at once."""
    done = subprocess.run([sys.executable, "-c", CAPPED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30e6


def test_beyond_a_number_no_more_are_fitted_on_and_every_example_is_still_scored_once() -> None:
    member = np.arange(4 * MOST_FITTED) % 2 == 0
    tested = []
    for fit, choose, test in splits(member, 0):
        assert len(fit) == MOST_FITTED
        assert len(choose) <= MOST_FITTED
        assert not set(fit) & set(choose)
        assert not set(fit) & set(test)
        assert member[fit].mean() == 0.5
        tested.append(test)
    assert np.array_equal(np.sort(np.concatenate(tested)), np.arange(len(member)))


def test_examples_of_several_shapes_and_empty_datasets_are_refused() -> None:
    class Ragged(Made):
        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(i) if i < 256 else (torch.zeros(9), 0)

    with pytest.raises(ValueError, match=r"from number 256 on have shape \(9,\), those before \(6,\)"):
        members_and_nonmembers(Ragged(1, 400), Made(2, 300), seed=0)
    with pytest.raises(ValueError, match="the dataset is empty"):
        members_and_nonmembers(Made(1, 0), Made(2, 300), seed=0)
