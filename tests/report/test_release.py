"""The report answers the decision: promise in plain words, standing, what was tried, files, a place to sign."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lmdp.app import cli
from lmdp.app.runs import RunFolder
from lmdp.audit.curves import GaussianSteps
from lmdp.private import PrivacyStatement
from lmdp.report import Story, card, headline, render, verdict
from lmdp.report.charts import epsilon_over_steps
from lmdp.report.files import FILES, MAY, MUST_NOT, listed
from lmdp.report.glossary import QUESTIONS, WORDS
from lmdp.report.guarantee import guarantees
from lmdp.report.release import NO_PROOF, OTHER_TRAININGS, PUBLISHED, SEVERAL, facts, promise, several
from lmdp.report.roc import Limit, of_several
from lmdp.report.svg import PAGE, Sheet
from lmdp.report.tables import tpr_limit
from tests.app.test_cli import SMALL, make_npz
from tests.report import sample

STORIES = {
    "ordinary": sample.story(),
    "planted": sample.planted_story(),
    "alone": sample.story(trained=(sample.dpsgd(),)),
    "unaudited": sample.story(trained=(replace(sample.dpsgd(), audit=None),)),
    "not certified": sample.story(trained=(sample.lm(reasons=["so"]),)),
    "nothing": sample.story(trained=()),
}
NUMBER = re.compile(r"(?<![\w'])\d+(?:[.,]\d+)?(?:e-?\d+)?")


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_headline_has_at_most_three_numbers_and_the_percentage_of_the_box(story: Story) -> None:
    said = headline(story)
    assert len(NUMBER.findall(said)) <= 3
    assert "epsilon" not in said  # it stands below, with its delta
    limited = tuple(replace(t, limit=0.2) if t.privacy else t for t in story.trained)
    said = headline(replace(story, trained=limited))
    assert len(NUMBER.findall(said)) <= 3
    assert all("at most 20\u00a0% of" in each for t in limited if t.privacy for each in [said.lower(), promise(t)])


def test_the_headline_tells_the_weakest_promise_and_whether_it_is_certified() -> None:
    tight, loose = replace(sample.dpsgd(), limit=0.05), replace(sample.lm(), limit=0.2)
    assert "At most 20\u00a0% of the examples that each model trained by DP-SGD and LM-DP-SGD" in headline(
        sample.story(trained=(tight, loose))
    )
    doubted = replace(sample.lm(reasons=["so"]), limit=0.2)
    for trained in [(doubted,), (tight, doubted)]:
        said = headline(sample.story(trained=trained))
        assert said.startswith("It is claimed, and NOT certified, that at most 20\u00a0%")
        assert "certified by this program" not in said
    little = replace(sample.dpsgd(), limit=0.97)
    assert headline(sample.story(trained=(little,))).startswith("Little is promised: nearly all examples may be")
    infinite = replace(sample.dpsgd(), privacy={**(sample.dpsgd().privacy or {}), "epsilon": "inf"})
    assert headline(sample.story(trained=(infinite,))).startswith("Nothing is promised.")
    assert headline(sample.story(trained=(infinite, tight))).startswith("Nothing is promised.")


@pytest.mark.parametrize("limit", [0.011, 0.0971, 0.1, 0.123, 0.8999])
def test_a_promise_is_never_told_smaller_than_it_is(limit: float) -> None:
    said = promise(replace(sample.dpsgd(), limit=limit))
    told = re.search(r"at most ([\d.]+)\u00a0% of members", said)
    assert told is not None
    assert limit <= float(told[1]) / 100 <= 1.1 * limit + 0.001


def test_a_promise_that_limits_little_is_said_to() -> None:
    assert promise(replace(sample.dpsgd(), limit=0.97)).startswith("Little:")
    infinite = {**(sample.dpsgd().privacy or {}), "epsilon": "inf"}
    assert promise(replace(sample.dpsgd(), privacy=infinite)).startswith("Nothing")


@pytest.mark.parametrize("unit, told", [("example", "Not one person"), ("user", "One user, with all its rows")])
def test_the_unit_is_that_of_the_statement(unit: str, told: str) -> None:
    one = replace(sample.dpsgd(), privacy={**(sample.dpsgd().privacy or {}), "unit": unit})
    story = sample.story(trained=(one,))
    assert told in render(story)
    assert told in card(story)


def test_the_number_of_examples_says_that_canaries_are_in_it() -> None:
    planted = {**(sample.dpsgd().privacy or {}), "examples": {"trained_on": 900, "held_out": 100, "canaries": 300}}
    identity = dict(facts(replace(sample.dpsgd(), privacy=planted), sample.story()).identity)
    assert identity["examples trained on (N)"].endswith(", with those of 300 planted canaries that are in")
    assert "canaries" not in dict(facts(sample.dpsgd(), sample.story()).identity)["examples trained on (N)"]


def test_what_is_not_certified_is_never_called_so() -> None:
    doubted = replace(sample.lm(reasons=["so"]), limit=0.2)
    fact = facts(doubted, sample.story())
    assert not fact.certified
    assert fact.promise.startswith("Claimed, not certified: ")
    assert fact.standing.startswith("NOT certified")
    assert "yes, by this program" not in card(sample.story(trained=(doubted,)))


@pytest.mark.parametrize(
    "story", [s for s in STORIES.values() if s.trained], ids=[n for n in STORIES if n != "nothing"]
)
def test_page_and_card_tell_every_model_its_promise_and_that_silence_is_no_proof(story: Story) -> None:
    page, told = render(story), card(story)
    assert page.count("May this be released?") == 1
    assert "Decision: ☐ release" in page
    for trained in story.trained:
        assert f"## {trained.name}" in told
        if trained.audit is not None:
            assert NO_PROOF in told
            assert NO_PROOF in facts(trained, story).tried
    assert all(name in page and name in told for name in FILES)


def test_a_card_holds_no_result_of_an_attack_on_members() -> None:
    """It is made to be published; an audit is covered by no epsilon."""
    story = sample.planted_story()
    other = replace(story, trained=tuple(replace(t, audit=_others(t.audit)) for t in story.trained))
    assert card(other) == card(story)
    assert render(other) != render(story)


def _others(audit):  # type: ignore[no-untyped-def]
    """The same attacks on as many examples, with other results."""
    layers = tuple(replace(leak, auc=0.9, tpr_at_1pct=0.7) for leak in audit.layers)
    return replace(audit, layers=layers, peak=replace(audit.peak, auc=0.9, interval=(0.8, 0.95)))


def test_a_model_that_exploded_is_told_on_page_and_card() -> None:
    story = sample.story(trained=(replace(sample.dpsgd(), remark="the training has exploded"),))
    assert "the training has exploded" in render(story)
    assert "the training has exploded" in card(story)
    assert "exploded" not in card(sample.story())


REFUTED_HERE = sample.story(trained=(sample.dpsgd(),), bounds=(sample.bound(8.0, 12.0),))


def test_a_bound_that_refutes_a_claim_is_told_by_headline_verdict_box_and_card_and_nothing_is_certified() -> None:
    assert headline(REFUTED_HERE).startswith("The epsilon that is claimed for DP-SGD is refuted by an attack")
    assert verdict(REFUTED_HERE).startswith(REFUTED_HERE.bounds[0].verdict)
    told = facts(REFUTED_HERE.trained[0], REFUTED_HERE)
    assert not told.certified
    assert told.standing.startswith("REFUTED")
    assert any("at least 12 (delta 1e-5; 8 is claimed); that refutes the claim" in one for one in told.tried)
    page, on_card = render(REFUTED_HERE), card(REFUTED_HERE)
    for each in (page, on_card):
        assert "REFUTED: " in each
        assert "Certified by this program" not in each
        assert "yes, by this program" not in each
    assert ">certified<" not in page
    assert "12" not in on_card.split("How far it can be relied on")[1].split("|")[0], "no results on a card"


def test_a_bound_of_another_method_refutes_only_that_one() -> None:
    both = sample.story(trained=(sample.dpsgd(), sample.lm()), bounds=(sample.bound(8.0, 12.0),))
    assert "claimed for DP-SGD is refuted" in headline(both)
    assert facts(both.trained[1], both).certified


def test_after_bounds_by_canaries_in_other_trainings_nobody_says_that_the_most_vulnerable_were_not_tried() -> None:
    bounded = replace(STORIES["alone"], bounds=(sample.bound(8.0, 0.3),))
    for before, after in ((render(STORIES["alone"]), render(bounded)), (card(STORIES["alone"]), card(bounded))):
        assert "The most vulnerable examples were not tried" in before
        assert "The most vulnerable examples were not tried" not in after
        assert "in other trainings of the same settings" in after
    assert "the only ones tried" not in headline(bounded)
    assert facts(bounded.trained[0], bounded).certified


def test_what_one_model_gives_away_and_what_several_give() -> None:
    assert "What it gives away was not measured." in headline(STORIES["unaudited"])
    several_models = tuple(replace(trained, audit=None) for trained in (sample.dpsgd(), sample.lm()))
    assert "What they give away was not measured." in headline(sample.story(trained=several_models))


def test_no_epsilon_stands_without_its_delta() -> None:
    chart = epsilon_over_steps(sample.story())
    assert chart is not None
    drawn = html.unescape(chart(Sheet(430.0, PAGE, "e")))
    assert "epsilon spent (delta 1e-5)" in drawn
    assert all("(delta 1e-5)" in tip for tip in re.findall(r"DP-SGD, step \d+: epsilon [^<\"]*", drawn))
    assert "at the same epsilon of 8 (delta 1e-5)" in verdict(sample.story())
    assert "(delta 1e-05, 95% confidence)" in sample.bound().verdict


def test_the_box_leads_to_the_table_of_assumptions_and_names_versions_and_date() -> None:
    made = {"trained": "2026-11-18", "versions": "lmdp 0.2.0, torch 2"}
    for trained in (sample.dpsgd(), sample.lm(reasons=["so"]), sample.sgd()):
        told = sample.story(trained=(replace(trained, provenance=made),))
        page = render(told)
        assert all(value in page and value in card(told) for value in made.values())
        if trained.privacy is not None:
            assert '<a href="#privacy-h">under Privacy</a>' in page
            assert 'id="privacy-h"' in page


def test_a_report_without_an_audit_may_leave_the_house_and_one_with_an_audit_may_not() -> None:
    there = ["model.safetensors", "metrics.jsonl", "report.html", "figures/"]
    for more, word in (([], MAY), (["audit.json"], MUST_NOT), (["epsilon.json"], MUST_NOT)):
        named = dict(listed(word, [*there, *more]))
        assert {"report.html", "figures/"} <= set(named)
        assert ("without an audit" in named["report.html"]) is (not more)
    assert "report.html" in dict(listed(MUST_NOT, None))


def test_no_layer_weights_are_not_said_to_come_from_anywhere() -> None:
    assert "weights from" not in render(STORIES["alone"])
    assert "weights: none" not in str(PrivacyStatement.from_dict(sample.dpsgd().privacy or {}))


def test_a_card_cannot_be_given_markup_by_a_name() -> None:
    hostile = sample.story(title="a\n# b <script>x</script> | c")
    assert "\n# b" not in card(hostile)
    assert "<script>" not in card(hostile)


def test_epsilons_that_lie_on_each_other_are_one_line_with_all_names() -> None:
    story = sample.story(trained=(sample.dpsgd(), replace(sample.lm(), metrics=sample.dpsgd().metrics)))
    chart = epsilon_over_steps(story)
    assert chart is not None
    assert "DP-SGD, LM-DP-SGD" in chart(Sheet(430.0, PAGE, "e"))


def test_layers_are_named_and_risk_is_not_spoken_of_where_there_is_none() -> None:
    page = render(sample.story(risk=None))
    assert "turned down where the layer is riskier" not in page
    assert "turned down where the layer is riskier" in render(sample.story())


def test_a_run_is_told_before_and_after_its_audit_and_every_file_of_it_is_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = make_npz(tmp_path / "private.npz")
    assert cli.main(["train", *SMALL, "--data", spec, "--holdout", "0", "--out", "run", "--quiet"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "layer 1" not in page
    assert "conv1" in page
    folder = RunFolder(tmp_path / "run")
    said = (folder / "privacy-card.md").read_text()
    assert str(tmp_path) not in said
    for entry in folder.path.iterdir():
        name = entry.name + ("/" if entry.is_dir() else "")
        assert any(name.startswith(known) for known in FILES) or name == ".lock", name
    assert FILES["private/"][0] == FILES["report.html"][0] == MUST_NOT
    named = {name for word in (MAY, MUST_NOT) for name, why in listed(word, _names(folder)) if "if kept" not in why}
    assert all(name in said for name in named)
    assert not any(f"`{name}`" in said for name in FILES if not any(one.startswith(name) for one in _names(folder)))


def _names(folder: RunFolder) -> list[str]:
    return [entry.name + "/" * entry.is_dir() for entry in folder.path.iterdir()]


def test_only_files_that_are_there_are_named_and_those_often_moved_as_if_kept() -> None:
    there = ("model.safetensors", "audit.json", "audit-ab.html")
    told = card(sample.story(files=there))
    assert {name for word in (MAY, MUST_NOT) for name, _ in listed(word, there)} == {
        *("model.safetensors", "audit", "privacy-card.md", "report.html", "figures/", "checkpoints/", "private/")
    }
    assert "`private/`: if kept: " in told
    assert "`tokenizer/`" not in told
    assert "any other file: not judged here; treat it as private" in told


@pytest.mark.parametrize("k", SEVERAL)
def test_several_examples_of_one_person_are_as_one_of_a_gaussian_with_so_much_less_noise(k: int) -> None:
    curve, exact = GaussianSteps(4.0).curve(), GaussianSteps(4.0 / k).curve().most(0.01)
    assert exact - 1e-3 <= of_several(curve.most, k) <= 1.02 * exact + 1e-3


def test_two_examples_of_one_person_are_limited_no_lower_than_their_own_mechanism_is() -> None:
    """In a step both, one or none are drawn: `dp-accounting` knows that mixture."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    noise, rate, steps = 1.2, 0.1, 40
    drawn = [(1 - rate) ** 2, 2 * rate * (1 - rate), rate**2]
    both = pld.from_mixture_gaussian_mechanism(noise, [0.0, 1.0, 2.0], drawn, value_discretization_interval=1e-3)
    losses = both.self_compose(steps)
    least = min(math.exp(e) * 0.01 + d for i in range(60) for e in [i / 10] for d in [losses.get_delta_for_epsilon(e)])
    told = of_several(GaussianSteps(noise, rate, steps).curve().most, 2)
    assert least <= told < 1.2 * least


