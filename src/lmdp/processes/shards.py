"""Models under `fully_shard` (FSDP2): each process holds a part of every parameter, and none ever holds all of them.

    unit       what torch gathers at a time: the parameters of one module that `fully_shard` was called on
    gather     a unit is whole on a process while its module runs there, forward or backward
    sums       of a unit are added up as soon as they are formed; each process is left with those of its own part
    noise      is made for that part: its numbers of the noise that one process would have made (`compiled/parts.py`)

Guarantee. As in `sums.py`: the parts are, put together, the sums that one process would have, with its noise, once.

Why. Nothing else is different. Scales follow from norms that a process computes of its own examples, over all layers,
from whole modules; a part of a sum is moved by an example no further than the sum is. Of the key stream all processes
read the places that one process would, each its own, so no number of noise is used for two parameters.

Gathering and adding up take all processes, and not all run the model as often: parts of a batch, looks and empty draws
differ. So nobody counts passes. Before each of these a process says by a record what it needs (`Group.turn`); whoever
is at another exchange of the training meanwhile takes part and repeats its own: with its part of the unit, or with
zeros as its sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.gradients.attach import give_freed_memory_back
from lmdp.gradients.compiled.parts import Part
from lmdp.guards.content import Content, is_sharded, local
from lmdp.processes.group import Group
from lmdp.processes.held import Summed, Totals, wide

GATHER = 0
"""Of a unit; 1 and 2: to add up its first and its second sums."""
KINDS = 3
FORGOTTEN = (
    "a batch was begun, and parts of it were added up over all processes, but it was not stepped to its end. Under "
    "fully_shard they cannot be taken back. Step every part that the data loader hands out, and start this training "
    "again, from its last checkpoint if there is one."
)


@dataclass(frozen=True)
class Unit:
    """What torch gathers at a time. `parameters`: all of them by name, in torch's order; `trained`: of those, these."""

    module: Any
    parameters: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]

    @property
    def is_whole(self) -> bool:
        """Whether its parameters are whole here and now."""
        return not all(is_sharded(p) for p in self.module.parameters())


