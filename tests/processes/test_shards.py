"""Under fully_shard: the model of one process, its promise, and never the whole of it in one place."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.accounting import Grid
from lmdp.audit.canaries import Slate
from lmdp.gradients.compiled.parts import Part
from lmdp.gradients.contract import Example
from lmdp.gradients.plan import RULES
from lmdp.private.noise import Noised, Seeded
from lmdp.private.weights import Private
from lmdp.processes import Group, Sums
from lmdp.processes.shards import Shards
from tests.gradients.test_rule_table import inputs
from tests.private.test_sensitivity import RISK, aligned, outlier
from tests.processes.crew import Crew
from tests.processes.test_faults import QUICK, failures, rank
from tests.processes.test_same_answer import TOLERANCE, check
from tests.processes.train import BATCH, DELTA, Trained, data, model, settings, shard_blocks, train, whole, work
from tests.tables import Choice, certified, choices

SHARD: dict[str, Any] = {"shard": True}
FEW: dict[str, Any] = {"steps": 2, "max_physical_batch_size": 4}


def all_choices(options: dict[str, Any]) -> list[Trained]:
    return [train(*choice, torch.float64, **QUICK, **options) for choice in choices()]


def test_two_processes_with_half_of_each_parameter_make_the_model_of_one(pair: Crew) -> None:
    """Of every method and source, in parts, of which one process may have more than the other."""
    first, second = pair(all_choices, SHARD | FEW)
    for alone, *together in zip(all_choices(FEW), first, second, strict=True):
        check(alone, together, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("choice", choices(), ids="-".join)
def test_twenty_steps_of_two_processes_make_the_model_of_one(pair: Crew, choice: Choice, dtype: torch.dtype) -> None:
    alone = train(*choice, dtype, **QUICK)
    check(alone, pair(work, (*choice, dtype), SHARD | QUICK), TOLERANCE[dtype])
    check(alone, pair(work, (*choice, dtype), SHARD | QUICK | {"max_physical_batch_size": 2}), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("choice", choices(), ids="-".join)
def test_looks_at_a_sharded_model_change_nothing_of_the_answer(pair: Crew, trio: Crew, choice: Choice) -> None:
    check(train(*choice), pair(work, choice, SHARD), 1e-5)
    check(train(*choice), trio(work, choice, SHARD | {"max_physical_batch_size": 4}), 1e-5)


@pytest.mark.slow
def test_a_sharded_training_is_certified_and_every_process_says_the_same(pair: Crew) -> None:
    first, second = pair(work, (), SHARD | {"seed": None})
    assert torch.equal(first.flat, second.flat)
    assert first.statement == second.statement
    assert first.statement["certified"], first.statement["reasons"]
    assert "each holds a part of every parameter" in first.statement["verdicts"]["process"]["how"]
    assert (first.statement["processes"], first.statement["sample_rate"]) == (2, BATCH / 90)


def most_held() -> tuple[int, int, dict[str, Any]]:
    """Numbers of parameters that are whole here at a time, at most, and all there are; of a run with all its looks."""
    net, most, gather = model(), 0, Group.gather
    total = sum(p.numel() for p in net.parameters())

    def noted(self: Group, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        units = [m for m in net.modules() if hasattr(m, "unshard")]
        each = [one for m in units for group in m._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params]
        here = [getattr(one, "_unsharded_param", None) for one in each]
        most = max(most, sum(t.numel() for t in here if t is not None and t.untyped_storage().size()))
        return gather(self, *args, **kwargs)

    Group.gather = noted  # type: ignore[method-assign]
    try:
        trained = train(net=net, steps=3, shard=True, seed=None)
    finally:
        Group.gather = gather  # type: ignore[method-assign]
    return most, total, trained.statement


def test_no_process_ever_has_all_parameters_and_the_training_is_certified(pair: Crew) -> None:
    """Four modules, of which the largest has 204 of 445 numbers; torch gathers the next one ahead."""
    (most, total, first), (_, _, second) = pair(most_held)
    assert 0 < most < 0.9 * total
    assert first == second
    assert first["certified"], first["reasons"]
    assert "each holds a part of every parameter" in first["verdicts"]["process"]["how"]


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    processes=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_parts_get_the_noise_that_the_whole_would_get(
    sizes: list[int], processes: int, seed: int, dtype: torch.dtype
) -> None:
    """Bit for bit, and the noise of the statistic, which comes after, too."""
    sums = [torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) for n in sizes]
    weights, last = torch.linspace(0.5, 1, len(sizes), dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def noised(tensors: list[Tensor], parts: list[Part]) -> list[list[Tensor]]:
        after = Noised([last], [last.clone()], weights[:1], Grid.of(1.0))
        return Seeded(seed).noise(3).added(Noised(tensors, [*tensors], weights, Grid.of(1.5), 10.0, parts), after)

    released, (statistic,) = noised(sums, [])
    dealt = []
    for place in range(processes):
        most = [-(-n // processes) for n in sizes]
        begins = [min(place * m, n) for m, n in zip(most, sizes)]
        mine = [t[b : b + m] for t, b, m in zip(sums, begins, most)]
        each, (again,) = noised(mine, [Part(b, n) for b, n in zip(begins, sizes)])
        assert torch.equal(again, statistic)
        dealt.append(each)
    for one, parts in zip(released, zip(*dealt), strict=True):
        assert torch.equal(one, torch.cat(parts))


FEW_DRAWN: dict[str, Any] = {"batch_size": 1, "seed": 7}


def drawn_here(options: dict[str, Any]) -> tuple[Trained, list[int]]:
    """And how many examples were added up here in each step."""
    drawn: list[int] = []
    over = Sums.over

    def noted(self: Sums, *args: Any, **kwargs: Any) -> Sums:
        drawn.append(self.examples)
        return over(self, *args, **kwargs)

    with patch.object(Sums, "over", noted):
        return train(**QUICK, **FEW_DRAWN, **options), drawn


@pytest.mark.parametrize("parts", [None, 1])
def test_draws_of_nobody_and_of_unequal_numbers_make_the_model_of_one_process(pair: Crew, parts: int | None) -> None:
    """Under fully_shard; one example is expected in a draw, so that of many none is drawn here, or nowhere."""
    options = {"allow_large_delta": True, "max_physical_batch_size": parts, "dtype": torch.float64}
    options |= {"dataset": TensorDataset(*data(torch.float64, size=20).tensors)}
    alone, of_one = drawn_here(options)
    (first, of_first), (second, of_second) = pair(drawn_here, options | SHARD)
    assert [a + b for a, b in zip(of_first, of_second, strict=True)] == of_one
    assert 0 in of_one  # nobody at all was drawn
    assert any(a and not b for a, b in zip(of_first, of_second))  # all that were drawn are with one process
    assert parts is None or first.parts != second.parts
    check(alone, [first, second], 1e-12)


def records_of_a_step() -> tuple[int, int]:
    """Of all processes, in one that is not looked at; and how many units there are."""
    training = Sharded()
    batches, exchanged = iter(training.loader), Group._exchanged
    training.step(next(batches))
    with patch.object(Group, "_exchanged", autospec=True, side_effect=exchanged) as seen:
        training.step(next(batches))
    return seen.call_count, len(training.engine._attached.held._units)  # type: ignore[attr-defined]


def test_a_step_takes_three_records_for_each_unit_and_one_more(pair: Crew) -> None:
    """Gathered forward, gathered backward, added up; and the release. `benchmarks/scaling.py` counts on it."""
    for records, units in pair(records_of_a_step):
        assert records == 3 * units + 1


def memory_given_back(device: str) -> int:
    """How often that is asked for, where the trained parameters are on this device."""
    capture = SimpleNamespace(device=torch.device(device), parameters={}, model=nn.Module())
    with patch("lmdp.processes.shards._refuse"), patch("lmdp.processes.shards.give_freed_memory_back") as asked:
        with suppress(StopIteration):  # it has no parameters
            Shards(capture, Group(alone=True))  # type: ignore[arg-type]
        return asked.call_count


def test_freed_memory_is_given_back_where_the_host_has_the_parameters() -> None:
    assert [memory_given_back("cpu"), memory_given_back("cuda")] == [1, 0]


# -- one example ------------------------------------------------------------------------------------------------------


def released(size: float) -> list[tuple[Tensor, Tensor, float]]:
    """The gradient and the statistic of every certified choice, with an example of this size or without; no noise."""
    group, generator = Group(), torch.Generator().manual_seed(0)
    batch, public = aligned(60, generator), (aligned(20, generator), torch.zeros(20))
    answers = []
    for method, source in certified():
        net = Slate(layers=4, width=3).double()
        fully_shard(net)
        optimizer, engine = torch.optim.SGD(net.parameters(), lr=0.0), lmdp.PrivacyEngine()
        loader = DataLoader(TensorDataset(torch.zeros(1, 4, 3)), batch_size=1)
        options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "loss_reduction": "sum", "poisson_sampling": False}
        options |= {"method": method, "weights": source, "public_data": public, "risk": RISK, "emphasis": 2.0}
        options |= {"criterion": lambda output, _: output.mean(), "seed": 0}
        engine.make_private(module=net, optimizer=optimizer, data_loader=loader, **options)
        at_work, seen = engine._attached.step.source, [torch.zeros(1)]
        if isinstance(at_work, Private):
            observe = at_work.observe
            at_work.observe = lambda value, o=observe, s=seen: (s.append(value), o(value))  # type: ignore[method-assign]
        for each in (batch, torch.cat([batch, outlier(batch, size, 2)]) if size else batch):
            optimizer.zero_grad()
            net(each[group.rank :: group.size]).sum().backward()
            optimizer.step()
        gradient = torch.cat([p.grad.full_tensor() for p in net.parameters()])  # type: ignore[union-attr]
        answers.append((gradient, seen[-1], engine.mechanism.sensitivity))
    return answers


def test_an_outlier_moves_the_total_of_all_parts_by_at_most_the_sensitivity(pair: Crew) -> None:
    (without, _), (with_it, _) = pair(released, 0.0), pair(released, 1e6)
    for (before, seen_before, sensitivity), (after, seen_after, _) in zip(without, with_it, strict=True):
        assert (before - after).norm() <= sensitivity * (1 + 1e-9)
        assert (seen_before - seen_after).norm() <= 1 + 1e-9


# -- every kind of module ---------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A module of some rule, and a layer that takes what it gives out."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.inner = example.make()
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        given = self.inner(x)
        given = given[0] if isinstance(given, tuple) else given
        return self.head(given.flatten(1))


def of_rules(places: list[tuple[str, int]], shard: bool) -> list[Tensor]:
    """The weights after two steps of a model around each of these examples."""
    return [of_rule(RULES[name].examples[at], shard=shard) for name, at in places]


def of_rule(example: Example, *, shard: bool) -> Tensor:
    torch.manual_seed(0)
    x = inputs(example, torch.float64).repeat(4, *[1] * len(example.shape))
    net = Around(example).double()
    net(x)
    if shard:
        shard_blocks(net)
    optimizer, engine = torch.optim.SGD(net.parameters(), lr=0.2), lmdp.PrivacyEngine(accountant="rdp")
    loader = DataLoader(TensorDataset(x, torch.arange(len(x)) % 3), batch_size=8)
    options: dict[str, Any] = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "seed": 3, "check_mixing": False}
    _, _, batches = engine.make_private(module=net, optimizer=optimizer, data_loader=loader, **options)
    for xs, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(xs), y).backward()
        optimizer.step()
        if engine.steps == 2:
            break
    engine.detach()
    return torch.cat([w.flatten() for w in whole(net).values()])


@pytest.mark.slow
def test_every_rule_is_exact_under_fully_shard(pair: Crew) -> None:
    places = [(rule.name, at) for rule in RULES.values() for at in range(len(rule.examples))]
    first, second = pair(of_rules, places, True)
    for place, alone, one, other in zip(places, of_rules(places, False), first, second, strict=True):
        assert torch.equal(one, other), place
        assert torch.allclose(one, alone, rtol=1e-10, atol=1e-12), place


# -- what is refused, and faults --------------------------------------------------------------------------------------


def refused(kind: str) -> None:
    net, mesh = model(), init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"diagnostics": True} if kind == "diagnostics" else {}
    setups: dict[str, dict[str, Any]] = {
        "mp_policy": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload_policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "shard_placement_fn": {"shard_placement_fn": lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None},
        "HSDP": {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))},
    }
    if kind == "not sharded":
        fully_shard(net.get_submodule("0"), mesh=mesh)
    else:
        fully_shard(net, **setups.get(kind, {}))
    train(net=net, steps=1, **QUICK, **options)


REFUSED = {
    "mp_policy": "use torch.autocast",
    "offload_policy": "offload_policy",
    "shard_placement_fn": "Shard the first dimension",
    "HSDP": "a mesh of more than one dimension",
    "not sharded": "Call fully_shard on the model itself too",
    "diagnostics": "Leave diagnostics out",
}


def test_what_of_fully_shard_is_not_built_is_refused_by_name(pair: Crew) -> None:
    for kind, told in REFUSED.items():
        assert all(told in message for message in failures(pair, refused, kind)), kind


class Sharded:
    """A training whose steps are made one by one."""

    def __init__(self, **more: Any) -> None:
        self.net = shard_blocks(model())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.engine = lmdp.PrivacyEngine(accountant="rdp")
        options = settings("lm", "private", torch.float32, **QUICK, **more)
        loader = DataLoader(data(), batch_size=BATCH)
        _, _, self.loader = self.engine.make_private(
            module=self.net, optimizer=self.optimizer, data_loader=loader, **options
        )

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.optimizer.step()


def abandons() -> None:
    """Steps the first part of a batch, and then one that did not come from the loader."""
    training = Sharded(max_physical_batch_size=1)
    training.step(next(iter(training.loader)))
    training.step((data().tensors[0][:1], data().tensors[1][:1]))


def test_parts_that_others_have_already_cannot_be_left_out(pair: Crew) -> None:
    assert all("they cannot be taken back" in message for message in failures(pair, abandons))


def raises_on_one() -> None:
    training = Sharded()
    for batch in training.loader:
        training.step(batch if rank() == 0 else [t[:1] for t in batch])


def test_an_error_in_one_process_of_a_sharded_training_is_raised_by_all(pair: Crew) -> None:
    first, second = failures(pair, raises_on_one)
    assert "another number of examples than the data loader handed out" in second
    assert first.startswith("process 1 of 2 failed: RuntimeError: the model was run on another number")


def reads_directly() -> None:
    training = Sharded()
    x, y = next(iter(training.loader))
    training.optimizer.zero_grad()
    first = training.net.get_submodule("0")
    first.register_forward_hook(lambda m, _, out: out + m.weight.square().sum(), prepend=True)
    with training.engine._attached.held.group.reaching_all():
        F.cross_entropy(training.net(x), y).backward()


def test_a_parameter_that_is_used_past_its_module_is_refused_under_fully_shard_too(pair: Crew) -> None:
    assert all("was used outside the forward of the module" in message for message in failures(pair, reads_directly))


def evaluated_on_one() -> Tensor:
    """The first process alone runs the model between steps; the other takes part when it gets to its own step."""
    training = Sharded()
    for batch in training.loader:
        training.step(batch)
        if rank() == 0:
            with torch.no_grad():
                training.net(data().tensors[0])
        if training.engine.steps == 3:
            break
    training.engine.privacy_statement(DELTA)
    return torch.cat([w.flatten() for w in whole(training.net).values()])


def test_one_process_alone_may_run_the_model_between_steps(pair: Crew) -> None:
    first, second = pair(evaluated_on_one)
    assert torch.equal(first, second)


# -- going on ---------------------------------------------------------------------------------------------------------


def half(steps: int, state: dict[str, Any] | None, options: dict[str, Any]) -> Trained:
    return train(dtype=torch.float64, steps=steps, state=state, **QUICK, **options)


def test_a_sharded_run_goes_on_with_one_process_and_the_other_way_round(pair: Crew) -> None:
    uninterrupted = half(6, None, {})
    begun = pair(half, 3, None, SHARD)[0]
    assert torch.allclose(half(6, begun.state, {}).flat, uninterrupted.flat, rtol=1e-12)
    for begun_by, options in ((begun, SHARD), (begun, {}), (half(3, None, {}), SHARD)):
        resumed = pair(half, 6, begun_by.state, options)[0]
        assert torch.allclose(resumed.flat, uninterrupted.flat, rtol=1e-12)
        assert resumed.statement["steps"] == 6


def begins_with(weights: dict[str, Tensor]) -> dict[str, Any]:
    net = model()
    net.load_state_dict(weights)
    return train(net=net, steps=1, **QUICK).statement


def test_weights_of_a_sharded_training_are_known_by_what_they_cost(pair: Crew) -> None:
    """By whoever goes on from them, whole, on the same machine."""
    begun = pair(work, (), SHARD | QUICK | {"steps": 2, "seed": None})[0]
    fresh, after = pair(work, (), QUICK | {"steps": 1})[0].statement, pair(begins_with, begun.weights)[0]
    assert "earlier trainings released" in after["verdicts"]["account"]["how"] or after["epsilon"] > fresh["epsilon"]


def until_killed(folder: str) -> str:
    training = Sharded()
    try:
        while True:
            for batch in training.loader:
                training.step(batch)
                (Path(folder) / f"charged-{rank()}").write_text(str(training.engine.steps))
    except RuntimeError as error:
        assert not training.engine.privacy_statement(DELTA).certified
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(6))
def test_when_a_process_of_a_sharded_training_is_killed_the_other_ends(tmp_path: Path, moment: int) -> None:
    import random
    import time

    crew = Crew(2, tmp_path, seconds=60)
    try:
        crew.begin(until_killed, str(tmp_path))
        while not all((tmp_path / f"charged-{each}").exists() for each in range(2)):
            time.sleep(0.01)
        time.sleep(random.Random(moment).random() * 0.5)
        crew.kill(moment % 2)
        begin = time.monotonic()
        answers = crew.answers(30)
        assert answers.pop(moment % 2) is None
        assert time.monotonic() - begin < 10
        assert answers[0].startswith("Parted: another process of this training is gone")
    finally:
        crew.close()


def test_the_parts_of_a_gradient_have_the_placement_of_their_parameter(pair: Crew) -> None:
    pair(placed)


def placed() -> None:
    training = Sharded()
    training.step(next(iter(training.loader)))
    for p in training.net.parameters():
        assert isinstance(p.grad, DTensor)
        assert (p.grad.placements, p.grad.shape) == (p.placements, p.shape)  # type: ignore[attr-defined]
