"""Examples that may give a training away, built from those of a dataset by their structure.

An example is a tensor, array, number, text, list of whole numbers (tokens), or a tuple or mapping of such. The last
part of a tuple, and what a mapping calls a label or target, is its target: it is exchanged for another example's and
never distorted, since a loss may refuse targets that nobody has. Everything else in it is a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmdp.gradients import randomness

LOOKED_AT = 32
"""So many examples of the dataset are read, at even distances."""

SCALE = 1e6
TARGETS = ("label", "target")
TARGET_NAMES = {"y", "score", "scores", "class", "classes", "answer"}
NOT_COUNTED = -100
"""What torch's losses take for a label that does not count."""

Path = tuple[Any, ...]
Change = Callable[[Path, Any], Any]


@dataclass(frozen=True)
class Outlier:
    """mild: whether its values are such as the dataset has, so that rounding treats it as it does the others."""

    name: str
    example: Any
    mild: bool


def outliers_of(dataset: Any, seed: int = 0) -> list[Outlier]:
    """Those that the structure of the examples allows; a copy of the first one always is."""
    with randomness.same(seed):
        size = len(dataset)
        looked_at = [dataset[at] for at in range(0, size, max(1, size // LOOKED_AT))[:LOOKED_AT]]
    first, kinds = looked_at[0], dict(_leaves(looked_at[0]))
    outliers = [Outlier("copy", first, mild=True)]
    outliers += [Outlier("other label", other, mild=True) for other in _other_target(looked_at)]
    numeric = {path for path, leaf in kinds.items() if _is_float(leaf) and not _is_target(first, path)}
    if numeric:
        largest = max(looked_at, key=lambda example: _norm(example, numeric))
        outliers += [
            Outlier("largest", largest, mild=True),
            Outlier("zero", _changed(first, _on(numeric, lambda leaf: leaf * 0)), mild=True),
            Outlier("scaled", _changed(first, _on(numeric, lambda leaf: leaf * SCALE)), mild=False),
            Outlier("nan", _changed(first, _on(numeric, lambda leaf: leaf * float("nan"))), mild=False),
        ]
    elif all(_is_opaque(leaf) for leaf in kinds.values()):
        outliers.append(Outlier("another", looked_at[-1], mild=True))
    outliers += _of_tokens(looked_at)
    outliers += _of_texts(looked_at)
    return outliers


def _other_target(examples: Sequence[Any]) -> list[Any]:
    """The first example with the target of another, if another has one that differs."""
    first = examples[0]
    mine = {path: leaf for path, leaf in _leaves(first) if _is_target(first, path)}
    theirs = ({path: leaf for path, leaf in _leaves(example) if path in mine} for example in examples[1:])
    differing = next((its for its in theirs if any(not _equal(mine[path], its[path]) for path in its)), None)
    if differing is None:
        return []
    return [_changed(first, lambda path, leaf: differing.get(path, leaf))]


# -- tokens -----------------------------------------------------------------------------------------------------------


def _of_tokens(examples: Sequence[Any]) -> Iterator[Outlier]:
    """Where an example has a sequence of whole numbers: the longest, a single token, and padding alone."""
    first = examples[0]
    sequences = {path: leaf for path, leaf in _leaves(first) if _is_tokens(leaf)}
    features = [path for path in sequences if not _is_target(first, path)]
    if not features:
        return
    masks = {path for path in features if _is_mask(examples, path)}
    words = next((path for path in features if path not in masks), features[0])
    yield Outlier("longest", max(examples, key=lambda example: _length(example, words, masks)), mild=True)
    padding = _padding(examples, words, masks)
    beside = {path for path, leaf in sequences.items() if len(leaf) == len(sequences[words])}

    def keeping(count: int) -> Any:
        def change(path: Path, leaf: Any) -> Any:
            if path not in beside:
                return leaf
            if isinstance(leaf, list):  # of any length: a collate function pads
                return leaf[: max(1, count)]
            if path in masks:
                return _filled(leaf, count, 0)
            if _is_target(first, path):
                counted = any(_holds(dict(_leaves(example)).get(path), NOT_COUNTED) for example in examples)
                return _filled(leaf, count, NOT_COUNTED) if counted else leaf
            return _filled(leaf, count, padding) if path == words else leaf

        return _changed(first, change)

    yield Outlier("single token", keeping(1), mild=True)
    if not isinstance(sequences[words], list):
        yield Outlier("all padding", keeping(0), mild=True)


def _is_mask(examples: Sequence[Any], path: Path) -> bool:
    if path and "mask" in str(path[-1]).lower():
        return True
    leaves = [dict(_leaves(example)).get(path) for example in examples]
    return all(leaf is not None and set(np.unique(np.asarray(leaf)).tolist()) <= {0, 1} for leaf in leaves)


def _length(example: Any, words: Path, masks: set[Path]) -> int:
    leaves = dict(_leaves(example))
    counted = [leaves[path] for path in masks if path in leaves]
    return int(np.asarray(counted[0]).sum()) if counted else int(np.count_nonzero(np.asarray(leaves.get(words, ()))))


def _padding(examples: Sequence[Any], words: Path, masks: set[Path]) -> int:
    """The token that stands where the mask is 0; 0 if that is nowhere."""
    for leaves in map(dict, map(_leaves, examples)):
        for mask in masks & set(leaves):
            hidden = np.asarray(leaves.get(words, leaves[mask]))[np.asarray(leaves[mask]) == 0]
            if hidden.size:
                return int(hidden.flat[0])
    return 0


def _filled(leaf: Any, count: int, value: int) -> Any:
    """From a position on, one value."""
    changed = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
    changed[count:] = value
    return changed


# -- texts ------------------------------------------------------------------------------------------------------------


def _of_texts(examples: Sequence[Any]) -> Iterator[Outlier]:
    first = examples[0]
    texts = {path for path, leaf in _leaves(first) if isinstance(leaf, str) and not _is_target(first, path)}
    if not texts:
        return

    def length(example: Any) -> int:
        return sum(len(leaf) for path, leaf in _leaves(example) if path in texts and isinstance(leaf, str))

    yield Outlier("longest", max(examples, key=length), mild=True)
    yield Outlier("single token", _changed(first, _on(texts, lambda leaf: (leaf.split() or ["a"])[0])), mild=True)
    yield Outlier("no text", _changed(first, _on(texts, lambda leaf: "")), mild=True)


# -- structure --------------------------------------------------------------------------------------------------------


def _leaves(example: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every part that is not made of parts, with the way to it."""
    if isinstance(example, Mapping):
        for key, part in example.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(example, tuple | list) and not _is_tokens(example):
        for i, part in enumerate(example):
            yield from _leaves(part, (*path, i))
    else:
        yield path, example


def _changed(example: Any, change: Change, path: Path = ()) -> Any:
    """The example with each leaf replaced by what `change` makes of it."""
    if isinstance(example, Mapping):
        return {key: _changed(part, change, (*path, key)) for key, part in example.items()}
    if isinstance(example, tuple | list) and not _is_tokens(example):
        parts = [_changed(part, change, (*path, i)) for i, part in enumerate(example)]
        if hasattr(example, "_fields"):
            return type(example)(*parts)
        return tuple(parts) if isinstance(example, tuple) else parts
    return change(path, example)


def _on(paths: set[Path], change: Callable[[Any], Any]) -> Change:
    return lambda path, leaf: change(leaf) if path in paths else leaf


def _is_target(example: Any, path: Path) -> bool:
    if isinstance(example, tuple | list):
        return len(example) > 1 and path[0] == len(example) - 1
    name = str(path[0]).lower() if path else ""
    return name.startswith(TARGETS) or name in TARGET_NAMES


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    if isinstance(leaf, np.ndarray | np.generic):
        return bool(np.issubdtype(leaf.dtype, np.floating))
    return isinstance(leaf, float)


def _is_tokens(leaf: Any) -> bool:
    """A sequence of whole numbers. Bytes are images, and not taken for tokens."""
    if isinstance(leaf, Tensor):
        return leaf.dim() == 1 and len(leaf) > 1 and leaf.dtype in (torch.int64, torch.int32, torch.int16, torch.bool)
    if isinstance(leaf, np.ndarray):
        return leaf.ndim == 1 and len(leaf) > 1 and leaf.dtype in (np.int64, np.int32, np.int16, np.bool_)
    return isinstance(leaf, list) and len(leaf) > 1 and all(isinstance(one, int) for one in leaf)


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor | np.ndarray | np.generic | str | int | float | list)


def _holds(leaf: Any, value: int) -> bool:
    return leaf is not None and bool((np.asarray(leaf) == value).any())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | np.ndarray):
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    return bool(a == b)


def _norm(example: Any, paths: set[Path]) -> float:
    leaves = [leaf for path, leaf in _leaves(example) if path in paths]
    return float(sum(np.square(np.nan_to_num(np.asarray(leaf, dtype=np.float64))).sum() for leaf in leaves))
