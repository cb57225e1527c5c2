"""Real images, where they are at hand: set LMDP_TEST_DATA to a folder with fashion_mnist.npz (x_train, y_train)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import lmdp
from lmdp.models import SCNN

DATA = Path(os.environ.get("LMDP_TEST_DATA", "")) / "fashion_mnist.npz"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_file(), reason="LMDP_TEST_DATA has no fashion_mnist.npz")
def test_an_overfitted_shallow_network_leaks_in_its_last_layers_only() -> None:
    with np.load(DATA, allow_pickle=False) as arrays:
        x = torch.tensor(arrays["x_train"][:6000]).float().unsqueeze(1) / 127.5 - 1
        y = torch.tensor(arrays["y_train"][:6000].astype(np.int64))
    profile = lmdp.estimate_risk(SCNN, (x, y))
    first, *_, last = profile.layers
    assert profile.shadow.train_accuracy >= 0.99
    assert last.interval[0] > first.interval[1]
    assert first.interval[0] <= 0.5
