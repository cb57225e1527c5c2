"""The processes of one training, and all that they say to each other.

    meet       before every release: all are at the same step of the same model, or all stop
    added      sums over the processes, in flat buckets
    turn       before what takes all processes and only some of them need (`shards.py`): the others take part
    gathered   what each of them has to say; `same`: what the first one says

Every exchange begins with a record of fixed length from each process, in which it says what it is about to do. So a
process that has failed, that is elsewhere, or that is gone is noticed by all the others, and nobody waits for what
nobody sends. One process alone is a group too: then nothing is sent.

`torch.distributed` does the work. Sums go over the group that the user has set up; records are small and go over the
host's network (gloo), so that no device is waited for.
"""

from __future__ import annotations

import secrets
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STEP, WORDS, FAILED, TURN = 0, 1, 2, 3
STOP = b"stop"
RECORD = struct.Struct("<5q470s")
"""What it is about; numbers; and, of a failure, its message."""
BUCKET = 25 * 2**20
"""Bytes that are sent at a time."""
SHOWN = 5
"""Differences that are named."""
AGAIN = "Start the training again; with a checkpoint it goes on after the last step that was saved."

ALL_ASK = (
    "some processes ask for a privacy statement, a saved state or make_private, and others make a step: call "
    "privacy_statement, state_dict and make_private on every process, also where only one of them uses the result."
)


class Parted(RuntimeError):
    """The processes of a training are no longer together: one has failed, is elsewhere, or is gone."""


