"""What each model promises, how far that can be relied on, and what no promise covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmdp.report.html import listing, named, pairs, paragraph, section
from lmdp.report.release import OTHER_TRAININGS
from lmdp.report.svg import Style, el, text
from lmdp.report.values import (
    NOT_ESTABLISHED,
    Assumed,
    assumed,
    epsilon,
    epsilon_text,
    finite,
    is_certified,
    small,
    standing,
)

if TYPE_CHECKING:
    from lmdp.report.story import Trained

FIELDS = {
    "neighbouring_relation": "neighbours",
    "rows_per_unit": "rows averaged",
    "sampling": "sampling",
    "sample_rate": "sample rate",
    "expected_batch_size": "expected batch",
    "steps": "steps",
    "noise_multiplier": "noise multiplier",
    "sensitivity": "sensitivity",
    "clip_norm": "clip norm",
    "method": "method",
    "weight_source": "layer weights",
    "noise_source": "noise from",
    "accountant": "accountant",
}
ONE_ROW = ("rows_per_unit", 1)
"""Goes without saying."""
MARKS = {"holds": "✓", "violated": "✗", NOT_ESTABLISHED: "?"}
"""A state is told by a word and a mark, and not by colour alone."""


def guarantees(trained: Sequence[Trained]) -> str:
    """One card per private model; what is not covered is said once where it is the same for all."""
    private = [(t, Style.of_model(i), t.privacy) for i, t in enumerate(trained) if t.privacy is not None]
    bare = [t.name for t in trained if t.privacy is None]
    if not private:
        words = f"{', '.join(bare)}: trained without differential privacy; nothing is guaranteed."
        return section("Privacy", paragraph(words), key="privacy") if bare else ""
    gaps = list(dict.fromkeys(tuple(not_covered(privacy)) for _, _, privacy in private))
    same = len(gaps) == 1
    cards = (_card(t.name, style, privacy, with_gaps=not same) for t, style, privacy in private)
    parts = [el("div", *cards, class_="cards"), paragraph(OTHER_TRAININGS, "note after")]
    if same and gaps[0]:
        parts += [el("h3", "What these guarantees do not cover", class_="gap"), listing(list(gaps[0]))]
    if bare:
        parts.append(
            paragraph(f"{', '.join(bare)}: trained without differential privacy; nothing is guaranteed.", "note after")
        )
    return section("Privacy", *parts, key="privacy")


def _card(name: str, style: Style, privacy: Mapping[str, Any], *, with_gaps: bool) -> str:
    good = is_certified(privacy)
    badge = el("span", standing(privacy), class_=f"badge {'good' if good else 'bad'}")
    promise = f"(ε, δ) = ({epsilon_text(epsilon(privacy))}, {small(finite(privacy.get('delta')))}) "
    parts = [el("h3", named(name, style)), el("p", text(promise), badge, class_="promise")]
    fields = {label: privacy[key] for key, label in FIELDS.items() if key in privacy and (key, privacy[key]) != ONE_ROW}
    parts.append(pairs([(k, text(f"{v:.6g}" if isinstance(v, float) else str(v))) for k, v in fields.items()]))
    rows = assumed(privacy)
    parts.append(_assumptions(rows))
    said = " ".join(row.how for row in rows)
    if others := [reason for reason in _texts(privacy, "reasons") if reason not in said]:
        parts.append(el("div", el("strong", "Not certified because", class_="bad"), listing(others), class_="reasons"))
    parts += [paragraph(f"Checked: {seen}.", "note after") for seen in _texts(privacy, "checks")]
    if with_gaps and (gaps := not_covered(privacy)):
        parts += [el("h3", "Not covered", class_="gap"), listing(gaps)]
    return el("article", *parts, class_="card")


def _assumptions(rows: Sequence[Assumed]) -> str:
    """What the proof assumes and what is known of it; first what does not hold."""
    ordered = sorted(rows, key=lambda row: row.holds)
    missing = sum(not row.holds for row in rows)
    without = f"{missing} of {len(rows)} assumptions of the proof cannot be relied on:"
    said = without if missing else f"All {len(rows)} assumptions of the proof hold:"
    head = el("tr", el("th", "assumption", scope="col"), el("th", "state", scope="col"))
    body = (_assumption(row) for row in ordered)
    table = el("table", el("thead", head), el("tbody", *body), class_="assumptions")
    return paragraph(said, "note after") + table


def _assumption(row: Assumed) -> str:
    mark = el("span", MARKS[row.state], class_="mark-of-state", aria_hidden="true")
    state = el("span", mark, " " + row.state, class_="good" if row.holds else "bad")
    told = el("span", text(row.sentence)) + el("div", text(row.how), class_="how")
    return el("tr", el("th", told, scope="row"), el("td", state))


def not_covered(privacy: Mapping[str, Any]) -> list[str]:
    """What the statement says that its promise leaves out."""
    return _texts(privacy, "not_covered")


def _texts(privacy: Mapping[str, Any], key: str) -> list[str]:
    items = privacy.get(key)
    return [str(item) for item in items] if isinstance(items, list | tuple) else []
