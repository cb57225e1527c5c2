"""What goes wrong on one process is known to all, at once and in words; nothing is released that was not charged."""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import lmdp
from lmdp import PerUser, Views
from lmdp.processes import Group
from tests.processes.crew import Crew, Failed
from tests.processes.train import BATCH, DELTA, EXAMPLES, Trained, data, model, settings, train, work

QUICK: dict[str, Any] = {"check_mixing": False}


def rank() -> int:
    return Group().rank


def failures(crew: Crew, work: Any, *args: Any) -> list[str]:
    """What every process has raised."""
    crew.begin(work, *args)
    answers = crew.answers()
    assert all(isinstance(answer, Failed) for answer in answers), answers
    return [answer.message for answer in answers]


class Placed(Dataset[Any]):
    """Items tell their place, as a number or as a tensor."""

    def __init__(self, at: Sequence[int]) -> None:
        self.at = at

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, i: int) -> Any:
        x, y = data()[self.at[i]]
        return x, y, i, torch.tensor(i)


class Shapes(Dataset[Any]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(9), 0


class Augmented(Dataset[Any]):
    """By a generator of its own: nobody can read an example twice."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> Any:
        x, y = data()[i]
        return x + 0.01 * torch.randn(8, generator=self.generator), y


def unchanged(rows: Tensor, uniforms: Tensor) -> Tensor:
    return rows


def jittered(rows: Tensor, uniforms: Tensor) -> Tensor:
    return rows + 0.01 * uniforms[:, :1]


def large() -> TensorDataset:
    return data(size=600)


def other_data(kind: str) -> Trained:
    mine = {
        "order": Subset(data(), torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(rank())).tolist()),
        "two rows": Subset(large(), [*range(500), 500 + rank(), 501 - rank(), *range(502, 600)]),
        "two rows in memory": TensorDataset(*(t[[*range(500), 500 + rank(), 501 - rank()]] for t in large().tensors)),
        "two rows behind views": Views(Subset(data(), [rank(), 1 - rank()]), 2, unchanged),
        "two users": PerUser(data(), [(i + rank() * (i == 50)) % 9 for i in range(EXAMPLES)], rows=2),
        "size": data(size=EXAMPLES - rank()),
        "shape": [data(), Shapes()][rank()],
        "augmented": Augmented(),
    }
    return train(steps=2, dataset=mine[kind])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("order", "in the same order"),
        ("two rows", "of 600 examples 2 differ, the first at index 500"),
        ("two rows in memory", "of 502 examples 2 differ"),
        ("two rows behind views", "of 2 examples 2 differ"),
        ("two users", "of 9 examples 2 differ"),
        ("size", "examples: 90, 89"),
        ("shape", "have different data"),
    ],
)
def test_processes_with_other_data_are_refused(pair: Crew, kind: str, told: str) -> None:
    assert all(told in message for message in failures(pair, other_data, kind))


def test_data_that_nobody_can_compare_is_not_certified(pair: Crew) -> None:
    for one in pair(other_data, "augmented"):
        assert one.statement["verdicts"]["sampling"]["state"] == "not established"
        assert "read differently each time" in one.statement["verdicts"]["sampling"]["how"]


def same_parts(kind: str) -> Trained:
    every = list(range(EXAMPLES))
    half, turned = every[rank() :: 2], every[:: 1 - 2 * rank()]
    some = every[: EXAMPLES // 2 + 1] if rank() else every[EXAMPLES // 2 :]
    mine: dict[str, Dataset[Any]] = {
        "same": Subset(data(), every),
        "placed": Placed(turned),
        "views": Views(Subset(data(), turned), 2, jittered),
        "some views": Subset(Views(data(), 2, jittered), turned),
        "users": PerUser(Subset(data(), half), [i // 6 for i in half], rows=2),
        "some users": Subset(PerUser(data(), [str(i // 6) for i in every], rows=2), range(10)),
        "users under other names": PerUser(data(), [f"{rank()} {i // 6}" for i in every], rows=2),
        "some": Subset(data(), some),
        "augmented": Augmented(),
    }
    return train(steps=2, dataset=mine[kind], collate_fn=getattr(mine[kind], "collate", None), sharded=True)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("same", "the processes have the same examples"),
        ("placed", "the processes have the same examples"),
        ("views", "the processes have the same examples"),
        ("some views", "the processes have the same examples"),
        ("users", "15 of 15 users are in the parts of several"),
        ("some users", "10 of 10 users are in the parts of several"),
        ("users under other names", "the processes have the same examples"),
    ],
)
def test_parts_that_are_the_same_data_are_refused(pair: Crew, kind: str, told: str) -> None:
    assert all(told in message for message in failures(pair, same_parts, kind))


@pytest.mark.parametrize(("kind", "told"), [("some", "leave sharded out"), ("augmented", "read differently each time")])
def test_parts_that_may_have_an_example_in_common_are_not_certified(pair: Crew, kind: str, told: str) -> None:
    for one in pair(same_parts, kind):
        assert one.statement["verdicts"]["sampling"]["state"] == "not established"
        assert told in one.statement["verdicts"]["sampling"]["how"]


def parted(kind: str) -> Trained:
    """The remedy for rows of users, and views of parts."""
    at = [i for i in range(EXAMPLES) if zlib.crc32(str(i // 6).encode()) % 2 == rank()]
    users = PerUser(Subset(data(), at), [i // 6 for i in at], rows=2)
    mine = users if kind == "users" else Views(Subset(data(), range(rank(), EXAMPLES, 2)), 2, jittered)
    return train(steps=1, dataset=mine, collate_fn=mine.collate, sharded=True)


@pytest.mark.parametrize(("kind", "size"), [("users", 15), ("views", EXAMPLES)])
def test_parts_with_all_rows_of_their_users_and_views_of_parts_are_in_no_doubt(
    pair: Crew, kind: str, size: int
) -> None:
    for one in pair(parted, kind):
        assert one.statement["dataset_size"] == size
        assert "in the parts of several" not in one.statement["verdicts"]["sampling"]["how"]
        assert "nobody could compare" not in one.statement["verdicts"]["sampling"]["how"]


def impatient() -> Trained:
    with patch("lmdp.processes.comparison.PATIENCE", 0.0):
        return train(steps=1, dataset=Subset(data(), range(EXAMPLES)))


def test_examples_that_there_was_no_time_to_read_are_in_doubt(pair: Crew) -> None:
    for one in pair(impatient):
        assert one.statement["verdicts"]["sampling"]["state"] == "not established"
        assert "not all were compared" in one.statement["verdicts"]["sampling"]["how"]


def wrapped(how: str) -> Trained:
    net = model()
    engine = lmdp.PrivacyEngine(accountant="rdp")
    ddp = DistributedDataParallel(net) if how != "after" else net
    given = ddp if how == "before" else net
    optimizer = torch.optim.SGD(given.parameters(), lr=0.2, momentum=0.5)
    loader = DataLoader(data(), batch_size=BATCH)
    options = settings("lm", "private", torch.float32)
    _, _, loader = engine.make_private(module=given, optimizer=optimizer, data_loader=loader, **options)
    run = DistributedDataParallel(net) if how == "after" else net
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()
        if engine.steps == 3:
            break
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return Trained(weights, engine.privacy_statement(DELTA).to_dict(), 0, engine.steps, {})


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_wrapped_model_is_refused_with_the_remedy(pair: Crew, how: str) -> None:
    assert all("Pass the model itself" in message for message in failures(pair, wrapped, how))


def test_the_remedy_for_a_wrapped_model_trains(pair: Crew) -> None:
    for one in pair(wrapped, "remedy"):
        assert torch.equal(one.flat, train(steps=3).flat) or torch.allclose(one.flat, train(steps=3).flat, rtol=1e-5)


def alone_in_a_group() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    train(steps=2, group=groups[rank()])


def test_a_process_that_trains_alone_beside_others_is_refused(pair: Crew) -> None:
    assert all("Leave group out" in message for message in failures(pair, alone_in_a_group))


def in_a_part_of_the_world() -> Trained | None:
    group = dist.new_group([0, 2])
    return train(steps=2, group=group) if dist.get_rank() != 1 else None


def test_a_group_that_leaves_out_others_trains_and_is_not_certified(trio: Crew) -> None:
    first, _, last = trio(in_a_part_of_the_world)
    assert torch.equal(first.flat, last.flat)
    assert first.statement["processes"] == 2
    assert "2 of the 3 processes" in first.statement["verdicts"]["process"]["how"]


def secure() -> None:
    engine = lmdp.PrivacyEngine(secure_mode=True)
    net = model()
    engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def test_a_key_that_must_not_be_copied_is_refused(pair: Crew) -> None:
    assert all("Leave secure_mode out" in message for message in failures(pair, secure))


class Training:
    """A training whose steps are made one by one."""

    def __init__(self, **more: Any) -> None:
        self.net = model()
        self.net.register_buffer("kept", torch.zeros(1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.engine = lmdp.PrivacyEngine(accountant="rdp")
        loader = DataLoader(data(), batch_size=BATCH)
        options = settings("lm", "private", torch.float32, **({"seed": None} | more))
        _, _, self.loader = self.engine.make_private(
            module=self.net, optimizer=self.optimizer, data_loader=loader, **options
        )
        self._batches = iter(self.loader)

    def step(self, *, mangle: bool = False) -> None:
        x, y = next(self._batches)
        self.optimizer.zero_grad()
        x, y = (x[:1], y[:1]) if mangle else (x, y)
        F.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()

    def verdicts(self) -> dict[str, Any]:
        return {key: (v.state, v.how) for key, v in self.engine.privacy_statement(DELTA).verdicts.items()}


def one_raises() -> None:
    training = Training(**QUICK)
    training.step()
    training.step(mangle=rank() == 1)


def test_an_error_in_one_process_is_raised_by_all(pair: Crew) -> None:
    first, second = failures(pair, one_raises)
    assert "another number of examples than the data loader handed out" in second
    assert first.startswith("process 1 of 2 failed: RuntimeError: the model was run on another number")


def statement_after_an_error() -> dict[str, Any]:
    training = Training(**QUICK)
    training.step()
    with pytest.raises(RuntimeError):
        training.step(mangle=rank() == 1)
    assert training.engine.steps == 1
    return training.verdicts()


def test_after_an_error_all_state_the_same_and_none_is_certified(pair: Crew) -> None:
    first, second = pair(statement_after_an_error)
    assert first == second
    assert first["sampling"][0] == first["process"][0] == "violated"


def buffer_changes_on_one() -> dict[str, Any]:
    training = Training()
    training.step()
    if rank() == 1:
        training.net.get_buffer("kept").fill_(1.0)
    training.step()
    return training.verdicts()


def test_what_is_violated_on_one_process_is_violated_for_all(pair: Crew) -> None:
    for verdicts in pair(buffer_changes_on_one):
        state, how = verdicts["content"]
        assert state == "violated"
        assert how.startswith("process 1: ['kept'] changed during training")


def other_rate() -> None:
    training = Training(**QUICK)
    training.step()
    training.optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * rank()
    training.step()
    training.step()


def test_parameters_that_drift_apart_stop_all(pair: Crew) -> None:
    assert all("before step 3 the parameters are not the same" in message for message in failures(pair, other_rate))


def drifts_in_the_last_step() -> dict[str, Any]:
    training = Training(**QUICK)
    training.optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * rank()
    training.step()
    return training.verdicts()


def test_parameters_that_drift_apart_in_the_last_step_are_seen_by_the_statement(pair: Crew) -> None:
    assert all(verdicts["process"][0] == "violated" for verdicts in pair(drifts_in_the_last_step))


def skips_on_one() -> None:
    training = Training(**QUICK)
    training.step()
    if rank() == 1:
        next(training._batches)
    training.step()


def test_a_batch_that_one_process_leaves_out_stops_all(pair: Crew) -> None:
    for message in failures(pair, skips_on_one):
        assert "process 0: step 2, draw 1, process 1: step 2, draw 2" in message


def statement_on_one() -> None:
    training = Training(**QUICK)
    training.step()
    if rank() == 0:
        training.engine.privacy_statement(DELTA)
    else:
        training.step()


def test_a_statement_that_only_one_process_asks_for_is_refused(pair: Crew) -> None:
    for message in failures(pair, statement_on_one):
        assert "call privacy_statement, state_dict and make_private on every process" in message


def other_weights_to_begin_with() -> Any:
    net = model()
    if rank() == 1:
        torch.manual_seed(99)
        for p in net.parameters():
            nn.init.normal_(p)
    return train(steps=2, net=net, **QUICK)


def test_all_begin_with_the_weights_of_the_first(pair: Crew) -> None:
    for one in pair(other_weights_to_begin_with):
        assert torch.allclose(one.flat, train(steps=2, **QUICK).flat, rtol=1e-5)


def meets_on_one() -> None:
    """A loss that compares the examples of its batch, on one process only."""
    training = Training()
    for x, y in training.loader:
        training.optimizer.zero_grad()
        logits = training.net(x)
        loss = F.cross_entropy(logits, y)
        if rank() == 1:
            loss = F.cross_entropy(logits - logits.mean(0), y)
        with training.engine._attached.population.group.reaching_all():  # what a process does that ends by an error
            loss.backward()
        training.optimizer.step()


def test_examples_that_meet_on_one_process_stop_all(pair: Crew) -> None:
    first, second = failures(pair, meets_on_one)
    assert "the loss lets the examples of a batch meet" in first
    assert "the loss lets the examples of a batch meet" in second


# -- processes that are gone, and runs that go on ----------------------------------------------------------------------


def until_killed(folder: str) -> str:
    """Says after every step how many were charged, before the next one is made."""
    training = Training(**QUICK, looks_besides=True)
    charged = Path(folder) / f"charged-{rank()}"
    try:
        while True:
            training._batches = iter(training.loader)
            for _ in range(len(training.loader)):
                training.step()
                charged.write_text(str(training.engine.steps))
    except RuntimeError as error:
        assert training.engine.steps >= int(charged.read_text() if charged.exists() else "0")
        statement = training.engine.privacy_statement(DELTA)
        assert not statement.certified
        assert statement.verdicts["process"] in ("violated", "not established")
        return f"{type(error).__name__}: {error}"


class Slow(Dataset[Any]):
    """Takes half a second to be compared between the processes."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.5 / EXAMPLES)
        return data()[i]


def until_killed_in_make_private(folder: str) -> str:
    (Path(folder) / f"charged-{rank()}").write_text("0")
    try:
        while True:
            train(steps=1, dataset=Slow(), **QUICK)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def killed(
    folder: Path, after: float, size: int = 2, *, which: int = -1, at: Any = until_killed
) -> tuple[list[Any], float]:
    """The answers of a crew of which one process, the last unless told, is killed so many seconds after its first step,
    and how long the others took to answer."""
    crew, which = Crew(size, folder, seconds=60), range(size)[which]
    try:
        crew.begin(at, str(folder))
        while not all((folder / f"charged-{each}").exists() for each in range(size)):
            time.sleep(0.01)
        time.sleep(after)
        crew.kill(which)
        begin = time.monotonic()
        answers = crew.answers(30)
        assert answers.pop(which) is None
        return answers, time.monotonic() - begin
    finally:
        crew.close()


@pytest.mark.parametrize("at", [until_killed, until_killed_in_make_private])
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_when_a_process_is_killed_the_others_end_in_seconds_with_one_line(tmp_path: Path, which: int, at: Any) -> None:
    train(steps=1)
    others, seconds = killed(tmp_path, 0.1, size=3, which=which, at=at)
    assert seconds < 10
    assert len(others) == 2
    for told in others:
        assert told.startswith("Parted: another process of this training is gone")
        assert "\n" not in told


@pytest.mark.slow
@pytest.mark.parametrize("at", [until_killed, until_killed_in_make_private])
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_random_moments_nobody_hangs(tmp_path: Path, moment: int, at: Any) -> None:
    train(steps=1)
    (other,), seconds = killed(tmp_path, random.Random(moment).random() * 0.5, which=moment % 2, at=at)
    assert seconds < 10
    assert other.startswith("Parted: ")


def half(steps: int, state: dict[str, Any] | None, options: dict[str, Any]) -> Trained:
    return train(steps=steps, state=state, **options)


@pytest.mark.parametrize("source", ["private", "public"])
def test_a_run_goes_on_with_another_number_of_processes(pair: Crew, trio: Crew, source: str) -> None:
    options = {"source": source, **QUICK}
    uninterrupted = train(steps=12, **options)
    first, second = pair(half, 6, None, options)
    assert first.state["engine"]["steps"] == second.state["engine"]["steps"] == 6
    for one in trio(half, 12, first.state, options):
        assert torch.allclose(one.flat, uninterrupted.flat, rtol=1e-5, atol=1e-7)
        assert one.statement["steps"] == 12
    back = train(steps=12, state=second.state, **options)
    assert torch.allclose(back.flat, uninterrupted.flat, rtol=1e-5, atol=1e-7)
    assert back.statement["epsilon"] == uninterrupted.statement["epsilon"]


def doubtful_state() -> dict[str, Any]:
    training = Training()
    training.step()
    if rank() == 1:
        training.net.get_buffer("kept").fill_(1.0)
    training.step()
    state: dict[str, Any] = training.engine.state_dict()
    return state


def test_what_one_process_has_seen_stays_with_the_saved_run(pair: Crew) -> None:
    state, other = pair(doubtful_state)
    assert state == other
    assert any("'kept'" in why for why in state["said"]["violated"]["content"])


def test_sharded_data_needs_several_processes() -> None:
    with pytest.raises(ValueError, match="this is the only process"):
        train(steps=1, sharded=True)


def weights_are_noted_once() -> int:
    os.environ["LMDP_LINEAGE"] += "-noted"
    from lmdp.lineage.index import earlier

    training = Training(**QUICK)
    training.step()
    training.verdicts()
    dist.barrier()
    return len(earlier(dict(training.net.named_parameters())))


def test_a_training_of_several_processes_is_noted_as_one(pair: Crew) -> None:
    assert pair(weights_are_noted_once) == [1, 1]


def test_nothing_is_said_where_there_is_one_process() -> None:
    group = Group()
    assert (group.size, group.rank, group.several, group.sent) == (1, 0, False, 0)
    tensors = [torch.ones(2)]
    assert group.added(tensors)[0] is tensors[0]
    assert group.gathered("a word") == ["a word"]
    group.meet(1, 2, 3)


def test_work_is_the_same_work(pair: Crew) -> None:
    """The crew is still together after all that went wrong in it."""
    first, second = pair(work, (), {"steps": 2, **QUICK})
    assert torch.equal(first.flat, second.flat)


def threads_after_the_group() -> list[str]:
    train(steps=2)
    dist.destroy_process_group()
    return [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no names there")
def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    """Such a thread may abort a Python that ends: it asks for the interpreter when it drops what was sent last."""
    crew = Crew(2, tmp_path)
    try:
        for names in crew(threads_after_the_group):
            assert not [name for name in names if "gloo" in name]
    finally:
        crew.close()
