"""A cell: one training, one risk estimate or one timing, named by everything that was chosen for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdp.app.config import Config

TRAIN, RISK, STEP = "train", "risk", "step"
PRINTED, HELD_OUT, IN_SAMPLE, ALIKE = "printed", "heldout", "in-sample", "alike"
RATES = (PRINTED, HELD_OUT, IN_SAMPLE, ALIKE)
"""Error rates that `lm` weighs layers by: the paper's own, held out, in-sample, or the same for all."""
NAMED = ("method", "weights", "epsilon", "clip_norm", "emphasis", "learning_rate", "seed")


@dataclass(frozen=True)
class Cell:
    """What is measured, of which experiment (`setting`), with which values of a configuration.

    Values that are not given are the defaults of a configuration; a cell keeps its name when others are added to it.
    """

    kind: str
    setting: str
    values: tuple[tuple[str, Any], ...]
    rates: str = ALIKE
    in_sample: bool = False
    examples: int = 1000

    @classmethod
    def of(cls, kind: str, setting: str, values: Mapping[str, Any], **more: Any) -> Cell:
        return cls(kind, setting, tuple(sorted(values.items())), **more)

    def config(self, **changed: Any) -> Config:
        return Config.of({**dict(self.values), **changed}, f"cell {self.name}")

    def __getitem__(self, key: str) -> Any:
        return dict(self.values).get(key, Config.__dataclass_fields__[key].default)

    @property
    def seed(self) -> int:
        return int(self["seed"] or 0)

    def changed(self, **values: Any) -> Cell:
        return Cell.of(
            self.kind,
            self.setting,
            {**dict(self.values), **values},
            rates=self.rates,
            in_sample=self.in_sample,
            examples=self.examples,
        )

    @property
    def name(self) -> str:
        """A file name: for people first, and then a digest of all that was chosen."""
        content = json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)
        digest = hashlib.blake2b(content.encode(), digest_size=5).hexdigest()
        words = [self.kind, self.setting, *(str(v) for k, v in self.values if k in NAMED and v is not None)]
        return "-".join([*words, *([self.rates] if self.rates != ALIKE else []), digest])

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "setting": self.setting,
            "rates": self.rates,
            "in_sample": self.in_sample,
            "examples": self.examples,
            "values": dict(self.values),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Cell:
        told = dict(content)
        return cls.of(told.pop("kind"), told.pop("setting"), told.pop("values"), **told)


@dataclass(frozen=True)
class Measured:
    """A cell with what came out."""

    cell: Cell
    result: Mapping[str, Any]


def estimate_for(cell: Cell) -> Cell:
    """The risk estimate whose error rates a training of `lm` uses: on its own shadow data, with its own seed."""
    keys = ("model", "shadow", "size", "channels", "seed", "shadow_epochs", "shadow_enough")
    values = {key: value for key, value in cell.values if key in keys}
    return Cell.of(RISK, cell.setting, {**values, "protocol": "paper"})
