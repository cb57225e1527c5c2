"""`lmdp doctor`: what is installed here, what this machine can do, and a test of what a private step releases.

The test trusts nothing of the library but its front door: it makes private steps and compares what they release with a
plain loop in double precision, and the noise with the distribution that it must have.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lmdp.data.request import default_cache
from lmdp.gradients import compiled
from lmdp.layers import LayerMap
from lmdp.methods import METHODS, Method
from lmdp.private import PrivacyEngine

PACKAGES = ("lmdp", "torch", "numpy", "scipy", "scikit-learn", "dp-accounting", "cryptography", "safetensors", "pillow")
EXTRAS = ("mlxtend", "transformers", "sentence-transformers", "peft", "accelerate", "datasets", "lightning", "opacus")
CLIP, NOISE, EXAMPLES = 0.5, 1.5, 12
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative, of what is released; about 1e-15 and 1e-7 are usual."""
DRAWS = 1_000_000
UNLIKELY = 1e-9
"""How rarely sound noise may fail the test."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `well` is None where there is nothing to judge."""

    what: str
    seen: str
    well: bool | None = None


@dataclass(frozen=True)
class Findings:
    every: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        return all(one.well is not False for one in self.every)

    def to_dict(self) -> dict[str, Any]:
        return {"well": self.well, "findings": [asdict(one) for one in self.every]}


def examine(*, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> Findings:
    """Everything that a bug report should say, and unless `quick` the test of exactness and noise."""
    seen = [*_surroundings()]
    if not quick:
        say("testing exactness and noise …")
        seen += [_attributed("exactness", exactness), _attributed("noise", noise)]
    return Findings(tuple(seen))


def text_of(findings: Findings) -> str:
    width = max(len(one.what) for one in findings.every)
    marks = {None: " ", True: "✓", False: "✗"}
    lines = [f"{marks[one.well]} {one.what:{width}}  {one.seen}" for one in findings.every]
    tested = any(one.well is not None for one in findings.every)
    end = "all is well" if findings.well else "something is wrong: do not rely on an epsilon of this machine"
    return "\n".join([*lines, "", end if tested else "nothing was tested (--quick)"])


def _surroundings() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    extras = [f"{name} {_version(name)}" for name in EXTRAS if _version(name)]
    yield Finding("extras", ", ".join(extras) or "none")
    yield Finding("devices", ", ".join(_devices()))
    yield Finding("compiled loops", compiled.description())
    yield Finding("processes", f"{os.cpu_count()} processors; torch uses {torch.get_num_threads()} threads")
    cache = default_cache()
    yield Finding("data cache", f"{cache} ({_size(cache)})")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[str]:
    yield "cpu"
    if torch.cuda.is_available():
        yield from (f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        yield "mps (refused: it has no float64)"


def _size(folder: Path) -> str:
    if not folder.is_dir():
        return "empty"
    return f"{sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 1e6:.0f} MB"


def _attributed(what: str, test: Callable[[], str]) -> Finding:
    begun = time.monotonic()
    try:
        said, well = test(), True
    except AssertionError as error:
        said, well = str(error), False
    return Finding(what, f"{said} ({time.monotonic() - begun:.0f} s)", well)


def exactness() -> str:
    """Of every private method that needs no public data: what a step without noise releases."""
    names = [name for name, method in METHODS.items() if method.private and not method.optimal]
    expected = {name: _plain(name) for name in names}
    told = []
    for dtype, allowed in TOLERANCE.items():
        worst = max(float((_released(name, dtype) - plain).norm() / plain.norm()) for name, plain in expected.items())
        told.append(f"{worst:.0e} in {str(dtype).removeprefix('torch.')}")
        if not worst <= allowed:
            raise AssertionError(
                f"released sums differ from a plain loop's by {told[-1]}; at most {allowed:.0e} may be"
            )
    return f"{', '.join(names)}: released sums differ from a plain loop's by {' and '.join(told)}"


def noise() -> str:
    """A step on examples without gradients releases noise alone, of the deviation that was paid for."""
    model = nn.Linear(1000, DRAWS // 1000, bias=False)
    engine = PrivacyEngine()
    data = TensorDataset(torch.zeros(4, 1000), torch.zeros(4))
    step = _private(engine, model, DataLoader(data, batch_size=4), NOISE, "dpsgd")
    step(lambda x, y: model(x).sum(1).mean())
    draws = _gradient(model) * 4 / (NOISE * CLIP)
    spread = float((draws**2).sum())
    p = min(2 * min(stats.chi2.cdf(spread, len(draws)), stats.chi2.sf(spread, len(draws))), 1.0)
    fit = float(stats.kstest(draws.numpy(), "norm").pvalue)
    told = f"{len(draws):,} draws have a deviation of {float(draws.std()):.4f} times what was paid for"
    if not min(p, fit) >= UNLIKELY:
        raise AssertionError(f"{told}: not the normal distribution that it must be (p {p:.0e}, shape {fit:.0e})")
    return f"{told}, and are normal"


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)
        ).double()


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.arange(EXAMPLES) % 3


def _released(method: str, dtype: torch.dtype) -> Tensor:
    model, engine = _network().to(dtype), PrivacyEngine()
    inputs, labels = _data()
    loader = DataLoader(TensorDataset(inputs.to(dtype), labels), batch_size=EXAMPLES)
    step = _private(engine, model, loader, 0.0, method)
    step(lambda x, y: nn.functional.cross_entropy(model(x), y))
    return _gradient(model)


def _private(
    engine: PrivacyEngine, model: nn.Module, loader: DataLoader[Any], noise_multiplier: float, method: str
) -> Callable[[Callable[[Tensor, Tensor], Tensor]], None]:
    """One private step on all examples, given the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    *_, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        method=method,
        weights="fixed",
        poisson_sampling=False,
    )

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
        engine.detach()

    return step


def _plain(method: str) -> Tensor:
    """The same by a loop: each example's gradient by itself, bounded, added up."""
    model = _network()
    layers = LayerMap.of(model)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for x, y in zip(*_data()):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        total += _bounded(dict(model.named_parameters()), layers, METHODS[method])
    return total / EXAMPLES


def _bounded(parameters: dict[str, nn.Parameter], layers: LayerMap, method: Method) -> Tensor:
    """One example's gradient, each layer scaled as the method's formula says; layers count alike."""
    gradients = {name: p.grad.reshape(-1) for name, p in parameters.items() if p.grad is not None}
    norms = torch.stack([torch.cat([gradients[name] for name in layer.parameters]).norm() for layer in layers])
    assert method.scales is not None
    scales = method.scales(norms[None], CLIP)[0] * (len(layers) ** -0.5 if method.reweighted else 1.0)
    scaled = {name: scales[i] * gradients[name] for i, layer in enumerate(layers) for name in layer.parameters}
    return torch.cat([scaled[name] for name in parameters])


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None])
