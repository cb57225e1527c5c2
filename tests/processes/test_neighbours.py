"""The neighbour check, by several processes: what one example moves in all that they release together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lmdp
from lmdp.audit.neighbours.result import NeighbourReport
from tests.audit.cases import CLASSES, Parts, mlp, training, vectors
from tests.processes.conftest import pair as pair
from tests.processes.crew import Crew
from tests.processes.test_faults import failures
from tests.processes.train import shard_blocks
from tests.tables import Choice, certified

RISK = [0.4, 0.2]
HUGE = (torch.full((6,), 1e4, dtype=torch.float64), torch.tensor(CLASSES - 1))
Options = dict[str, Any]


def double() -> nn.Module:
    return mlp().double()


def checked(options: Options, **loop: Any) -> NeighbourReport:
    common = vectors(torch.float64)
    public = {"public_data": (common.tensors[0].flip(0) + 1, common.tensors[1]), "public_every": 1, "emphasis": 2.0}
    train = training(double, **loop, risk=RISK, **public, **options)
    return lmdp.audit.check_neighbours(train, common, HUGE)


def by_choice(choice: Choice) -> NeighbourReport:
    return checked({"method": choice[0], "weights": choice[1]})


@pytest.mark.parametrize("choice", certified(), ids="-".join)
def test_one_example_moves_what_two_processes_release_as_far_as_what_one_does(pair: Crew, choice: Choice) -> None:
    alone = by_choice(choice)
    for report in pair(by_choice, choice):
        assert report.passed, report
        for finding, its in zip(report.findings, alone.findings):
            assert finding.name == its.name
            assert finding.movement == pytest.approx(its.movement, abs=1e-6)


# -- what only several processes can do wrong -------------------------------------------------------------------------


def summed(number: Tensor) -> Tensor:
    dist.all_reduce(number)
    return number


def by_the_batch_of_all(parts: Parts, batch: Any) -> Any:
    """Examples meet across processes: a norm over all batches scales them."""
    return [batch[0] / summed(batch[0].square().sum()).sqrt(), batch[1]]


def with_a_sum_of_all(parts: Parts, batch: Any) -> None:
    """What is added to the released gradient has no noise."""
    largest = summed(batch[0].abs().max())
    for p in parts.model.parameters():
        p.data.add_(largest)


def said_by_one(parts: Parts, batch: Any) -> None:
    """On the process that the example is on, and nowhere else."""
    print(float(batch[0].abs().max()))  # noqa: T201


LOOPS: dict[str, Options] = {
    "batches of all": {"before": by_the_batch_of_all},
    "sums of all": {"after": with_a_sum_of_all},
    "said by one": {"after": said_by_one},
}


def broken(loop: str) -> NeighbourReport:
    return checked({"method": "dpsgd"}, **LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_what_one_example_does_on_another_process_is_found(pair: Crew, loop: str) -> None:
    assert not all(report.passed for report in pair(broken, loop))


def sharded() -> NeighbourReport:
    return checked({"method": "dpsgd"}, start=shard_blocks)


def test_the_check_of_a_model_under_fully_shard_is_refused_with_the_remedy(pair: Crew) -> None:
    assert all("training without fully_shard, by as many" in message for message in failures(pair, sharded))
