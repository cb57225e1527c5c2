"""May this be released? The facts that such a decision needs, the same for the page (`box`) and for `privacy-card.md`.

The program decides nothing: it says what is promised, how far that was established, what was tried, and leaves a place
to sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdp.report.drawn import Vulnerable
from lmdp.report.files import MAY, MUST_NOT, THE_REST, listed
from lmdp.report.html import listing, named, pairs, paragraph, section
from lmdp.report.roc import of_several
from lmdp.report.story import REFUTED, refuted
from lmdp.report.svg import Style, el, text
from lmdp.report.tables import limit_of, tpr_limit
from lmdp.report.values import (
    LITTLE,
    Estimate,
    assumed,
    at_output,
    bounds_of,
    epsilon,
    epsilon_text,
    finite,
    found_in_output,
    is_certified,
    peak,
    percent,
    small,
)

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit, Bound
    from lmdp.report.story import Story, Trained

NO_PROOF = "An audit that finds nothing is no proof."
BY_WHOM = "by this program, which watched the training; by no authority"
DECIDES = (
    "The program does not decide this. Below is what is promised, how far that was established, what was tried against "
    "it, and what else to think of; somebody who answers for the data decides, and signs."
)
UNIT = (
    "One example: one image, one text or one row, added or left out. Not one person: whoever is in the data with "
    "k examples is promised k times the epsilon, at a larger delta."
)
OTHER_UNIT = (
    "One {unit}, with all its rows, added or left out. Whoever is in the data as several such counts several times."
)
PUBLISHED = (
    "The weights, and outputs and embeddings of other people's inputs, are all computed from the released model: the "
    "same promise covers them, as far as it holds, however many there are. (Each tells of its own input, which is "
    "another matter.) Outputs or embeddings of the training examples themselves, handed out with their names, are as "
    "private as the examples. Files that know who was in the training are not covered."
)
NOTHING_PUBLISHED = "No promise covers the weights, nor outputs or embeddings, which are computed from them."
OTHER_TRAININGS = (
    "Other trainings on the same data, also discarded and tuning ones, are not known to this run: ask for them and add "
    "up."
)
OF_FILE = "SHA-256 of {}"
NOT_RECORDED = (
    "which weights it speaks of was not recorded when training finished (an earlier version does not): nothing tells "
    "whether they are those of this file"
)
MADE = {"trained": "trained on (date)", "versions": "trained by"}
SEVERAL = (2, 5, 10)
"""How many examples of one person the promise is told for."""
PER_PERSON = (
    "To protect all examples of a person as one, train with lmdp.PerUser (Python), or, where the data are a table of "
    "texts, with --unit user:COLUMN (lmdp train); or keep one example of each person."
)


@dataclass(frozen=True)
class Facts:
    """What there is to know of one model before it is released; each value is a sentence or two."""

    name: str
    private: bool
    certified: bool
    promise: str
    standing: str
    reasons: tuple[str, ...]
    tried: tuple[str, ...]
    again: str
    identity: tuple[tuple[str, str], ...]
    remark: str = ""
    several: str = ""


def facts(trained: Trained, story: Story) -> Facts:
    privacy = trained.privacy
    if privacy is None:
        none = "Nothing is promised: it was trained without differential privacy, and may hold its data by heart."
        identity, seen = _identity(trained), tuple(tried(trained))
        return Facts(trained.name, False, False, none, "not private", (), seen, "", identity, trained.remark)
    good, doubts = is_certified(privacy), [row for row in assumed(privacy) if not row.holds]
    reasons = tuple(f"{row.sentence}: {row.how}" for row in doubts)
    standing, told = _how_far(trained, story, len(doubts)), tuple(tried(trained, story.bounds))
    again, identity, said = _again(privacy), _identity(trained), promise(trained)
    return Facts(
        trained.name, True, good, said, standing, reasons, told, again, identity, trained.remark, several(trained)
    )


def _how_far(trained: Trained, story: Story, doubts: int) -> str:
    """How far a promise can be relied on."""
    privacy = trained.privacy or {}
    if refuted(trained, story.bounds):
        return f"REFUTED: {REFUTED}. Do not release it."
    rows = len(assumed(privacy))
    if is_certified(privacy):
        return (
            f"Certified {BY_WHOM}: all {rows} assumptions of the proof were looked at while it trained, and held. "
            "They are listed under Privacy."
        )
    return (
        f"NOT certified: of {rows} assumptions of the proof {doubts or 'some'} could not be relied on. All of them are "
        "listed under Privacy."
    )


def promise(trained: Trained) -> str:
    """Epsilon and delta in words that need no mathematics."""
    assert trained.privacy is not None
    spent, delta = epsilon(trained.privacy), finite(trained.privacy.get("delta"))
    numbers = f"epsilon {epsilon_text(spent)}, delta {small(delta)}"
    limit = tpr_limit(trained)
    if limit is None or spent is None or math.isinf(spent):
        return f"Nothing ({numbers})."
    if limit > LITTLE:
        return f"Little: with {numbers}, nearly every member may be recognised at 1 % false alarms."
    claimed = "" if is_certified(trained.privacy) else "Claimed, not certified: "
    one = f"one {trained.privacy.get('unit', 'example')}"
    return (
        f"{claimed}Somebody has the model and knows all data but {one}, and tries to tell whether that one was "
        f"trained on. At 1 % false alarms, at most {percent(limit)} of members can be recognised ({numbers}); "
        f"guessing recognises 1 %.{_whence(trained, limit)}"
    )


def _whence(trained: Trained, limit: float) -> str:
    """Why it is less than epsilon and delta alone would say, where it is."""
    alone = limit_of(trained)
    if alone is None or percent(limit) == percent(alone.tpr(0.01)):
        return ""
    return (
        f" The {percent(limit)} follow from the exact mechanism (noise, sampling rate, steps); from epsilon and delta "
        f"alone would follow {percent(alone.tpr(0.01))}."
    )


def several(trained: Trained) -> str:
    """The promise to a person who is in the data with several examples; "" where a person is what is protected."""
    alone = limit_of(trained)
    if alone is None or (trained.privacy or {}).get("unit", "example") != "example":
        return ""
    rates = trained.several or {k: of_several(alone.tpr, k) for k in SEVERAL}
    told = ", ".join(f"at most {percent(rate)} of those with {k} examples" for k, rate in rates.items())
    claimed = "" if is_certified(trained.privacy or {}) else "Claimed, not certified: "
    none = " 100 % is no limit." if any(percent(rate) == percent(1.0) for rate in rates.values()) else ""
    return (
        f"{claimed}Whoever is in the data with several examples is promised less: at 1 % false alarms {told} can be "
        f"recognised.{none} {PER_PERSON}"
    )


def published(story: Story) -> str:
    """What the promise covers besides the weights, and what it does not."""
    return PUBLISHED if any(trained.privacy is not None for trained in story.trained) else NOTHING_PUBLISHED


def unit(story: Story) -> str:
    """Of whom the promise is."""
    units = dict.fromkeys(str(t.privacy.get("unit", "example")) for t in story.trained if t.privacy is not None)
    return " ".join(UNIT if name == "example" else OTHER_UNIT.format(unit=name) for name in units) or UNIT


def tried(trained: Trained, bounds: Sequence[Bound] = ()) -> list[str]:
    """What attacks found, and that finding nothing is no proof. `bounds`: by attacks on epsilon, of any model."""
    shown = bounds_of(trained, bounds)
    if trained.audit is None:
        alone = ["This model was not attacked."] if shown else ["Nothing: it was not attacked. lmdp audit does that."]
        return [*alone, *map(_elsewhere, shown), *([NO_PROOF] if shown else [])]
    said = []
    side = Vulnerable.of(trained.audit)
    mine = None if trained.audit.canaries is None else trained.audit.canaries.bound
    if side is not None:
        said.append(f"The most vulnerable, {side.members + side.nonmembers} canaries: {_seen(side)}.")
    elif not shown:
        said.append(untried(trained))
    said += [f"With {b.confidence:.0%} confidence they show {_bounded(b)}." for b in shown if b is mine]
    said += [_elsewhere(bound) for bound in shown if bound is not mine]
    count = f"{trained.audit.members} members against {trained.audit.nonmembers} others"
    said.append(f"Ordinary examples, {count}: {_seen(trained.audit)}.")
    return [*said, NO_PROOF]


def untried(trained: Trained) -> str:
    """That the most vulnerable were left out, and why."""
    there = planted(trained)
    why = f"{there} canaries were planted, and not looked for" if there else "no canaries were planted"
    return f"The most vulnerable examples were not tried: {why}."


def _seen(audit: Audit) -> str:
    """What layers give away, and the model's own output."""
    layer = audit.peak.interval[0] > 0.5
    told = f"layer '{audit.peak.name}' gives them away" if layer else "no layer gives them away measurably"
    told += f" (AUC {peak(audit)})"
    if (output := at_output(audit)) is None:
        return told
    also = {
        (True, True): "and so does the model's own output",
        (True, False): "the model's own output does not measurably",
        (False, True): "but the model's own output does",
        (False, False): "nor does the model's own output",
    }[layer, found_in_output(audit)]
    return f"{told}, {also} (AUC {Estimate(output.auc, output.interval)})"