@pytest.mark.parametrize("k", SEVERAL)
def test_of_epsilon_and_delta_alone_several_examples_cost_as_many_epsilons_at_a_larger_delta(k: int) -> None:
    one, delta = Limit(0.3, 1e-5), 1e-5 * math.expm1(0.3 * k) / math.expm1(0.3)
    assert of_several(one.tpr, k) <= math.exp(0.3 * k) * 0.01 + delta + 1e-12
    assert of_several(one.tpr, 2) == pytest.approx(math.exp(0.6) * 0.01 + 1e-5 * (1 + math.exp(0.3)))


def test_page_and_card_tell_of_people_with_several_examples_and_how_to_protect_them() -> None:
    one = replace(sample.dpsgd(), limit=0.1, several={2: 0.3001, 5: 0.8, 10: 1.0})
    assert (
        "80 % of those with 5 examples, at most 100 % of those with 10 examples can be recognised. 100 % is no limit."
        in several(one).replace("\u00a0", " ")
    )
    for told in (card(sample.story(trained=(one,))), render(sample.story(trained=(one,)))):
        assert "at most 31 % of those with 2 examples" in told.replace("\u00a0", " ")
        assert "lmdp.PerUser" in told
    assert several(replace(one, privacy={**(one.privacy or {}), "unit": "user"})) == ""
    assert several(replace(sample.lm(reasons=["so"]), several=one.several)).startswith("Claimed, not certified: ")


