"""A story as one page: the verdict first, then what it rests on, then how to make it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmdp.report import charts, tables
from lmdp.report.drawn import Vulnerable
from lmdp.report.epsilon import epsilon_bounds
from lmdp.report.glossary import glossary
from lmdp.report.guarantee import guarantees
from lmdp.report.headline import headline
from lmdp.report.html import HALF, chart, document, folded, named, pairs, paragraph, section, warning
from lmdp.report.release import NO_PROOF, box
from lmdp.report.svg import Style, el, text
from lmdp.report.values import accuracy, peak, percent, small
from lmdp.report.verdict import verdict

if TYPE_CHECKING:
    from lmdp.report.charts import Audited
    from lmdp.report.drawn import Bound
    from lmdp.report.roc import Limit
    from lmdp.report.story import Story, Trained
    from lmdp.risk.profile import RiskProfile


RANGES = (
    "Ranges, in brackets or below a number, are 95 % intervals; those of a model's leakiest layer and of its output "
    "are corrected for having looked at all layers. Certified: by this program, under the assumptions that stand under "
    "Privacy; by no authority."
)


SETTINGS = (
    "It need not be the one that trained: a page is written anew by every audit. The settings of the training are in "
    "config.toml of the run folder, and here."
)


def render(story: Story) -> str:
    """HTML that opens offline. Everything in the story is text to it, whatever it contains."""
    return document(
        story.title,
        _head(story),
        box(story),
        _leaks(story),
        _training(story),
        _weights(story),
        _table(story),
        _risk(story.risk),
        guarantees(story.trained),
        _bounds(story.bounds),
        _making(story),
        glossary(),
    )


def _head(story: Story) -> str:
    over = " · ".join(part for part in ("lmdp " + story.version if story.version else "lmdp", story.date) if part)
    warnings = dict.fromkeys(t.audit.warning for t in story.trained if t.audit is not None)
    tiles = (_tile(trained, Style.of_model(i)) for i, trained in enumerate(story.trained))
    return el(
        "header",
        paragraph(over, "over"),
        el("h1", text(story.title)),
        paragraph(headline(story) or verdict(story), "verdict"),
        paragraph(RANGES, "note") if story.trained else "",
        *map(warning, warnings),
        el("ul", *tiles, class_="tiles") if story.trained else "",
    )


def _tile(trained: Trained, style: Style) -> str:
    """The numbers to know of a model."""
    last = accuracy(trained)
    entries = [("test accuracy", tables.value(last, large=True))] if last else []
    entries.append(("epsilon", tables.spent(trained, large=True)))
    if trained.audit is not None:
        side = Vulnerable.of(trained.audit)
        if side is not None:
            entries.append(("AUC, most vulnerable", tables.value(peak(side), large=True)))
        entries.append(("AUC, ordinary examples", tables.value(peak(trained.audit), large=side is None)))
    return el("li", el("h3", named(trained.name, style)), pairs(entries), class_="tile")


def _leaks(story: Story) -> str:
    models = charts.audited(story)
    if not models:
        return (
            section("Leakage by layer", paragraph("No model was audited.", "note"), key="mia") if story.trained else ""
        )
    told = verdict(story)
    drawn = leakage(models, story.layers, charts.limits(story), told)
    return section("Leakage by layer", paragraph(told, "detail"), *drawn, key="mia")


def leakage(models: list[Audited], layers: tuple[str, ...], limits: list[Limit], told: str) -> list[str]:
    """What attacks on every layer find: canaries first, where there are any, then ordinary examples.

    What the page has `told` before is not said again.
    """
    proof = "An audit" if NO_PROOF in told else f"{NO_PROOF.removesuffix('.')}: it"
    planted = charts.most_vulnerable(models)
    parts = [
        paragraph(
            "How well the best of several attacks tells members of the training data from others, by what it sees of "
            f"each layer. Every example is scored by an adversary that never saw it. {proof} bounds these attacks on "
            "these examples, epsilon bounds all."
        )
    ]
    if planted:
        about = (
            f"Canaries stand for them ({_kinds(models)}): examples that a model can only learn by heart, each in the "
            "training or not by a secret coin. Members are those that were in; nothing but a coin made them so."
        )
        parts += [el("h3", "The most vulnerable examples"), paragraph(about)]
        parts += _attacked(planted, layers, limits, "canaries")
        parts.append(el("h3", "Ordinary examples"))
    else:
        about = (
            "Only ordinary examples were tried. An average example hardly leaks, whatever the model; what the most "
            "vulnerable give away was not measured. Plant canaries: lmdp train --canaries 500."
        )
        said = "Only ordinary examples were tried" in told
        parts.append(paragraph("An average example hardly leaks, whatever the model." if said else about, "note"))
    return [*parts, *_attacked(models, layers, limits, "mia")]


def _attacked(models: list[Audited], layers: tuple[str, ...], limits: list[Limit], key: str) -> list[str]:
    """By layer, the curves of the leakiest layers, and all numbers folded."""
    parts = []
    controls = any(audit.controls for _, _, audit in models)
    by_layer = charts.mia_by_layer(models, layers, "" if key == "mia" else key)
    if by_layer is not None:
        caption = (
            "From the first layer to the last; each model's peak is labelled. Below the layers: the model's own output "
            "for reference"
        )
        if controls:
            caption += (
                ", and the controls (raw input, untrained network). What a control finds is a difference between the "
                "groups, not a leak; it counts where its AUC lies 3.29 standard errors above 0.5, as by luck in one of "
                "two thousand"
            )
        parts.append(chart(by_layer, key, f"{caption}."))
    curves = charts.roc_at_peak(models, limits)
    if curves is not None:
        drawn = chart(curves, "roc" if key == "mia" else f"{key}-roc", width=HALF)
        parts.append(el("div", drawn, _about_roc(models, limits), class_="two"))
    parts.append(paragraph(_sizes(models), "note after"))
    parts.append(folded("All layers, with every number", tables.layers([(model, audit) for model, _, audit in models])))
    return parts


def _kinds(models: list[Audited]) -> str:
    return ", ".join(dict.fromkeys(audit.canaries.kind for _, _, audit in models if audit.canaries is not None))


def _sizes(models: list[Audited]) -> str:
    """How many examples were attacked, said once where it is the same for all models."""
    sizes: dict[str, list[str]] = {}
    for model, _, audit in models:
        words = f"{audit.members} members, {audit.nonmembers} non-members"
        words += f", {audit.left_out} left out to balance them" if audit.left_out else ""
        sizes.setdefault(words, []).append(model)
    if len(sizes) == 1:
        return f"Attacked: {next(iter(sizes))}."
    return "Attacked: " + "; ".join(f"{words} ({', '.join(names)})" for words, names in sizes.items()) + "."


def _about_roc(models: list[Audited], limits: list[Limit]) -> str:
    least = charts.least_rate([audit.nonmembers for _, _, audit in models])
    words = [
        "The leakiest layer of each model on logarithmic axes: the left edge shows how many members can be named while "
        "almost no one is named wrongly. On the dashed line an attack guesses.",
        *(
            f"Grey: no attack on a model with epsilon {limit.epsilon:.3g} and delta {small(limit.delta)} can exceed it."
            if limit.visible(least)
            else f"The limit that epsilon {limit.epsilon:.3g} and delta {small(limit.delta)} alone set lies beyond "
            f"these axes: at a false positive rate of {least:g} a true positive rate of up to "
            f"{percent(limit.tpr(least))}. The exact mechanism (noise, sampling rate, steps) sets a tighter one, which "
            "stands under Numbers."
            for limit in limits
        ),
    ]
    return el("div", *(paragraph(sentence, "note") for sentence in words), class_="beside")


def _training(story: Story) -> str:
    accurate, cost = charts.accuracy_over_steps(story), charts.epsilon_over_steps(story)
    if accurate is None and cost is None:
        return ""
    drawn = [chart(accurate, "accuracy", width=HALF)] if accurate else []
    drawn += [chart(cost, "epsilon", width=HALF)] if cost else []
    private = any(trained.privacy is not None for trained in story.trained)
    without = [] if cost or not private else [paragraph("Epsilon was not recorded during training.", "note")]
    return section("Training", el("div", *drawn, class_="two"), *without, key="training")


def _weights(story: Story) -> str:
    drawn = charts.weights(story)
    if not drawn:
        return ""
    about = paragraph(f"Each layer's share of every update: its share of the gradient{_turned(story.risk)}.")
    figures = (
        chart(weights, f"weights-{i}", trained.name if len(drawn) > 1 else "")
        for i, (trained, weights) in enumerate(drawn)
    )
    return section("Layer weights", about, *figures, key="weights")


def _turned(risk: RiskProfile | None) -> str:
    if risk is None:
        return "; no risk was given"
    if risk.weighs_alike:
        return ". The risk profile does not tell layers apart, and turns none of them down"
    return ", turned down where the layer is riskier"


def _table(story: Story) -> str:
    if not story.trained:
        return ""
    note = (
        "The intervals of the peak and of the output are corrected for having looked at every layer. TPR, FPR: true, "
        "false positive rate. No attack exceeds the limit if the epsilon holds. Where the exact mechanism of the "
        "training is known (noise, sampling rate, steps), the limit is taken from it: epsilon and delta alone would "
        "allow more. In percent, above, it is rounded up."
    )
    return section("Numbers", tables.models(story), paragraph(note, "note after"), key="numbers")


def _risk(profile: RiskProfile | None) -> str:
    if profile is None:
        return ""
    shadow = profile.shadow
    count = "1 shadow model" if shadow.models == 1 else f"{shadow.models} shadow models"
    about = (
        f"Estimated before training, on public data only{shadow.of and f' ({shadow.of})'}: {count} on half of "
        f"{shadow.examples} examples, "
        f"{shadow.epochs} epochs, train accuracy {shadow.train_accuracy:.3f}, test accuracy "
        f"{shadow.test_accuracy:.3f}. Protocol: {profile.protocol}."
    )
    parts = [paragraph(profile.verdict), paragraph(about, "note")]
    held_out = charts.risk_by_layer(profile)
    if held_out is not None:
        parts.append(
            chart(held_out, "risk", "Attacks on layers of the shadow model, with the same controls as an audit.")
        )
    memorised = charts.in_sample_by_layer(profile)
    if memorised is not None:
        caption = (
            "The paper's protocol scores the adversary on its own training set. Beside it, the same adversary on "
            "permuted labels: the part that is memory, not membership."
        )
        parts.append(chart(memorised, "in-sample", caption))
    parts.append(folded("The risk profile in numbers", tables.risk(profile)))
    return section("Risk profile on public data", *parts, key="risk")


def _bounds(bounds: Sequence[Bound]) -> str:
    if not bounds:
        return ""
    about = (
        "By canaries: those planted in this run itself, and those of lmdp audit --epsilon, which are as bad as they "
        "get in small trainings of the same method, weights and noise, or mislabelled in the run's own training once "
        "more. "
        "A bound above the claim would refute it; one below it is not a proof."
    )
    drawn = chart(lambda sheet: epsilon_bounds(sheet, bounds), "bounds", "Epsilon, claimed and shown to be at least.")
    return section(
        "Lower bounds on epsilon",
        paragraph(about),
        drawn,
        *(paragraph(b.verdict, "note") for b in bounds),
        key="bounds",
    )


def _making(story: Story) -> str:
    parts = []
    if story.command:
        parts = [paragraph("The command that wrote this page:", "note"), el("pre", el("code", text(story.command)))]
    if story.config:
        parts.append(paragraph(SETTINGS, "note"))
        shown = json.dumps(_plain(story.config), indent=2, ensure_ascii=False, default=str)
        parts.append(folded("Resolved configuration", el("pre", el("code", text(shown)))))
    return section("How to reproduce this", *parts, key="making") if parts else ""


def _plain(value: Any) -> Any:
    """Mappings of any kind as JSON knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
