"""Batches in parts that nobody asked for: chosen by model and shape, said, and without a trace in the result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmdp.app import parts, training
from lmdp.app.config import Config
from lmdp.app.network import blank, fresh_model
from lmdp.app.parts import kept_of_one, parts_of, said_of_parts
from lmdp.data import Images, Texts, load
from lmdp.models import build

KEPT_BY_LINEAR = 4 * (48 + 10)
"""Bytes for an example of 3x4x4 numbers: what a linear layer takes in, and what tanh gives out."""


def images(number: int) -> Images:
    return Images(torch.zeros(number, 3, 4, 4, dtype=torch.uint8), torch.zeros(number, dtype=torch.int64))


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.Tanh())


def test_what_one_more_example_keeps_for_the_backward_pass_is_counted_to_the_byte() -> None:
    assert kept_of_one(Config(), model(), blank(images(1))) == KEPT_BY_LINEAR


@pytest.mark.parametrize(("room", "chosen"), [(2**30, None), (100 * KEPT_BY_LINEAR, 64), (1, 1)])
def test_parts_are_the_largest_power_of_two_that_fits_and_none_where_the_batch_does(
    room: int, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROOM", room)
    assert parts_of(Config(batch_size=300), model(), images(1000)) == chosen
    assert bool(said_of_parts(Config(batch_size=300), model(), images(1000))) == (chosen is not None)


def test_a_number_that_was_given_is_kept_and_not_commented() -> None:
    given = Config(batch_size=300, max_physical_batch_size=7)
    assert parts_of(given, model(), images(1000)) == 7
    assert said_of_parts(given, model(), images(1000)) == ""


def test_the_model_and_the_generator_are_left_as_they_were() -> None:
    words = torch.zeros(1, 8, dtype=torch.int64)
    texts = Texts(words, torch.ones_like(words), torch.zeros(1, dtype=torch.int64))
    encoder = build("tiny-encoder", (8,), 2, vocabulary=50).train()
    before, draws = {name: t.clone() for name, t in encoder.state_dict().items()}, torch.random.get_rng_state()
    assert kept_of_one(Config(model="tiny-encoder"), encoder, blank(texts)) > 0
    assert all(torch.equal(t, before[name]) for name, t in encoder.state_dict().items())
    assert encoder.training
    assert torch.equal(torch.random.get_rng_state(), draws)


def test_a_training_in_parts_that_nobody_asked_for_ends_as_one_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, source = (
        Config(size=14, batch_size=100, epochs=0.3, delta=1e-4, seed=1, accountant="rdp"),
        load("digits?limit=400", size=14),
    )
    ends = []
    for room in (2**30, 2**18):
        monkeypatch.setattr(parts, "ROOM", room)
        network = fresh_model(config, source)
        assert (parts_of(config, network, source.train) is None) == (room == 2**30)
        job = training.prepare(config, network, source.train, risk=None, public=None)
        ends.append({name: t.clone() for name, t in training.run_through(job).state_dict().items()})
        assert job.engine is not None
        job.engine.detach()
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=1e-5)
