"""How large each experiment is: `full` has the paper's settings, `cpu` what two cores do in hours, `smoke` in minutes.

What the paper does not say (steps, splits, shadow training, adversaries) is chosen here; docs/reproduction.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmdp.app.reproduce.paper import ABLATED, EXPERIMENTS

SHAPES = {"mnist": (28, 1), "cifar10": (32, 3), "cifar100": (32, 3), "celeba": (64, 3)}
"""Pixels a side, and channels."""
CLASSES = {"mnist": "10", "cifar10": "10", "cifar100": "100", "celeba": "2"}


@dataclass(frozen=True)
class Scale:
    """Which experiments, how many seeds, and what differs from the paper.

    values      of a configuration, by experiment
    limits      training examples of the private and of the shadow data, at most; 0: all
    examples    members, and non-members, that are attacked, at most
    sgd         what differs for SGD: with so few examples it takes longer to fit
    ablated     the experiment that ablations vary, and its shadow sets
    """

    name: str
    seeds: int
    values: Mapping[str, Mapping[str, Any]]
    limits: Mapping[str, tuple[int, int]]
    examples: int
    shadows: Mapping[str, tuple[str, ...]]
    epsilons: tuple[float, ...]
    clip_norms: tuple[float, ...]
    emphases: tuple[float, ...]
    frontier_epsilons: tuple[float, ...]
    frontier_rates: tuple[float, ...]
    timed_steps: int
    sgd: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def experiments(self) -> tuple[str, ...]:
        return tuple(self.values)

    def ablated(self, experiments: tuple[str, ...]) -> tuple[str, ...]:
        """As in the paper, D-CNN where it is among these; else the first of them."""
        return (ABLATED,) if ABLATED in experiments else experiments[:1]

    def data(self, name: str, limit: int) -> str:
        """The SPEC of a data set, at most so many of it."""
        spec = self.renamed.get(name, name)
        return f"{spec}{'&' if '?' in spec else '?'}limit={limit}" if limit else spec

    def base(self, experiment: str) -> dict[str, Any]:
        """The values that all cells of an experiment have."""
        told = EXPERIMENTS[experiment]
        size, channels = SHAPES[experiment]
        private, shadow = self.limits[experiment]
        return {
            "model": told.model,
            "data": self.data(told.data, private),
            "shadow": self.data(told.shadow, shadow),
            "size": size,
            "channels": channels,
            "classes": CLASSES[experiment],
            "epsilon": told.epsilon,
            "delta": told.delta,
            "sample_rate": told.sample_rate,
            "learning_rate": told.learning_rate,
            "clip_norm": told.clip_norm,
            "accountant": "rdp",
            "holdout": 0.2,
            "canaries": 1000,
            "canary_kind": "mislabelled",
            "shadow_epochs": 40,
            "shadow_enough": 2.0,
            **self.values[experiment],
        }


def _paper(epochs: int, **more: Any) -> dict[str, Any]:
    return {"epochs": epochs, "sgd_learning_rate": 0.05, "holdout": 0.1, **more}


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            seeds=2,
            values={
                "mnist": {
                    "epochs": 2,
                    "sample_rate": 0.2,
                    "learning_rate": 0.5,
                    "holdout": 0.3,
                    "canaries": 300,
                    "canary_kind": "noise",
                    "shadow_epochs": 2,
                    "delta": 1e-4,
                }
            },
            limits={"mnist": (0, 0)},
            examples=150,
            shadows={"mnist": ("fashion-mnist", "svhn")},
            epsilons=(3.0, 8.0),
            clip_norms=(0.5, 2.0),
            emphases=(1.0, 5.0),
            frontier_epsilons=(8.0,),
            frontier_rates=(1.0,),
            timed_steps=2,
            renamed={
                "mnist": "digits?half=1",
                "fashion-mnist": "digits?half=2",
                "svhn": "digits?half=2&limit=600",
            },
        ),
        Scale(
            "cpu",
            seeds=3,
            values={
                "mnist": {"epochs": 15, "sample_rate": 0.05, "learning_rate": 0.5, "sgd_learning_rate": 0.05},
                "cifar10": {
                    "epochs": 12,
                    "sample_rate": 0.05,
                    "learning_rate": 0.5,
                    "canaries": 600,
                    "shadow_epochs": 25,
                },
            },
            limits={"mnist": (5000, 4000), "cifar10": (3000, 2000)},
            examples=800,
            shadows={
                "mnist": ("fashion-mnist", "svhn", "cifar10"),
                "cifar10": ("imagenet", "svhn", "mnist"),
            },
            epsilons=(3.0, 5.0, 8.0, 50.0),
            clip_norms=(0.25, 1.0, 4.0),
            emphases=(1.0, 3.0, 5.0, 10.0),
            frontier_epsilons=(8.0, 50.0),
            frontier_rates=(1.0, 4.0),
            timed_steps=9,
            sgd={
                "mnist": {"epochs": 60, "schedule": "cosine"},
                "cifar10": {"epochs": 20, "schedule": "cosine", "optimizer": "adamw", "sgd_learning_rate": 0.002},
            },
        ),
        Scale(
            "full",
            seeds=5,
            values={
                "mnist": _paper(40),
                "cifar10": _paper(100, max_physical_batch_size=512),
                "cifar100": _paper(100, max_physical_batch_size=256),
                "celeba": _paper(30, max_physical_batch_size=128, allow_large_delta=True),
            },
            limits={"mnist": (0, 20_000), "cifar10": (0, 20_000), "cifar100": (0, 20_000), "celeba": (0, 20_000)},
            examples=5000,
            shadows={
                name: tuple(dict.fromkeys((EXPERIMENTS[name].shadow, "svhn", "mnist", "vggface2")))
                for name in EXPERIMENTS
            },
            epsilons=(3.0, 5.0, 8.0, 10.0, 12.0),
            clip_norms=(0.5, 1.0, 2.0, 3.0, 4.0),
            emphases=(1.0, 2.0, 3.0, 4.0, 5.0, 10.0),
            frontier_epsilons=(3.0, 8.0, 50.0, 800.0),
            frontier_rates=(0.5, 1.0, 2.0, 5.0, 10.0),
            timed_steps=20,
        ),
    )
}
