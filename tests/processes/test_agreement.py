"""What processes of a training must have in common is compared before anything is exchanged that hangs on it."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

from lmdp.layers import LayerMap
from lmdp.processes import Group, agreement
from lmdp.processes.agreement import source_digest, versions
from tests.processes.crew import Crew
from tests.processes.test_faults import QUICK, failures, rank
from tests.processes.train import Trained, model, shard_blocks, train

HOW = pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])


def other_settings(values: dict[str, tuple[Any, Any]], shard: bool) -> Trained:
    return train(steps=2, shard=shard, **(QUICK | {name: each[rank()] for name, each in values.items()}))


SETTINGS: dict[str, tuple[tuple[Any, Any], str]] = {
    "noise_multiplier": ((0.7, 0.8), "noise_multiplier: 0.7, 0.8"),
    "max_grad_norm": ((1.0, 2.0), "max_grad_norm: 1.0, 2.0"),
    "method": (("dpsgd", "autos"), "method: dpsgd, autos"),
    "emphasis": ((1.0, 2.0), "emphasis"),
    "seed": ((1, 2), "seed: 1, 2"),
    "batch_size": ((12, 6), "batch size: 12, 6"),
    "unit_clip": ((True, False), "unit_clip: True, False"),
    "unit_gain": ((True, False), "unit_gain: True, False"),
    "loss_reduction": (("mean", "sum"), "loss_reduction: mean, sum"),
    "diagnostics": ((True, False), "diagnostics: True, False"),
    "poisson_sampling": ((True, False), "poisson_sampling: True, False"),
    "allow_unused": ((True, False), "allow_unused: True, False"),
    "generic": ((("0",), ()), "generic: ['0'], []"),
    "check_mixing": ((True, False), "check_mixing: True, False"),
    "sharded": ((True, False), "sharded: True, False"),
    "weights": (("private", "batch"), "weights: private, batch"),
    "risk": (([0.4, 0.3, 0.2], [0.4, 0.3, 0.1]), "rates: [0.4, 0.3, 0.2], [0.4, 0.3, 0.1]"),
}


@HOW
@pytest.mark.parametrize("name", SETTINGS)
def test_processes_with_other_settings_are_refused_before_the_first_step(pair: Crew, name: str, shard: bool) -> None:
    values, told = SETTINGS[name]
    for message in failures(pair, other_settings, {"source" if name == "weights" else name: values}, shard):
        assert told in message
        assert "Start all of them with the same" in message


def one_without_a_seed() -> None:
    train(steps=2, **QUICK, seed=None if rank() else 1)


def test_a_seed_on_one_process_only_is_refused(pair: Crew) -> None:
    """The others would wait for a key that nobody sends."""
    assert all("seed: 1, None" in message for message in failures(pair, one_without_a_seed))


@HOW
def test_each_process_may_hand_its_batches_out_in_parts_of_its_own(pair: Crew, shard: bool) -> None:
    options = {"max_physical_batch_size": (1, 4), "memory_budget": (10**6, None)}
    first, second = pair(other_settings, options, shard)
    assert first.parts > second.parts
    assert first.flat.equal(second.flat)


def joined(at: int) -> LayerMap:
    """The layers of the model, of which two that follow each other count as one."""
    layers = list(LayerMap.of(model()))
    first, second = layers[at : at + 2]
    one = replace(first, modules=first.modules + second.modules, parameters=first.parameters + second.parameters)
    layers[at : at + 2] = [replace(one, tap=second.tap)]
    return LayerMap(tuple(layers))


def other_layers(shard: bool) -> None:
    train(steps=2, shard=shard, layers=joined(rank()), risk=[0.4, 0.3], **QUICK)


@HOW
def test_processes_with_as_many_other_layers_are_refused(pair: Crew, shard: bool) -> None:
    assert all("layer '0': 0.weight" in message for message in failures(pair, other_layers, shard))


def other_modules(kind: str, shard: bool) -> Trained:
    net: Any = model()
    if kind == "activation" and rank():
        net[2] = nn.Tanh()
    if kind == "setting":
        net[1].eps = 1e-5 * (1 + rank())
    if kind == "mode":
        net[2].train(not rank())
    if kind == "address":
        net[2].extra_repr = lambda: f"of <object at 0x7f{rank()}>"
    return train(steps=2, net=net, shard=shard, **QUICK)


@HOW
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("activation", "module '2': torch.nn.modules.activation.ReLU(), torch.nn.modules.activation.Tanh()"),
        ("setting", "eps=1e-05"),
        ("mode", "ReLU() in evaluation mode"),
    ],
)
def test_processes_with_other_modules_are_refused_by_their_names(pair: Crew, kind: str, told: str, shard: bool) -> None:
    for message in failures(pair, other_modules, kind, shard):
        assert told in message
        assert message.count("module '") == 1


def test_where_an_object_lies_in_memory_may_differ(pair: Crew) -> None:
    first, second = pair(other_modules, "address", False)
    assert first.flat.equal(second.flat)


def other_model() -> None:
    train(steps=2, net=model() if rank() else nn.Sequential(model(), nn.Linear(5, 5)), risk=None)


def test_processes_with_other_models_are_refused(pair: Crew) -> None:
    assert all("parameters" in message for message in failures(pair, other_model))


# -- versions ----------------------------------------------------------------------------------------------------------


def other_versions(kind: str, folder: str) -> None:
    if kind == "lmdp":
        root = Path(folder) / str(rank())
        shutil.copytree(agreement.ROOT / "gradients" / "compiled", root)
        with (root / "kernels.c").open("a") as file:
            file.write(f"// {rank()}\n")
        with patch.object(agreement, "source_digest", lambda: source_digest(root)):
            train(steps=2)
    places = {
        "python": "platform.python_version",
        "numpy": "numpy.__version__",
        "torch": "torch.__version__",
        "compiled loops": "lmdp.gradients.compiled.vector_bytes",
    }
    told = f"1.{rank()}" if kind in ("numpy", "torch") else lambda: rank() or None
    with patch(places[kind], told):
        train(steps=2)


@pytest.mark.parametrize("kind", ["lmdp", "python", "numpy", "torch", "compiled loops"])
def test_processes_with_other_versions_are_refused(pair: Crew, kind: str, tmp_path: Path) -> None:
    own = versions()[kind]
    for message in failures(pair, other_versions, kind, str(tmp_path)):
        assert f"({kind}: " in message
        assert own not in message or kind == "compiled loops"


@pytest.mark.parametrize("name", ["kernels.c", "loops.h", "parts.py"])
def test_the_digest_of_the_program_follows_every_source_of_it(tmp_path: Path, name: str) -> None:
    digests = {source_digest(agreement.ROOT)}
    for change in ("", "\n"):
        root = tmp_path / f"with{len(change)}"
        shutil.copytree(agreement.ROOT, root, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        file = root / "gradients" / "compiled" / name
        file.write_text(file.read_text() + change)
        digests.add(source_digest(root))
    assert len(digests) == 2  # the copy without a change has the same


# -- nobody waits for who has failed -----------------------------------------------------------------------------------

SECONDS = 20.0


@pytest.fixture
def impatient(tmp_path: Path) -> Any:
    """Processes that wait for so long and no longer."""
    train(steps=1)
    crew = Crew(2, tmp_path, seconds=SECONDS)
    yield crew
    crew.close()


def fails_on_one(kind: str) -> None:
    net = shard_blocks(model())
    if kind == "risk":
        train(net=net, steps=1, risk=[0.4, 0.3, 0.2][: 3 - rank()], **QUICK)
    if kind == "held":  # by what only one process has: it is refused there, while the other goes on
        with patch("lmdp.processes.shards._refuse", side_effect=ValueError("not here") if rank() else None):
            train(net=net, steps=1, **QUICK)
    train(net=net, steps=1, diagnostics=bool(rank()), **QUICK)


@pytest.mark.parametrize(
    ("kind", "told"),
    [("risk", "risk has 2 error rates"), ("held", "not here"), ("diagnostics", "diagnostics: False, True")],
)
def test_an_error_in_make_private_on_one_process_reaches_all_at_once(impatient: Crew, kind: str, told: str) -> None:
    begin = time.monotonic()
    assert all(told in message for message in failures(impatient, fails_on_one, kind))
    assert time.monotonic() - begin < SECONDS / 2


def patience_of_records(shard: bool) -> timedelta:
    """Of the group that a training makes for its records, beside the user's."""
    waits = []
    new_group = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        waits.append(group._get_backend(group._device_types[0]).options._timeout)
        return group

    with patch.object(dist, "new_group", noted), patch.object(dist, "get_backend", lambda group: "nccl"):
        if shard:
            train(shard=True, steps=1, **QUICK)
        else:
            Group()
    return max(waits)


@HOW
def test_records_are_waited_for_as_long_as_the_users_group_says(impatient: Crew, shard: bool) -> None:
    assert impatient(patience_of_records, shard) == [timedelta(seconds=SECONDS)] * 2
