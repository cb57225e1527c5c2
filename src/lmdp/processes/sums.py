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

from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.processes.held import Held


@dataclass
class Sums:
    """What has been added up of the current batch. Everything in here is private until noise is added."""

    clipped: dict[str, Tensor]
    raw: dict[str, Tensor]
    shares: Tensor
    norms: list[Tensor]
    examples: int = 0
    nonfinite: int = 0

    def over(self, held: Held, *, raw: bool, norms: bool) -> Sums:
        """The same of all processes. `raw`, `norms`: whether those are kept. A process without examples adds zeros."""
        group = held.group
        if not group.several:
            return self
        kept = (self.clipped, self.raw) if raw else (self.clipped,)
        counts = torch.tensor([self.examples, self.nonfinite], dtype=self.shares.dtype, device=self.shares.device)
        small, totals = held.added(torch.cat([self.shares, counts]), kept)
        shares, counts = small.split([len(self.shares), 2])
        examples, nonfinite = (int(count) for count in counts.tolist())
        every = [t.to(self.shares.device) for ts in group.gathered(self.norms) for t in ts] if norms else []
        clipped, *others = totals if examples else [{}, {}]  # where nobody was drawn, nothing was added up
        return Sums(clipped, others[0] if others else {}, shares, every, examples, nonfinite)
