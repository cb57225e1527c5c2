"""Canaries in the data of a run: planted before its first step, found again when it goes on and when it is audited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmdp.app.config import Config
from lmdp.app.runs import Coins, RunFolder
from lmdp.audit import planting
from lmdp.audit.planting import MISLABELLED, NOISE, Canaries
from lmdp.data import Examples, Images, Source, Texts, load
from lmdp.data.request import Say


@dataclass(frozen=True)
class Planting:
    """A run's data with canaries in it: `source.train` is `ordinary` and those of `images` that are included."""

    source: Source
    ordinary: Examples
    images: Examples
    included: NDArray[np.bool_]
    kind: str
    key: bytes

    @property
    def coins(self) -> Coins:
        return Coins.of(self.key, self.images, self.included.tolist())

    @property
    def said(self) -> str:
        """For whoever reads the statement. How many are in can be told from N; who they are cannot."""
        who = f"{len(self.images)} canaries ({self.kind}) were planted, each in the training by a secret fair coin"
        if self.kind == NOISE:
            what = "words" if isinstance(self.images, Texts) else "inputs"
            return f"{who}: random {what} and labels, nobody's data; those that are in count in N. They cost accuracy"
        if self.kind != MISLABELLED:
            return f"{who}: those that are in count in N and are covered by epsilon like all others. They cost accuracy"
        return (
            f"{who}: private examples with a wrong label. Those that are in count in N and are covered by epsilon like "
            "all others; those that are out, and copies of canaries, are in no model. They cost accuracy"
        )

    def canaries(self) -> Canaries:
        return Canaries(self.kind, *self.images.tensors(), self.included)


def plant(config: Config, source: Source, folders: Sequence[RunFolder], say: Say) -> Planting | None:
    """The canaries of a run: with the key of the first of these folders that has one, else with a new one.

    Nothing where none are wanted. A run that has begun and lost its coins is refused.
    """
    if not config.canaries:
        return None
    kept = next((coins for folder in folders if (coins := Coins.read(folder)) is not None), None)
    if kept is None and folders[0].has_run:
        raise ValueError(
            f"{folders[0].path} was trained with canaries, but private/canaries.txt is gone: nobody knows who was in"
        )
    return planted(config, source, planting.new_key(config.seed) if kept is None else kept.key, say)


def planted(config: Config, source: Source, key: bytes, say: Say) -> Planting:
    """The canaries of this key."""
    ordinary, images = _made(config, source, key, say)
    included = planting.tossed(images.contents(), key)
    train = ordinary.joined(images.take(np.flatnonzero(included).tolist()))
    return Planting(replace(source, train=train), ordinary, images, included, config.canary_kind, key)


def still_there(planting: Planting, folder: RunFolder, *, changed_data: bool) -> Canaries:
    """The canaries of a run as its coins have it; refused where some are gone or others, unless that is allowed."""
    kept = Coins.read(folder)
    recorded = dict(kept.tossed) if kept is not None else {}
    now = planting.coins.tossed
    same = [i for i, (digest, inside) in enumerate(now) if recorded.get(digest) == inside]
    if len(same) < max(len(now), len(recorded)) and not changed_data:
        raise ValueError(
            f"the data has changed since {folder.path} was trained: of its {len(recorded)} canaries {len(same)} are as "
            "they were planted. Restore them, or audit those that are left with --changed-data."
        )
    return Canaries(planting.kind, *planting.images.take(same).tensors(), planting.included[same])


def ordinary(images: Examples, folder: RunFolder) -> Examples:
    """Those of a run's examples that are no canaries."""
    kept = Coins.read(folder)
    if kept is None:
        return images
    planted = {digest for digest, _ in kept.tossed}
    return images.take([i for i, digest in enumerate(images.digests(kept.key)) if digest not in planted])


def _made(config: Config, source: Source, key: bytes, say: Say) -> tuple[Examples, Examples]:
    """The ordinary examples, and the canaries with the labels they are planted with."""
    pool, classes, kind = source.train, len(source.classes), config.canary_kind
    if kind == MISLABELLED:
        contents = list(pool.contents())
        keep, taken = planting.chosen(contents, pool.labels.tolist(), config.canaries)
        canaries = pool.take(taken)
        wrong = planting.wrong_labels(canaries.contents(), canaries.labels.tolist(), classes)
        return pool.take(keep), canaries.relabelled(wrong)
    if kind == NOISE:
        canaries = _noise(config.canaries, source, key)
    else:
        channels, size = (pool.shape[0], pool.shape[-1]) if len(pool.shape) == 3 else (None, None)
        named = load(kind, size=size, channels=channels, say=say, **config.data_options)
        canaries = named.train if named.test is None else named.train.joined(named.test)
        canaries = canaries.take_random(config.canaries) if len(canaries) > config.canaries else canaries
        if canaries.shape != pool.shape or _kind(canaries) != _kind(pool):
            raise ValueError(
                f"canaries of {kind!r} have shape {canaries.shape}; the private examples have {pool.shape}"
            )
    planting.refuse_unfit(list(canaries.contents()), canaries.labels.tolist(), list(source.pool.contents()), classes)
    return pool, canaries


def _noise(number: int, source: Source, key: bytes) -> Examples:
    """Random pixels, numbers or words, with random labels."""
    pool = source.train
    labels = pool.labels.new_tensor(planting.noise_labels(number, len(source.classes), key))
    if isinstance(pool, Images):
        return Images(planting.noise_like(pool.pixels[0], number, key), labels)
    if source.tokenizer is None:
        raise ValueError(
            "canaries of noise are made of images, or of texts with their tokenizer; name a SPEC of others"
        )
    ids, mask = source.tokenizer.noise(number, pool.shape[0], planting.generator_for(key, "noise"))
    return Texts(ids, mask, labels)


def _kind(examples: Examples) -> object:
    return examples.pixels.dtype if isinstance(examples, Images) else type(examples)
