"""How much epsilon a run's training spends, at least: canaries for its mechanism, and for its own model and data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from lmdp.app import training
from lmdp.app.config import Config
from lmdp.app.network import fresh_model
from lmdp.app.pipeline import public_examples
from lmdp.app.progress import Bar, Show
from lmdp.app.runs import RunFolder, write_json
from lmdp.audit import canaries
from lmdp.audit.epsilon import EpsilonBound, audit_epsilon
from lmdp.data import Source
from lmdp.data.records import Amount, field_of, read_object
from lmdp.methods import METHODS
from lmdp.private import PrivacyEngine
from lmdp.risk import RiskProfile

LAYERS, CROWD, STEPS_AT = 2, 39, 30
MOST_CANARIES = 400


def bound_epsilon(folder: RunFolder, source: Source, show: Show, *, runs: int) -> list[EpsilonBound]:
    """Two attacks on the run's method, weights and noise, by repeated runs; one on its own training, in one run."""
    config = folder.config()
    if not METHODS[config.method].private:
        raise ValueError(f"method is {config.method!r}, which claims no epsilon: there is nothing to bound")
    if config.unit is not None:
        raise ValueError(
            f"unit is {config.unit!r}, but the canaries that bound epsilon are single rows. Audit without --epsilon."
        )
    path = folder / "privacy.json"
    sigma: float = field_of(read_object(path, "a privacy statement"), "noise_multiplier", Amount, str(path))
    with show.bar("bound epsilon", 3.0) as bar:
        bounds = [
            _of_mechanism(config, sigma, canary, runs, partial(_part, bar, number))
            for number, canary in enumerate(("dirac", "tipping"))
        ]
        bounds.append(_of_training(config, folder, source, show))
        bar.to(3.0)
    write_json(folder / "epsilon.json", [bound.to_dict() for bound in bounds])
    return bounds


def _part(bar: Bar, number: int, done: int, of: int) -> None:
    bar.to(number + done / of)


def load_bounds(path: Path) -> tuple[EpsilonBound, ...]:
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(EpsilonBound.from_dict(item) for item in content)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a list of epsilon bounds ({error})") from None


def _of_mechanism(config: Config, sigma: float, canary: str, runs: int, progress: Any) -> EpsilonBound:
    """The run's method, weights and noise multiplier on gradients set by hand, two steps at a high sampling rate."""
    one, score = {
        "dirac": (canaries.dirac(LAYERS, LAYERS, 1)[0], canaries.along),
        "tipping": (canaries.tipping(LAYERS, LAYERS), canaries.tipped),
    }[canary]
    options: dict[str, Any] = {"weights": config.weights} if METHODS[config.method].reweighted else {}
    train = canaries.slate_training(batch_size=STEPS_AT, noise_multiplier=sigma, method=config.method, **options)
    return audit_epsilon(
        train,
        canaries.crowd(CROWD, LAYERS, LAYERS),
        [one],
        delta=config.delta,
        runs=runs,
        score=score,
        canary=canary,
        progress=progress,
    )


def _of_training(config: Config, folder: RunFolder, source: Source, show: Show) -> EpsilonBound:
    """The whole training once more, with mislabelled test examples, each in with probability 1/2."""
    if source.test is None:
        raise ValueError(f"data {source.spec!r} has no test part, from which canaries could be made")
    path = folder / "risk.json"
    risk = RiskProfile.load(path) if path.exists() else None
    public = public_examples(config, source, show)

    def train(engine: PrivacyEngine, dataset: Dataset[Any]) -> nn.Module:
        model = fresh_model(config, source)
        return training.run_through(
            training.prepare(config, model, dataset, risk=risk, public=public, engine=engine)
        ).eval()

    count = min(MOST_CANARIES, len(source.test), len(source.train))
    wrong = canaries.mislabelled(source.test, count, len(source.classes))
    return audit_epsilon(train, source.train, wrong, delta=config.delta, canary="mislabelled", method="one-run")
