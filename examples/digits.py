"""Train a small CNN privately on scikit-learn's handwritten digits, and say what that promises.

    python examples/digits.py

Risk here is a made-up set of error rates that calls the later layers leakier; `lmdp.estimate_risk` will measure them.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp

EPSILON, DELTA, EPOCHS, BATCH = 5.0, 1e-4, 30, 128


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 test images of 8x8 pixels, scaled by the public constant 16."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(y)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).double().mean()
    model.train()
    return float(right)


def main() -> None:
    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it gives
    train, test = digits()
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    loader = DataLoader(train, batch_size=BATCH)

    engine = lmdp.PrivacyEngine(accountant="pld")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
        method="lm",
        risk={"0": 0.40, "4": 0.35, "9": 0.30},
    )

    print(f"private data: {len(train)} digits, test data: {len(test)}, layers: {', '.join(engine.layers.names)}")
    start = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch % 5 == 0:
            print(
                f"epoch {epoch:3d} of {EPOCHS}   test accuracy {accuracy(model, test):6.1%}   "
                f"epsilon {engine.get_epsilon(DELTA):.2f}   {time.perf_counter() - start:4.1f} s"
            )
    print(f"\ntest accuracy {accuracy(model, test):.1%} after {engine.steps} private steps\n")
    print(engine.privacy_statement(DELTA))


if __name__ == "__main__":
    main()
