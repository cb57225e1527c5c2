"""Trainers of others, made private: what they do beside the loop that would break the account is refused or translated.

privacy     what a user says of privacy, the same for every trainer
left        what a training has left in a model, and whether it is still that
account     the engine of one run, when it must stop, what is saved beside checkpoints, privacy.json
loading     what a trainer iterates over: one batch for every step
arguments   settings of transformers that are refused by name, or translated
training    what the trainers of transformers and sentence-transformers have in common
hugging     `DPTrainer`
sentences   `DPSentenceTransformerTrainer`
lightning   `DPCallback`
accelerate  `accelerated`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdp.integrations.accelerate import accelerated
    from lmdp.integrations.hugging import DPTrainer
    from lmdp.integrations.lightning import DPCallback
    from lmdp.integrations.privacy import Privacy
    from lmdp.integrations.sentences import DPSentenceTransformerTrainer

__all__ = ["DPCallback", "DPSentenceTransformerTrainer", "DPTrainer", "Privacy", "accelerated"]

_HOME = {
    "DPCallback": ("lightning", "lightning>=2.4"),
    "DPSentenceTransformerTrainer": ("sentences", "sentence-transformers>=6 datasets>=2.19 accelerate>=1.3"),
    "DPTrainer": ("hugging", "transformers>=5 accelerate>=1.3"),
    "Privacy": ("privacy", ""),
    "accelerated": ("accelerate", "accelerate>=1.3"),
}
"""Name → its file here, and what must be installed for it."""


def __getattr__(name: str) -> Any:
    """Opened when it is first asked for: nobody needs all of these libraries."""
    if name not in _HOME:
        raise AttributeError(f"module 'lmdp.integrations' has no attribute {name!r}")
    home, packages = _HOME[name]
    try:
        return getattr(importlib.import_module(f"lmdp.integrations.{home}"), name)
    except ImportError as error:
        if not packages:
            raise
        quoted = " ".join(f"'{package}'" for package in packages.split())
        raise ImportError(
            f"lmdp.integrations.{name} needs other packages ({error}). Run: pip install {quoted}"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