def _elsewhere(bound: Bound) -> str:
    """Of canaries in trainings that were made for it, and not in the model itself."""
    return (
        f"The most vulnerable, in other trainings of the same settings (canary '{bound.canary}'): they show "
        f"{_bounded(bound)}, with {bound.confidence:.0%} confidence."
    )


def _bounded(bound: Bound) -> str:
    against = "; that refutes the claim" if bound.exceeded else ""
    at_least = f"at least {bound.lower:.2g}" if bound.lower > 0 else "0 or more, which is nothing"
    claim = f"; {epsilon_text(bound.claimed)} is claimed" if math.isfinite(bound.claimed) else ""
    return f"an epsilon of {at_least} (delta {small(bound.delta)}{claim}){against}"


def _again(privacy: Mapping[str, Any]) -> str:
    spent, delta = epsilon(privacy), finite(privacy.get("delta"))
    if spent is None or delta is None or math.isinf(spent):
        return ""
    return (
        "Every further model of the same data counts, if it is released or looked at to choose. A second one like this "
        f"costs at most epsilon {epsilon_text(2 * spent)} (delta {small(2 * delta)}) with it; "
        "lmdp.accounting.composed_epsilon computes it exactly, from noise_multiplier, sample_rate and steps in the "
        "privacy.json of both."
    )


