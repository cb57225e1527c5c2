"""What an export says of its privacy to whoever reads it; and that no place of this machine is named in it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from lmdp.app.config import Config
from lmdp.private import PrivacyStatement

README, CARD = "README.md", "privacy-card.md"
TEXTS = (".json", ".md")
NOT_OURS = "tokenizer.json"
"""Words only; some have hundreds of thousands."""


def add_privacy(folder: Path, statement: PrivacyStatement) -> None:
    """A paragraph in the README that others have written."""
    path = folder / README
    if not path.exists():
        return
    card = f" [{CARD}]({CARD}) says what that promises, what it rests on, and what it does not cover"
    more = f"{card}; " if (folder / CARD).exists() else " "
    text = f"## Privacy\n\n{_promise(statement)}{more}privacy.json is the same for programs.\n"
    path.write_text(f"{path.read_text(encoding='utf-8').rstrip()}\n\n{text}", encoding="utf-8")


def _promise(statement: PrivacyStatement) -> str:
    if math.isinf(statement.epsilon):
        return "Trained by lmdp without differential privacy: nothing is promised of its training data."
    certified = "certified" if statement.certified else "NOT certified"
    return (
        f"Trained with differential privacy by lmdp: epsilon {statement.epsilon:.4g} at delta {statement.delta:.3g} "
        f"for one {statement.unit}, {certified}."
    )


def forget_places(folder: Path, places: Iterable[Path]) -> None:
    """Paths in what is written there keep their last part only."""
    named = sorted({str(place) for place in places if len(place.parts) > 1}, key=len, reverse=True)
    for path in folder.rglob("*"):
        if path.suffix not in TEXTS or path.name == NOT_OURS or not path.is_file():
            continue
        before = after = path.read_text(encoding="utf-8")
        for place in named:
            for written in (place, json.dumps(place)[1:-1], _escaped(place)):
                after = after.replace(f"{written}/", "")
        if after != before:
            path.write_text(after, encoding="utf-8")


def _escaped(place: str) -> str:
    """As the privacy card writes it."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", place)


def places_of(config: Config) -> set[Path]:
    """Folders of whatever a configuration names: data, weights, tokenizer."""
    words = (word for value in config.anchored().to_dict().values() for word in re.split(r"[:?&=]", str(value)))
    return {Path(word).parent for word in words if word.startswith("/")}
