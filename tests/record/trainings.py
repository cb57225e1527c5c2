"""Seeded trainings of every method and source, and what they leave: `python -m tests.record.trainings` prints it.

The digest is of every bit: parameters, released weights, state and statement. The numbers beside it are a few sums of
the parameters, for processors whose kernels round otherwise.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from tests.record.models import MODELS, examples
from tests.tables import choices

STEPS, DELTA = 5, 1e-5


def train(model_name: str, method: str, source: str) -> dict[str, Any]:
    """Five private steps; batches of the d-cnn come in parts."""
    model, x, y = examples(model_name)
    layers = len(lmdp.LayerMap.of(model))
    engine = lmdp.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x) // 3),
        noise_multiplier=0.7,
        max_grad_norm=1.5,
        method=method,
        weights=source,
        risk=[0.3 + 0.02 * layer for layer in range(layers)],
        emphasis=2.0,
        public_data=(x.flip(0), y.flip(0)) if source == "public" else None,
        public_every=2,
        max_physical_batch_size=3 if model_name == "d-cnn" else None,
        seed=7,
    )
    while engine.steps < STEPS:
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if engine.steps == STEPS:
                break
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    left = {
        "statement": engine.privacy_statement(DELTA).to_dict(),
        "state": {key: value for key, value in engine.state_dict().items() if key != "run"},  # a random name
        "weights": engine.layer_weights,
    }
    digest.update(json.dumps(left, sort_keys=True).encode())
    flat = [p.detach().double().flatten() for p in model.parameters()]
    sums = [float(values @ torch.arange(len(values)).double().cos()) for values in flat]
    return {"digest": digest.hexdigest(), "sums": sums, "epsilon": left["statement"]["epsilon"]}


def all_trainings() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {f"{m} {method} {source}": train(m, method, source) for m in MODELS for method, source in choices()}


if __name__ == "__main__":
    json.dump(all_trainings(), sys.stdout)
