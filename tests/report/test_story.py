"""The page says what the data say: no more, whatever is missing, and whatever things are called."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmdp.guards.verdicts import ASSUMPTIONS
from lmdp.report import Story, Trained, figures, render, verdict
from lmdp.report.tables import tpr_limit
from lmdp.report.values import accuracy, at_output, is_certified, wilson
from lmdp.report.verdict import NO_PROOF
from tests.report import sample

HOSTILE = (
    "<script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "'><img src=x onerror=alert(1)>",
    "&amp;",
    "]]>",
    "\x00\x1b",
)
CLAIMS = re.compile(r"\b(less|protects?|lower|higher|more)\b")


def parsed(page: str) -> ElementTree.Element:
    """The page as a tree; only well-formed markup has one."""
    bare = re.sub(r"(<(style|script)[^>]*>).*?(</\2>)", r"\1\3", page.removeprefix("<!doctype html>"), flags=re.S)
    return ElementTree.fromstring(bare)


def words(node: ElementTree.Element) -> str:
    return " ".join(node.itertext())


def sentences(said: str) -> list[str]:
    return re.split(r"(?<=[.])\s(?=[A-Z])", said)


def part(page: str, key: str) -> ElementTree.Element | None:
    return parsed(page).find(f".//section[@id='{key}-s']")


names = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30), st.just("层" * 40))
wild = st.one_of(st.none(), st.floats(), st.integers(), st.just("inf"), st.booleans())
rows = st.fixed_dictionaries(
    {},
    optional={
        "step": st.one_of(st.integers(0, 500), wild),
        "epsilon": st.one_of(st.floats(0, 20), wild),
        "test_accuracy": st.one_of(st.floats(0, 1), wild),
        "layer_weights": st.one_of(st.none(), st.lists(st.one_of(st.floats(0, 2), wild), max_size=12)),
    },
)
verdicts = st.fixed_dictionaries({"state": st.one_of(wild, st.sampled_from(["holds", "violated"]))})
privacies = st.one_of(
    st.none(),
    st.builds(lambda e, r: sample.statement(e, "lm", r), st.floats(0, 900), st.lists(names, max_size=2)),
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("epsilon", "delta", "reasons", "certified", "steps", "checks", "table"), wild),
            "verdicts": st.one_of(
                wild, st.dictionaries(names, st.one_of(wild, st.fixed_dictionaries({"state": wild})))
            ),
        },
    ),
)
aucs = st.dictionaries(names, st.floats(0, 1), min_size=1, max_size=5)
ordinary = st.builds(sample.audit, aucs, st.floats(0, 1), st.floats(0.3, 0.6), st.floats(0, 0.2))
bounds = st.none() | st.builds(sample.bound, st.one_of(st.floats(0, 900), st.just(math.inf)), st.floats(0, 9))
planted = st.builds(sample.with_canaries, ordinary, st.floats(0, 1), st.floats(0, 0.2), bounds)
audits = st.one_of(st.none(), ordinary, planted)
trained = st.builds(
    Trained, names, st.sampled_from(["sgd", "dpsgd", "lm", "lm-optimal", "x"]), st.lists(rows, max_size=6).map(tuple),
    privacies, audits, st.one_of(st.none(), st.integers(0, 5000)),
)  # fmt: skip
stories = st.builds(
    Story, names, names, st.lists(names, max_size=5, unique=True).map(tuple), st.lists(trained, max_size=4).map(tuple),
    st.one_of(st.none(), st.sampled_from(["heldout", "paper"]).map(sample.risk)),
    st.dictionaries(names, wild, max_size=3), names, names,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_any_story_renders_to_well_formed_markup_without_nan(story: Story) -> None:
    page = parsed(render(story))
    assert words(page.find(".//p[@class='verdict']")).strip()  # type: ignore[arg-type]
    drawings = [*page.iter("svg"), *map(ElementTree.fromstring, figures(story).values())]
    for node in (node for drawing in drawings for node in drawing.iter()):
        for key, value in node.attrib.items():
            assert key == "fill" or not re.search(r"\b(nan|inf)\b", value, re.I), (node.tag, key, value)
    ids = [node.attrib["id"] for node in page.iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_stays_text(name: str) -> None:
    named = replace(sample.sgd(), name=name, audit=sample.audit({name: 0.6, "fc": 0.5}))
    private = replace(sample.lm(), name=name, privacy=sample.statement(3.0, name, [name]))
    page = render(
        sample.story(title=name, command=name, layers=(name, "fc"), trained=(named, private), config={name: name})
    )
    tree = parsed(page)
    assert len(list(tree.iter("script"))) == 1
    assert not list(tree.iter("img"))
    assert not [key for node in tree.iter() for key in node.attrib if key.startswith("on")]
    assert "<script>alert" not in page
    shown = re.sub("[\x00\x1b]", "\ufffd", name)
    assert (tree.findtext(".//h1") or "") == shown


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def test_every_number_of_the_tables_is_in_the_data() -> None:
    story = sample.story()
    values = list(numbers(asdict(story)))
    values += [edge for t in story.trained for edge in wilson(accuracy(t).value, t.test_examples)]  # type: ignore[union-attr, arg-type]
    values += [limit for t in story.trained if (limit := tpr_limit(t)) is not None]
    assert story.risk is not None
    values += [edge for layer in story.risk.layers for edge in story.risk.corrected(layer)]
    values += [edge for t in story.trained if t.audit and (own := at_output(t.audit)) for edge in own.interval]
    rounded = {f"{value:.3f}" for value in values}
    tables = list(parsed(render(story)).iter("td"))
    shown = [number for cell in tables for number in re.findall(r"\d\.\d{3}", words(cell))]
    assert len(shown) > 100
    assert set(shown) <= rounded


def test_the_table_has_accuracy_epsilon_peak_and_tpr_with_their_intervals() -> None:
    page = render(sample.story())
    table = words(part(page, "numbers"))  # type: ignore[arg-type]
    for expected in ("0.637", "0.621–0.653", "0.969–0.987", "certified", "not private", "fc2", "0.067–0.078"):
        assert expected in table


def test_the_table_has_the_limit_that_epsilon_sets_to_the_tpr() -> None:
    """The audit's own where it has one; else that of epsilon and delta; none where nothing is promised."""
    open_model, low, high = sample.sgd(), sample.dpsgd(epsilon=1.0), sample.lm(epsilon=8.0)
    measured = replace(high, audit=replace(high.audit, tpr_limit_at_1pct=0.1234))  # type: ignore[type-var]
    assert tpr_limit(open_model) is None
    assert tpr_limit(low) == pytest.approx(math.e * 0.01 + 1e-5)
    assert tpr_limit(measured) == 0.1234
    assert tpr_limit(replace(low, privacy={**low.privacy, "epsilon": "inf"})) is None  # type: ignore[dict-item]
    table = words(part(render(sample.story(trained=(open_model, low, measured))), "numbers"))  # type: ignore[arg-type]
    assert "limit of it by epsilon" in table
    assert "0.124" in table  # rounded up: a promise may not become smaller by being told
    assert "0.028" in table
    assert "at most 0.124 at 1 % FPR" in str(measured.audit)
    assert "at most" not in str(low.audit)
    assert "tpr_limit_at_1pct" not in sample.audit({"fc": 0.6}).to_dict()