def _identity(trained: Trained) -> tuple[tuple[str, str], ...]:
    entries = []
    if trained.sha256:
        entries.append((OF_FILE.format("model.safetensors"), trained.sha256))
        if trained.privacy is not None and "sha256" not in trained.privacy:
            entries.append(("its statement", NOT_RECORDED))
    rate, batch = (finite((trained.privacy or {}).get(key)) for key in ("sample_rate", "expected_batch_size"))
    if rate and batch and rate > 0:
        among = f", with those of {planted(trained)} planted canaries that are in" if planted(trained) else ""
        entries.append(("examples trained on (N)", f"{round(batch / rate)}{among}"))
    steps = finite((trained.privacy or {}).get("steps"))
    if steps is not None:
        entries.append(("steps", f"{steps:g}"))
    entries += [(name, trained.provenance[key]) for key, name in MADE.items() if key in trained.provenance]
    return tuple(entries)


def planted(trained: Trained) -> Any:
    """How many canaries, by the statement; None where it does not say."""
    counts = (trained.privacy or {}).get("examples")
    return counts.get("canaries") if isinstance(counts, Mapping) else None


def box(story: Story) -> str:
    """The section of the page."""
    if not story.trained:
        return ""
    every = [(facts(t, story), Style.of_model(i)) for i, t in enumerate(story.trained)]
    cards = el("div", *(_card(fact, style) for fact, style in every), class_="decisions")
    about = [("what is protected", text(unit(story))), ("what may be published", text(published(story)))]
    about.append(("other trainings", text(OTHER_TRAININGS)))
    if story.together is not None:
        about.append(("several models", text(str(story.together))))
    lists = (
        el("div", el("h3", f"What {word}"), listing(_files(word, story)), class_="files") for word in (MAY, MUST_NOT)
    )
    signed = el("p", text(f"Decision: {'  '.join(f'☐ {one}' for one in decisions(story))}"), class_="sign") + el(
        "p", text("Name, date and reasons:"), class_="sign line"
    )
    return section(
        "May this be released?",
        paragraph(DECIDES),
        cards,
        el("div", pairs(about), class_="unit"),
        el("div", *lists, class_="two"),
        signed,
        key="release",
    )


def decisions(story: Story) -> list[str]:
    """What may be ticked: each model that promises something, where there are several."""
    private = [trained.name for trained in story.trained if trained.privacy is not None]
    release = [f"release {name}" for name in private] if private and len(story.trained) > 1 else ["release"]
    return [*release, "do not release" if len(release) == 1 else "release none"]


def _card(fact: Facts, style: Style) -> str:
    mark = "" if not fact.private else el("span", "certified" if fact.certified else "NOT certified",
                                         class_=f"badge {'good' if fact.certified else 'bad'}")  # fmt: skip
    entries = (
        [("how far it can be relied on", _standing(fact.standing) + listing(list(fact.reasons)))]
        if fact.private
        else []
    )
    entries += [("several examples of one person", text(fact.several))] if fact.several else []
    entries += [("the model", el("strong", text(fact.remark), class_="bad"))] if fact.remark else []
    entries.append(("tried against it", listing(list(fact.tried))))
    entries += [("further models", text(fact.again))] if fact.again else []
    entries += [(name, el("code", text(value))) for name, value in fact.identity]
    head = el("h3", named(fact.name, style), mark)
    return el("article", head, el("p", text(fact.promise), class_="promise"), pairs(entries), class_="card")


def _standing(said: str) -> str:
    """With a way to the table of assumptions."""
    before, named_there, after = said.partition("under Privacy")
    return text(before) + (el("a", text(named_there), href="#privacy-h") if named_there else "") + text(after)


def _files(word: str, story: Story) -> list[str]:
    told = [f"{name}{'…' if name == 'audit' else ''}: {why}" for name, why in listed(word, story.files)]
    return [*unpromised(story), *told, THE_REST] if word == MUST_NOT else told


def unpromised(story: Story) -> list[str]:
    """Of several models, those that are not private: the list of what may leave is not of them."""
    public = [trained.name for trained in story.trained if trained.privacy is None]
    return [f"all files of {name}: nothing is promised of them" for name in public if len(story.trained) > len(public)]
