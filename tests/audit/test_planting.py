"""Canaries: chosen, called and tossed by their own content, and a bound on epsilon that holds in the run itself."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.app import rules
from lmdp.audit import planting
from lmdp.audit.coins import bound_by_canaries, lower_losses
from lmdp.audit.planting import FEWEST_CANARIES, KINDS, Planted, chosen, plant_canaries, tossed, wrong_labels

CLASSES = 5


def data(count: int = 1200, width: int = 40, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    inputs = torch.randn(count, width, generator=generator)
    inputs[:, :CLASSES] += 2 * F.one_hot(labels, CLASSES)
    return TensorDataset(inputs, labels)


def rows(dataset: Any) -> Counter[tuple[bytes, int]]:
    return Counter((x.numpy().tobytes(), int(y)) for x, y in (dataset[i] for i in range(len(dataset))))


contents_of = [f"{i}".encode() for i in range(2000)]


@settings(max_examples=30, deadline=None)
@given(st.integers(300, 900), st.integers(0, 100), st.integers(0, 2**32))
def test_nobody_becomes_a_canary_or_gets_a_coin_because_of_others(number: int, gone: int, seed: int) -> None:
    """Others in their place, in another order: the chance is that of the same number of examples."""
    chaos, key = random.Random(seed), b"k" * 32
    left = chaos.sample(contents_of, len(contents_of) - gone)
    others = [*left, *(f"other {i}".encode() for i in range(gone))]
    before = {contents_of[i] for i in chosen(contents_of, [3] * 2000, number)[1]}
    after = {others[i] for i in chosen(others, [3] * len(others), number)[1]}
    assert before & set(left) == after & set(left)
    for of in (lambda c: wrong_labels(c, [3] * len(c), CLASSES), lambda c: tossed(c, key).tolist()):
        then, now = dict(zip(contents_of, of(contents_of))), dict(zip(left, of(left)))
        assert now.items() <= then.items()


def test_one_example_more_hardly_ever_changes_the_chance() -> None:
    chances = [planting._rough(500 / size) for size in range(1000, 20_000)]
    assert sum(a != b for a, b in itertools.pairwise(chances)) < 50
    assert max(abs(chance * size / 500 - 1) for size, chance in enumerate(chances, 1000)) < 1 / 15


def test_coins_are_fair_independent_of_each_other_and_secret() -> None:
    tosses = np.array([tossed(contents_of, planting.new_key(None)) for _ in range(60)], dtype=float)
    assert abs(tosses.mean() - 0.5) < 4 * 0.5 / np.sqrt(tosses.size)
    assert np.abs(tosses.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(60)
    between = np.corrcoef(tosses[:, :50].T)[np.triu_indices(50, 1)]
    assert abs(between.mean()) < 4 / np.sqrt(60 * len(between))
    assert (tossed(contents_of, planting.new_key(3)) == tossed(contents_of, planting.new_key(3))).all()
    assert (tossed(contents_of, planting.new_key(3)) != tossed(contents_of, planting.new_key(4))).mean() > 0.4


def test_every_wrong_label_is_wrong_and_all_of_them_occur_alike() -> None:
    labels = [i % CLASSES for i in range(2000)]
    wrong = wrong_labels(contents_of, labels, CLASSES)
    pairs = Counter(zip(labels, wrong, strict=True))
    assert set(pairs) == {(a, b) for a in range(CLASSES) for b in range(CLASSES) if a != b}
    assert all(abs(count - 100) < 5 * 10 for count in pairs.values())


OWN = TensorDataset(torch.randn(400, 40, generator=torch.Generator().manual_seed(9)), torch.arange(400) % CLASSES)


@pytest.mark.parametrize("kind", [*KINDS, OWN], ids=[*KINDS, "own"])
def test_those_that_are_in_are_in_the_training_and_those_that_are_out_are_not(kind: Any) -> None:
    whole = data()
    planted = plant_canaries(whole, 400, classes=CLASSES, kind=kind)
    canaries = planted.canaries
    trained, given_in = rows(planted.dataset), rows(TensorDataset(*canaries.inside))
    out = {content for content, _ in rows(TensorDataset(*canaries.outside))}
    assert trained == rows(planted.ordinary) + given_in
    assert not out & {content for content, _ in trained}
    assert 320 < len(canaries) < 480
    if kind == "mislabelled":
        true = dict(rows(whole).keys())
        assert all(true[content] != label for content, label in given_in)
        assert rows(planted.ordinary) <= rows(whole)
        assert len(planted.ordinary) + len(canaries) == len(whole)  # type: ignore[arg-type]
    else:
        assert rows(planted.ordinary) == rows(whole)


def test_copies_of_a_canary_are_left_out_so_that_coins_are_independent() -> None:
    keep, taken = chosen([*contents_of, *contents_of], [3] * 4000, 600)
    names = [contents_of[i % 2000] for i in taken]
    assert len(names) == len(set(names))
    assert not {contents_of[i % 2000] for i in keep} & set(names)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=40), st.integers(0, 10**6))
def test_whoever_leaves_changes_one_row_at_most_however_many_have_the_same_input(
    copies: list[tuple[int, int]], gone: int
) -> None:
    """The number of examples is public; here it is the same, so that the chance is."""
    people = [*copies, *((1000 + i, 0) for i in range(1200))]
    gone %= len(copies)
    neighbours = people, [*people[:gone], (5000, 0), *people[gone + 1 :]]

    def trained_on(data: list[tuple[int, int]]) -> Counter[tuple[bytes, int]]:
        contents, labels = [f"{content}".encode() for content, _ in data], [label for _, label in data]
        keep, taken = chosen(contents, labels, 400)
        wrong = wrong_labels([contents[i] for i in taken], [labels[i] for i in taken], CLASSES)
        rows = [(contents[i], labels[i]) for i in keep] + [(contents[i], w) for i, w in zip(taken, wrong)]
        return Counter(row for row in rows if row[0] != b"5000")

    before, after = map(trained_on, neighbours)
    assert (before - after).total() + (after - before).total() <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"number": 100}, "100 canaries for 1200 examples; there must be at least 300"),
        ({"number": 601, "kind": "mislabelled"}, r"at most half as many as examples \(600\)"),
        ({"classes": 1, "kind": "mislabelled"}, "at least 2"),
        ({"kind": "rare"}, "one of noise, mislabelled, or a dataset"),
        ({"kind": TensorDataset(*OWN[:50])}, "there would be 50 canaries"),
        ({"kind": TensorDataset(*(torch.cat([t[:300], t[:9]]) for t in OWN.tensors))}, "9 are copies of others"),
        ({"kind": TensorDataset(*data()[:400])}, "400 are among the data too"),
        ({"kind": OWN, "classes": 3}, "labels 0 to 4; with 3 classes, 0 to 2"),
    ],
)
def test_canaries_that_would_show_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plant_canaries(data(), **{"number": 400, "classes": CLASSES, **options})


def test_too_few_examples_for_any_canaries_are_told_how_many_it_takes() -> None:
    few = TensorDataset(*data()[:599])
    with pytest.raises(ValueError, match=r"300 canaries for 599 examples.* at least 600.*canaries = 0"):
        plant_canaries(few, number=300, classes=CLASSES)
    plant_canaries(TensorDataset(*data()[:600]), number=300, classes=CLASSES)


def test_the_command_line_asks_for_as_many() -> None:
    assert rules.FEWEST_CANARIES == FEWEST_CANARIES


def fitted(planted: Planted, noise: float | None, seed: int) -> tuple[nn.Module, lmdp.PrivacyStatement | None]:
    """A linear model, privately with this noise multiplier, or by heart."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(900, CLASSES))
    if noise is None:
        x, y = zip(*(planted.dataset[i] for i in range(len(planted.dataset))))  # type: ignore[arg-type]
        inputs, labels = torch.stack(x), torch.tensor([int(label) for label in y])
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)
        optimizer.step(lambda: _loss(model, optimizer, inputs, labels))
        return model, None
    engine = lmdp.PrivacyEngine()
    model, steps, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
        data_loader=DataLoader(planted.dataset, batch_size=100),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        method="dpsgd",
        seed=seed,
    )
    for _ in range(2):
        for a, b in loader:
            steps.zero_grad()
            F.cross_entropy(model(a), b).backward()
            steps.step()
    return model, engine.privacy_statement(1e-5)


