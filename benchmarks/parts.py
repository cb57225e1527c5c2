"""One training with whole batches and with the same batches in parts: how far apart do the weights end?

    python benchmarks/parts.py [--steps 50] [--batch 64] [--part 32]

The sums have the same terms, in another order, and torch computes batches of other sizes by other routines. What that
rounds otherwise grows from step to step, as any difference in the weights does while a network trains. In double
precision it begins 2^29 times smaller: if nothing else is different, it also ends about that much smaller.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import SCNN, fresh


def trained(dtype: torch.dtype, steps: int, batch: int, part: int | None, nudge: float = 0.0) -> Tensor:
    """`nudge`: what the first weight is multiplied with, less 1, before training begins."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(1000, 1, 28, 28, generator=generator, dtype=torch.float64).to(dtype),
        torch.randint(0, 10, (1000,), generator=generator),
    )
    model = fresh(SCNN, 0).to(dtype)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] *= 1 + nudge
    engine, optimizer = lmdp.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.5)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        max_physical_batch_size=part,
        seed=0,
        check_mixing=False,
    )
    while engine.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.steps == steps:
                break
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--part", type=int, default=32)
    given = parser.parse_args()
    print(f"S-CNN, {given.steps} steps, batch {given.batch}; relative distance of the weights at the end")
    for dtype in (torch.float32, torch.float64):
        whole = trained(dtype, given.steps, given.batch, None)
        parts = trained(dtype, given.steps, given.batch, given.part)
        nudged = trained(dtype, given.steps, given.batch, None, 4 * torch.finfo(dtype).eps)
        apart = [float((other - whole).norm() / whole.norm()) for other in (parts, nudged)]
        print(
            f"{dtype}: parts {apart[0]:.1e}; one weight nudged by 4 units in its last place {apart[1]:.1e}", flush=True
        )


if __name__ == "__main__":
    main()