def test_page_and_card_say_what_may_be_published_and_that_other_trainings_are_unknown() -> None:
    for told in (html.unescape(render(sample.story())), card(sample.story())):
        assert PUBLISHED in told
        assert OTHER_TRAININGS in told
    assert "No promise covers the weights" in card(sample.story(trained=(sample.sgd(),)))


def test_a_card_says_on_whom_attacks_were_tried_and_what_is_not_covered() -> None:
    assert "The most vulnerable examples were not tried: no canaries were planted." in card(sample.story())
    assert "stand for the most vulnerable" in card(sample.planted_story())
    planted = {**(sample.dpsgd().privacy or {}), "examples": {"canaries": 300}}
    unseen = card(sample.story(trained=(replace(sample.dpsgd(), privacy=planted, audit=None),)))
    assert "300 canaries were planted, and not looked for" in unseen
    for gap in planted["not_covered"]:
        assert gap.replace("_", "\\_") in card(sample.story())


def test_a_promise_below_that_of_epsilon_and_delta_alone_says_where_it_comes_from() -> None:
    assert "exact mechanism" in promise(replace(sample.dpsgd(), limit=0.2))
    alone = replace(sample.dpsgd(epsilon=1.0), limit=None, audit=None)
    assert "exact mechanism" not in promise(alone)


