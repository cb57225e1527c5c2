"""`privacy-card.md`: the facts of a run in the form of a model card, to go with the model.

Results of attacks on members are not in it: they are computed on private data, and a card is made to be published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmdp.report.files import MAY, MUST_NOT, THE_REST, listed
from lmdp.report.guarantee import not_covered
from lmdp.report.release import (
    BY_WHOM,
    NO_PROOF,
    OTHER_TRAININGS,
    decisions,
    facts,
    published,
    unit,
    unpromised,
    untried,
)
from lmdp.report.values import accuracy, assumed, epsilon, epsilon_text, finite, small

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
    yield f"**What was tried against it.** {_plain(_attacks(trained))}\n"
    yield from (f"**Further models.** {_plain(fact.again)}\n" for _ in [1] if fact.again)
    last = accuracy(trained)
    rows = [*fact.identity, *([("test accuracy (no epsilon covers test examples)", str(last))] if last else [])]
    yield "".join(f"- {_plain(name)}: {_plain(value)}\n" for name, value in rows)


def _numbers(trained: Trained) -> Iterator[str]:
    privacy = trained.privacy or {}
    spent, delta = epsilon(privacy), finite(privacy.get("delta"))
    yield f"| epsilon | delta | certified |\n|---|---|---|\n| {epsilon_text(spent)} | {small(delta)} | " + (
        f"yes, {BY_WHOM} |\n" if all(row.holds for row in assumed(privacy)) else "no |\n"
    )


def _assumptions(trained: Trained) -> Iterator[str]:
    rows = (f"| {_cell(row.sentence)} | {row.state} | {_cell(row.how)} |" for row in assumed(trained.privacy or {}))
    yield "\n".join(["| assumption of the proof | state | how that is known |", "|---|---|---|", *rows]) + "\n"


def _attacks(trained: Trained) -> str:
    """Which attacks there were, on whom, and on whom not, without what they found."""
    audit = trained.audit
    if audit is None:
        return f"Nothing: it was not attacked. {untried(trained)}"
    told = (
        f"Membership attacks on {len(audit.layers)} layers, {audit.members} members against {audit.nonmembers} others"
    )
    if audit.canaries is None:
        told += f". {untried(trained)}"
    else:
        count = audit.canaries.inside + audit.canaries.outside
        told += f", and on {count} planted canaries, which stand for the most vulnerable examples."
    return f"{told} Results are computed on private examples and stay in report.html. {NO_PROOF}"


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
