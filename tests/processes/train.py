"""A small training, the same for any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import lmdp

EXAMPLES, BATCH, CLASSES = 90, 12, 5
RISK = [0.4, 0.3, 0.2]
DELTA = 1e-4


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5))
    return net.to(dtype)


def data(dtype: torch.dtype = torch.float32, size: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 8, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, size)[:, None]
    return TensorDataset(x.to(dtype), torch.randint(0, CLASSES, (size,), generator=generator))


def public(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = data(dtype).tensors
    return x.flip(0) + 1, y


@dataclass
class Trained:
    """What is left of a training: its weights, what was told of it, and the parts that this process has stepped."""

    weights: dict[str, Tensor]
    statement: dict[str, Any]
    parts: int
    steps: int
    state: dict[str, Any]

    @property
    def flat(self) -> Tensor:
        return torch.cat([w.flatten() for w in self.weights.values()])


def settings(method: str, source: str, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    needed = {"public_data": public(dtype), "public_every": 4} if source == "public" else {}
    basic = {"noise_multiplier": 0.7, "max_grad_norm": 1.0, "method": method, "weights": source, "risk": RISK}
    return basic | {"emphasis": 2.0, "seed": 11, "looks_besides": True} | needed | more


def train(
    method: str = "lm",
    source: str = "private",
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 20,
    dataset: Any = None,
    net: nn.Module | None = None,
    state: dict[str, Any] | None = None,
    batch_size: int = BATCH,
    collate_fn: Any = None,
    shard: bool = False,
    **more: Any,
) -> Trained:
    """So many steps, as users write them. Every batch is stepped until there have been enough.

    `shard`: under fully_shard.
    """
    net = net or model(dtype)
    if shard:
        shard_blocks(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    engine = lmdp.PrivacyEngine(accountant="rdp")
    loader = DataLoader(data(dtype) if dataset is None else dataset, batch_size=batch_size, collate_fn=collate_fn)
    _, _, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, **settings(method, source, dtype, **more)
    )
    if state is not None:
        load(net, optimizer, state, shard=shard)
        engine.load_state_dict(state["engine"])
    parts = 0
    while engine.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            parts += 1
            if engine.steps == steps:
                break
    statement = engine.privacy_statement(DELTA).to_dict()
    kept = {"weights": net.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
    kept = pytree.tree_map_only(DTensor, DTensor.full_tensor, kept)
    weights = {name: p.detach().clone() for name, p in whole(net).items()}
    engine.detach()
    return Trained(weights, statement, parts, engine.steps, kept)


def shard_blocks(net: nn.Module) -> nn.Module:
    """Under fully_shard, as its documentation says: first what is inside, each with parameters of its own, then all."""
    for child in net.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(net)


def whole(net: nn.Module) -> dict[str, Tensor]:
    named = net.named_parameters()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}


def load(net: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, shard: bool) -> None:
    """What `train` has kept, whole, for any number of processes."""
    mesh = next(net.parameters()).device_mesh if shard else None

    def part(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if shard and tensor.dim() else tensor.clone()

    net.load_state_dict(pytree.tree_map_only(Tensor, part, state["weights"]))
    optimizer.load_state_dict(pytree.tree_map_only(Tensor, part, state["optimizer"]))


def work(args: tuple[Any, ...], options: dict[str, Any]) -> Trained:
    return train(*args, **options)
