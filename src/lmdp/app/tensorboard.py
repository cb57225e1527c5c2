"""TensorBoard event files, where the `tensorboard` extra is installed. Only rows of metrics.jsonl go in."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes to `tensorboard/` in the run folder; does nothing without the extra."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        step = row["step"]
        for name in ("epsilon", "test_accuracy", "average_test_accuracy"):
            if row.get(name) is not None:
                self._writer.add_scalar(name, row[name], step)
        for index, weight in enumerate(row["layer_weights"] or ()):
            self._writer.add_scalar(f"layer_weights/{index}", weight, step)
        self._writer.flush()
