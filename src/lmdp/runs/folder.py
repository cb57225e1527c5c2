"""A run folder: everything one training leaves behind, written so that a crash at any moment loses nothing.

    config.toml  metrics.jsonl  model.safetensors  privacy.json  audit.json  report.html  checkpoints/

Metrics appear together with the checkpoint they belong to, so nothing of a step that a crash discards has been seen
anywhere. No file holds code: tensors are safetensors, the rest is TOML and JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmdp.config import Config
from lmdp.runs.checkpoint import Checkpoint, decode, encode
from lmdp.runs.files import write

Say = Callable[[str], None]
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
        return (self / "model.safetensors").exists()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder if need be, and hold it for this process alone."""
        from filelock import FileLock, Timeout

        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a run needs a folder. Choose another name.")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self.path} is in use by another process. Wait for it, or choose another folder."
            ) from None
        try:
            yield
        finally:
            if [path.name for path in self.path.iterdir()] == [".lock"]:  # nothing came of it: leave no trace
                (self / ".lock").unlink()
                self.path.rmdir()
            lock.release()

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
        saved = Config.load(self / "config.toml").to_dict()
        now = config.to_dict()
        if differing := {
            key: (saved.get(key), now.get(key)) for key in {*saved, *now} if saved.get(key) != now.get(key)
        }:
            raise ValueError(f"{self.path} holds a run of another configuration; saved and given differ: {differing}")

    def publish(self, checkpoint: Checkpoint, keep: int) -> None:
        """Save a checkpoint, then the metrics up to it, then drop checkpoints beyond the newest `keep`."""
        folder = self / "checkpoints"
        folder.mkdir(exist_ok=True)
        write(folder / f"step-{checkpoint.step:08}.safetensors", encode(checkpoint))
        self._write_metrics(checkpoint.metrics)
        for _, old in self._checkpoints()[keep:]:
            old.unlink(missing_ok=True)

    def latest(self, say: Say) -> Checkpoint | None:
        """The newest checkpoint that is intact, charged with every step that was ever published.

        Where a newer checkpoint is damaged, its steps are lost but they have been seen: they stay charged.
        """
        charged = max([step for step, _ in self._checkpoints()] + [self._last_step_in_metrics()])
        for _, path in self._checkpoints():
            try:
                found = decode(path.read_bytes(), str(path))
            except ValueError as error:
                say(f"{error}. Going back to the checkpoint before it.")
                continue
            if charged > found.step:
                say(f"{charged - found.step} steps after the checkpoint are lost; they stay charged to the budget")
            self._write_metrics(found.metrics)
            return Checkpoint(charged, found.model, found.optimizer, {**found.engine, "steps": charged}, found.metrics)
        if charged:
            raise ValueError(
                f"{self.path}: {charged} steps were made but no checkpoint is readable. Start a new run in another "
                "folder; what this one has shown counts as spent."
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

    def _write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write(self / "metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def _last_step_in_metrics(self) -> int:
        steps = [row.get("step") for row in self.metrics()]
        return max((step for step in steps if isinstance(step, int)), default=0)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Newest first."""
        folder = self / "checkpoints"
        found = [(_CHECKPOINT.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
