"""Who trains: this process alone, or all of a group whose sums are added up before noise is added (`lmdp.processes`).

Everything else is refused, or noticed. Ranks that average what each has released spend more than each of them states; a
model that was wrapped, sharded or put into shared memory may be trained by somebody whom no account knows of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lmdp.gradients.attach import REGISTRY
from lmdp.guards.content import is_sharded, local
from lmdp.guards.verdicts import HOLDS, NOT_ESTABLISHED, Judgement, Verdict

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
UNWRAPPED = (
    "Pass the model itself to make_private and to the optimizer, without a wrapper: the private step adds up over all "
    "processes of torch.distributed."
)


class Processes:
    """Looks at the group, the wrappers and the memory of one training. `size`: of the group that trains together."""

    def __init__(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], judgement: Judgement, size: int = 1
    ) -> None:
        """Refuses what is trained neither by this process alone nor by the group as a whole."""
        self._parameters, self._judgement, self._size = list(parameters), judgement, size
        self._sharded = any(map(is_sharded, self._parameters))
        self._process, self._world = REGISTRY.process, _ranks()
        wrapped = [name for name, m in model.named_modules() if _is_wrapper(m)]
        if wrapped:
            kinds = sorted({type(m).__name__ for m in model.modules() if _is_wrapper(m)})
            raise ValueError(
                f"modules {wrapped} are wrapped for several processes ({', '.join(kinds)}): their gradients would be "
                f"added up past the private step. {UNWRAPPED}"
            )
        if size == 1 < self._world:
            raise ValueError(
                f"torch.distributed has {self._world} processes, and group is this one alone: each would state its own "
                "epsilon, and together they spend more. Leave group out: make_private then adds up over all of them."
            )

    def check(self) -> None:
        """Before a release."""
        if (ranks := _ranks()) > self._world:
            self._judgement.violated("process", "a group of several processes was at work while steps were made")
            raise RuntimeError(
                f"torch.distributed has a group of {ranks} processes since make_private: each would state its own "
                "epsilon, and together they spend more. Call init_process_group before make_private, which then adds "
                "up over all of them, or train in one process."
            )
        self._notice()

    def verdict(self) -> Verdict:
        self._notice()
        if any(local(p).is_shared() for p in self._parameters if p.device.type == "cpu"):
            return Verdict(
                NOT_ESTABLISHED,
                "the parameters are in shared memory, where other processes may train them (share_memory, spawn); give "
                "other processes a copy",
            )
        if self._size < self._world:
            return Verdict(
                NOT_ESTABLISHED,
                f"{self._size} of the {self._world} processes of torch.distributed train together; what the others "
                "release of the same data is not counted here",
            )
        if self._size > 1:
            held = (
                "each holds a part of every parameter"
                if self._sharded
                else "in every step they had the same parameters"
            )
            return Verdict(
                HOLDS,
                f"{self._size} processes added up their sums before noise was added, once; {held}",
            )
        return Verdict(HOLDS, "no group of processes, no wrapper and no shared memory was seen in any step")

    def _notice(self) -> None:
        if self._process != REGISTRY.process:
            self._judgement.doubted(
                "process",
                "this process was forked from the one that called make_private; what that one releases of the same "
                "data is not counted here",
            )
        if _ranks() > self._world:
            self._judgement.violated("process", "a group of several processes was at work while steps were made")


def refuse_running_wrapper() -> None:
    """While the model runs: raise if a wrapper that was put around it since make_private runs it."""
    if torch.distributed.is_available() and DistributedDataParallel._get_active_ddp_module() is not None:
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after make_private: gradients would be added up past the "
            f"private step. {UNWRAPPED}"
        )


def _is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ in WRAPPERS for kind in type(module).__mro__)


def _ranks() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())
