"""A step reads in one direction: which files it walks through, from the user's backward() to the released gradient.

`python -m tests.private.test_reading_order` prints all of them, those beside the way too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import SCNN
from tests.tables import choices

ROOT = Path(lmdp.__file__).parent
MOST = 14
BESIDE = ("guards/", "accounting.py", "gradients/compiled/")
"""Not on the way of a gradient: looks, which pass nothing on; the account; and the inner loops of a rule."""

RULES = tuple(f"gradients/{name}.py" for name in ("linear", "conv", "norm", "embedding", "generic"))


def walked(method: str, weights: str) -> list[str]:
    """Files of lmdp in the order in which a later step enters them."""
    torch.manual_seed(0)
    model, x, y = SCNN(), torch.randn(6, 1, 28, 28), torch.arange(6)
    engine = lmdp.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        weights=weights,
        public_data=(x.flip(0), y) if weights == "public" else None,
        public_every=100,
        seed=0,
    )
    files: dict[str, None] = {}

    def enter(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.setdefault(path.relative_to(ROOT).as_posix())

    for _ in range(2):
        for inputs, labels in loader:
            if not len(inputs):
                continue
            files.clear()
            loss = F.cross_entropy(model(inputs), labels)
            sys.setprofile(enter)
            loss.backward()
            optimizer.step()
            sys.setprofile(None)
            optimizer.zero_grad()
    engine.detach()
    return list(files)


@pytest.mark.parametrize(("method", "weights"), choices())
def test_a_step_walks_through_few_files(method: str, weights: str) -> None:
    files = [file for file in walked(method, weights) if not file.startswith(BESIDE)]
    way = dict.fromkeys("the rule of a layer" if file in RULES else file for file in files)
    assert len(way) <= MOST, way


if __name__ == "__main__":
    print("\n".join(walked("lm", "private")))  # noqa: T201
