"""The files of a run: which of them may leave the house, if the promise suffices, and which must not."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAY, MUST_NOT = "may leave the house, if the promise above suffices", "must not leave the house"
FILES: Mapping[str, tuple[str, str]] = {
    "model.safetensors": (MAY, "the model; it carries what was spent for it"),
    "model.json": (MAY, "how the model is used: classes, inputs, preprocessing, layers"),
    "network/": (MAY, "the configuration of a model of transformers"),
    "tokenizer/": (MAY, "of texts: a public tokenizer"),
    "average.safetensors": (MAY, "the averaged model, at the same epsilon"),
    "checkpoints/": (MAY, "covered by the same epsilon; nobody needs them"),
    "privacy.json": (MAY, "the privacy statement"),
    "privacy-card.md": (MAY, "this card"),
    "risk.json": (MAY, "of public data only"),
    "metrics.jsonl": (MAY, "holds test accuracies, which no epsilon covers"),
    "tensorboard/": (MAY, "the same numbers"),
    "config.toml": (MAY, "look at it first: it holds paths of your machine"),
    "results.json": (MUST_NOT, "of a comparison: holds results of attacks on members"),
    "report.html": (MUST_NOT, "holds results of attacks on members"),
    "figures/": (MUST_NOT, "the same, drawn"),
    "audit": (MUST_NOT, "all files that begin so: results of attacks on members"),
    "epsilon.json": (MUST_NOT, "bounds by attacks on this data"),
    "references/": (MUST_NOT, "models of parts of the private data, for audits"),
    "private/": (MUST_NOT, "tells who was in the training"),
}
"""What a run leaves behind, by the beginning of its name: whether it may leave the house, and why."""
WITH_THE_REPORT = ("privacy-card.md", "report.html", "figures/")
"""Written together with the list, so that they are not there yet when it is made."""
UNATTACKED = {
    "report.html": "without an audit, as now; look at it first: it holds the settings, with paths of your machine",
    "figures/": "without an audit, as now: the same, drawn",
}
"""What holds no results of attacks before there are any."""
ATTACKED = ("audit", "epsilon.json", "results.json")
"""How files begin that tell of attacks."""
OFTEN_MOVED = ("checkpoints/", "private/")
"""Made by every run, and kept elsewhere or deleted by some."""
THE_REST = "any other file: not judged here; treat it as private"


def listed(word: str, there: Collection[str] | None) -> list[tuple[str, str]]:
    """Names and reasons of the files of one list that are `there`; of all that a run may leave, where that is unknown.

    What a list does not name is not thereby free: the second list ends with all the rest (`THE_REST`).
    """
    rows = ((name, why) for name, (which, why) in FILES.items() if which == word)
    if there is None:
        return list(rows)
    if not any(one.startswith(ATTACKED) for one in there):
        rows = ((name, UNATTACKED.get(name, why)) for name, (which, why) in FILES.items()
                if (MAY if name in UNATTACKED else which) == word)  # fmt: skip
    present = {name for name in FILES if name in WITH_THE_REPORT or any(one.startswith(name) for one in there)}
    named = ((name, why) for name, why in rows if name in present or name in OFTEN_MOVED)
    return [(name, why if name in present else f"if kept: {why}") for name, why in named]
