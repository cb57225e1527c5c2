"""secure_mode: the same noise in distribution, from a cipher whose stream is used once and never written down."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

import lmdp
from lmdp.app.config import METHODS, Config
from lmdp.private.keystream import KeyStream
from lmdp.private.noise import ROUND, Secure, SummedNoise
from tests.private.test_engine import Small, data, train
from tests.private.test_noise import Written

pytestmark = pytest.mark.usefixtures("widest_loops")

KEY = bytes(range(32))
MILLION = 10**6


def normals(count: int, key: bytes = KEY, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return Secure(key).noise(1).like([torch.empty(count, dtype=dtype)], 1.0)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_million_draws_are_normal_to_the_tails(dtype: torch.dtype) -> None:
    draws = normals(MILLION, dtype=dtype).double().numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    deviations = [draws.mean(), (draws**2).mean() - 1, (draws**3).mean(), (draws**4).mean() - 3]
    spreads = [1, math.sqrt(2), math.sqrt(15), math.sqrt(96)]
    assert all(abs(d) < 4.9 * s / 1000 for d, s in zip(deviations, spreads))
    for bound in (3.0, 4.0):
        tail, expected = int((np.abs(draws) > bound).sum()), 2 * stats.norm.sf(bound) * MILLION
        assert abs(tail - expected) < 4.9 * math.sqrt(expected)


def test_the_standard_deviation_is_the_one_asked_for_and_zero_means_none() -> None:
    noise = Secure(KEY).noise(1)
    assert float(noise.like([torch.empty(MILLION)], 0.3)[0].std()) == pytest.approx(0.3, rel=4.5 / math.sqrt(2e6))
    assert noise.like([torch.ones(3)], 0.0)[0].tolist() == [0, 0, 0]
    assert len(noise.like([torch.empty(1), torch.empty(0), torch.empty(2, 3)], 1.0)[0]) == 1


def test_neighbours_calls_tensors_and_streams_are_independent() -> None:
    noise = Secure(KEY).noise(1)
    first, second = (noise.like([torch.empty(2, ROUND, dtype=torch.float64)], 1.0)[0] for _ in range(2))
    rows = [
        *first,
        *second,
        *(torch.roll(first[0], lag) for lag in (1, 2, ROUND // 2, ROUND // 2 - 1)),
    ]
    off = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    squares = torch.corrcoef(torch.stack(rows).square()) - torch.eye(len(rows), dtype=torch.float64)
    bound = 5.5 / math.sqrt(ROUND)
    assert off.abs().max() < bound
    assert squares.abs().max() < bound


def test_no_number_is_drawn_twice_and_no_two_engines_share_a_stream() -> None:
    noise = Secure(KEY)
    coins = [noise.uniforms(0, 1000) for _ in range(2)]
    draws = [noise.noise(0).like([torch.empty(50_000, dtype=torch.float64)], 1.0)[0] for _ in range(4)]
    assert len(torch.cat(draws + coins).unique()) == 202_000
    assert not np.isin(Secure().uniforms(0, 1000).numpy(), Secure().uniforms(0, 1000).numpy()).any()


def test_regions_of_one_key_are_far_apart() -> None:
    blocks = [KeyStream(KEY, number).words(4096) for number in range(9)]
    assert len(torch.cat(blocks).unique()) == 4096 * 9


def test_the_key_stream_is_that_of_aes_256_in_counter_mode() -> None:
    """FIPS-197's example key: the blocks are the encryptions of the counters 0, 1, …, however they are asked for."""
    cipher = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    blocks = b"".join(cipher.update(counter.to_bytes(16, "big")) for counter in range(2**19))
    stream = KeyStream(KEY)
    some = [stream.words(count) for count in (2, 1, 3, 0, 2**20 - 6)]  # more than is enciphered in one go
    assert torch.cat(some).numpy().tobytes() == blocks
    assert KeyStream(KEY).uniform(2)[0] == ((int.from_bytes(blocks[:8], "little") + 2**63) % 2**64 >> 11) * 2.0**-53


def test_coins_are_uniform() -> None:
    coins = Secure(KEY).uniforms(0, MILLION).numpy()
    assert stats.kstest(coins, "uniform").pvalue > 1e-4
    assert coins.min() >= 0
    assert coins.max() < 1


def test_the_last_bits_of_the_noise_are_not_those_of_one_box_muller_draw() -> None:
    """The countermeasure: sums of four fill the grid of floats where single draws leave holes."""
    draws = normals(200_000)
    near_one = draws[(draws > 1.0) & (draws < 1.0 + 2**-10)]
    low_bits = (near_one.numpy().view(np.int64) & 7).astype(int)
    assert stats.chisquare(np.bincount(low_bits, minlength=8)).pvalue > 1e-4


def test_both_numbers_of_a_pair_go_into_different_sums() -> None:
    """Their sum is one normal number of another angle: it would have as few pre-images as a single one."""
    most, turn = 2**63 - 1, 2**61  # a radius of 0, an eighth of a circle
    noise = SummedNoise(Written(1 << 50, *[most] * 3, *[turn] * 4, *[most] * 4))
    sums = noise.like([torch.empty(4, dtype=torch.float64)], 1.0)[0]
    assert sums[0] == pytest.approx(float(sums[1]))
    assert sums[0] > 1
    assert sums[2:].tolist() == [0, 0]


def test_a_fork_draws_other_noise_than_its_parent() -> None:
    noise, (reader, writer) = Secure(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, noise.uniforms(0, 4).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 64) != noise.uniforms(0, 4).numpy().tobytes()
    os.close(reader)
    os.close(writer)


def test_a_generator_is_neither_copied_nor_saved() -> None:
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or saved"):
            attempt(Secure())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sgd"])
def test_every_method_trains_in_secure_mode_and_says_so(method: str) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = lmdp.PrivacyEngine(secure_mode=True)
    public = {"weights": "public", "public_data": data(60)} if method == "lm-optimal" else {}
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        max_physical_batch_size=5,
        **public,
    )
    train(model, optimizer, loader)
    statement = engine.privacy_statement(1e-5)
    assert statement.certified
    assert "AES-256-CTR" in statement.noise_source
    assert "AES-256-CTR" in str(statement)
    state = json.dumps(engine.state_dict())
    assert "key" not in state
    assert "counter" not in state


def test_a_seed_and_secure_mode_contradict_each_other() -> None:
    model = Small()
    engine = lmdp.PrivacyEngine(secure_mode=True)
    with pytest.raises(ValueError, match=r"seed is 3, but secure_mode"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=data(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=3,
        )
    with pytest.raises(ValueError, match="seed is 3, but noise = secure"):
        Config(noise="secure", seed=3)