def test_the_words_of_a_report_are_those_of_its_page_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reading-a-report.md").read_text()
    for word, meaning in WORDS.items():
        assert f"| {word} | {meaning} |" in page
        assert meaning in html.unescape(render(sample.story()))


def test_the_limit_of_a_run_is_that_of_its_whole_curve_and_below_epsilon_and_delta_alone() -> None:
    trained = replace(sample.dpsgd(), limit=0.1)
    assert tpr_limit(trained) == 0.1
    alone = tpr_limit(replace(trained, limit=None, audit=None))
    assert alone is not None
    assert math.isfinite(alone)


def test_the_headline_speaks_of_models_and_not_of_methods_in_which_members_are_found() -> None:
    assert "in the model trained by DP-SGD; that is no proof." in headline(STORIES["alone"])
    told = headline(STORIES["ordinary"])
    assert "in the model trained by SGD, and not in the models trained by DP-SGD and LM-DP-SGD" in told


@pytest.mark.parametrize("layer", [0.5, 0.6])
@pytest.mark.parametrize("output", [0.5, 0.6])
def test_what_the_output_of_a_model_gives_away_is_found_as_what_a_layer_gives_away_is(
    layer: float, output: float
) -> None:
    seen = sample.audit(dict.fromkeys(sample.LAYERS, layer), output=output)
    trained = replace(sample.dpsgd(), audit=seen)
    found = headline(sample.story(trained=(trained,)))
    assert ("did not find" in found) is (max(layer, output) < 0.55)
    (told,) = (one for one in facts(trained, sample.story()).tried if one.startswith("Ordinary examples"))
    assert ("no layer" in told) is (layer < 0.55)
    says = {
        (0.5, 0.5): "nor does the model's own output",
        (0.5, 0.6): "but the model's own output does",
        (0.6, 0.5): "the model's own output does not measurably",
        (0.6, 0.6): "and so does the model's own output",
    }
    assert f", {says[layer, output]} (AUC {output:.3f} [" in told
    silent = replace(trained, audit=replace(seen, reference=None))
    assert not any("output" in one for one in facts(silent, sample.story()).tried)


