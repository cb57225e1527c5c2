"""Who is measured: each contender makes one training step out of a model and a batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.methods import METHODS, SOURCES

Step = Callable[[], None]
Contender = Callable[[nn.Module, Tensor, Tensor], Step]
SGD = "non-private SGD"
OURS = "lmdp lm (private)"
SAME_STEP = ("perlayer", "naive-perlayer")
"""Methods that are not timed: they do what `dpsgd` does but for one line on the norms, so its row stands for them."""
NOISE, CLIP = 1.0, 1.0


def contenders() -> tuple[dict[str, Contender], list[str]]:
    """All that can run here, by name, and a sentence for each that cannot."""
    everybody: dict[str, Contender] = {SGD: sgd}
    timed = [method for method in METHODS.values() if method.private and method.name not in SAME_STEP]
    everybody |= {f"lmdp {method.name}": private(method.name) for method in timed if not method.reweighted}
    for method in timed:
        everybody |= {f"lmdp {method.name} ({source})": private(method.name, source) for source in method.sources}
    everybody["naive torch.func lm"] = naive
    if importlib.util.find_spec("opacus") is None:
        return everybody, ["opacus is not installed (pip install 'lmdp[peers]'): its rows are missing"]
    return everybody | {f"opacus {mode}": opacus(mode) for mode in ("hooks", "ghost", "functorch", "per-layer")}, []


def chosen(only: Sequence[str]) -> list[str]:
    """SGD, and the contenders whose names hold one of these parts; all of them if there are none."""
    everybody, missing = contenders()
    if unknown := [part for part in only if not any(part in name for name in everybody)]:
        raise ValueError(
            "; ".join([f"no contender is called {', '.join(unknown)}: they are {', '.join(everybody)}", *missing])
        )
    return [name for name in everybody if name == SGD or not only or any(part in name for part in only)]


def hooked(name: str) -> bool:
    """Whether a contender puts hooks on modules, under which nothing may be written in place."""
    return name.startswith("opacus")


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return _loop(model, _optimizer(model), x, y)


def private(method: str, weights: str = "private") -> Contender:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        return attached(model, x, y, method, weights)[1]

    return make


def attached(model: nn.Module, x: Tensor, y: Tensor, method: str, weights: str) -> tuple[lmdp.PrivacyEngine, Step]:
    engine, optimizer = lmdp.PrivacyEngine(), _optimizer(model)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        method=method,
        weights=weights,
        public_data=(x.flip(0), y.flip(0)) if SOURCES[weights].needs_public_data else None,
        poisson_sampling=False,
    )
    return engine, _loop(model, optimizer, x, y)


def opacus(mode: str) -> Contender:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        if not ModuleValidator.is_valid(model):
            model = ModuleValidator.fix(model)  # a recurrent layer of its own
        per_layer = mode == "per-layer"
        parts: Any = PrivacyEngine().make_private(
            module=model,
            optimizer=_optimizer(model),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=NOISE,
            max_grad_norm=[CLIP] * sum(p.requires_grad for p in model.parameters()) if per_layer else CLIP,
            clipping="per_layer" if per_layer else "flat",
            grad_sample_mode="hooks" if per_layer else mode,
            poisson_sampling=False,
            criterion=nn.CrossEntropyLoss(),
        )
        if mode != "ghost":
            return _loop(parts[0], parts[1], x, y)
        words = {"shape": y.shape} if y.dim() > 1 else {}  # examples, and how many losses each has
        return _loop(parts[0], parts[1], x, y, lambda output, y: parts[2](*_flat(output, y), **words))

    return make


def naive(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """LM-DP-SGD as one would write it down: all per-example gradients by `torch.func`, equal layer weights."""
    layers = lmdp.LayerMap.of(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = _optimizer(model)

    def loss(values: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, values, (example.unsqueeze(0),))
        return mean_loss(output, target.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        per_example = gradients({name: p.detach() for name, p in parameters.items()}, x, y)
        squares = torch.zeros(len(x), len(layers))
        for name, rows in per_example.items():
            squares[:, layers.index[name]] += rows.flatten(1).square().sum(1)
        norms = squares.sqrt()
        clipped = squares.sum(1, keepdim=True).sqrt().clamp(max=CLIP)
        scales = clipped / norms.clamp(min=1e-12) / len(layers) ** 0.5
        for name, rows in per_example.items():
            total = torch.tensordot(scales[:, layers.index[name]], rows, dims=1)
            parameters[name].grad = (total + NOISE * CLIP * torch.randn_like(total)) / len(x)
        optimizer.step()

    return step


def mean_loss(output: Tensor, y: Tensor) -> Tensor:
    """Of scores [B, classes], or [B, T, classes]."""
    return F.cross_entropy(*_flat(output, y))


def _flat(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, -2), y.flatten()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, criterion: Any = None) -> Step:
    criterion = criterion or mean_loss

    def step() -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()  # last, so that no gradients lie about while others have their turn

    return step
