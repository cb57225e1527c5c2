"""A run folder: everything one training leaves behind, written so that a crash at any moment loses nothing.

    config.toml  metrics.jsonl  model.safetensors  privacy.json  audit.json  report.html  checkpoints/  private/

Metrics appear together with the checkpoint they belong to, so nothing of a step that a crash discards has been seen
anywhere. A checkpoint that was being written counts as seen: it is used if it is whole, and charged for if it is not.
No file holds code: tensors are safetensors, the rest is TOML and JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmdp.app.config import Config
from lmdp.app.runs.checkpoint import Checkpoint, decode, encode
from lmdp.app.runs.files import unfinished, write
from lmdp.data.records import Count, field_of, read_object

Say = Callable[[str], None]
MODEL, AVERAGE = "model.safetensors", "average.safetensors"
OF_OLD: Mapping[str, Any] = {"splits": "position", "holdout": 0.0, "risk_as_measured": True}
"""What runs did whose configuration does not say it: nobody could choose then."""
_CHECKPOINT = re.compile(r"step-(\d{8})\.safetensors")


class RunFolder:
    """The folder of one run. Open it with `claim`, which keeps a second process out."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def has_run(self) -> bool:
        return (self / "config.toml").exists()

    @property
    def finished(self) -> bool:
        return (self / MODEL).exists()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder if need be, and hold it for this process alone."""
        from filelock import FileLock, Timeout

        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a run needs a folder. Choose another name.")
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            if path.is_symlink() and (path.is_dir() or path.name == ".lock"):
                raise ValueError(f"{path} is a link: it would lead what is written out of the run folder. Remove it.")
        lock = FileLock(self / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self.path} is in use by another process. Wait for it, or choose another folder."
            ) from None
        try:
            for path in (p for at in (".", "figures", "private") for p in unfinished(self / at)):
                path.unlink(missing_ok=True)
            yield
        finally:
            if [path.name for path in self.path.iterdir()] == [".lock"]:  # nothing came of it: leave no trace
                (self / ".lock").unlink()
                self.path.rmdir()
            lock.release()

    def config(self) -> Config:
        """Of the run, which may be one of an earlier version."""
        return Config.load(self / "config.toml", **OF_OLD)

    def resumed(self, config: Config) -> Config:
        """The same, with what a run that goes on cannot change."""
        if not self.has_run:
            return config
        saved = self.config()
        if config.learning_rate is None:  # it was chosen when the run began
            config = config.changed(learning_rate=saved.learning_rate)
        if config.sample_rate is None and config.batch_size is None and saved.batch_size is None:
            config = config.changed(sample_rate=saved.sample_rate)
        return config.changed(**{key: value for key, value in OF_OLD.items() if getattr(saved, key) == value})

    def begin(self, config: Config) -> None:
        """Write the configuration of a new run. Call `check` first, and begin when nothing can be refused any more."""
        if not self.has_run:
            write(self / "config.toml", config.to_toml())

    def check(self, config: Config, *, resume: bool) -> None:
        """Refuse a folder that holds a run, unless it is to be resumed with the same configuration."""
        if not self.has_run:
            return
        if not resume:
            raise ValueError(f"{self.path} holds a run already. Continue it with --resume, or choose another folder.")
        saved, now = self.config().anchored().to_dict(), config.anchored().to_dict()
        if differing := {
            key: (saved.get(key), now.get(key)) for key in {*saved, *now} if saved.get(key) != now.get(key)
        }:
            raise ValueError(f"{self.path} holds a run of another configuration; saved and given differ: {differing}")

    def publish(self, checkpoint: Checkpoint, keep: int) -> None:
        """Save a checkpoint, then the metrics up to it, then drop checkpoints beyond the newest `keep`."""
        self._save(checkpoint)
        self._write_metrics(checkpoint.metrics)
        for _, old in self._checkpoints()[keep:]:
            old.unlink(missing_ok=True)

    def latest(self, say: Say, *, noted: int | None = 0) -> Checkpoint | None:
        """The newest checkpoint that is intact, charged with every step that was ever published: in this folder, or by
        a copy of it that went on (so many are `noted` of the run on this machine; None: it repeats itself).

        Where a newer checkpoint is damaged, its steps are lost but they have been seen: they stay charged. One that
        broke off while it was written is charged too, unless the run repeats itself exactly, as it does under a seed:
        then its steps will show the same again.
        """
        whole, broken_off = self._checkpoints(), _numbered(unfinished(self / "checkpoints"))
        repeats = noted is None
        charged = max(noted or 0, self._charged(whole if repeats else whole + broken_off, repeats=repeats))
        for _, path in sorted(whole + broken_off, reverse=True):
            try:
                checkpoint = decode(path.read_bytes(), str(path))
            except ValueError as error:
                say(f"{error}. Going back to the checkpoint before it.")
                continue
            charged = max(charged, checkpoint.step)
            if charged > checkpoint.step:
                say(f"{charged - checkpoint.step} steps after the checkpoint are lost; they stay charged to the budget")
            checkpoint = replace(checkpoint, step=charged, engine={**checkpoint.engine, "steps": charged})
            if path.name != _name(charged):  # before anything goes that the charge can be known from
                self._save(checkpoint)
            self._write_metrics(checkpoint.metrics)
            for _, old in broken_off:
                old.unlink(missing_ok=True)
            return checkpoint
        if charged or self.finished:
            raise ValueError(
                f"{self.path}: {charged or 'all'} steps were made but no checkpoint is readable. Start a new run in "
                "another folder; what this one has shown counts as spent."
            )
        return None

    def metrics(self) -> list[dict[str, Any]]:
        path = self / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is not a JSON object")
            rows.append(row)
        return rows

    def _save(self, checkpoint: Checkpoint) -> None:
        folder = self / "checkpoints"
        folder.mkdir(exist_ok=True)
        write(folder / _name(checkpoint.step), encode(checkpoint))

    def _write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows and not (self / "metrics.jsonl").exists():
            return
        write(self / "metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def _charged(self, checkpoints: Sequence[tuple[int, Path]], *, repeats: bool) -> int:
        """The newest step of which these checkpoints, the metrics or the privacy statement tell.

        The statement is written before anything that it paid for; a run that repeats itself will pay for the same.
        """
        steps = [0, *(step for step, _ in checkpoints)]
        steps += [row["step"] for row in self.metrics() if isinstance(row.get("step"), int)]
        path = self / "privacy.json"
        if path.exists() and not repeats:
            steps.append(field_of(read_object(path, "a privacy statement"), "steps", Count, str(path)))
        return max(steps)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Newest first."""
        folder = self / "checkpoints"
        named = {path: path.name for path in (folder.iterdir() if folder.is_dir() else ())}
        return sorted(_numbered(named), reverse=True)


def _numbered(named: Mapping[Path, str]) -> list[tuple[int, Path]]:
    """Those of the files that are named as checkpoints, each with its step."""
    return [(int(match[1]), path) for path, name in named.items() if (match := _CHECKPOINT.fullmatch(name))]


def _name(step: int) -> str:
    return f"step-{step:08}.safetensors"
