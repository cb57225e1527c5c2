"""Which classes there are: declared, or a public fact of the set; read off the labels only where nobody says so."""

from __future__ import annotations

from lmdp.data.images import Inferred, Source
from lmdp.data.request import Request

UNLABELLED = ("",)
"""The classes of examples without labels, which all have label 0."""
MOST_TOLD = 20
"""Classes that are named one by one."""


def numbered(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def agreed(classes: tuple[str, ...], request: Request) -> tuple[str, ...]:
    """The classes of a source, by the names that were declared for them. Another number of them is refused."""
    declared = request.classes
    if declared is None:
        return classes
    count = declared if isinstance(declared, int) else len(declared)
    if count != len(classes):
        raise ValueError(f"{request.spec} has {len(classes)} classes; classes declares {count}. Correct one of them.")
    return classes if isinstance(declared, int) else declared


def seen(count: int, file: str = "") -> Inferred:
    """That there are so many classes, where only labels say so. `file` could say it too."""
    add = f"add classes = {count} (--classes {count})"
    return Inferred(f"there are {count} classes", f"{add}, or the array num_classes to {file}" if file else add)


def seen_names(names: tuple[str, ...], file: str = "") -> Inferred:
    """That these are the classes, where only folders or a choice among them say so. `file` could list them."""
    told = ",".join(names)
    add = f'add classes = "{told}" (--classes "{told}")'
    listed = f"write their names into {file}, one in a line"
    awkward = len(names) == 1 or any("," in name for name in names)
    remedy = listed if awkward and file else f"{add}, or {listed}" if file else add
    return Inferred(f"there are these {len(names)} classes", remedy)


def seen_channels(channels: int) -> Inferred:
    """That images are grey, or that there are colours among them."""
    return Inferred(
        f"images {'are grey' if channels == 1 else 'have colours'}",
        f"add channels = {channels} (--channels {channels})",
    )


def counted(source: Source) -> str:
    """Which classes there are and how many examples of each, for whoever trains on them: counts of private data."""
    parts = {"training": source.train, "kept out": source.held_out, "test": source.test}
    counts = {
        part: examples.labels.bincount(minlength=len(source.classes)).tolist()
        for part, examples in parts.items()
        if examples is not None
    }
    told = [
        f"{name} ({', '.join(f'{numbers[i]} {part}' for part, numbers in counts.items())})"
        for i, name in enumerate(source.classes[:MOST_TOLD])
    ]
    more = f", and {len(source.classes) - MOST_TOLD} more" if len(source.classes) > MOST_TOLD else ""
    return f"{len(source.classes)} classes: {', '.join(told)}{more}"