def _loss(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_a_private_run_stays_below_its_claim_and_that_of_memory_does_not_stay_low(seed: int) -> None:
    planted = plant_canaries(data(800, 900, seed), 400, classes=CLASSES, seed=seed)
    model, statement = fitted(planted, 1.0, seed)
    assert statement is not None
    private = bound_by_canaries(model, planted.canaries, statement)
    assert private.claimed == statement.epsilon
    assert private.lower <= private.claimed
    assert not private.exceeded
    by_heart, _ = fitted(planted, None, seed)
    open_one = bound_by_canaries(by_heart, planted.canaries, statement)
    assert open_one.lower > 2, "nearly all coins are guessed"


def test_a_score_never_looks_at_the_coins_and_sees_nothing_in_a_model_that_saw_nobody() -> None:
    lows = []
    for seed in range(40):
        torch.manual_seed(seed)
        planted = plant_canaries(data(800, 40), 400, classes=CLASSES, seed=seed)
        canaries, model = planted.canaries, nn.Linear(40, CLASSES)
        turned = planting.Canaries(canaries.kind, canaries.inputs, canaries.labels, ~canaries.included)
        assert (lower_losses(model, canaries) == lower_losses(model, turned)).all()
        lows.append(bound_by_canaries(model, canaries, _statement()).lower)
    assert sum(low > 0 for low in lows) <= 6  # at most 5 % each: more than 6 of 40 have a chance of 1 in 300


def _statement() -> lmdp.PrivacyStatement:
    engine = lmdp.PrivacyEngine()
    model = nn.Linear(2, 2)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(50, 2), torch.zeros(50, dtype=torch.long)), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="dpsgd",
    )
    statement = engine.privacy_statement(1e-5)
    engine.detach()
    return statement


def test_an_audit_reports_canaries_beside_ordinary_examples() -> None:
    planted = plant_canaries(data(800, 900), 400, classes=CLASSES, seed=1)
    model, _ = fitted(planted, None, 1)
    members = TensorDataset(*(t[:200] for t in map(torch.stack, zip(*(planted.ordinary[i] for i in range(300))))))
    others = data(300, 900, seed=77)
    report = lmdp.audit(model, members, others, canaries=planted.canaries, statement=_statement(), views=False)
    assert report.canaries is not None
    assert report.canaries.peak.auc > 0.95
    assert [leak.name for leak in report.canaries.layers] == [leak.name for leak in report.layers]
    assert (report.canaries.inside, report.canaries.outside) == tuple(
        int(side.sum()) for side in (planted.canaries.included, ~planted.canaries.included)
    )
    assert report.canaries.bound is not None
    assert report.canaries.bound.exceeded, "a model by heart under a claim of little"
    with pytest.raises(ValueError, match="attacked through a model"):
        lmdp.audit(None, members, others, canaries=planted.canaries)