class Shards:
    """The parameters of one model, of which every process of a group holds a part."""

    sharded = True

    def __init__(self, capture: Capture, group: Group) -> None:
        self._capture, self.group = capture, group
        _refuse(capture, group)
        if capture.device.type == "cpu":  # elsewhere only noise is made here, and would take longer
            give_freed_memory_back()
        self._units = list(_units(capture))
        self._unit_of = {name: i for i, unit in enumerate(self._units) for name in unit.trained}
        self._mesh = next(iter(capture.parameters.values())).device_mesh  # type: ignore[attr-defined]
        self.parts = [Part(*self._place(p)[:2]) for p in capture.parameters.values()]
        self._totals: list[Totals] = [{}, {}]
        self._gave = False
        self._before = [_gatherer(unit.module) for unit in self._units]
        group.serve(self._take_part)
        for number, unit in enumerate(self._units):
            unit.module.set_custom_all_gather(_InTurn(self, number, self._before[number]))
        for unit in self._units:  # the whole of a parameter is an object of its own, always the same
            with self._whole(unit):
                capture.attachment.refuse_direct_use({name: capture.model.get_parameter(name) for name in unit.trained})

    def _place(self, parameter: Tensor) -> tuple[int, int, int]:
        """(first number held here, of how many in all, how many each process holds at most)."""
        n, rows = parameter.numel(), len(parameter) if parameter.dim() else 1
        most = -(-rows // self.group.size) * (n // max(1, rows))
        return min(n, self.group.rank * most), n, most

    # -- where sums go -----------------------------------------------------------------------------------------------

    def local(self) -> dict[str, Tensor]:
        return {name: local(p).detach() for name, p in self._capture.parameters.items()}

    def take_in(self, totals: Sequence[Totals], sums: Summed, reached: Sequence[str]) -> None:
        """A unit is added up once all sums of it are there."""
        expected = [len(unit.trained.keys() & set(reached)) for unit in self._units]
        ready: dict[int, dict[str, list[Tensor]]] = {}
        for name, values in sums:
            unit = self._unit_of[name]
            ready.setdefault(unit, {})[name] = values
            if len(ready[unit]) == expected[unit]:
                self._give(unit, ready.pop(unit))
        for unit in sorted(ready):
            self._give(unit, ready[unit])

    def _give(self, unit: int, sums: Mapping[str, list[Tensor]]) -> None:
        for k in range(len(next(iter(sums.values())))):
            self.group.turn(KINDS * unit + 1 + k)
            self._gave = True
            self._add_up(unit, k, {name: each[k] for name, each in sums.items()})

    def _add_up(self, unit: int, k: int, sums: Mapping[str, Tensor]) -> None:
        """By all processes at once: each gives its sums, zero unless it has some, and keeps its part of the total."""
        trained = self._units[unit].trained
        places = {name: self._place(p) for name, p in trained.items()}
        kind = max((wide(p) for p in trained.values()), key=lambda dtype: dtype.itemsize)
        size, device = sum(most for _, _, most in places.values()), next(iter(trained.values())).device
        given = torch.zeros(self.group.size, size, dtype=kind, device=device)  # [processes, numbers of each]
        at = 0
        for name, (_, n, most) in places.items():
            if name in sums and n:
                _deal(sums[name].reshape(-1), given[:, at : at + most])
            at += most
        kept = given.new_empty(size)
        self.group.scatter(kept, given.view(-1), self._mesh.get_group())
        for name, mine in zip(places, kept.split([most for _, _, most in places.values()])):
            here = local(trained[name])
            more = mine[: here.numel()].view(here.shape).to(wide(here))
            total = self._totals[k]
            total[name] = total[name].add_(more) if name in total else more.clone()

    def forget(self) -> None:
        if self._gave:
            raise RuntimeError(FORGOTTEN)

    def added(self, small: Tensor, totals: Sequence[Totals]) -> tuple[Tensor, list[Totals]]:
        (small,) = self.group.added([small])
        taken, self._totals, self._gave = self._totals, [{}, {}], False
        return small, taken[: len(totals)]

    def joined(self, of_parts: Tensor) -> Tensor:
        return self.group.added([of_parts])[0]

    def gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        spread: Any = parameter
        return DTensor.from_local(
            value, spread.device_mesh, spread.placements, shape=spread.shape, stride=spread.stride(), run_check=False
        )

    # -- the whole of it, one unit after the other -------------------------------------------------------------------

    def everything(self) -> Mapping[str, Tensor]:
        model = self._capture.model
        rest = [*model.named_parameters(), *model.named_buffers()]
        return _Gathered(self, {name: t for name, t in rest if not is_sharded(t)}, trained=False)

    def trained(self) -> Mapping[str, Tensor]:
        return _Gathered(self, {}, trained=True)

    def each_whole(self, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
        """None once others are gone, and what they held."""
        for unit in () if self.group.lost else self._units:
            names = list(unit.trained if trained else unit.parameters)
            if names:
                with self._whole(unit):
                    for name in names:
                        yield name, self._capture.model.get_parameter(name).detach().clone()  # its memory is given back

    @contextmanager
    def _whole(self, unit: Unit) -> Iterator[None]:
        before = unit.is_whole
        unit.module.unshard()
        try:
            yield
        finally:
            if not before:
                unit.module.reshard()

    # -- together ----------------------------------------------------------------------------------------------------

    def _take_part(self, operation: int) -> None:
        """In what another process needs."""
        unit, kind = divmod(operation, KINDS)
        if kind != GATHER:
            self._add_up(unit, kind - 1, {})
            return
        padded = []
        for parameter in self._units[unit].parameters.values():
            mine = local(parameter).detach().reshape(-1)
            room = mine.new_zeros(self._place(parameter)[2])
            room[: len(mine)] = mine
            padded.append(room)
        given = torch.cat(padded)
        self.group.gather(given.new_empty(self.group.size * len(given)), given, self._mesh.get_group())

    def compared(self, content: Content, optimizer: torch.optim.Optimizer) -> int:
        """Parts are not the same, and what becomes of them should be: settings of the optimizer."""
        settings = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
        return int.from_bytes(hashlib.blake2b(repr(settings).encode(), digest_size=8).digest(), "big") >> 1

    def settle(self) -> None:
        for unit in self._units:
            if unit.is_whole:
                unit.module.reshard()

    def leave(self) -> None:
        for unit, before in zip(self._units, self._before):
            unit.module.set_custom_all_gather(before)


class _InTurn:
    """Gathers a unit, as torch does, when all processes are about to: `Group.turn`. `before`: what did so earlier."""

    def __init__(self, shards: Shards, unit: int, before: Any) -> None:
        self._shards, self._operation, self.before = shards, KINDS * unit + GATHER, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        together = self._shards.group
        together.turn(self._operation)
        return together.gather(output_tensor, input_tensor, group, later=async_op)


class _Gathered(Mapping[str, Tensor]):
    """Whole tensors by name, of which no two units are here at a time."""

    gathers = True
    """Whether reading it takes all processes."""

    def __init__(self, shards: Shards, rest: dict[str, Tensor], *, trained: bool) -> None:
        self._shards, self._rest, self._trained = shards, rest, trained

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._shards.each_whole(trained=self._trained)
        yield from self._rest.items()

    def items(self) -> Any:
        return self._each()

    def values(self) -> Any:
        return (tensor for _, tensor in self._each())

    def __getitem__(self, name: str) -> Tensor:
        return next(tensor for each, tensor in self._each() if each == name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._each())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _deal(numbers: Tensor, room: Tensor) -> None:
    """[n] → [processes, most]: the first ones to the first process, and so on."""
    most = room.shape[1]
    full = len(numbers) // most
    room[:full] = numbers[: full * most].view(full, most)
    if full < len(room):
        room[full, : len(numbers) - full * most] = numbers[full * most :]


def _state(module: Any) -> Any:
    """What torch keeps of a module under fully_shard; it has no public name."""
    return module._get_fsdp_state()


def _gatherer(module: Any) -> Any:
    gatherer = _state(module)._fsdp_param_groups[0]._all_gather_comm
    return gatherer.before if isinstance(gatherer, _InTurn) else gatherer


def _is_unit(module: nn.Module) -> bool:
    return "FSDPModule" in str(type(module).__mro__)


def _units(capture: Capture) -> Iterator[Unit]:
    """Those of torch, in the order of the modules; one that several modules are in comes once."""
    names = {id(p): name for name, p in capture.model.named_parameters()}
    trained = {id(p) for p in capture.parameters.values()}
    seen: set[int] = set()
    for module in capture.model.modules():
        groups = _state(module)._fsdp_param_groups if _is_unit(module) else []
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                held = {names[id(each.sharded_param)]: each.sharded_param for each in group.fsdp_params}
                yield Unit(module, held, {name: p for name, p in held.items() if id(p) in trained})


def _refuse(capture: Capture, group: Group) -> None:
    """What of fully_shard is not built here, by its name and with the remedy."""
    model = capture.model
    modules = [module for module in model.modules() if _is_unit(module)]
    whole = [name for name, p in capture.parameters.items() if not is_sharded(p)]
    trained: list[Any] = [p for p in capture.parameters.values() if is_sharded(p)]
    if not _is_unit(model) or whole or not group.several:
        which = f"parameters {whole[:5]} are trained and not sharded" if whole else "the model itself is not"
        which = which if group.several else "there is one process only"
        raise ValueError(
            f"parts of the model are under fully_shard, and {which}. Call fully_shard on the model itself too, after "
            "its blocks, in a group of several processes (torchrun), and then make_private."
        )
    if not all(hasattr(module, "set_custom_all_gather") for module in modules):
        raise ValueError(
            f"torch {torch.__version__} cannot be told how to gather parameters under fully_shard "
            "(FSDPModule.set_custom_all_gather). Use torch 2.13 or later, or train without fully_shard."
        )
    states = [_state(module) for module in modules]
    unsuited = {
        "several meshes in one module": any(len(state._fsdp_param_groups) > 1 for state in states),
        "a mesh of more than one dimension (HSDP, tensor parallel)": any(p.device_mesh.ndim != 1 for p in trained),
        "another group of processes than make_private's": any(not _is_of(group, p.device_mesh) for p in trained),
        "shard_placement_fn": any(str(p.placements) != "(Shard(dim=0),)" for p in trained),
        "mp_policy": any(_sets(state._mp_policy) for state in states),
        "offload_policy": any(
            type(each.offload_policy).__name__ != "OffloadPolicy" for s in states for each in s._fsdp_param_groups
        ),
        "reshard_after_forward=<a number>": any(
            each.post_forward_mesh_info is not None and each.post_forward_mesh_info.mesh.size() != group.size
            for s in states
            for each in s._fsdp_param_groups
        ),
    }
    if wrong := [name for name, is_set in unsuited.items() if is_set]:
        raise ValueError(
            f"fully_shard was called with {', '.join(wrong)}, which is not supported here. Shard the first dimension "
            "of all parameters over all processes of the training; for shorter numbers use torch.autocast."
        )


def _is_of(group: Group, mesh: Any) -> bool:
    return list(mesh.mesh.flatten().tolist()) == group.ranks


def _sets(policy: Any) -> bool:
    return any(getattr(policy, name, None) is not None for name in ("param_dtype", "reduce_dtype", "output_dtype"))
