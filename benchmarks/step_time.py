"""One training step of each contender, interleaved in one process; times as ratios to non-private SGD.

    python benchmarks/step_time.py [--models dcnn,scnn] [--repeats 9] [--json FILE]

Absolute times on a shared machine mean nothing; the ratio within one run does. The median over the repeats is shown,
with the quartiles of the ratio behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import DCNN, SCNN, VGG16, ResNet18

Step = Callable[[], None]


class Transformer(nn.Module):
    """Four pre-norm encoder blocks of width 256 with attention written out in linear layers."""

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "scnn": (SCNN, (600, 1, 28, 28), 10),
    "dcnn": (DCNN, (256, 3, 32, 32), 10),
    "resnet18": (lambda: ResNet18(classes=10), (64, 3, 32, 32), 10),
    "vgg16": (lambda: VGG16(classes=10), (32, 3, 64, 64), 10),
    "transformer": (Transformer, (32, 128, 256), 10),
}
METHODS = ("dpsgd", "autos", "psac", "lm")


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return loop(model, optimizer, x, y)


def ours(method: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = lmdp.PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=method,
            poisson_sampling=False,
        )
        return loop(model, optimizer, x, y)

    return make


def opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        import opacus

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        private = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
            criterion=nn.CrossEntropyLoss(),
        )
        criterion = private[2] if mode == "ghost" else F.cross_entropy
        return loop(private[0], private[1], x, y, criterion)

    return make


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, criterion: Callable = F.cross_entropy
) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def contenders() -> dict[str, Callable[[nn.Module, Tensor, Tensor], Step]]:
    found: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {"non-private SGD": sgd}
    found |= {f"lmdp {method}": ours(method) for method in METHODS}
    try:
        import opacus as _  # noqa: F401
    except ImportError:
        print("opacus is not installed (pip install 'lmdp[peers]'): its rows are missing")
    else:
        found |= {f"opacus {mode}": opacus(mode) for mode in ("hooks", "ghost")}
    return found


def measure(name: str, repeats: int) -> dict[str, list[float]]:
    """Seconds per step of every contender, in turns."""
    make, shape, classes = MODELS[name]
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(0, classes, (shape[0],))
    steps = {}
    for contender, prepare in contenders().items():
        torch.manual_seed(0)
        steps[contender] = prepare(make(), x, y)
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(repeats):
        for contender, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[contender].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Median step over median SGD step, and the quartiles of the step over that same median."""
    base = statistics.median(seconds["non-private SGD"])
    found = {}
    for contender, values in seconds.items():
        low, middle, high = statistics.quantiles([v / base for v in values], n=4)
        found[contender] = (middle, low, high)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="scnn,dcnn", help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the raw seconds here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus|torch")
    everything = {}
    for name in options.models.split(","):
        seconds = everything[name] = measure(name, options.repeats)
        print(
            f"\n{name}, batch {MODELS[name][1][0]}: ratio to non-private SGD, median of {options.repeats} (quartiles)"
        )
        for contender, (middle, low, high) in ratios(seconds).items():
            print(f"  {contender:20s} {middle:5.2f}   ({low:.2f} – {high:.2f})")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
