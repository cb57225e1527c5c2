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
from lmdp.gradients.compiled.rounds import ROUND
from lmdp.private.keystream import KeyStream
from lmdp.private.noise import Secure
from tests.private.probe import draw
from tests.private.test_engine import Small, data, train
from tests.private.test_noise import tuples

pytestmark = pytest.mark.usefixtures("widest_loops")

KEY = bytes(range(32))
MILLION = 10**6


def normals(count: int, key: bytes = KEY, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return draw(Secure(key).noise(1), [torch.empty(count, dtype=dtype)], 1.0)[0]


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
    assert float(draw(noise, [torch.empty(MILLION)], 0.3)[0].std()) == pytest.approx(0.3, rel=4.5 / math.sqrt(2e6))
    assert draw(noise, [torch.ones(3)], 0.0)[0].tolist() == [0, 0, 0]
    assert len(draw(noise, [torch.empty(1), torch.empty(0), torch.empty(2, 3)], 1.0)[0]) == 1


def test_neighbours_calls_tensors_and_streams_are_independent() -> None:
    noise = Secure(KEY).noise(1)
    first, second = (draw(noise, [torch.empty(2, ROUND, dtype=torch.float64)], 1.0)[0] for _ in range(2))
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
    draws = [draw(noise.noise(0), [torch.empty(50_000, dtype=torch.float64)], 1.0)[0] for _ in range(4)]
    assert len(tuples(torch.cat(draws)).unique()) == 50_000
    assert len(torch.cat(coins).unique()) == 2000
    assert not np.isin(Secure().uniforms(0, 1000).numpy(), Secure().uniforms(0, 1000).numpy()).any()


def test_regions_of_one_key_are_far_apart() -> None:
    streams = [KeyStream(KEY, number) for number in range(9)]
    blocks = [stream.words(4096) for stream in streams]
    assert len(torch.cat(blocks).unique()) == 4096 * 9
    places = [(stream, start, place) for stream in streams for start in (0, 1, 2**50) for place in (0, 1)]
    after = {stream.more(start, place, 1) for stream, start, place in places}
    assert len(after) == len(places)
    assert not after & {int(word) % 2**64 for block in blocks for word in block}


def test_the_bits_after_a_word_are_always_the_same_and_leave_the_stream_where_it_is() -> None:
    stream = KeyStream(KEY)
    one, three = stream.more(7, 1, 1), stream.more(7, 1, 3)
    assert three >> 128 == one
    assert stream.drawn == 0
    assert torch.equal(stream.words(10), KeyStream(KEY).words(10))
    assert stream.more(7, 1, 3) == three


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
