"""The error rates that a cell's layers are weighed by."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lmdp.app.cells.cell import PRINTED, Cell
from lmdp.app.cells.run import measured_rates
from lmdp.app.cells.store import Store
from lmdp.app.reproduce.paper import error_rates
from lmdp.layers import LayerMap
from lmdp.models import build


def rates_for(cell: Cell, store: Store) -> Mapping[str, float] | None:
    """As the paper prints them, or as measured before; None for all alike."""
    if cell.rates != PRINTED:
        return measured_rates(cell, store)
    model = build(cell["model"], (cell["channels"], cell["size"], cell["size"]), int(cell["classes"]))
    return error_rates(cell.setting, counted(model))


def counted(model: nn.Module) -> list[tuple[str, bool]]:
    """Layers in order, and whether each is one of those that the paper numbers: not norms, nor shortcuts."""
    return [(name, _counts(name, model.get_submodule(name))) for name in LayerMap.of(model).names]


def _counts(name: str, module: nn.Module) -> bool:
    aside = any(word in name for word in ("shortcut", "downsample"))
    return isinstance(module, nn.Conv2d | nn.Linear) and not aside
