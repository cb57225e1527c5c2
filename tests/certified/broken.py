"""BROKEN: every training that must be refused or not certified."""

from __future__ import annotations

from tests.certified import (
    broken_content,
    broken_losses,
    broken_models,
    broken_places,
    broken_processes,
    broken_rows,
    sequences,
)
from tests.certified.case import joined

BROKEN = joined(
    broken_models.broken,
    broken_losses.broken,
    broken_rows.broken,
    broken_places.broken,
    broken_content.broken,
    broken_processes.broken,
    sequences.broken,
)