def test_the_output_is_counted_among_what_gives_canaries_away() -> None:
    """In the sample every model's output does, and here no layer of the private ones."""
    story = sample.planted_story(dpsgd=0.503, lm=0.503)
    found = "Attacks found the most vulnerable examples in the models trained by SGD, DP-SGD and LM-DP-SGD."
    assert found in headline(story)
    for trained in story.trained[1:]:
        most = facts(trained, story).tried[0]
        assert "no layer gives them away measurably" in most
        assert "but the model's own output does (AUC 0.610 [" in most
    assert render(story).count("AUC of the model output") == 2


def test_of_several_models_those_without_a_promise_may_not_leave_and_each_other_has_its_own_decision() -> None:
    together, one = sample.story(), sample.story(trained=(sample.dpsgd(),))
    for told in (html.unescape(render(together)), card(together)):
        assert "all files of SGD: nothing is promised of them" in told
        assert "release DP-SGD" in told
        assert "release LM-DP-SGD" in told
        assert "release SGD" not in told
        assert "release none" in told
    for told in (html.unescape(render(one)), card(one)):
        assert "nothing is promised of them" not in told
        assert "release none" not in told
        assert "do not release" in told


def test_the_questions_of_the_page_are_those_of_the_documentation() -> None:
    page = Path("docs/reading-a-report.md").read_text()
    assert all(f"{number}. {question}" in page for number, question in enumerate(QUESTIONS, start=1))
    assert all(html.escape(question) in render(sample.story()) for question in QUESTIONS)


def test_weights_are_not_said_to_follow_a_risk_that_tells_no_layers_apart() -> None:
    assert "turned down where the layer is riskier" in render(sample.story())
    alike = replace(sample.risk(), layers=tuple(replace(one, interval=(0.4, 0.7)) for one in sample.risk().layers))
    assert alike.weighs_alike
    page = render(sample.story(risk=alike))
    assert "turned down where" not in page
    assert "does not tell layers apart, and turns none of them down" in page


def test_a_page_tells_its_command_from_the_settings_of_the_training_and_no_line_that_is_not_drawn() -> None:
    page = render(sample.story(command="lmdp audit runs/one"))
    assert "The command that wrote this page:" in page
    assert "The settings of the training are in config.toml" in page
    assert "grey line" not in page


def test_beside_the_assumption_that_all_is_counted_stands_what_a_run_cannot_know() -> None:
    assert OTHER_TRAININGS in guarantees((sample.dpsgd(),))
