"""What a trainer iterates over: one batch for every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lmdp.integrations.account import TrainerAccount
from lmdp.processes import sample_rate_of, steps_per_pass

_END = object()


class TrainerLoader:
    """The Poisson loader of an account, which there is once the trainer has an optimizer; until then, its length.

    Batches that make no step (those of a look, and all parts of a batch but the last) go to `pass_over`, which runs
    the trainer's own training step on them: a trainer that counts batches then counts steps. Without `pass_over` they
    are handed out like others. A pass ends early where the account allows no further step. `place` puts a batch
    onto its device, if the trainer does not.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        account: TrainerAccount,
        pass_over: Callable[[Any], None] | None = None,
        *,
        place: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.plain, self.dataset, self.batch_size = loader, loader.dataset, loader.batch_size
        self._account, self._pass_over, self._place = account, pass_over, place
        self._length = steps_per_pass(sample_rate_of(loader)[0])

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: draws go on where the account is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        loader, account = self._account.loader, self._account
        batches = iter(loader)
        while not account.exhausted and (batch := next(batches, _END)) is not _END:
            if self._pass_over is not None and not loader.log.completes:
                self._pass_over(batch)
            else:
                yield self._place(batch)
