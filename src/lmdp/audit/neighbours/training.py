"""A training that can be run again with one example more or less, everything else being equal.

An example that is not there keeps its place: the dataset has the same length in both worlds, its place is held by a
copy of the first example, and no draw ever takes it. So the sampling rate and the number of steps, which count as
public, are equal, and a training that looks at the whole dataset (to normalise it, say) is caught looking.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import logging
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lmdp.accounting import DEFAULT
from lmdp.gradients import randomness
from lmdp.guards import fingerprints
from lmdp.guards.content import is_sharded
from lmdp.private import Observer, PrivacyEngine
from lmdp.private.noise import GaussianNoise, Randomness

Train = Callable[[PrivacyEngine, Dataset[Any]], Any]
"""A whole training: builds model, optimizer and loader, calls `engine.make_private`, runs the loop, and returns what is
to be published (or None)."""


class Staged(Observer):
    """Fixes who is drawn: `alter` changes uniform numbers [N], below 0 for "always", 1 or more for "never"."""

    def __init__(self, alter: Callable[[Tensor], Tensor]) -> None:
        self.alter = alter
        self.noises: list[GaussianNoise] = []

    def randomness(self, randomness: Randomness) -> Randomness:
        return _StagedRandomness(randomness, self)


class _StagedRandomness:
    """Randomness whose draws are staged, and which remembers the noise that it has lent."""

    def __init__(self, randomness: Randomness, stage: Staged) -> None:
        self.source = randomness.source
        self._randomness, self._stage = randomness, stage

    def uniforms(self, draw: int, size: int) -> Tensor:
        return self._stage.alter(self._randomness.uniforms(draw, size))

    def noise(self, step: int) -> GaussianNoise:
        self._stage.noises.append(self._randomness.noise(step))
        return self._stage.noises[-1]


class StagedEngine(PrivacyEngine):
    """An engine whose randomness is fixed and whose draws are staged. Never certified: seeded, and observed."""

    def __init__(self, seed: int, stage: Staged, accountant: str = DEFAULT) -> None:
        super().__init__(accountant)
        self._seed, self.observer = seed, stage

    def make_private(self, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        if not options.get("poisson_sampling", True):
            raise ValueError("poisson_sampling is False; this check is about Poisson batches. Leave it at True.")
        if any(map(is_sharded, options["module"].parameters())):
            raise ValueError(
                "the model is under fully_shard, where no process has whole gradients to compare. Check the same "
                "training without fully_shard, by as many processes: its sums are the same."
            )
        # Nothing is looked for here: what examples do to each other is measured, in runs that make the same steps.
        return super().make_private(**(options | {"seed": self._seed, "check_mixing": False}))


class _Places(Dataset[Any]):
    """A dataset followed by more examples. With a seed, what reading one draws depends on no other that is read."""

    def __init__(self, dataset: Dataset[Any], size: int, more: Sequence[Any], seed: int | None) -> None:
        self._dataset, self._size, self._more, self._seed = dataset, size, more, seed
        self._times_read: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._size + len(self._more)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[one] for one in range(len(self))[at]]
        at = range(len(self))[int(at)]
        if at >= self._size:
            return self._more[at - self._size]
        if self._seed is None:
            return self._dataset[at]
        self._times_read[at] += 1
        with randomness.same(hash((self._seed, at, self._times_read[at])) % 2**32):
            return self._dataset[at]


def as_dataset(data: Any) -> Dataset[Any]:
    """A dataset, anything with a length and examples by number, or a tuple of tensors as one. Refuses an empty one."""
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor) for part in data):
        data = TensorDataset(*data)
    countable = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not countable or isinstance(data, str | bytes | Mapping | Tensor):
        raise TypeError(f"dataset is a {type(data).__name__}; pass a dataset with a length, or a tuple of tensors")
    if len(data) == 0:
        raise ValueError("the dataset is empty; a neighbour differs from it in one example, so it needs at least 1")
    return data  # type: ignore[no-any-return]


def with_places(
    dataset: Dataset[Any], extras: Sequence[Any], present: Sequence[bool], seed: int | None = None
) -> Dataset[Any]:
    """The dataset with a place for each extra example; the place of an absent one holds a copy of the first example."""
    size = len(dataset)  # type: ignore[arg-type]
    first = dataset[0]
    held = [extra if here else first for extra, here in zip(extras, present)]
    if isinstance(dataset, TensorDataset) and all(isinstance(extra, tuple | list) for extra in extras):
        columns = [torch.stack([torch.as_tensor(one[k]) for one in held]) for k in range(len(dataset.tensors))]
        return TensorDataset(*[torch.cat([t, c.to(t.dtype)]) for t, c in zip(dataset.tensors, columns)])
    return _Places(dataset, size, held, seed)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Everything printed, logged or warned about, in order of kind."""
    lines: list[str] = []
    text, log = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    root, always = logging.getLogger(), torch.is_warn_always_enabled()
    root.addHandler(handler)
    torch.set_warn_always(True)  # a warning given once per process would be heard in the first run only
    try:
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
        ):
            warnings.simplefilter("always")
            yield lines
    finally:
        torch.set_warn_always(always)
        root.removeHandler(handler)
        spoken = [*text.getvalue().split("\n"), *log.getvalue().split("\n"), *(str(w.message) for w in warned)]
        lines += [line for line in map(_without_times, spoken) if line]


TIMES = re.compile(
    r"\d+(:\d\d)+([.,]\d+)?|[\d.,?]+ ?(it/s|s/it|ms|s|sec|seconds|samples/s|steps/s)\b|((_runtime|_second)\W*)[\d.e-]+"
)


def _without_times(line: str) -> str:
    """A line without clock times and speeds, and of one that overwrites itself (a progress bar) what stays."""
    return TIMES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()


def content(value: Any, *, strict: bool = True) -> Any:
    """A value that is equal for equal content: what `train` returns is compared by it.

    Not strict: of things that nobody can look into, the kind is all that is compared.
    """
    if isinstance(value, nn.Module):
        return content(value.state_dict(), strict=False)
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(value)
        return (tuple(tensor.shape), str(tensor.dtype), fingerprints([("", tensor)])[""])
    if isinstance(value, Mapping):
        return {str(key): content(part, strict=strict) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [content(part, strict=strict) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(content(part, strict=strict)) for part in value)
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | torch.dtype | torch.device):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: content(getattr(value, f.name), strict=strict) for f in dataclasses.fields(value)}
    if not strict:
        return (type(value).__name__, _pickled(value))
    raise TypeError(
        f"train returned a {type(value).__name__}, which cannot be compared. Return what is published as numbers, "
        "text, tensors, modules, or lists, tuples and dicts of them; or return None."
    )


def _pickled(value: Any) -> str:
    """What would be saved of it."""
    try:
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    except Exception:  # whatever refuses to be saved is not published either
        return ""
