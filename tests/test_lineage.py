"""Earlier trainings are recognised by the weights that they released, and what goes on from them costs all of it."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
from collections.abc import Callable, Mapping
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.accounting import Mechanism, epsilon_spent
from lmdp.data import load
from lmdp.lineage import (
    Lineage,
    Spending,
    blind,
    dataset_digest,
    earlier,
    epsilon_of,
    from_metadata,
    metadata,
    record,
    together,
)
from lmdp.lineage.index import _SEEN, LEAST_VALUES, SWITCH
from lmdp.lineage.noted import OFTEN

STEP = Mechanism("dpsgd", "none", 1.0, 1.0, 1.1, 0.02, 20.0)
DELTA = 1e-5
Read = Callable[[lmdp.WeightAverage], Mapping[str, Tensor]]


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SWITCH, str(tmp_path / "index"))
    return tmp_path / "index" / "released.jsonl"


def weights(seed: int = 0, size: int = 40) -> dict[str, Tensor]:
    return {"weight": torch.randn(size, generator=torch.Generator().manual_seed(seed))}


def spending(run: str = "a", steps: int = 100, **others: object) -> Spending:
    return Spending(run, 1.1, 0.02, steps, **others)  # type: ignore[arg-type]


def test_released_weights_are_recognised_under_any_name_and_in_any_type() -> None:
    record(weights(), [spending()])
    (tensor,) = weights().values()
    for told in (tensor, tensor.double(), tensor.bfloat16(), tensor.half(), tensor.view(4, 10), nn.Parameter(tensor)):
        assert earlier({"other": told, "fresh": torch.randn(50)}) == (spending(),)
    assert earlier(weights(seed=1)) == ()
    shortened = [tensor.to(one).to(other) for one, other in permutations((torch.half, torch.bfloat16))]
    assert all(earlier({"": each.float()}) == (spending(),) for each in shortened)
    faint = 1e-6 * tensor  # in half precision such numbers lose digits
    record({"": faint}, [spending()])
    assert earlier({"": faint.to(torch.bfloat16).to(torch.half).float()}) == (spending(),)
    assert earlier({"weight": tensor + 1e-6}) == ()


def test_a_table_is_recognised_when_it_is_transposed() -> None:
    table = weights()["weight"].view(4, 10)
    record({"linear": table}, [spending()])
    assert earlier({"conv1d": table.T.contiguous()}) == (spending(),)


@pytest.mark.parametrize("constant", [torch.zeros(64), torch.ones(64), torch.arange(LEAST_VALUES - 1.0).repeat(4)])
def test_what_may_be_a_fresh_tensor_is_nobodys_release(constant: Tensor) -> None:
    record({"bias": constant}, [spending()])
    assert earlier({"bias": constant}) == ()


@pytest.mark.parametrize("values", [1, 2, LEAST_VALUES - 1])
def test_few_values_are_recognised_unless_they_are_short_numbers(values: int) -> None:
    record(weights(size=values), [spending()])
    assert earlier(weights(size=values)) == (spending(),)
    assert earlier(weights(seed=1, size=values)) == ()


def test_a_training_counts_once_with_the_most_steps_and_with_every_doubt() -> None:
    record(weights(0), [spending(steps=10)])
    record(weights(1), [spending(steps=30)])
    record(weights(2), [spending(steps=20, certified=False)])
    both = weights(0) | {f"w{seed}": weights(seed)["weight"] for seed in (1, 2)}
    assert earlier(both) == (spending(steps=30, certified=False),)
    assert together([spending("a"), spending("b"), spending("a")]) == (spending("a"), spending("b"))


def test_what_goes_on_costs_the_composition_of_all() -> None:
    first = Lineage(weights(0))
    alone = first.epsilon(STEP, 100, DELTA)
    assert alone == STEP.epsilon(100, DELTA) == epsilon_spent(1.1, 0.02, steps=100, delta=DELTA)
    first.record(weights(1), first.spent(1.1, 0.02, 100))
    second = Lineage(weights(1))
    assert second.epsilon(STEP, 100, DELTA) == pytest.approx(STEP.epsilon(200, DELTA), rel=1e-9)
    assert alone < second.epsilon(STEP, 100, DELTA) < 2 * alone
    assert "epsilon is that of all of them together" in second.said[0]
    second.record(weights(2), second.spent(1.1, 0.02, 100))
    third = Lineage(weights(2) | {"other": weights(1)["weight"]})  # a grandchild that also has a part of the child
    assert third.epsilon(STEP, 100, DELTA) == pytest.approx(STEP.epsilon(300, DELTA), rel=1e-9)


def test_a_training_that_is_continued_is_not_its_own_ancestor() -> None:
    first = Lineage(weights(0), run="run")
    first.record(weights(1), first.spent(1.1, 0.02, 50))
    assert Lineage(weights(1), run="run").earlier == ()
    assert Lineage(weights(1), run="run", inherited=[spending("b")]).earlier == (spending("b"),)
    assert len(Lineage(weights(1)).earlier) == 1


def test_what_a_training_left_as_it_was_is_not_its_release() -> None:
    frozen = {"frozen": weights(5)["weight"]}
    first = Lineage(weights(0) | frozen)
    first.record(weights(1) | frozen, first.spent(1.1, 0.02, 50))
    assert Lineage(weights(7) | frozen).earlier == ()
    assert Lineage(weights(1)).earlier


def test_weights_trained_without_noise_cost_everything_unless_the_data_is_other() -> None:
    rows = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    here, part, there, short = (
        dataset_digest(TensorDataset(x)) for x in (rows[:200], rows[190:250], rows[200:], rows[200:, :3])
    )
    record(weights(0), [Spending("sgd", 0.0, 0.1, 5, dataset=here)])
    _SEEN.clear()  # as in another process
    for x in (rows[190:250], rows[200:], rows[200:, :3]):
        dataset_digest(TensorDataset(x))
    for name in (here, part, ""):  # the same, data with ten of its examples, and unknown
        lineage = Lineage(weights(0), dataset=name)
        assert lineage.epsilon(STEP, 10, DELTA) == math.inf
        assert "without any noise" in lineage.doubts[0]
    for name in (short, "of another machine"):
        lineage = Lineage(weights(0), dataset=name)
        assert lineage.epsilon(STEP, 10, DELTA) == STEP.epsilon(10, DELTA)
        assert "cannot be compared" in lineage.doubts[0]
    other = Lineage(weights(0), dataset=there)
    assert other.epsilon(STEP, 10, DELTA) == STEP.epsilon(10, DELTA)
    assert other.doubts == ()
    assert "without privacy" in other.said[0]
    other.record(weights(1), other.spent(1.1, 0.02, 10))  # what was public for these data is not for those
    assert Lineage(weights(1), dataset=here).epsilon(STEP, 10, DELTA) == math.inf


@pytest.mark.parametrize(("before", "now"), [("example", "user"), ("user", "example"), ("user", "user")])
def test_what_one_example_cost_is_not_what_one_user_cost(before: str, now: str) -> None:
    record(weights(), [spending(unit=before)])
    doubts = Lineage(weights(), unit=now).doubts
    assert bool(doubts) == (before != now)
    assert all(f"privacy of one {before}" in doubt and f"cost one {now} is not known" in doubt for doubt in doubts)


def test_an_uncertified_ancestor_is_a_doubt() -> None:
    record(weights(0), [spending(certified=False)])
    assert "not certified" in Lineage(weights(0)).doubts[0]


def test_users_after_examples_are_not_certified() -> None:
    data = TensorDataset(torch.randn(200, 20), torch.randint(2, (200,)))
    model = nn.Linear(20, 2)
    users = lmdp.PerUser(data, [row // 2 for row in range(200)], rows=2)
    certified = []
    for loader in (DataLoader(data, batch_size=50), users.loader(50)):
        model = copy.deepcopy(model)  # as another process would load it
        engine, optimizer = lmdp.PrivacyEngine("rdp"), torch.optim.SGD(model.parameters(), lr=0.1)
        _, private, drawn = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="dpsgd",
        )
        for _ in range(3):
            for x, y in drawn:
                private.zero_grad()
                F.cross_entropy(model(x), y).backward()
                private.step()
        statement = engine.privacy_statement(1e-3)
        certified.append("is not known" not in " ".join(statement.reasons))
        engine.detach()
    assert certified == [True, False]


def test_nothing_is_recorded_before_the_first_step(index: Path) -> None:
    record(weights(0), [spending(steps=0)])
    assert earlier(weights(0)) == ()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\n", b"[]\n", b'{"tensors": 3, "spent": []}\n', b"[" * 9999])
def test_damage_of_the_index_loses_nothing_else(index: Path, damage: bytes) -> None:
    record(weights(0), [spending()])
    index.write_bytes(damage + index.read_bytes() + damage)
    record(weights(1), [spending("b")])
    assert earlier(weights(1)) == (spending("b"),)
    if not damage or damage.endswith(b"\n"):
        assert earlier(weights(0)) == (spending(),)


def _records(folder: str, first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, folder)
        for seed in range(first, first + 20):
            record(weights(seed), [spending(str(seed))])


def test_several_processes_may_write_at_once(index: Path) -> None:
    context = get_context("fork")
    workers = [context.Process(target=_records, args=(str(index.parent), 20 * number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(index.read_text().splitlines()) == 60
    assert all(earlier(weights(seed)) == (spending(str(seed)),) for seed in range(60))


def test_switched_off_or_out_of_reach_it_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blind() == ""
    monkeypatch.setenv(SWITCH, "0")
    record(weights(0), [spending()])
    assert "switched off" in blind()
    assert Lineage(weights(0)).doubts == (blind(),)
    assert dataset_digest(TensorDataset(torch.ones(3))) == ""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(SWITCH, str(tmp_path / "file" / "under"))
    assert "cannot be used" in blind()
    assert earlier(weights(0)) == ()
    with pytest.warns(UserWarning, match="could not be written"):
        record(weights(0), [spending()])


def test_data_is_known_by_its_content_under_a_key_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(9, 3), torch.arange(9)
    one = dataset_digest(TensorDataset(x, y))
    assert one == dataset_digest(TensorDataset(x.flip(0), y.flip(0)))
    assert one != dataset_digest(TensorDataset(x[1:], y[1:]))
    assert dataset_digest([1, 2, 3]) == ""
    assert dataset_digest(load("digits?limit=9").train)
    assert (tmp_path / "index" / "key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv(SWITCH, str(tmp_path / "elsewhere"))
    assert one != dataset_digest(TensorDataset(x, y))


def test_what_was_spent_survives_the_header_of_a_file() -> None:
    spent = (spending("a"), spending("b", dataset="d", certified=False))
    assert from_metadata(metadata(spent), "here") == spent
    assert from_metadata({}, "here") == ()
    for wrong in ("{", "3", '[{"run": "a"}]', json.dumps([{**vars(spending()), "sample_rate": 2}])):
        with pytest.raises(ValueError, match="here"):
            from_metadata({"lmdp.spent": wrong}, "here")


def test_trainings_without_steps_cost_nothing() -> None:
    assert epsilon_of([spending(steps=0)], delta=DELTA) == epsilon_of([], delta=DELTA) == 0


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(
    model: nn.Module, passes: int = 3, average: lmdp.WeightAverage | None = None, state: dict[str, Any] | None = None
) -> lmdp.PrivacyEngine:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(32) % 3), batch_size=8)
    engine = lmdp.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, method="dpsgd"
    )
    if state is not None:
        engine.load_state_dict(state)
    return go_on(engine, passes, average)


def go_on(engine: lmdp.PrivacyEngine, passes: int = 3, average: lmdp.WeightAverage | None = None) -> lmdp.PrivacyEngine:
    model, optimizer, loader = engine._attached.capture.model, engine._attached.optimizer.optimizer, engine._loader
    for _ in range(passes):
        for batch, label in loader or ():
            optimizer.zero_grad()
            F.cross_entropy(model(batch), label).backward()
            optimizer.step()
            if average is not None:
                average.update()
    return engine


def test_weights_of_an_engine_that_was_forgotten_without_a_statement_are_known() -> None:
    first = perceptron()
    steps = [trained(first).steps]
    gc.collect()
    begun = perceptron()
    begun.load_state_dict(first.state_dict())
    again = trained(begun)
    steps.append(again.steps)
    mechanism = again.mechanism
    alone = [mechanism.epsilon(many, DELTA) for many in (*steps, sum(steps))]
    assert again.get_epsilon(DELTA, quiet=True) == pytest.approx(alone[2])
    assert alone[2] > max(alone[:2])
    assert not again.privacy_statement(DELTA).certified  # nobody knows whether the first one was


READ_IN_THE_MIDDLE: dict[str, Callable[[nn.Module], Mapping[str, Tensor]]] = {
    "by state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "in part": lambda model: {f"0.{name}": t.clone() for name, t in model.get_submodule("0").state_dict().items()},
    "as a copy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "pickled": lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
}


@pytest.mark.parametrize("ends", ["with a statement", "without one"])
@pytest.mark.parametrize("how", READ_IN_THE_MIDDLE)
def test_who_begins_with_weights_that_were_read_in_the_middle_of_a_training_begins_after_what_they_cost(
    how: str, ends: str
) -> None:
    model, seen = perceptron(), []
    first = [trained(model, passes=0)]

    def read(*_: Any) -> None:
        if first[0].steps == 3:
            seen.append(READ_IN_THE_MIDDLE[how](model))

    first[0]._attached.optimizer.optimizer.register_step_post_hook(read)
    go_on(first[0])
    if ends == "with a statement":
        assert first[0].privacy_statement(DELTA).certified
    first.clear()
    gc.collect()
    begun = perceptron()
    begun.load_state_dict(seen[0], strict=False)
    again = trained(begun)
    statement = again.privacy_statement(DELTA)
    assert statement.epsilon == pytest.approx(again.mechanism.epsilon(3 + again.steps, DELTA))
    assert statement.certified == (ends == "with a statement")


def test_a_copy_made_in_the_middle_of_a_training_can_be_read_without_the_library() -> None:
    engine = trained(perceptron(), passes=1)
    assert b"lmdp" not in pickle.dumps(engine._attached.capture.model)
    copied = copy.deepcopy(engine._attached.capture.model)
    assert [*copied.state_dict()] == [*perceptron().state_dict()]
    engine.detach()
    assert not any(module._state_dict_pre_hooks for module in engine._attached.capture.model.modules())


def test_weights_that_are_read_after_every_step_stay_known(index: Path) -> None:
    model, seen = perceptron(), []
    engine = trained(model, passes=0)
    engine._attached.optimizer.optimizer.register_step_post_hook(
        lambda *_: seen.append(copy.deepcopy(model.state_dict()))
    )
    go_on(engine, passes=OFTEN // 3)
    assert engine.steps > OFTEN + 1
    for at in (0, OFTEN - 1, OFTEN, len(seen) - 1):
        assert [one.steps for one in earlier(seen[at])] == [at + 1]


@pytest.mark.parametrize("read", [lambda average: average.weights, lambda average: average.state_dict()])
@pytest.mark.parametrize("ends", ["with a statement", "without one", "before it is read"])
def test_who_begins_with_an_average_begins_after_what_the_averaged_weights_cost(read: Read, ends: str) -> None:
    first = perceptron()
    average = lmdp.WeightAverage(first, decay=0.9)
    engine: lmdp.PrivacyEngine | None = trained(first, average=average)
    assert engine is not None
    steps = engine.steps
    if ends == "before it is read":
        engine = None
        gc.collect()
    weights = {name.removeprefix("weights/"): tensor for name, tensor in read(average).items()}
    if ends == "with a statement" and engine is not None:
        engine.privacy_statement(DELTA)
    begun = perceptron()
    begun.load_state_dict(weights, strict=False)
    again = trained(begun)
    assert again.get_epsilon(DELTA, quiet=True) == pytest.approx(again.mechanism.epsilon(steps + again.steps, DELTA))
    assert again.privacy_statement(DELTA).certified == (ends != "before it is read")


def test_steps_that_were_noted_after_the_state_of_a_resumed_run_are_counted() -> None:
    model = perceptron()
    first = trained(model, passes=1)
    state, weights = first.state_dict(), copy.deepcopy(model.state_dict())
    at = first.steps
    for _ in range(2):  # each goes on from the same state, and releases something else
        model = perceptron()
        model.load_state_dict(weights)
        again = trained(model, passes=2, state=state)
        again.privacy_statement(DELTA)
    last = perceptron()
    last.load_state_dict(weights)
    engine = trained(last, passes=1, state=state)
    statement = engine.privacy_statement(DELTA)
    lost = 2 * (again.steps - at)
    assert statement.epsilon == pytest.approx(engine.mechanism.epsilon(engine.steps + lost, DELTA))
    assert any(f"{lost} steps of this run were noted after" in verdict.how for verdict in statement.verdicts.values())


def test_a_resumed_run_keeps_what_it_had_behind_it_whatever_is_loaded_first() -> None:
    before = trained(perceptron())
    before.privacy_statement(DELTA)
    tuned = perceptron()
    tuned.load_state_dict(before._attached.capture.model.state_dict())
    engine = trained(tuned)
    spent, state = engine.get_epsilon(DELTA, quiet=True), engine.state_dict()
    again = trained(perceptron(), passes=0)
    again.load_state_dict(state)
    assert again.get_epsilon(DELTA, quiet=True) == pytest.approx(spent)
    assert spent > engine.mechanism.epsilon(engine.steps, DELTA)


def test_an_index_of_thousands_of_lines_is_searched_in_no_time(index: Path) -> None:
    """Only lines that name the weights are read."""
    record(weights(), [spending()])
    line = index.read_text()
    index.write_text("".join(line.replace(line[14:46], f"{i:032x}") for i in range(5000)) + line)
    assert earlier(weights()) == (spending(),)
