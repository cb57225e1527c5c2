"""Released weights → what was spent for them: an index on this machine.

It is in the user's data folder, or where $LMDP_LINEAGE says; LMDP_LINEAGE=0 switches it off, and then no account can
be known to be complete (`blind`). It holds digests of released weights and a key, and no data: one line for every
release, written under a lock. Damaged lines are passed over; what the others say still counts. Of data that were
trained on without noise it holds keyed digests of the examples, so that other data can be compared with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdp.data.records import encoded
from lmdp.lineage.spending import Spending, spendings, together

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "LMDP_LINEAGE"
OFF = ("0", "off")
LEAST_VALUES = 4
"""Distinct values that a tensor must have to be recognised: fresh biases and norm weights are all zeros or ones."""
MOST_LOOKED_AT = 4096
"""Values of a tensor among which they are looked for, spread over it."""
MOST_EXAMPLES = 2**16
"""Of a set of data whose digests are kept: those that are smallest."""
DATASETS, SEEN = "datasets", 16
"""Where they are; and of how many sets of data a process knows them without that."""
_SEEN: dict[str, bytes] = {}
_EACH = 16
AT_ONCE = 2**20
"""Values that are converted at a time: a copy of a large table is much to hold beside a training."""


def earlier(parameters: Mapping[str, Tensor]) -> tuple[Spending, ...]:
    """What was spent for these weights, also transposed, each training once; nothing where none was ever released."""
    sought = {*digests(parameters), *digests({name: t.T for name, t in parameters.items() if t.dim() == 2})}
    path = _index()
    if path is None or not sought:
        return ()
    told: dict[tuple[str, str, int], Spending] = {}  # of the same weights the latest line counts
    for line in _lines(path):
        entry = _entry(line) if any(digest in line for digest in sought) else None  # few of thousands are of use
        if entry is not None:
            told |= {(digest, one.run, one.steps): one for digest in sought.intersection(entry[0]) for one in entry[1]}
    return together(told.values())


def steps_noted(run: str) -> int:
    """The most steps that were ever noted of this training."""
    path = _index()
    entries = [] if path is None else [_entry(line) for line in _lines(path) if run in line]
    return max((one.steps for entry in entries if entry for one in entry[1] if one.run == run), default=0)


def record(parameters: Mapping[str, Tensor], spent: Sequence[Spending]) -> None:
    """Remember that these weights were released. What cannot be written is warned of: the training itself is sound."""
    append(set(digests(parameters, casts=True)), spent)


def append(tensors: Collection[str], spent: Sequence[Spending]) -> None:
    """One line, for the digests of what is released."""
    path = _index()
    if path is None or not tensors or not any(one.steps for one in spent):
        return
    for one in spent:
        if not one.noise_multiplier:
            keep_dataset(one.dataset)
    line = json.dumps({"tensors": sorted(tensors), "spent": encoded(tuple(spent))}, allow_nan=False)
    try:
        with _locked(path), path.open("a+b") as file:
            broken_off = file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n"
            file.write((b"\n" if broken_off else b"") + line.encode() + b"\n")
    except OSError as error:
        warnings.warn(
            f"{path} could not be written ({error.strerror or error}): a training that goes on from these weights will "
            f"not be seen to. Set {SWITCH} to a folder that can be.",
            stacklevel=3,
        )


def digests(parameters: Mapping[str, Tensor], *, casts: bool = False) -> Iterator[str]:
    """Of the values of those tensors that cannot be an initialisation by accident; with `casts`, of halved ones too.

    Names do not count, nor does the type that holds the values: neither renaming nor conversion hides anything. A
    tensor of few values counts if one of them is no short number; shortened, it could be anybody's.
    """
    import torch

    half, short = torch.float16, torch.bfloat16
    for tensor in parameters.values():
        flat = tensor.detach().cpu().reshape(-1)
        if not flat.is_floating_point():
            continue
        values = torch.unique(flat[:: 1 + len(flat) // MOST_LOOKED_AT])
        few = len(values) < LEAST_VALUES
        if few and not (values.float() != values.to(short).float()).any():
            continue
        for kinds in ((), (short,), (half,), (half, short), (short, half)) if casts and not few else ((),):
            digest = hashlib.blake2b(digest_size=16)
            for part in flat.split(AT_ONCE):
                for kind in kinds:
                    part = part.to(kind)
                digest.update(part.float().view(torch.uint8).numpy())
            yield digest.hexdigest()


def blind() -> str:
    """Why earlier spending would go unnoticed; "" if it would not."""
    path = _index()
    if path is None:
        return f"the index of released weights is switched off ({SWITCH}): earlier private trainings go unnoticed"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a+b"):
            return ""
    except OSError as error:
        return f"the index of released weights, {path}, cannot be used ({error.strerror or error}): set {SWITCH}"


def dataset_digest(dataset: Any) -> str:
    """Of the data as a set, under this machine's key: published, it tells nothing to who has not the key.

    Without a key, anybody who has all of the data but one example could try that example. "" where there is no index,
    and for datasets that are neither tensors nor images in memory: reading them may take hours, or differ each time.
    """
    key = _key()
    contents = _contents(dataset)
    if key is None or contents is None:
        return ""
    parts = sorted(hashlib.blake2b(content, digest_size=_EACH, key=key).digest() for content in contents)
    digest = hashlib.blake2b(b"".join(parts), digest_size=16, key=key).hexdigest()
    kind = hashlib.blake2b(_kind(dataset).encode(), digest_size=_EACH, key=key).digest()
    _SEEN.pop(digest, None)
    _SEEN[digest] = kind + b"".join(parts[:MOST_EXAMPLES])
    while len(_SEEN) > SEEN:
        del _SEEN[next(iter(_SEEN))]
    return digest


def keep_dataset(digest: str) -> None:
    """Have digests of its examples at hand in later processes too: something without noise was made of this data."""
    path = _index()
    if path is not None and digest in _SEEN:
        _keep(path.with_name(DATASETS) / digest, _SEEN[digest])


def in_common(one: str, other: str) -> bool | None:
    """Whether two sets of data, by their digests, have an example in common; None where nobody knows: of data that were
    never seen here, and of examples that are cut or scaled otherwise."""
    (kind, these), (another, those) = map(_examples_of, (one, other))
    if not kind or kind != another:
        return None
    return not these.isdisjoint(those)


def _kind(dataset: Any) -> str:
    """Examples of one kind have the same content if they are the same."""
    from torch.utils.data import TensorDataset

    if isinstance(dataset, TensorDataset):
        return f"TensorDataset {[(tuple(t.shape[1:]), t.dtype) for t in dataset.tensors]}"
    return f"{type(dataset).__name__} {getattr(dataset, 'shape', '')}"


def _examples_of(digest: str) -> tuple[bytes, frozenset[bytes]]:
    path = _index()
    held = _SEEN.get(digest, b"")
    if not held and path is not None and digest.isalnum():
        with suppress(OSError):
            held = (path.with_name(DATASETS) / digest).read_bytes()
    parts = [held[at : at + _EACH] for at in range(0, len(held), _EACH)]
    return (parts[0], frozenset(parts[1:])) if parts else (b"", frozenset())


def _keep(path: Path, content: bytes) -> None:
    """What cannot be kept is not known later, and then a training that goes on from there is not certified."""
    with suppress(OSError):
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        beside.replace(path)


def _contents(dataset: Any) -> Iterator[bytes] | None:
    from torch.utils.data import TensorDataset

    if isinstance(dataset, TensorDataset):
        rows = zip(*(tensor.detach().cpu() for tensor in dataset.tensors), strict=True)
        return (b"".join(part.contiguous().numpy().tobytes() for part in row) for row in rows)
    contents = getattr(dataset, "contents", None)
    return contents() if callable(contents) else None


def _index() -> Path | None:
    """The file, one line for every release; None if there is to be none."""
    chosen = os.environ.get(SWITCH)
    if chosen in OFF:
        return None
    if chosen:
        return Path(chosen).expanduser() / "released.jsonl"
    import platformdirs

    return Path(platformdirs.user_data_dir("lmdp")) / "released.jsonl"


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError:
        return


def _entry(line: str) -> tuple[list[str], tuple[Spending, ...]] | None:
    """None for a line that is damaged: what others say still counts."""
    try:
        content: Any = json.loads(line)
        tensors = content["tensors"]
        spent = spendings(content["spent"], "the index")
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return ([str(digest) for digest in tensors], spent) if isinstance(tensors, list) else None


def _key() -> bytes | None:
    """Made once, kept beside the index and never published; None if there is none to be had."""
    index = _index()
    if index is None or blind():
        return None
    path = index.with_name("key")
    try:
        with _locked(path):
            if not path.exists() or path.stat().st_size != 32:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(32))
            return path.read_bytes()
    except OSError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. Where a file system has no locks, an append of one line is as good as whole."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with suppress(OSError, NotImplementedError):
        lock.acquire(timeout=60)
    try:
        yield
    finally:
        lock.release()