class Group:
    """`given`: a process group of torch.distributed, or None for all of its processes, if there are several.

    alone whether this is of one process, however many there are
    name  of the training, the same everywhere; "" for one process
    parted
          why the processes went separate ways, if they did
    sent  bytes that this process has given to be added up, and in records
    """

    def __init__(self, given: Any = None, *, alone: bool = False) -> None:
        self._group = _Kept(None if alone else _process_group(given))
        self.rank = 0 if self._group.none else dist.get_rank(self._group.here)
        self.size = 1 if self._group.none else dist.get_world_size(self._group.here)
        self._records = self._group
        self._lost = self.parted = ""
        self._stops = self.stop_asked = False
        self._exchanges = 0
        self._take_part: Callable[[int], None] | None = None
        self.sent = 0
        if not self._group.none and dist.get_backend(self._group.here) != "gloo":
            self._records = _Kept(self._new_group())
        self.name: str = self.same(secrets.token_hex(16)) if self.several else ""

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def ranks(self) -> list[int]:
        """Of its processes, in the order of their ranks in it."""
        return [0] if self._group.none else dist.get_process_group_ranks(self._group.here)

    def ask_to_stop(self) -> None:
        """All processes know with the next step that one of them would stop after it (`stop_asked`)."""
        self._stops, self.stop_asked = True, self.stop_asked or not self.several

    @property
    def lost(self) -> str:
        """Why the others can no longer be asked; "" if they can."""
        return self._lost

    def meet(self, step: int, draw: int, digest: int) -> None:
        """All are about to release this step, of the draw of this number, for parameters of this digest."""
        if not self.several:
            return
        try:
            self._compare(step, self._exchange(STEP, step, draw, digest, text=STOP if self._stops else b""))
        except Parted as error:
            self.parted = str(error)
            raise

    def _compare(self, step: int, records: Sequence[tuple[int, ...]]) -> None:
        if len({record[0] for record in records}) > 1:
            raise Parted(ALL_ASK)
        if len({record[:3] for record in records}) > 1:
            places = ", ".join(f"process {rank}: step {r[1]}, draw {r[2]}" for rank, r in enumerate(records))
            raise Parted(
                f"the processes are not at the same step ({places}). Run the same loop over the data loader of "
                "make_private on every process, and step every batch that it hands out."
            )
        if len({record[3] for record in records}) > 1:
            raise Parted(
                f"before step {step} the parameters are not the same on all processes: something changed them on some "
                "only (a learning rate that follows batches instead of steps, weights loaded on one process, an "
                f"optimizer with other settings). Do the same on every process. {AGAIN}"
            )

    @contextmanager
    def reaching_all(self) -> Iterator[None]:
        """An error inside is raised by every process at its next exchange."""
        try:
            yield
        except Parted:
            raise
        except Exception as error:
            if self.several and not self._lost:
                told = f"{type(error).__name__}: {' '.join(str(error).split())}".encode()[:470]
                with suppress(Parted):
                    records = self._exchange(FAILED, text=told)
                    self.parted = "" if all(r[0] == FAILED for r in records) else told.decode(errors="replace")
            raise

    def added(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's sum over all processes. They must be of the same shapes and types everywhere.

        What fills a bucket alone is added up in its place.
        """
        if not self.several:
            return list(tensors)
        totals: list[Tensor] = []
        for parts in _buckets(tensors):
            flat = torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
            with self._together():
                dist.all_reduce(flat, group=self._group.here)
            self.sent += flat.nbytes
            ends = flat.split([part.numel() for part in parts])
            totals += [end.view(part.shape) for end, part in zip(ends, parts)]
        return totals

    def gathered(self, word: Any) -> list[Any]:
        """What every process says, in the order of their ranks. All must ask for it."""
        if not self.several:
            return [word]
        self._all_ask()
        words: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(words, word, group=self._records.here)
        return words

    def _all_ask(self) -> None:
        self._exchanges += 1
        if len({record[:2] for record in self._exchange(WORDS, self._exchanges)}) > 1:
            raise Parted(ALL_ASK)

    def told(self, word: Any) -> list[Any]:
        """The same; only this one's word where others are gone (`lost`)."""
        try:
            return self.gathered(word)
        except Parted:
            if not self._lost:
                raise
            return [word]

    def same(self, word: Any) -> Any:
        """What the first process says. All must ask for it."""
        if not self.several:
            return word
        self._all_ask()
        words = [word]
        with self._together():
            dist.broadcast_object_list(words, group_src=0, group=self._records.here)
        return words[0]

    def secret(self, key: bytes, *, copied: bool) -> bytes:
        """The first one's key, on all. `copied`: whether it may be."""
        if not copied:
            raise ValueError(
                f"secure_mode=True keeps the key in one process, but {self.size} must have it to make the same noise. "
                "Leave secure_mode out (the key then comes from the operating system, and is sent to all), or train in "
                "one process."
            )
        return bytes(self.same(key))

    def agreed(self, facts: dict[str, Any]) -> None:
        """Refuse to go on where these are not the same on all processes."""
        every = self.gathered(facts)
        names = dict.fromkeys(name for one in every for name in one)
        differing = [name for name in names if any(other.get(name) != every[0].get(name) for other in every)]
        if differing:
            shown = [f"{name}: {', '.join(str(other.get(name)) for other in every)}" for name in differing[:SHOWN]]
            values = "; ".join([*shown, *([f"and {len(differing) - SHOWN} more"] if differing[SHOWN:] else [])])
            raise ValueError(
                f"the processes of this training are not set up alike ({values}, in the order of their ranks). Start "
                "all of them with the same program, versions, settings and data."
            )

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Every process has the first one's values from here on."""
        for tensor in tensors if self.several else ():
            with self._together(), torch.no_grad():
                dist.broadcast(tensor.detach(), group_src=0, group=self._group.here)

    def serve(self, take_part: Callable[[int], None]) -> None:
        """Let processes `turn`; `take_part` does what one of them needs. Records get a group of their own: what the
        user's loop sends between two passes of the model must not meet them."""
        self.gathered(None)  # who fails says so before others wait in torch for it
        self._records = _Kept(self._new_group())
        self._take_part = take_part

    def _new_group(self) -> Any:
        """Of the same processes, for records; as patient as the user's."""
        return dist.new_group(self.ranks, timeout=_timeout(self._group.here), backend="gloo")

    def turn(self, operation: int) -> None:
        """Returns when all processes are about to do this: those who need it, and those who take part."""
        self._exchange(TURN, operation)

    def gather(self, output: Tensor, given: Tensor, group: Any, *, later: bool = False) -> Any:
        """What every process gives, one behind the other."""
        self.sent += given.nbytes
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._together():
            return gather(output, given, group=group, async_op=later)

    def scatter(self, output: Tensor, given: Tensor, group: Any) -> None:
        """The sum of what every process gives, of which each gets its part."""
        self.sent += given.nbytes
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self._together():
            scatter(output, given, group=group)

    def _exchange(self, kind: int, *numbers: int, text: bytes = b"") -> list[tuple[int, ...]]:
        """The records of all, once nobody else needs anything; raises what one of them has told to have failed."""
        while True:
            records = self._exchanged(kind, *numbers, text=text)
            needed = [record[1] for record in records if record[0] == TURN]  # that of the first comes first
            if not needed or kind == FAILED or (kind == TURN and needed[0] == numbers[0]):
                return records
            assert self._take_part is not None
            self._take_part(needed[0])

    def _exchanged(self, kind: int, *numbers: int, text: bytes = b"") -> list[tuple[int, ...]]:
        if self._lost:
            raise Parted(self._lost)
        three = (*numbers, 0, 0, 0)[:3]
        mine = torch.frombuffer(bytearray(RECORD.pack(kind, *three, len(text), text)), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with self._together():
            dist.all_gather(every, mine, group=self._records.here)
        self.sent += len(mine)
        records = [RECORD.unpack(record.numpy().tobytes()) for record in every]
        self.stop_asked = self.stop_asked or any(r[5][: r[4]] == STOP for r in records)
        failures = [(rank, r[5][: r[4]].decode(errors="replace")) for rank, r in enumerate(records) if r[0] == FAILED]
        if kind != FAILED and failures:
            rank, told = failures[0]
            raise Parted(f"process {rank} of {self.size} failed: {told}")
        return [record[:4] for record in records]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What torch says of a connection that broke is said in words."""
        try:
            yield
        except RuntimeError as error:
            self._lost = (
                f"another process of this training is gone, or gave no answer in time ({_short(error)}). Look at what "
                f"it printed. {AGAIN}"
            )
            raise Parted(self._lost) from error


class _Kept:
    """A process group, as long as torch keeps it, which is until it is destroyed.

    Who holds one longer keeps its threads alive. If they are when Python ends, the process may abort.
    """

    def __init__(self, group: Any) -> None:
        self.none = group is None
        self._group = None if group is None else weakref.ref(group)

    @property
    def here(self) -> Any:
        group = None if self._group is None else self._group()
        if group is None:
            raise RuntimeError("its process group was destroyed")
        return group


def _process_group(given: Any) -> Any:
    if given is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        given = dist.group.WORLD
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is one that this process does not belong to. Call make_private only on processes of the group."
        )
    return given


def _timeout(group: Any) -> Any:
    """For which an exchange of this group waits; None, for torch's own, where it does not say."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type and device, up to the size of a bucket."""
    for _, alike in groupby(tensors, key=lambda t: (t.dtype, t.device)):
        bucket: list[Tensor] = []
        room = BUCKET
        for tensor in alike:
            if bucket and tensor.nbytes > room:
                yield bucket
                bucket, room = [], BUCKET
            bucket.append(tensor)
            room -= tensor.nbytes
        yield bucket


def _short(error: BaseException) -> str:
    """Its first line, without the place in torch's own source."""
    first = str(error).strip().partition("\n")[0]
    return first.rpartition("] ")[2][:200]
