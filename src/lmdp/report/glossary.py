"""The words of a report, and what to ask before deciding. `docs/reading-a-report.md` has the same, and more."""

from __future__ import annotations

from lmdp.report.html import folded, pairs, paragraph, section
from lmdp.report.svg import el, text

PAGE = "docs/reading-a-report.md"
WORDS = {
    "accountant": "the computation that adds up what all steps of a training cost: epsilon for a delta",
    "AUC": "how well an attack tells members from others: 0.5 is guessing, 1 is always right",
    "canary": "a made-up example planted in the training, in or out by a coin; stands for the most vulnerable",
    "delta": "the chance, roughly, that the promise of epsilon does not hold; below 1 / number of examples",
    "embedding, representation": "the numbers that a layer makes of an input",
    "epsilon": (
        "how much the model may depend on one example: 0 not at all, 1 strong, 8 common, 50 hardly any promise"
    ),
    "false alarm": "an example that was not trained on, said to have been",
    "LM-DP-SGD": (
        "private training (DP-SGD) in which every layer gets a weight of its own; it is a method, not the model"
    ),
    "member": "an example that was trained on",
    "noise, fast or secure": (
        "a setting: both draw from AES-256 under a key of the operating system (fast, on a GPU: from its own "
        "generator, seeded so); secure also keeps that key from being copied"
    ),
    "Poisson": "how batches are drawn: every example by a coin of its own in every step, as the accountant assumes",
    "sensitivity": "the most that one example can move the sum that noise is added to",
    "TPR at 1 % FPR": "of all members, how many are found when 1 % of the others are accused wrongly",
}


QUESTIONS = (
    "Is it certified? If not, can you live with the reasons?",
    "Is the percentage one that you would tell the people in the data?",
    "Is one example really what must be protected, or one person?",
    "Were canaries tried, and not found?",
    "Was this the only training on these data? If not, what do all cost together?",
    "Is the file that leaves the house the one with that SHA-256, and does none of the second list leave?",
)


def glossary() -> str:
    words = pairs([(word, text(meaning)) for word, meaning in WORDS.items()])
    more = paragraph(f"How to read this page, without mathematics: {PAGE} in the documentation of lmdp.", "note")
    asked = folded(
        "Questions for the decision",
        el("ol", *(el("li", text(question)) for question in QUESTIONS), class_="questions"),
    )
    return section("Words", more, asked, folded("What they mean", el("div", words, class_="unit words")), key="words")
