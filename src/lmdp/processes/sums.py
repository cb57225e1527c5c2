"""What has been added up of a batch in this process, and the same over all processes.

Guarantee. The sums over R processes are those of one process that was handed the union of their batches: the same
terms, one for each example that was drawn, in another order. So one example moves them as far as it moves the sum of
one process, by at most the mechanism's sensitivity (the gradient) and by at most 1 (the statistic), and they are noised
once, after they were added up, with the noise of one process.

Why. Every example that was drawn is in the batch of exactly one process (`population.py`). Its scale follows from its
own gradient and from public numbers only, so neither its process nor who else is there changes its term. Weights w are
applied to the total, after the sums were added up, and are the same everywhere: they follow from released values, or
are measured on public data by the first process. What the processes send each other is private, like the sums
themselves: nothing of it is released before noise is added. The noise is the same on every process, because it follows
from one key, and only one noisy sum exists, in R copies: seeing all of them tells no more than seeing one.
Averaging what R processes have each released, with noise of their own, is another mechanism, and is not this one.

Assumes that no process keeps, prints or saves what it is sent, that the network between them is as private as their
memory, and that no example is in the data of two processes where each has a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.processes.group import Group


@dataclass
class Sums:
    """What has been added up of the current batch. Everything in here is private until noise is added."""

    clipped: dict[str, Tensor]
    raw: dict[str, Tensor]
    shares: Tensor
    norms: list[Tensor]
    examples: int = 0
    nonfinite: int = 0

    def over(self, group: Group, parameters: Mapping[str, Tensor], *, raw: bool, norms: bool) -> Sums:
        """The same of all processes. `raw`, `norms`: whether those are kept. A process without examples adds zeros."""
        if not group.several:
            return self
        kept = (self.clipped, self.raw) if raw else (self.clipped,)
        counts = torch.tensor([self.examples, self.nonfinite], dtype=self.shares.dtype, device=self.shares.device)
        small = torch.cat([self.shares, counts])
        small, *large = group.added([small, *(t for sums in kept for t in _complete(sums, parameters))])
        shares, counts = small.split([len(self.shares), 2])
        examples, nonfinite = (int(count) for count in counts.tolist())
        clipped, others = large[: len(parameters)], large[len(parameters) :]
        every = [t.to(self.shares.device) for ts in group.gathered(self.norms) for t in ts] if norms else []
        names = list(parameters) if examples else []  # where nobody was drawn, nothing was added up
        return Sums(dict(zip(names, clipped)), dict(zip(names, others)), shares, every, examples, nonfinite)


def _complete(sums: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """A sum for every parameter, zero where none was reached; in 32 bits where it has fewer. They are taken away."""
    wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in parameters.items()}
    missing = {name: p for name, p in parameters.items() if name not in sums}
    zeros = {name: torch.zeros_like(p, dtype=wide[name], requires_grad=False) for name, p in missing.items()}
    return [sums.pop(name).to(wide[name]) if name in sums else zeros[name] for name in parameters]
