"""Every number of the paper that is compared with ours, and the settings it was measured with. No other file has any.

Shares are fractions; the paper prints per cent. "Printed" layers are those whose numbers its tables give, counted over
convolutions from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASELINES = ("dpsgd", "autos", "psac")
METHODS = (*BASELINES, "lm")


@dataclass(frozen=True)
class Experiment:
    """A row group of the paper's tables: Table 1 (settings), Table 2 (attacks), running time, memory.

    `sgd` and `attacked` are attack accuracies at the printed layers, without privacy and by method.
    """

    name: str
    title: str
    model: str
    data: str
    shadow: str
    epsilon: float
    delta: float
    sample_rate: float
    learning_rate: float
    clip_norm: float
    emphasis: float
    layers: tuple[int, ...]
    sgd: tuple[float, ...]
    attacked: Mapping[str, tuple[float, ...]]
    seconds: Mapping[str, float]
    mebibytes: Mapping[str, float | None]

    @property
    def peak(self) -> dict[str, float]:
        return {method: max(values) for method, values in self.attacked.items()}

    @property
    def gain(self) -> float:
        """By how much LM-DP-SGD lowers the peak, against the best baseline."""
        return min(self.peak[name] for name in BASELINES) - self.peak["lm"]


def _by_method(*values: float | None) -> dict[str, float]:
    return {name: value for name, value in zip(METHODS, values) if value is not None}


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            "mnist",
            "S-CNN on MNIST",
            "s-cnn",
            "mnist",
            "fashion-mnist",
            *(5.0, 1e-5, 0.01, 0.08, 1.0, 5.0),
            layers=(1, 2),
            sgd=(0.725, 0.750),
            attacked={
                "dpsgd": (0.672, 0.709),
                "autos": (0.666, 0.700),
                "psac": (0.677, 0.718),
                "lm": (0.683, 0.692),
            },
            seconds=_by_method(0.0984, 0.1071, 0.1049, 0.1078),
            mebibytes=_by_method(2342, 3360, 3526, 3734),
        ),
        Experiment(
            "cifar10",
            "D-CNN on CIFAR-10",
            "d-cnn",
            "cifar10",
            "imagenet",
            *(8.0, 1e-5, 0.01, 0.10, 2.0, 3.0),
            layers=(1, 3, 5, 7, 8),
            sgd=(0.596, 0.649, 0.683, 0.716, 0.731),
            attacked={
                "dpsgd": (0.570, 0.632, 0.655, 0.673, 0.698),
                "autos": (0.582, 0.631, 0.664, 0.682, 0.707),
                "psac": (0.577, 0.628, 0.651, 0.680, 0.694),
                "lm": (0.590, 0.643, 0.652, 0.665, 0.679),
            },
            seconds=_by_method(0.1516, 0.1569, 0.1536, 0.1632),
            mebibytes=_by_method(14524, 15498, 15926, 19918),
        ),
        Experiment(
            "cifar100",
            "ResNet-18 on CIFAR-100",
            "resnet18",
            "cifar100",
            "imagenet",
            *(8.0, 1e-5, 0.01, 0.10, 3.0, 2.0),
            layers=(1, 5, 10, 15, 17),
            sgd=(0.521, 0.572, 0.615, 0.648, 0.661),
            attacked={
                "dpsgd": (0.497, 0.545, 0.598, 0.627, 0.647),
                "autos": (0.499, 0.547, 0.590, 0.619, 0.639),
                "psac": (0.490, 0.538, 0.581, 0.610, 0.631),
                "lm": (0.525, 0.559, 0.593, 0.602, 0.618),
            },
            seconds=_by_method(0.2735, 0.2845, 0.2857, 0.2860),
            mebibytes=_by_method(40378, 41295, None, 46578),  # DP-PSAC is printed as 413452, ten times all others
        ),
        Experiment(
            "celeba",
            "VGG-16 on CelebA",
            "vgg16",
            "celeba?attribute=Smiling",
            "ffhq",
            *(8.0, 1e-5, 0.01, 0.08, 3.0, 2.0),
            layers=(1, 5, 10, 12, 13),
            sgd=(0.633, 0.671, 0.709, 0.717, 0.724),
            attacked={
                "dpsgd": (0.571, 0.616, 0.652, 0.679, 0.685),
                "autos": (0.573, 0.621, 0.664, 0.683, 0.699),
                "psac": (0.568, 0.612, 0.649, 0.667, 0.682),
                "lm": (0.606, 0.634, 0.641, 0.645, 0.656),
            },
            seconds=_by_method(0.2557, 0.2593, 0.2615, 0.2654),
            mebibytes=_by_method(36304, 37459, 37857, 40352),
        ),
    )
}

ABLATED = "cifar10"
SHADOW_ERROR_RATES: dict[str, tuple[float, ...]] = {
    "imagenet": (0.404, 0.351, 0.317, 0.284, 0.269),
    "svhn": (0.402, 0.350, 0.314, 0.281, 0.267),
    "mnist": (0.399, 0.348, 0.314, 0.281, 0.265),
    "vggface2": (0.408, 0.355, 0.319, 0.287, 0.272),
}
"""Of D-CNN by shadow set, at layers 1, 3, 5, 7 and 8."""
EMPHASIS: dict[float, tuple[float, ...]] = {
    1.0: (0.574, 0.637, 0.655, 0.675, 0.694),
    2.0: (0.578, 0.639, 0.654, 0.672, 0.691),
    3.0: (0.590, 0.643, 0.652, 0.665, 0.679),
    4.0: (0.603, 0.648, 0.649, 0.658, 0.672),
    5.0: (0.609, 0.652, 0.646, 0.654, 0.669),
}
"""Attack accuracy of LM-DP-SGD on D-CNN by r, at the same layers."""
UTILITY_BAND = 0.02


def error_rates(experiment: str, layers: list[tuple[str, bool]]) -> dict[str, float]:
    """Error rates for all layers of a model, out of those that the paper prints.

    `layers` are names in order, and whether each stands on the main path and counts (convolutions, linear layers); one
    that does not, as a norm, shares the rate of the one before it. Between printed layers, and beyond the last, rates
    lie on straight lines. D-CNN has its rates on the shadow set; of the others only attacks on SGD are printed.
    """
    import numpy as np

    told = EXPERIMENTS[experiment]
    printed = SHADOW_ERROR_RATES["imagenet"] if experiment == ABLATED else tuple(1 - share for share in told.sgd)
    counted, rates = 0, {}
    for name, counts in layers:
        counted += counts
        at = max(1, counted)
        if at > told.layers[-1]:
            steepness = (printed[-1] - printed[-2]) / (told.layers[-1] - told.layers[-2])
            rates[name] = printed[-1] + steepness * (at - told.layers[-1])
        else:
            rates[name] = float(np.interp(at, told.layers, printed))
    return {name: min(0.5, max(0.01, rate)) for name, rate in rates.items()}
