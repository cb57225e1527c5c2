"""`celeba`: aligned faces from CelebA's own files, with one of its attributes as the label.

CelebA is handed out through Google Drive under an agreement, so it is not downloaded: the error says what to put where.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import torch

from lmdp.data.decode import Picture, decode
from lmdp.data.faces import landmarks_for, read_landmarks
from lmdp.data.images import Images, Source
from lmdp.data.request import Request
from lmdp.data.splits import at_most

PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
IMAGES, ATTRIBUTES, PARTITION = "img_align_celeba", "list_attr_celeba.txt", "list_eval_partition.txt"
TRAIN, TEST = "0", "2"
SIZE = 64  # where none is asked for: at full size the set needs 23 GB
ATTRIBUTE = "Smiling"


def read_celeba(request: Request) -> Source:
    folder = request.folder
    lacking = [name for name in (IMAGES, ATTRIBUTES, PARTITION) if not (folder / name).exists()]
    if lacking:
        raise FileNotFoundError(
            f"celeba lacks {', '.join(lacking)} in {folder}. Get {IMAGES}.zip (unpacked), {ATTRIBUTES} and {PARTITION} "
            f"from {PAGE} and put them there, or set LMDP_DATA to the folder that holds celeba/."
        )
    attribute = request.options.get("attribute", ATTRIBUTE)
    labels = read_attribute(folder / ATTRIBUTES, attribute)
    parts = read_partition(folder / PARTITION)
    train = [name for name in sorted(parts) if parts[name] == TRAIN]
    test = [name for name in sorted(parts) if parts[name] == TEST]
    if request.limit is not None and request.limit < len(train):
        names = (name.encode() for name in train)  # official, and one for each example: no file need be read for it
        train = [train[i] for i in at_most(request.limit, names, len(train), request.splits)]
    images = _read(train + test, labels, request)
    learnt, held = images.cut(len(train))
    return Source(request.spec, learnt, held if test else None, (f"not {attribute}", attribute))


def _read(names: list[str], labels: dict[str, int], request: Request) -> Images:
    unlabelled = [name for name in names if name not in labels]
    if unlabelled:
        raise ValueError(f"{request.folder / ATTRIBUTES} has no line for {unlabelled[0]}, which {PARTITION} lists")
    pictures = [Picture(name, request.folder / IMAGES / name) for name in names]
    if "landmarks" in request.options:
        where = request.folder / Path(request.options["landmarks"]).expanduser()
        points = read_landmarks(where)
        pictures = [Picture(p.name, p.file, landmarks_for(p.name, points, where)) for p in pictures]
    size, channels = request.size or SIZE, request.channels or 3
    pixels = decode(pictures, size=size, channels=channels, crop=True, say=request.say)
    return Images(pixels, torch.tensor([labels[name] for name in names], dtype=torch.int64))


def read_attribute(path: Path, attribute: str) -> dict[str, int]:
    """Image name → 1 where it has the attribute, 0 where it has not."""
    rows = _rows(path)
    names = rows[1] if len(rows) > 1 else []
    if attribute not in names:
        near = difflib.get_close_matches(attribute, names, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"celeba has no attribute {attribute!r}; {guess}{path.name} has {', '.join(names) or 'none'}")
    column = 1 + names.index(attribute)
    labels = {}
    for number, row in enumerate(rows[2:], start=3):
        if len(row) != 1 + len(names) or row[column] not in ("1", "-1"):
            raise ValueError(f"{path} line {number}: must be an image name and {len(names)} values of 1 or -1")
        labels[row[0]] = int(row[column] == "1")
    return labels


def read_partition(path: Path) -> dict[str, str]:
    """Image name → 0 (training), 1 (validation) or 2 (test)."""
    rows = _rows(path)
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 or row[1] not in ("0", "1", "2"):
            raise ValueError(f"{path} line {number}: must be an image name and 0, 1 or 2")
    return {row[0]: row[1] for row in rows}


def _rows(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.split() for line in file if line.strip()]