def test_the_wilson_interval_is_that_of_the_textbook() -> None:
    low, high = wilson(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert wilson(1.0, 50)[1] == pytest.approx(1.0)
    assert wilson(1.0, 50)[0] < 0.95


def test_the_verdict_says_less_where_intervals_separate() -> None:
    said = verdict(sample.story())
    assert "'fc2' of SGD gives membership away" in said
    assert "DP-SGD and LM-DP-SGD give away less" in said
    assert "at the same epsilon of 8" in said
    assert sentences(said)[0].startswith("Of ordinary examples, the only ones tried: ")
    assert len(sentences(said)) == 3, "what was found, what was not tried, and what that proves"


@settings(max_examples=80, deadline=None)
@given(st.floats(0.45, 0.7), st.floats(0.45, 0.7), st.floats(0.001, 0.05), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_the_verdict_claims_nothing_where_intervals_overlap(
    first: float, second: float, error: float, one: float, other: float
) -> None:
    pair = []
    for base, auc, final in ((sample.dpsgd(), first, one), (sample.lm(), second, other)):
        pair.append(
            replace(base, audit=sample.audit({"fc": auc}, error=error), metrics=({"step": 1, "test_accuracy": final},))
        )
    said = verdict(sample.story(trained=tuple(pair), risk=None))
    a, b = (t.audit.peak.interval for t in pair)
    apart = a[1] < b[0] or b[1] < a[0]
    c, d = (wilson(final, 1000) for final in (one, other))
    if not apart:
        assert not re.search(r"\b(less|more|protects?)\b", said)
    if not (c[1] < d[0] or d[1] < c[0]):
        assert not re.search(r"\b(lower|higher)\b", said)
    if max(a[0], b[0]) <= 0.5:
        assert not re.search(r"\b(less|more|protects?)\b", said), "nothing leaks, so nothing leaks less"


def test_the_verdict_leads_with_the_most_vulnerable_and_tells_ordinary_examples_apart() -> None:
    first, second, *rest = sentences(verdict(sample.planted_story()))
    assert first.startswith("The most vulnerable examples (mislabelled canaries): layer 'fc2' of SGD gives membership")
    assert "0.970" in first
    assert "at the same epsilon of 8 (delta 1e-5), the difference" in first
    assert second.startswith("Ordinary examples: layer 'fc2' of SGD gives membership away (AUC 0.637")
    assert rest == [NO_PROOF], "no layer of the private models gives ordinary examples away"


SAFE = re.compile(r"\b(safe|secure|protected|harmless|no leak|leaks nothing|private enough)\b", re.I)


@settings(max_examples=80, deadline=None)
@given(st.floats(0.45, 0.7), st.floats(0.45, 0.7), st.none() | st.floats(0.45, 0.8), st.booleans())
def test_an_attack_that_fails_is_never_called_a_proof(
    one: float, other: float, canaries: float | None, alone: bool
) -> None:
    audits = [sample.audit({"fc": auc}) for auc in (one, other)]
    if canaries is not None:
        audits = [sample.with_canaries(report, canaries) for report in audits]
    models = tuple(replace(t, audit=report) for t, report in zip((sample.sgd(), sample.dpsgd()), audits, strict=True))
    told = sample.story(trained=models[:1] if alone else models)
    for said, reports in ((verdict(told), audits[:1] if alone else audits), (audits[0].verdict, audits[:1])):
        assert not SAFE.search(said)
        peaks = [r.peak for r in reports] + [r.canaries.peak for r in reports if r.canaries]
        if any(top.interval[0] <= 0.5 for top in peaks):
            assert NO_PROOF in said
        where = [said.find(words) for words in ("most vulnerable", "rdinary examples")]
        assert min(where) >= 0, "both are spoken of"
        if canaries is not None:
            assert where[0] < where[1], "the most vulnerable first"
        else:
            assert "--canaries 500" in said
    page = render(told)
    assert "An audit that finds nothing is no proof" in words(part(page, "mia"))  # type: ignore[arg-type]


def test_canaries_are_told_although_the_groups_of_ordinary_examples_differ() -> None:
    shifted = [replace(sample.sgd(), audit=sample.with_canaries(sample.audit({"fc": 0.6}, control=0.58), 0.9))]
    shifted.append(replace(sample.dpsgd(), audit=sample.with_canaries(sample.audit({"fc": 0.6}), 0.55)))
    for models in (shifted, shifted[:1]):
        said = verdict(sample.story(trained=tuple(models)))
        assert said.index("0.900") < said.index("differ before any training is looked at")
        assert NO_PROOF in said


def test_a_claim_that_canaries_refute_is_told_before_all_else() -> None:
    broken = sample.with_canaries(sample.audit({"fc": 0.5}), 0.9, shown=sample.bound(lower=9.5))
    models = (replace(sample.dpsgd(), audit=broken), sample.lm())
    for trained in (models, models[:1]):
        said = verdict(sample.story(trained=trained)).removeprefix("DP-SGD: ")
        assert sentences(said)[:2][1] == "The claim does not hold."


def test_the_page_shows_canaries_and_ordinary_examples_with_their_numbers() -> None:
    story = sample.planted_story()
    page = render(story)
    leaks = part(page, "mia")
    assert leaks is not None
    assert [head.text for head in leaks.iter("h3")] == ["The most vulnerable examples", "Ordinary examples"]
    ids = [figure.attrib["id"] for figure in leaks.iter("figure")]
    assert ids == ["canaries", "canaries-roc", "mia", "roc"]
    assert "260 members, 243 non-members" in words(leaks)
    table = words(part(page, "numbers"))  # type: ignore[arg-type]
    for expected in ("0.970", "0.920–1.020", "0.637", "0.621–0.653", "epsilon, at least", "0.7"):
        assert expected in table
    assert {"canaries-by-layer.svg", "canaries-roc.svg", "mia-by-layer.svg", "roc.svg"} <= set(figures(story))
    assert "Only ordinary examples were tried" not in page
    assert "Only ordinary examples were tried" in render(sample.story())


@settings(max_examples=60, deadline=None)
@given(st.floats(0.45, 0.7), st.floats(0.45, 0.7), st.floats(0.001, 0.05))
def test_a_private_model_is_called_better_than_an_open_one_only_beyond_doubt(a: float, b: float, error: float) -> None:
    models = (
        replace(sample.sgd(), audit=sample.audit({"fc": a}, error=error)),
        replace(sample.dpsgd(), audit=sample.audit({"fc": b}, error=error)),
    )
    said = verdict(sample.story(trained=models))
    low, high = models[0].audit.peak.interval[0], models[1].audit.peak.interval[1]  # type: ignore[union-attr]
    assert bool(re.search(r"\bless\b", said)) == (low > high and low > 0.5)


def test_accuracies_without_test_examples_are_not_compared() -> None:
    pair = tuple(replace(t, test_examples=None) for t in (sample.dpsgd(final=0.5), sample.lm(final=0.99)))
    assert not CLAIMS.search(verdict(sample.story(trained=pair)))


def test_different_epsilons_are_not_compared() -> None:
    said = verdict(sample.story(trained=(sample.dpsgd(8.0, peak=0.6), sample.lm(2.0))))
    assert "same epsilon" not in said
    assert not CLAIMS.search(said)


def test_a_control_that_fires_is_all_the_verdict_speaks_of() -> None:
    shifted = replace(sample.sgd(), audit=sample.audit({"fc": 0.9}, control=0.7))
    said = verdict(sample.story(trained=(shifted, sample.dpsgd(), sample.lm())))
    assert "measures that shift" in said
    assert not CLAIMS.search(said)


def test_a_run_that_is_not_certified_is_labelled_so_wherever_its_epsilon_stands() -> None:
    page = render(sample.story(trained=(sample.sgd(), sample.dpsgd(), sample.lm(reasons=["of <this>"]))))
    assert "claimed, NOT certified" in verdict(sample.story(trained=(sample.dpsgd(), sample.lm(reasons=["so"]))))
    assert "of <this>" in words(part(page, "privacy"))  # type: ignore[arg-type]
    for key in ("numbers", "privacy"):
        assert words(part(page, key)).count("claimed, NOT certified") == 1  # type: ignore[arg-type]
    assert words(parsed(page).find(".//ul[@class='tiles']")).count("claimed, NOT certified") == 1  # type: ignore[arg-type]
    assert "claimed" not in render(sample.story())


def states(page: str) -> list[tuple[str, str]]:
    """(assumption, state) of every row of the first card."""
    rows = parsed(page).findall(".//table[@class='assumptions']/tbody/tr")
    return [(row.findtext("th/span") or "", words(row[1]).split(maxsplit=1)[1]) for row in rows]


def test_every_assumption_is_shown_with_its_state_and_how() -> None:
    page = render(sample.story(trained=(sample.lm(),)))
    assert [sentence for sentence, _ in states(page)] == list(ASSUMPTIONS.values())
    assert {state for _, state in states(page)} == {"holds"}
    for how in sample.HOW.values():
        assert how in page


def test_what_does_not_hold_stands_first_and_is_told_by_word_and_mark() -> None:
    page = render(sample.story(trained=(replace(sample.lm(), privacy=disturbed("numbers", "account")),)))
    assert [state for _, state in states(page)] == ["violated", "not established", *["holds"] * 7]
    assert [sentence for sentence, _ in states(page)][:2] == [ASSUMPTIONS["numbers"], ASSUMPTIONS["account"]]
    table = words(parsed(page).find(".//table[@class='assumptions']"))  # type: ignore[arg-type]
    assert [table.count(mark) for mark in "✗?✓"] == [1, 1, 7]


def disturbed(violated: str, unknown: str) -> dict[str, Any]:
    privacy = sample.statement(8.0, "lm")
    states = {ASSUMPTIONS[violated]: "violated", ASSUMPTIONS[unknown]: "not established"}
    table = [(sentence, states.get(sentence, state), how) for sentence, state, how in privacy["table"]]
    return {**privacy, "table": table}


@pytest.mark.parametrize("drop", [("verdicts", "table"), ("table",)])
def test_a_statement_without_verdicts_is_never_shown_as_certified(drop: tuple[str, ...]) -> None:
    privacy = {key: value for key, value in sample.statement(8.0, "lm").items() if key not in drop}
    page = render(sample.story(trained=(replace(sample.lm(), privacy=privacy),)))
    if "verdicts" in drop:
        assert [state for _, state in states(page)] == ["not established"]
        assert "written before assumptions were judged" in page
        assert "claimed, NOT certified" in page
    else:
        assert [sentence for sentence, _ in states(page)] == list(ASSUMPTIONS)
        assert "claimed, NOT certified" not in page


@pytest.mark.parametrize("state", ["violated", "not established", "HOLDS", "", None, 3])
def test_one_assumption_that_does_not_hold_is_enough_against_a_certificate(state: Any) -> None:
    privacy = sample.statement(8.0, "lm")
    for key in privacy["verdicts"]:
        altered = {**privacy["verdicts"], key: {"state": state, "how": "so"}}
        assert not is_certified({**privacy, "verdicts": altered, "table": None})
    assert is_certified({**privacy, "table": None})


def test_what_a_check_has_seen_is_shown() -> None:
    privacy = {**sample.statement(8.0, "lm"), "checks": ["lmdp.check ran <this> training"]}
    page = render(sample.story(trained=(replace(sample.lm(), privacy=privacy),)))
    assert "Checked: lmdp.check ran <this> training." in words(part(page, "privacy"))  # type: ignore[arg-type]


def test_an_infinite_epsilon_is_shown_and_never_called_certified() -> None:
    run = sample.lm(math.inf, reasons=["no noise was added"])
    page = render(sample.story(trained=(run,)))
    assert "(ε, δ) = (∞, 1e-5)" in page
    assert "claimed, NOT certified" in page


def test_the_warning_about_private_members_stands_before_the_numbers() -> None:
    page = render(sample.story())
    assert page.index("not covered by any epsilon") < page.index('class="tiles"')
    assert "not covered by any epsilon" not in render(sample.story(trained=(replace(sample.sgd(), audit=None),)))


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"trained": ()}, {"risk", "making"}, {"mia", "training", "weights", "numbers", "privacy"}),
        ({"trained": (replace(sample.lm(), audit=None),)}, {"mia", "training", "weights"}, set()),
        ({"trained": (sample.sgd(),), "risk": None}, {"mia", "numbers"}, {"weights", "risk"}),
        ({"trained": (), "risk": None, "command": "", "config": {}}, set(), {"risk", "making", "mia"}),
    ],
)
def test_a_part_without_data_is_left_out(changes: dict[str, Any], present: set[str], absent: set[str]) -> None:
    page = render(sample.story(**changes))
    assert {key for key in present | absent if part(page, key) is not None} == present


def test_the_command_and_the_folded_configuration_are_there() -> None:
    story = sample.story()
    making = part(render(story), "making")
    assert making is not None
    assert making.findtext("pre/code") == story.command
    assert '"mnist-5k"' in words(making.find("details"))  # type: ignore[arg-type]


def test_nothing_is_loaded_from_elsewhere_and_the_page_is_small() -> None:
    page = render(sample.story())
    assert len(page.encode()) < 200_000
    assert len(render(sample.crowd()).encode()) < 2_000_000
    assert not re.search(r"https?://", page)
    policy = parsed(page).find("head/meta[@http-equiv]").attrib["content"]  # type: ignore[union-attr]
    assert policy.startswith("default-src 'none';")
    assert "unsafe-inline" not in page


def test_an_audit_alone_has_the_same_charts() -> None:
    from lmdp.report.audit_page import render as audit_page

    report = sample.audit({"embedding": 0.55})
    page = audit_page(report)
    tree = parsed(page)
    assert words(tree.find(".//p[@class='verdict']")) == report.verdict  # type: ignore[arg-type]
    assert {figure.attrib["id"] for figure in tree.iter("figure")} == {"mia", "roc"}
    assert report.warning[1:] in page
