"""References for the audit of a run: its own training again, each time on a random half of the audited examples.

Each is a cell of its own in the run folder, references/1, references/2, …, in which a finished model stays: an audit
that was broken off, or that asks for more references, goes on where the last one ended.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lmdp.app import training
from lmdp.app.config import Config
from lmdp.app.network import Network
from lmdp.app.progress import Show
from lmdp.app.runs import RunFolder, load_model, save_model, write_json
from lmdp.app.runs.files import write
from lmdp.audit import Reference
from lmdp.data import Examples
from lmdp.data.records import read_object
from lmdp.membership.workers import Share
from lmdp.risk import RiskProfile

FOLDER, NOTICE, CELL, MODEL = "references", "PRIVATE.txt", "cell.json", "model.safetensors"
FIRST_LINE = (
    "PRIVATE: models trained on the private data for the audit of this run only. No epsilon covers them. Never publish "
    "them.\n"
)
KEY = b"lmdp references"
MOST = 256


@dataclass(frozen=True)
class Cell:
    """One reference to be trained: where it goes, how, and on what."""

    path: Path
    config: Config
    examples: Examples
    network: Network
    risk: RiskProfile | None
    public: Any

    @property
    def record(self) -> dict[str, Any]:
        """What must be the same for a finished model to be this cell's."""
        whole = hashlib.blake2b("".join(sorted(self.examples.digests(KEY))).encode(), digest_size=16).hexdigest()
        return {"config": self.config.to_dict(), "examples": len(self.examples), "content": whole}

    @property
    def finished(self) -> bool:
        path = self.path / CELL
        return path.exists() and (self.path / MODEL).exists() and read_object(path, "a reference") == self.record

    def fresh_model(self) -> nn.Module:
        return replace(self.network, config=self.config).fresh()


def train_references(
    number: int,
    folder: RunFolder,
    trained_on: Examples,
    inside: Examples,
    outside: Examples,
    network: Network,
    show: Show,
    *,
    risk: RiskProfile | None,
    public: Any,
    workers: int | None = None,
    share: Share | None = None,
) -> list[Reference]:
    """As many references of the run's own configuration, each trained on what the run was trained on beside the audited
    examples (`inside` and `outside`), and on those of them that a coin chooses for it.

    In so many `workers` of this machine; or several processes `share` them, which all see the run folder.
    """
    if not 0 < number <= MOST:
        raise ValueError(f"{number} references were asked for; ask for 1 to {MOST}")
    config = folder.config()
    audited = set(inside.digests(KEY)) | set(outside.digests(KEY))
    rest = trained_on.take([i for i, digest in enumerate(trained_on.digests(KEY)) if digest not in audited])
    write(_made(folder / FOLDER) / NOTICE, FIRST_LINE)
    cells, references = [], []
    for k in range(1, number + 1):
        coins = [_coins(images, config.seed or 0, k) for images in (inside, outside)]
        examples = rest.joined(_chosen(inside, coins[0])).joined(_chosen(outside, coins[1]))
        cell = Cell(folder / FOLDER / str(k), _configuration(config, k), examples, network, risk, public)
        cells.append(cell)
        references.append(Reference(cell.fresh_model(), *coins))
    due = [cell for cell in cells if not cell.finished]
    if len(due) < number:
        show.say(f"{number - len(due)} of {number} references are there already")
    apart = [partial(_apart, cell) for cell in due]
    training_them = _trained(due, workers or torch.get_num_threads()) if share is None else share(apart)
    with show.bar("train references", max(1, len(due))) as bar:
        for done, _ in enumerate(training_them, 1):
            bar.to(done)
    for cell, reference in zip(cells, references):
        load_model(cell.path / MODEL, reference.model)
        reference.model.eval()
    return references


def _trained(cells: Sequence[Cell], workers: int) -> Iterator[Cell]:
    """In processes of one thread each; one after the other in this one where there is only one to run."""
    if min(workers, len(cells)) <= 1:
        for cell in cells:
            _train(cell)
            yield cell
        return
    with _processes(min(workers, len(cells))) as pool:
        running = {pool.submit(_train, cell): cell for cell in cells}
        for future in as_completed(running):
            future.result()
            yield running[future]


def _apart(cell: Cell) -> None:
    """In a process of its own, which belongs to no group: what it trains is its own."""
    with _processes(1) as pool:
        pool.submit(_train, cell).result()


def _processes(number: int) -> ProcessPoolExecutor:
    """Of one thread each. (A fork would inherit torch's threads, which do not run in it.)"""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, initializer=torch.set_num_threads, initargs=(1,))


def _train(cell: Cell) -> None:
    _made(cell.path)
    job = training.prepare(cell.config, cell.fresh_model(), cell.examples, risk=cell.risk, public=cell.public)
    with torch.random.fork_rng(devices=[]):
        model = training.run_through(job)
    if job.engine is not None:
        job.engine.detach()
    save_model(cell.path / MODEL, model)
    write_json(cell.path / CELL, cell.record)


def _configuration(config: Config, k: int) -> Config:
    """The run's, with draws and noise of its own. Nothing is claimed for it, so that no delta is too large."""
    seed = None if config.seed is None else int(np.random.SeedSequence([config.seed, k]).generate_state(1)[0]) % 2**31
    return config.changed(seed=seed, allow_large_delta=True)


def _coins(images: Examples, seed: int, k: int) -> NDArray[np.bool_]:
    """In or out, by content: whatever the order, and whoever else is there."""
    key = f"{seed}:{k}".encode()
    return np.array([int(digest, 16) % 2 == 1 for digest in images.digests(key)])


def _chosen(images: Examples, coins: NDArray[np.bool_]) -> Examples:
    return images.take(np.flatnonzero(coins).tolist())


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder
