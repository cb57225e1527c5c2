"""The table of methods: one record is all that a new method needs, and no test can be kept from seeing it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lmdp
from lmdp.accounting import Mechanism
from lmdp.methods import METHODS, SOURCES, Method, clipped_norm, over
from lmdp.private import weights
from lmdp.private.weights import source_for
from tests.audit.trainings import examples, outliers, training
from tests.private.probe import private_probe, step
from tests.tables import certified, choices, refuted, with_default_source


def halved(n: Tensor, C: float) -> Tensor:
    """Made up: every layer normalised to half its share of the clip norm."""
    return over(clipped_norm(n, C).expand_as(n), n) / (2 * math.sqrt(n.shape[1]))


HALVED = Method("halved", "Halved", halved, lambda layers: 0.5)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Method:
    monkeypatch.setitem(METHODS, HALVED.name, HALVED)
    return HALVED


def test_a_method_is_added_by_one_record_and_is_then_trained_stated_and_tested(made_up: Method) -> None:
    assert ("halved", "private") in choices()
    assert ("halved", "private") in certified()
    assert "halved" in with_default_source()
    batch = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    engine, model, optimizer = private_probe(batch, method="halved", max_grad_norm=0.7)
    expected = (halved(batch.norm(dim=2), 0.7)[..., None] * batch).sum(0)
    torch.testing.assert_close(step(model, optimizer, batch), expected)
    statement = engine.privacy_statement(1e-5)
    assert (statement.method, statement.sensitivity, statement.weight_source) == ("halved", 0.35, "none")


def test_the_neighbour_check_passes_a_made_up_method_and_fails_one_that_understates_its_sensitivity(
    made_up: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> lmdp.audit.NeighbourReport:
        return lmdp.audit.check_neighbours(training(method="halved"), examples(), outliers()["huge"])

    assert check().passed
    monkeypatch.setitem(METHODS, HALVED.name, replace(HALVED, sensitivity=lambda layers: 0.4))
    assert "gradient" in check().failures


def test_an_unknown_method_is_refused_with_all_that_there_are(made_up: Method) -> None:
    with pytest.raises(ValueError, match=r"dpsgd, .*halved"):
        private_probe(torch.zeros(1, 2, 3), method="nothing")


def test_every_source_of_the_table_is_at_work_under_its_own_name() -> None:
    """With the certification that the table says: only `batch` may look at the private batch."""
    for method, source in choices():
        at_work = source_for(source, METHODS[method], [0.3, 0.4], 1.0, lambda: lambda _: 1 / 0, 1, 0.1)  # type: ignore[arg-type, return-value]
        assert at_work.name == (source if METHODS[method].reweighted else "none")
        assert at_work.reads_batch == (bool(SOURCES[source].refuted) and METHODS[method].reweighted)
        assert math.isclose(float(at_work.current().norm()), 1.0) or not METHODS[method].reweighted


@pytest.mark.parametrize(("method", "source"), refuted())
def test_a_source_that_the_table_refutes_is_never_certified(method: str, source: str) -> None:
    engine, *_ = private_probe(torch.ones(2, 2, 3), method=method, weights=source, seed=None, noise_multiplier=1.0)
    assert SOURCES[source].refuted in engine.privacy_statement(1e-5).reasons


@pytest.mark.parametrize(("method", "source"), choices())
def test_an_empty_batch_releases_noise_under_every_method_and_source(method: str, source: str) -> None:
    """Also where weights are computed of the batch: nothing is known of an empty one, so all layers count alike."""
    public = (torch.ones(3, 4, 5, dtype=torch.float64), torch.zeros(3)) if source == "public" else None
    empty = torch.zeros(0, 4, 5, dtype=torch.float64)
    engine, model, optimizer = private_probe(
        empty, method=method, weights=source, public_data=public, noise_multiplier=1.0, diagnostics=True
    )
    assert (step(model, optimizer, empty) != 0).all()
    assert engine.steps == 1


def test_the_mechanism_is_what_statement_identity_and_neighbour_check_print() -> None:
    engine, *_ = private_probe(
        torch.ones(2, 2, 3), method="lm", noise_multiplier=1.3, max_grad_norm=0.5, weight_budget=0.2
    )
    mechanism, statement = engine.mechanism, engine.privacy_statement(1e-5)
    assert isinstance(mechanism, Mechanism)
    printed = [name for name in vars(mechanism) if hasattr(statement, name)]
    assert set(vars(mechanism)) - set(printed) == {"statistic_share"}
    assert all(getattr(statement, name) == getattr(mechanism, name) for name in printed)
    identity = engine.state_dict()["identity"]
    assert {k: v for k, v in identity.items() if k not in ("layers", "dataset_size")} == {
        name: getattr(mechanism, name) for name in identity if name not in ("layers", "dataset_size")
    }
    together = mechanism.gradient_std**-2 * mechanism.sensitivity**2 + mechanism.statistic_std**-2
    assert together == pytest.approx(1.3**-2)


def test_the_event_of_a_mechanism_composes_with_others_to_what_the_ledger_says() -> None:
    from dp_accounting.rdp import RdpAccountant

    engine, *_ = private_probe(torch.ones(2, 2, 3), method="dpsgd", noise_multiplier=2.0)
    mechanism = dataclasses.replace(engine.mechanism, accountant="rdp")
    together, apart = RdpAccountant(), RdpAccountant()
    together.compose(mechanism.event(7))
    apart.compose(mechanism.event(3)).compose(mechanism.event(4))
    assert together.get_epsilon(1e-5) == pytest.approx(mechanism.epsilon(7, 1e-5))
    assert apart.get_epsilon(1e-5) == pytest.approx(together.get_epsilon(1e-5))


def test_docs_tell_of_every_method_and_source() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    for told in (lmdp.PrivacyEngine.make_private.__doc__ or "", page):
        assert [name for name, method in METHODS.items() if method.private and name not in told] == []
        assert [name for name in SOURCES if name not in told] == []


def test_the_classes_of_the_sources_are_those_of_the_table() -> None:
    kinds = [kind for kind in vars(weights).values() if isinstance(kind, type) and issubclass(kind, weights.Fixed)]
    assert {kind.name for kind in kinds} - {"none"} == set(SOURCES)


def test_observers_are_asked_and_make_a_run_uncertified() -> None:
    class Mute(lmdp.private.Observer):
        asked = 0

        def after_release(self) -> None:
            Mute.asked += 1

    engine = lmdp.PrivacyEngine()
    engine.observer = Mute()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="dpsgd",
        looks_besides=True,
    )
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
    assert Mute.asked == engine.steps == 2
    assert "an observer may have replaced what was drawn or released" in engine.privacy_statement(1e-5).reasons


def test_the_observer_that_does_nothing_cannot_be_made_to_do_something() -> None:
    """Else a run could be watched, or its noise replaced, without a word in the statement."""
    engine, *_ = private_probe(torch.ones(2, 2, 3), method="dpsgd")
    for name in ("randomness", "statistic", "before_release", "after_release"):
        with pytest.raises(AttributeError):
            setattr(engine.observer, name, lambda *_: None)
    with pytest.raises(RuntimeError, match="already made a training private"):
        engine.observer = lmdp.private.Observer()


def test_an_observer_cannot_cover_its_tracks() -> None:
    class Sly(lmdp.private.Observer):
        def randomness(self, randomness: Any) -> Any:
            engine.observer = lmdp.private.Observer()
            return randomness

    engine = lmdp.PrivacyEngine()
    engine.observer = Sly()
    model = nn.Linear(2, 1)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert not engine.privacy_statement(1e-5).certified


def test_weights_that_read_the_batch_are_not_certified_whatever_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "batch", replace(SOURCES["batch"], refuted=""))
    engine, *_ = private_probe(torch.ones(2, 2, 3), method="lm", weights="batch", seed=None, noise_multiplier=1.0)
    assert "the layer weights read the private batch" in engine.privacy_statement(1e-5).reasons


@pytest.mark.parametrize(
    "options",
    [{"weight_budget": 5}, {"weights": "public", "public_data": "x"}, {"weights": "public", "public_every": 0}],
    ids=str,
)
def test_settings_of_weights_are_checked_even_where_a_method_has_none(options: dict[str, Any]) -> None:
    public = {"public_data": (torch.ones(2, 2, 3), torch.zeros(2))}
    with pytest.raises((ValueError, TypeError)):
        private_probe(torch.ones(2, 2, 3), method="dpsgd", **(public | options))
