"""`cifar10` and `cifar100`: the binary archives. Members are read in memory by name; nothing is unpacked to disk."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lmdp.data.download import fetch
from lmdp.data.images import Images, Source
from lmdp.data.official import REMOTES
from lmdp.data.request import Request

SIDE = 32
MAX_MEMBER = 1 << 30  # the largest official one has 154 MB


@dataclass(frozen=True)
class Layout:
    """The members of an archive, and the bytes of a record before its pixels: the last of them is the label."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    classes: int
    label_bytes: int


LAYOUTS = {
    "cifar10": Layout(
        tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
        ("cifar-10-batches-bin/test_batch.bin",),
        "cifar-10-batches-bin/batches.meta.txt",
        classes=10,
        label_bytes=1,
    ),
    "cifar100": Layout(
        ("cifar-100-binary/train.bin",),
        ("cifar-100-binary/test.bin",),
        "cifar-100-binary/fine_label_names.txt",
        classes=100,
        label_bytes=2,
    ),
}


def read_cifar(request: Request) -> Source:
    (remote,) = REMOTES[request.kind]
    layout = LAYOUTS[request.kind]
    path = fetch(remote, request.folder, request.say)
    members = members_of(path, (*layout.train, *layout.test, layout.names))
    names = tuple(members[layout.names].decode("utf-8", "replace").split())
    if len(names) != layout.classes:
        raise ValueError(f"{layout.names} in {path} names {len(names)} classes; it must name {layout.classes}")
    train = parse_records([members[name] for name in layout.train], layout, f"{path}, training part")
    test = parse_records([members[name] for name in layout.test], layout, f"{path}, test part")
    return Source(request.spec, train, test, names)


def members_of(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """These members of a tar.gz, in one pass over it."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.size > MAX_MEMBER:  # tarfile would count its way through bytes that are not there
                    raise ValueError(f"{member.name} announces {member.size} bytes; {MAX_MEMBER} are allowed")
                file = archive.extractfile(member) if member.isreg() and member.name in names else None
                if file is not None:
                    contents[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole tar.gz ({error}). Delete it, and it is downloaded again.") from error
    lacking = [name for name in names if name not in contents]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}. Delete it, and it is downloaded again.")
    return contents


def parse_records(parts: Sequence[bytes], layout: Layout, name: str) -> Images:
    data = b"".join(parts)
    record = layout.label_bytes + 3 * SIDE * SIDE
    if not data or len(data) % record:
        raise ValueError(f"{name}: {len(data)} bytes; it must be a positive multiple of {record}, one record per image")
    rows = torch.tensor(np.frombuffer(data, np.uint8).reshape(-1, record))
    labels = rows[:, layout.label_bytes - 1].long()
    if int(labels.max()) >= layout.classes:
        raise ValueError(f"{name}: label {int(labels.max())}; labels must be 0 to {layout.classes - 1}")
    return Images(rows[:, layout.label_bytes :].reshape(-1, 3, SIDE, SIDE).contiguous(), labels)
