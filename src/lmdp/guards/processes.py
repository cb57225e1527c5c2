"""Who trains: this process alone. Several are refused, or noticed, because nothing is added up over them.

Ranks that average what each has released spend more than each of them states; a model that was wrapped, sharded or
put into shared memory may be trained by somebody whom no account knows of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lmdp.gradients.attach import REGISTRY
from lmdp.guards.verdicts import HOLDS, NOT_ESTABLISHED, Judgement, Verdict

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
REMEDY = "Train in one process, without a wrapper."


class Processes:
    """Looks at the group, the wrappers and the memory of one training."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], judgement: Judgement) -> None:
        """Refuses what cannot be trained by one process alone."""
        self._parameters, self._judgement = list(parameters), judgement
        self._process = REGISTRY.process
        wrapped = [name for name, m in model.named_modules() if _is_wrapper(m)]
        if wrapped:
            kinds = sorted({type(m).__name__ for m in model.modules() if _is_wrapper(m)})
            raise ValueError(
                f"modules {wrapped} are wrapped for several processes ({', '.join(kinds)}): their gradients would be "
                f"added up past the private step. Pass the model itself. {REMEDY}"
            )
        if (ranks := _ranks()) > 1:
            raise ValueError(
                f"torch.distributed has a group of {ranks} processes: each would state its own epsilon, and together "
                f"they spend more. {REMEDY}"
            )
        if any(_is_sharded(p) for p in self._parameters):
            raise ValueError(f"the model's parameters are sharded over processes. {REMEDY}")

    def check(self) -> None:
        """Before a release."""
        if _ranks() > 1:
            self._judgement.violated("process", "a group of several processes was at work while steps were made")
            raise RuntimeError(
                f"torch.distributed has a group of {_ranks()} processes since make_private: each would state its own "
                f"epsilon, and together they spend more. {REMEDY}"
            )
        self._notice()

    def verdict(self) -> Verdict:
        self._notice()
        if any(p.is_shared() for p in self._parameters if p.device.type == "cpu"):
            return Verdict(
                NOT_ESTABLISHED,
                "the parameters are in shared memory, where other processes may train them (share_memory, spawn); give "
                "other processes a copy",
            )
        return Verdict(HOLDS, "no group of processes, no wrapper and no shared memory was seen in any step")

    def _notice(self) -> None:
        if self._process != REGISTRY.process:
            self._judgement.doubted(
                "process",
                "this process was forked from the one that called make_private; what that one releases of the same "
                "data is not counted here",
            )
        if _ranks() > 1:
            self._judgement.violated("process", "a group of several processes was at work while steps were made")


def _is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ in WRAPPERS for kind in type(module).__mro__)


def _ranks() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def _is_sharded(parameter: nn.Parameter) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__)
