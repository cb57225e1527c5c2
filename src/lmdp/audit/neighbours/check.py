"""One whole training on neighbouring datasets, with shared randomness: what does one example move?

Five runs on the same draws, noise and initial weights:

    without   the dataset                          with    the dataset and the outlier, drawn in every step
    empty     every draw comes out empty           alone   every draw holds the outlier and nothing else
    aside     the outlier is in the dataset, and in no draw

(with, without) and (alone, empty) are neighbours. `without` leads: its released values are put in place of those of
the others, so that every step is compared at equal parameters, weights and optimizer state. What is then released may
differ by at most the sensitivity, since the noise is the same and cancels; all else that leaves must not differ at all.
with − without − alone + empty is what the outlier did to the *other* examples' contributions: nothing, if none meet.
`aside` must be `without` to the last bit: the epsilon counts on it that who is not drawn is not seen.

The whole of it is measured from outside, on what `release` gives out: nothing inside has to be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmdp.audit.neighbours.compare import compare
from lmdp.audit.neighbours.outliers import Outlier, outliers_of
from lmdp.audit.neighbours.result import CheckReport, Finding, NeighbourReport
from lmdp.audit.neighbours.run import Record, Setting, World
from lmdp.audit.neighbours.training import Train, as_dataset

__all__ = ["CheckReport", "Finding", "NeighbourReport", "check", "check_neighbours"]

BARE_STEPS = 2


def check(
    train: Train, dataset: Any, *, seed: int = 0, steps: int | None = None, tolerance: float | None = None
) -> CheckReport:
    """Run a training with and without examples that may give it away; print the result for a table.

    train      train(engine, dataset): builds everything, calls engine.make_private and runs the loop; a few steps are
               enough. What it returns counts as published
    dataset    a few dozen examples, of the form that the training takes: a dataset, or a tuple of tensors
    steps      end every run after so many; what train would return is then not compared
    tolerance  for rounding, in units of the sensitivity; by the precision of the training unless given

    The examples are built from those of the dataset: a copy of one, one with another's label, the largest, zeros, one
    scaled by a million, NaN; of tokens or text the longest, a single token, and nothing but padding. Four runs are
    shared, and each example takes two more; two further ones, of two steps without clipping and noise, look at what
    clipping hides. Dropout is switched off in all of them.

    A pass means that these examples, in this training, were bounded as stated. It is evidence and not a proof.
    """
    common = as_dataset(dataset)
    reports, runs = _check(train, common, outliers_of(common, seed), seed, steps, tolerance)
    return CheckReport(reports, runs)


def check_neighbours(
    train: Train,
    dataset: Any,
    outlier: Any,
    *,
    seed: int = 0,
    steps: int | None = None,
    tolerance: float | None = None,
) -> NeighbourReport:
    """Run a training with and without one example, and compare all that leaves it with what its statement promises.

    train      train(engine, dataset): builds everything, calls engine.make_private and runs the loop; a few steps are
               enough. What it returns counts as published
    dataset    the common examples: a dataset, or a tuple of tensors
    outlier    one more example, as extreme as you can think of: huge, aligned with the others, zero, NaN
    steps      end every run after so many; what train would return is then not compared
    tolerance  for rounding, in units of the sensitivity: 1e-3 in float32 and 1e-6 in float64 unless given

    Use a model in float64 if you can (`model.double()`): rounding in float32 hides small influences between examples.
    Dropout draws one mask for the whole batch, which batches of different size cannot share: it is switched off.
    A pass means that this example, in this training, was bounded as stated. It is a test and not a proof.
    """
    reports, _ = _check(train, as_dataset(dataset), [Outlier("given", outlier, mild=False)], seed, steps, tolerance)
    return reports["given"]


def _check(
    train: Train, common: Any, outliers: Sequence[Outlier], seed: int, steps: int | None, tolerance: float | None
) -> tuple[dict[str, NeighbourReport], int]:
    """A report on each of the outliers, by its name, and how many runs that took."""
    setting = Setting(train, common, [outlier.example for outlier in outliers], seed, steps)
    leader = setting.run(World("without", others=True))
    if leader.raised is not None and not leader.releases:  # it cannot be run, or is refused, without any outlier
        raise leader.raised
    every = frozenset(range(len(outliers)))
    empty = setting.run(World("empty", others=False), leader)
    aside = setting.run(World("aside", others=True, present=every), leader)
    bare = replace(setting, limit=BARE_STEPS, bare=True)
    bare_leader = bare.run(World("without", others=True)) if any(outlier.mild for outlier in outliers) else None
    reports, runs = {}, 3 if bare_leader is None else 4
    for k, outlier in enumerate(outliers):
        with_it = [World("with", True, frozenset({k}), k), World("alone", False, frozenset({k}), k)]
        records = _by_name(leader, empty, aside, *(setting.run(world, leader) for world in with_it))
        if leader.raised is not None and all(r.error == leader.error for r in records.values() if r is not empty):
            raise leader.raised
        unclipped = None
        if bare_leader is not None and bare_leader.releases and outlier.mild:
            unclipped = _by_name(bare_leader, *(bare.run(world, bare_leader) for world in with_it))
        reports[outlier.name] = compare(records, tolerance, mild=outlier.mild, bare=unclipped)
        runs += 2 if unclipped is None else 4
    return reports, runs


def _by_name(*records: Record) -> dict[str, Record]:
    return {record.name: record for record in records}
