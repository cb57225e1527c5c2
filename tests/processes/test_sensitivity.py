"""One example moves what several processes release together by no more than what one process states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lmdp
from lmdp.private.weights import Private
from lmdp.processes import Group
from tests.private.probe import private_probe, step
from tests.private.test_sensitivity import RISK, aligned, outlier
from tests.processes.crew import Crew
from tests.processes.train import data, model
from tests.tables import Choice, certified


def released(batches: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """The last gradient and statistic that are released of these batches, each dealt to all processes; no noise."""
    group = Group()
    engine, net, optimizer = private_probe(batches[0], risk=RISK, emphasis=2.0, **options)
    source = engine._attached.step.source
    seen: list[Tensor] = [torch.zeros(1)]
    if isinstance(source, Private):
        observe = source.observe
        source.observe = lambda value: (seen.append(value), observe(value))  # type: ignore[method-assign]
    for batch in batches:
        gradient = step(net, optimizer, batch[group.rank :: group.size])
    return gradient, seen[-1], engine.mechanism.sensitivity


@pytest.mark.parametrize("choice", certified(), ids="-".join)
def test_an_outlier_on_one_process_moves_the_total_by_at_most_the_sensitivity(pair: Crew, choice: Choice) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, public = aligned(60, generator), (aligned(20, generator), torch.zeros(20))
    options = {"method": choice[0], "weights": choice[1], "public_data": public}
    for size in (10.0, 1e6):
        neighbour = torch.cat([batch, outlier(batch, size, 2)])
        without, with_it = pair(released, [batch, batch], options), pair(released, [batch, neighbour], options)
        for (before, seen_before, sensitivity), (after, seen_after, _) in zip(without, with_it):
            assert (before - after).norm() <= sensitivity * (1 + 1e-9)
            assert (seen_before - seen_after).norm() <= 1 + 1e-9
        assert torch.equal(with_it[0][0], with_it[1][0])
        assert (with_it[0][0] - released([batch, neighbour], options)[0]).norm() <= 1e-9  # of one process


def noise_alone() -> tuple[Tensor, float]:
    """What is released of a batch without examples, on each process."""
    options = {"noise_multiplier": 2.0, "seed": None, "max_grad_norm": 1.0, "method": "dpsgd"}
    nothing = torch.zeros(0, 4, 3000, dtype=torch.float64)
    engine, net, optimizer = private_probe(torch.zeros(1, 4, 3000, dtype=torch.float64), **options)
    return step(net, optimizer, nothing).flatten(), engine.mechanism.gradient_std


def test_noise_is_added_once_however_many_processes_there_are(trio: Crew) -> None:
    """Of 12,000 numbers; five standard errors of a standard deviation."""
    (noise, std), *others = trio(noise_alone)
    assert abs(float(noise.std()) / std - 1) <= 5 / (2 * 12_000) ** 0.5
    for other, _ in others:
        assert torch.equal(noise, other)


def until_it_is_spent() -> tuple[int, float, str]:
    net = model()
    engine = lmdp.PrivacyEngine(accountant="rdp")
    loader = torch.utils.data.DataLoader(data(), batch_size=12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    target = {"target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 1}
    _, _, loader = engine.make_private_with_epsilon(
        module=net, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, check_mixing=False, **target
    )
    told = ""
    while not told:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                told = str(error)
                break
    return engine.steps, engine.privacy_statement(1e-4).epsilon, told


def test_together_they_spend_the_epsilon_of_one_process_and_stop_at_its_end(pair: Crew) -> None:
    """A pass is as many steps as one process makes of it, and the step that would be too much is refused by all."""
    first, second = pair(until_it_is_spent)
    assert first == second
    steps, epsilon, told = first
    assert steps == until_it_is_spent()[0] == 8
    assert 2.9 < epsilon <= 3.0
    assert "past the target 3.0" in told
