"""What a process holds of the parameters: all of them (`Whole`), or a part of each (`shards.Shards`).

A step asks it where sums go, which numbers get noise here, and what becomes a gradient. The rest of the step is the
same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.gradients.compiled.parts import Part
from lmdp.guards.content import Content, is_sharded
from lmdp.processes.group import Group

Totals = dict[str, Tensor]
Summed = Iterable[tuple[str, list[Tensor]]]
"""Of every parameter that a backward pass has reached: its name, and its sum under each of some scales."""


class Held(Protocol):
    """Of one process. `sharded`: whether it is a part of every parameter; `parts`: which numbers, empty if all."""

    @property
    def group(self) -> Group: ...
    @property
    def sharded(self) -> bool: ...
    @property
    def parts(self) -> Sequence[Part]: ...

    def local(self) -> dict[str, Tensor]:
        """What is held here of each parameter."""
        ...

    def take_in(self, totals: Sequence[Totals], sums: Summed, reached: Sequence[str]) -> None:
        """Add the sums of a part of a batch, of the parameters `reached`."""
        ...

    def forget(self) -> None:
        """What was taken in is to count for nothing. Raises where others have it already."""
        ...

    def added(self, small: Tensor, totals: Sequence[Totals]) -> tuple[Tensor, list[Totals]]:
        """All that was taken in since, over all processes: of what is held here. `small` is added up as a whole."""
        ...

    def joined(self, of_parts: Tensor) -> Tensor:
        """Sums over what is held here → over whole parameters."""
        ...

    def gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """What an optimizer takes for the gradient of a parameter, from its numbers that are held here."""
        ...

    def everything(self) -> Mapping[str, Tensor]:
        """All that is saved with the model, whole; `trained`: its trained parameters. Read one after the other."""
        ...

    def trained(self) -> Mapping[str, Tensor]: ...

    def compared(self, content: Content, optimizer: torch.optim.Optimizer) -> int:
        """Of what must be the same on all processes before a step: a digest."""
        ...

    def settle(self) -> None:
        """Nothing runs: no module needs its parameters whole."""

    def leave(self) -> None:
        """The model is an ordinary one again."""


@dataclass(frozen=True)
class Whole:
    """Every process has all parameters, and the same."""

    capture: Capture
    group: Group
    sharded = False
    parts: Sequence[Part] = ()

    def local(self) -> dict[str, Tensor]:
        return dict(self.capture.parameters)

    def take_in(self, totals: Sequence[Totals], sums: Summed, reached: Sequence[str]) -> None:
        for name, values in sums:
            for total, value in zip(totals, values):
                total[name] = total[name].add_(value) if name in total else value

    def forget(self) -> None: ...

    def added(self, small: Tensor, totals: Sequence[Totals]) -> tuple[Tensor, list[Totals]]:
        names = list(self.capture.parameters)
        complete = [t for total in totals for t in _complete(total, self.capture.parameters)]
        small, *large = self.group.added([small, *complete])
        return small, [dict(zip(names, large[k : k + len(names)])) for k in range(0, len(large), len(names))]

    def joined(self, of_parts: Tensor) -> Tensor:
        return of_parts

    def gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        return value

    def everything(self) -> Mapping[str, Tensor]:
        return dict([*self.capture.model.named_parameters(), *self.capture.model.named_buffers()])

    def trained(self) -> Mapping[str, Tensor]:
        return self.capture.parameters

    def compared(self, content: Content, optimizer: torch.optim.Optimizer) -> int:
        return content.digest if self.group.several else 0

    def settle(self) -> None: ...

    def leave(self) -> None: ...


def held_by(capture: Capture, group: Group, diagnostics: Any = None) -> Held:
    """Of the parameters of a model, by each process of a group."""
    if not any(map(is_sharded, capture.model.parameters())):
        return Whole(capture, group)
    from lmdp.processes.shards import Shards

    if diagnostics is not None:
        raise ValueError(
            "diagnostics=True keeps un-noised sums of whole parameters, and under fully_shard no process has them. "
            "Leave diagnostics out, or train without fully_shard."
        )
    return Shards(capture, group)


def wide(parameter: Tensor) -> torch.dtype:
    """The type of its sums over processes: 32 bits where it has fewer."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _complete(sums: Totals, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """A sum for every parameter, zero where none was reached. They are taken away."""
    for name, p in parameters.items():
        yield (sums.pop(name) if name in sums else torch.zeros_like(p, requires_grad=False)).to(wide(p))
