"""Which canaries give a private training away most, and what they cost.

    python benchmarks/canaries.py --data fashion-mnist --other mnist [--epochs 60] [--seeds 2] [--noise 0.3]

An S-CNN is trained with DP-SGD on about 4,000 examples of public data, of which some 500 are canaries of one kind; some
500 more are left out, by coins. Printed for each kind and seed: the epsilon, test accuracy, the AUC of the best attack
at the leakiest layer and its TPR at 1 % FPR (cross-fitted, with 95 % intervals), the AUC of attacks on the output, and
the lower bound on epsilon that the same canaries give, for the training's own steps and for any mechanism.

    ordinary      examples of the data with their own label: what an average example gives away
    mislabelled   examples of the data with a wrong label
    other         examples of other data, with the labels that they have there
    noise         random bytes with random labels
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.audit import Planted, plant_canaries
from lmdp.data import Images, load
from lmdp.models import build, fresh

DELTA, N, CANARIES = 1e-5, 3500, 1000


def planted(kind: str, pool: Images, other: Images, seed: int) -> Planted:
    """About 3,500 ordinary examples and 500 canaries, and 500 canaries left out."""
    if kind == "mislabelled":
        dataset = TensorDataset(*pool.take_random(N + CANARIES, seed).tensors())
        return plant_canaries(dataset, CANARIES, classes=10, seed=seed)
    drawn = pool.take_random(N + CANARIES, seed)
    ordinary, rest = drawn.cut(N)
    chosen = {"ordinary": rest, "other": other.take_random(CANARIES, seed)}
    own = TensorDataset(*chosen[kind].tensors()) if kind in chosen else kind
    return plant_canaries(TensorDataset(*ordinary.tensors()), CANARIES, classes=10, kind=own, seed=seed)


def trained(data: Planted, arguments: argparse.Namespace, seed: int) -> tuple[torch.nn.Module, lmdp.PrivacyStatement]:
    model = fresh(lambda: build("s-cnn", (1, 28, 28), 10), seed)
    engine = lmdp.PrivacyEngine()
    size = len(data.dataset)  # type: ignore[arg-type]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=arguments.learning_rate),
        data_loader=DataLoader(data.dataset, batch_size=round(0.05 * size)),
        noise_multiplier=arguments.noise,
        max_grad_norm=1.0,
        method="dpsgd",
        seed=seed,
    )
    for _ in range(arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    statement = engine.privacy_statement(DELTA)
    engine.detach()
    return model, statement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist", help="a SPEC of 28x28 grey images")
    parser.add_argument("--other", default="mnist", help="a SPEC of another distribution")
    parser.add_argument("--kinds", default="ordinary,mislabelled,other,noise")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    arguments = parser.parse_args()
    source, other = load(arguments.data, classes=10), load(arguments.other, classes=10, size=28, channels=1)
    assert source.test is not None
    x, y = source.test.tensors()
    for kind in arguments.kinds.split(","):
        for seed in range(arguments.seeds):
            data = planted(kind, source.train, other.train, seed)
            model, statement = trained(data, arguments, seed)
            with torch.no_grad():
                accuracy = float((model.eval()(x).argmax(1) == y).float().mean())
            report = lmdp.audit(model, data.canaries.inside, data.canaries.outside, controls=False, seed=seed)
            bound = lmdp.audit.coins.bound_by_canaries(model, data.canaries, statement)
            top = next(leak for leak in report.layers if leak.name == report.peak.name)
            low, high = report.peak.interval
            certain = "–".join(f"{edge:.3f}" for edge in top.tpr_at_1pct_interval)
            assert report.reference is not None
            print(
                f"{kind:12} seed {seed}  epsilon {statement.epsilon:.0f}  accuracy {accuracy:.3f}  {top.name} AUC "
                f"{top.auc:.3f} [{low:.3f}–{high:.3f}]  TPR at 1 % {top.tpr_at_1pct:.3f} [{certain}]  output AUC "
                f"{report.reference.auc:.3f}  epsilon ≥ {bound.lower:.2f} (any: {bound.details['lower_any']:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
