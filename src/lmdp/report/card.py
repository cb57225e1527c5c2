"""`privacy-card.md`: the facts of a run in the form of a model card, to go with the model.

Results of attacks on members are not in it: they are computed on private data, and a card is made to be published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lmdp.report.files import MAY, MUST_NOT, THE_REST, listed
from lmdp.report.guarantee import not_covered
from lmdp.report.release import (
    BY_WHOM,
    NO_PROOF,
    OF_FILE,
    OTHER_TRAININGS,
    decisions,
    facts,
    published,
    unit,
    unpromised,
    untried,
)
from lmdp.report.story import REFUTED, refuted
from lmdp.report.values import accuracy, assumed, bounds_of, epsilon, epsilon_text, finite, is_certified, small

if TYPE_CHECKING:
    from lmdp.report.story import Story, Trained

HEADER = "---\nlibrary_name: lmdp\ntags:\n- differential-privacy\n---\n"


def card(story: Story) -> str:
    """Markdown. What a story holds is text to it: it cannot add headings or markup."""
    parts = [f"{HEADER}\n# Privacy card: {_plain(story.title)}\n", f"{_made(story)}\n"]
    for trained in story.trained:
        parts += [f"## {_plain(trained.name)}\n", *_model(trained, story)]
    if story.together is not None:
        parts.append(f"## Several models\n\n{_plain(str(story.together))}\n")
    parts += ["## What is protected\n", f"{_plain(unit(story))}\n"]
    parts += ["## What may be published\n", f"{_plain(published(story))}\n"]
    parts += ["## Other trainings\n", f"{OTHER_TRAININGS}\n", *_gaps(story), *_files(story)]
    ticks = "".join(f"- [ ] {_plain(one)}\n" for one in decisions(story))
    parts.append(f"## Decision\n\n{ticks}\nName, date and reasons:\n")
    return "\n".join(parts)


def exported(card: str, held: Mapping[str, str], trained: str) -> str:
    """The card of a run, to go with weights that were made of its own: their SHA-256.

    The lists of the run's files stay behind, and so does the form for a decision, which was for the house.

    `held`: file → SHA-256. `trained`: that of the run's model.
    """
    named = [f"- {OF_FILE.format(name)}: {sha}" for name, sha in held.items()]
    if trained not in held.values():
        named.append(f"- exported from the trained model.safetensors with SHA-256: {trained}")
    begin = f"- {OF_FILE.format('model.safetensors')}: "
    lines: list[str] = []
    left_out = False
    for line in card.splitlines():
        if line.startswith("## "):
            left_out = line in (f"## What {MAY}", f"## What {MUST_NOT}", "## Decision")
        if not left_out:
            lines += named if line.startswith(begin) else [line]
    return "\n".join(lines) + "\n"


def _made(story: Story) -> str:
    with_ = story.versions or (f"lmdp {story.version}" if story.version else "lmdp")
    return f"Written by {_plain(with_)}{f' on {_plain(story.date)}' if story.date else ''}."


def _model(trained: Trained, story: Story) -> Iterator[str]:
    fact = facts(trained, story)
    yield f"**Promise.** {_plain(fact.promise)}\n"
    if fact.private:
        yield f"**How far it can be relied on.** {_plain(fact.standing.replace('under Privacy', 'below'))}\n"
        yield from _numbers(trained)
        yield from _assumptions(trained)
        yield from (f"**Several examples of one person.** {_plain(fact.several)}\n" for _ in [1] if fact.several)
    yield from (f"**The model.** {_plain(fact.remark)}\n" for _ in [1] if fact.remark)
    yield f"**What was tried against it.** {_plain(_attacks(trained, story))}\n"
    yield from (f"**Further models.** {_plain(fact.again)}\n" for _ in [1] if fact.again)
    last = accuracy(trained)
    rows = [*fact.identity, *([("test accuracy (no epsilon covers test examples)", str(last))] if last else [])]
    yield "".join(f"- {_plain(name)}: {_plain(value)}\n" for name, value in rows)


def _numbers(trained: Trained) -> Iterator[str]:
    privacy = trained.privacy or {}
    spent, delta = epsilon(privacy), finite(privacy.get("delta"))
    yield f"| epsilon | delta | certified |\n|---|---|---|\n| {epsilon_text(spent)} | {small(delta)} | " + (
        f"yes, {BY_WHOM} |\n" if is_certified(privacy) else "no |\n"
    )


def _assumptions(trained: Trained) -> Iterator[str]:
    rows = (f"| {_cell(row.sentence)} | {row.state} | {_cell(row.how)} |" for row in assumed(trained.privacy or {}))
    yield "\n".join(["| assumption of the proof | state | how that is known |", "|---|---|---|", *rows]) + "\n"


def _attacks(trained: Trained, story: Story) -> str:
    """Which attacks there were, on whom, and on whom not, without what they found; but that a claim is refuted."""
    audit = trained.audit
    elsewhere = bounds_of(trained, story.bounds)
    others = (
        "; and canaries in other trainings of the same settings, which bound epsilon from below" if elsewhere else ""
    )
    broken = f" {REFUTED[:1].upper()}{REFUTED[1:]}." if refuted(trained, story.bounds) else ""
    if audit is None:
        return f"This model was not attacked{others}.{broken}" if others else (
            f"Nothing: it was not attacked. {untried(trained)}"
        )  # fmt: skip
    told = (
        f"Membership attacks on {len(audit.layers)} layers, {audit.members} members against {audit.nonmembers} others"
    )
    if audit.canaries is None:
        told += f"{others}." if others else f". {untried(trained)}"
    else:
        count = audit.canaries.inside + audit.canaries.outside
        told += f", and on {count} planted canaries, which stand for the most vulnerable examples."
    return f"{told} Results are computed on private examples and stay in report.html.{broken} {NO_PROOF}"


def _gaps(story: Story) -> Iterator[str]:
    gaps = dict.fromkeys(gap for trained in story.trained for gap in not_covered(trained.privacy or {}))
    if gaps:
        yield "## What the promise does not cover\n\n" + "\n".join(f"- {_plain(gap)}" for gap in gaps) + "\n"


def _files(story: Story) -> Iterator[str]:
    for word in (MAY, MUST_NOT):
        names = [f"- `{name}`: {why}" for name, why in listed(word, story.files)]
        if word == MUST_NOT:
            names = [*(f"- {_plain(one)}" for one in unpromised(story)), *names, f"- {THE_REST}"]
        yield f"## What {word}\n\n" + "\n".join(names) + "\n"


def _plain(words: str) -> str:
    """Words without a meaning in Markdown or HTML."""
    escaped = "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in words)
    return " ".join(escaped.split())


def _cell(words: str) -> str:
    return _plain(words)
