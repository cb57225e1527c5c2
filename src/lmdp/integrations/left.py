"""What a training has left in a model, known by its bits: whether the model still is what the account speaks of."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lmdp.guards import unnoised
from lmdp.guards.content import digest_of


class Left:
    """Of one training that is over. Its trained parameters may be those of any of its own checkpoints again, whose
    digests are `released`; nothing else may be other than it was."""

    def __init__(self, whole: nn.Module, trained: Mapping[str, Tensor], released: Collection[str]) -> None:
        self._whole, self._trained, self._released = whole, trained, released
        self._rest = unnoised(whole, trained)

    def said(self) -> str:
        """What has changed since; "" if nothing has."""
        now = unnoised(self._whole, self._trained)
        changed = [name for name in {**self._rest, **now} if now.get(name) != self._rest.get(name)]
        moved = digest_of(self._trained) not in self._released
        if not (changed or moved):
            return ""
        what = " and ".join([*(["the trained parameters"] if moved else []), *([str(changed[:5])] if changed else [])])
        return (
            f"{what} were changed after the training ended, outside of this account, and nobody knows from what. Save "
            "the model before that, or load one of its checkpoints again"
        )

    def holds(self, module: nn.Module) -> bool:
        """Whether this is the model, or a part of it."""
        return any(part is module for part in self._whole.modules())
