"""The noise is what the accountant was told: right size, drawn anew for every step and parameter, not guessable."""

from __future__ import annotations

import copy
import math
import os
import pickle
import secrets

import pytest
import torch
from scipy import stats
from torch import Tensor

from lmdp.gradients.compiled.rounds import ROUND
from lmdp.private.keystream import KeyStream
from lmdp.private.noise import Entropy, GaussianNoise, Randomness, Seeded
from lmdp.private.weights import Private
from tests.private.probe import draw, private_probe, step

pytestmark = pytest.mark.usefixtures("widest_loops")


def draws(steps: int, **options: object) -> tuple[Tensor, Tensor]:
    """Released gradients and statistics of an empty batch: pure noise."""
    width = 50
    empty = torch.zeros(0, 4, width, dtype=torch.float64)
    engine, model, optimizer = private_probe(empty, **options)
    source = engine._attached.step.source
    seen: list[Tensor] = []
    if isinstance(source, Private):
        source.observe = seen.append  # type: ignore[method-assign]
    gradients = torch.stack([step(model, optimizer, empty) for _ in range(steps)])
    return gradients, torch.stack(seen) if seen else torch.zeros(0)


def std_interval(count: int) -> float:
    """Relative half-width that a sample standard deviation leaves with probability below 1e-5."""
    return 4.5 / math.sqrt(2 * count)


@pytest.mark.parametrize(("method", "factor"), [("dpsgd", 1.0), ("perlayer", 1.0), ("naive-perlayer", 2.0)])
def test_gradient_noise_is_the_multiplier_times_the_sensitivity(method: str, factor: float) -> None:
    gradients, _ = draws(400, method=method, noise_multiplier=1.3, max_grad_norm=0.5)
    assert gradients.numel() == 400 * 4 * 50
    assert float(gradients.std()) == pytest.approx(1.3 * 0.5 * factor, rel=std_interval(gradients.numel()))
    assert abs(float(gradients.mean())) < 4.5 * 0.65 * factor / math.sqrt(gradients.numel())


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_both_released_parts_have_the_noise_that_their_shares_of_the_budget_buy(share: float) -> None:
    sigma, C = 1.1, 0.5
    gradients, statistics = draws(1000, method="lm", noise_multiplier=sigma, max_grad_norm=C, weight_budget=share)
    sigma_g, sigma_v = sigma / math.sqrt(1 - share), sigma / math.sqrt(share)
    assert sigma_g**-2 + sigma_v**-2 == pytest.approx(sigma**-2)
    assert float(gradients.std()) == pytest.approx(sigma_g * C, rel=std_interval(gradients.numel()))
    assert statistics.shape == (1000, 4)
    assert float(statistics.std()) == pytest.approx(sigma_v, rel=std_interval(statistics.numel()))


def test_the_noise_is_normal() -> None:
    gradients, statistics = draws(500, method="lm", noise_multiplier=1.0, weight_budget=0.5)
    for sample in (gradients, statistics):
        flat = sample.flatten()
        assert stats.kstest((flat / flat.std()).numpy(), "norm").pvalue > 1e-4


def test_noise_is_drawn_once_per_step_and_independently_across_steps_and_parameters() -> None:
    gradients, statistics = draws(2, method="lm", noise_multiplier=1.0)
    values = torch.cat([gradients.flatten(), statistics.flatten()])
    assert len(tuples(values).unique()) == len(values) // 4
    many, _ = draws(400, method="lm", noise_multiplier=1.0)
    bound = 4.9 / math.sqrt(400 * 200)
    a, b = many[:-1].flatten(), many[1:].flatten()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < bound
    layers = many.permute(1, 0, 2).flatten(1)
    assert (torch.corrcoef(layers) - torch.eye(4, dtype=torch.float64)).abs().max() < 2 * bound


def test_without_a_seed_two_runs_draw_different_noise_and_with_one_the_same() -> None:
    def first(seed: int | None) -> Tensor:
        return draws(1, method="dpsgd", noise_multiplier=1.0, seed=seed)[0]

    assert not torch.equal(first(None), first(None))
    assert torch.equal(first(5), first(5))
    assert not torch.equal(first(5), first(6))


def test_the_global_seed_does_not_reach_the_noise() -> None:
    torch.manual_seed(0)
    one = draws(1, method="dpsgd", noise_multiplier=1.0, seed=None)[0]
    torch.manual_seed(0)
    assert not torch.equal(one, draws(1, method="dpsgd", noise_multiplier=1.0, seed=None)[0])


def test_the_default_has_all_256_bits_of_its_key_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two of 256 keys with a single bit give the same coins or the same noise."""
    coins, noise = set(), set()
    for bit in range(256):
        monkeypatch.setattr(secrets, "token_bytes", lambda asked, bit=bit: (1 << bit).to_bytes(asked, "little"))
        chance = Entropy()
        coins.add(chance.uniforms(1, 2).numpy().tobytes())
        noise.add(draw(chance.noise(1), [torch.empty(2)], 1.0)[0].numpy().tobytes())
    assert len(coins) == len(noise) == 256
    monkeypatch.undo()
    assert stats.kstest(Entropy().uniforms(1, 200_000).numpy(), "uniform").pvalue > 1e-4
    assert stats.kstest(draw(Entropy().noise(1), [torch.empty(200_000)], 1.0)[0].numpy(), "norm").pvalue > 1e-4


def test_the_tail_is_that_of_a_normal_distribution() -> None:
    """Beyond 4.5 deviations there are as many draws as there should be, spread as they should be."""
    count = 4_000_000
    values = draw(Seeded(3).noise(1), [torch.empty(count)], 1.0)[0].double().abs()
    beyond = values[values > 4.5]
    expected = 2 * stats.norm.sf(4.5)
    assert stats.binomtest(len(beyond), count, expected).pvalue > 1e-4
    assert stats.kstest(1 - stats.norm.sf(beyond.numpy()) / stats.norm.sf(4.5), "uniform").pvalue > 1e-4


class Written(KeyStream):
    """A stream that was written by hand; beyond its end come zeros. `after` are the bits that come after any word."""

    def __init__(self, *words: int, after: int = 1 << 63) -> None:
        self.left, self.after, self.drawn = list(words), after, 0

    def words(self, count: int, room: Tensor | None = None) -> Tensor:
        these, self.left = [*self.left, *[0] * count][:count], self.left[count:]
        self.drawn += count
        return torch.tensor(these)

    def more(self, start: int, place: int, count: int) -> int:
        return self.after << 64 * (count - 1)


LEAST, MOST = -(2**63), 2**63 - 1


def test_every_word_gives_a_finite_number_and_the_smallest_go_on_to_13_deviations() -> None:
    """64 bits alone would end at 9.4 deviations."""
    like = [torch.empty(2, dtype=torch.float64)]
    for word in (0, -1):
        pair = draw(GaussianNoise(Written(word, after=1)), like, 1.0)[0]
        assert float(pair.abs().max()) == pytest.approx(math.sqrt(2 * 126.5 * math.log(2)), abs=0.03)
    for word in (LEAST, MOST, 1 << 31, -(1 << 31), 1):
        for turn in (LEAST, MOST, 0):
            assert torch.isfinite(draw(GaussianNoise(Written(word, turn)), like, 1.0)[0]).all()


def tuples(values: Tensor) -> Tensor:
    """Every four numbers as one: on a grid single numbers meet by chance, but four do not."""
    whole = (values.double().flatten() * 2.0**18).round().long()
    return (whole[: len(whole) // 4 * 4].view(-1, 4) * torch.tensor([1, 1 << 16, 1 << 32, 1 << 48])).sum(1)


def test_the_two_normal_numbers_of_a_pair_are_independent() -> None:
    """They share a radius and an angle: neither they nor their squares, sizes or signs go together."""
    one, two = draw(Seeded(6).noise(1), [torch.empty(2, 200_000, dtype=torch.float64)], 1.0)[0]
    for change in (lambda t: t, torch.square, torch.abs, torch.sign, lambda t: (t.abs() > 2).double()):
        for a, b in ((one, two), (one, two.roll(1))):
            assert abs(float(torch.corrcoef(torch.stack([change(a), change(b)]))[0, 1])) < 5 / math.sqrt(200_000)
    angle = torch.atan2(one, two).numpy()
    assert stats.kstest(angle / (2 * math.pi) + 0.5, "uniform").pvalue > 1e-4
    assert stats.kstest((one.square() + two.square()).numpy() / 2, "expon").pvalue > 1e-4


def test_zero_standard_deviation_means_no_noise() -> None:
    assert draw(Seeded(0).noise(1), [torch.ones(3)], 0.0)[0].tolist() == [0, 0, 0]


def test_parameters_without_entries_need_no_noise() -> None:
    for like in ([torch.empty(0)], [torch.ones(3), torch.empty(2, 0, dtype=torch.float64)]):
        assert [t.shape for t in draw(Seeded(1).noise(1), like, 1.0)] == [t.shape for t in like]


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_the_same_seed_gives_the_same_noise_on_any_number_of_threads(threads: int) -> None:
    shapes = [torch.empty(3, ROUND // 4), torch.empty(7), torch.empty(ROUND + 5, dtype=torch.float64)]
    before = torch.get_num_threads()
    first = draw(Seeded(4).noise(1), shapes, 0.7)
    try:
        torch.set_num_threads(threads)
        second = draw(Seeded(4).noise(1), shapes, 0.7)
    finally:
        torch.set_num_threads(before)
    for a, b, like in zip(first, second, shapes):
        assert a.dtype == like.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("chance", [Entropy(), Seeded(4)])
def test_rounds_never_repeat_one_another_nor_themselves(chance: Randomness) -> None:
    """A slice drawn twice would cancel in a difference of two released gradients."""
    noise = chance.noise(1)
    like = torch.empty(8, ROUND // 16, dtype=torch.float64)
    draws = torch.cat([draw(noise, [like, like], 1.0)[k] for k in (0, 1, 0)])
    assert len(tuples(draws).unique()) == draws.numel() // 4
    wide = draw(noise, [torch.empty(2 * ROUND)], 1.0)[0].view(32, -1)[:, :2000]
    off = torch.corrcoef(wide) - torch.eye(32)
    assert off.abs().max() < 5.5 / math.sqrt(2000)
    assert float(wide.std()) == pytest.approx(1.0, rel=std_interval(wide.numel()))


def test_coins_and_noise_of_one_key_have_nothing_in_common() -> None:
    chance = Entropy()
    coins = [chance._sampling.words(4096) for _ in range(2)]
    noise = [chance._noise._stream.words(4096) for _ in range(2)]
    assert len(torch.cat(coins + noise).unique()) == 4 * 4096


def test_a_copy_and_a_fork_have_keys_of_their_own() -> None:
    chance = Entropy()
    copies = [copy.deepcopy(chance), copy.deepcopy(chance), pickle.loads(pickle.dumps(chance))]
    assert len(torch.cat([each.uniforms(1, 4) for each in (chance, *copies)]).unique()) == 16
    before = chance._sampling
    before._process = (-1, 0)
    chance.noise(1)
    assert chance._sampling is not before


def test_under_a_seed_the_noise_of_a_step_follows_from_its_number_alone() -> None:
    like = [torch.empty(1000, dtype=torch.float64)]
    first, second, again = (draw(Seeded(4).noise(number), like, 1.0)[0] for number in (7, 8, 7))
    assert torch.equal(first, again)
    assert len(tuples(torch.cat([first, second])).unique()) == 500
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(1000)
    big = torch.cat([draw(Seeded(4).noise(number), [torch.empty(20)], 1.0)[0] for number in range(1000)])
    assert stats.kstest(big.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("same_number", [False, True])
def test_noise_that_was_lent_before_a_fork_is_not_drawn_after_it(
    same_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child may even have the number of its parent, in a namespace of its own."""
    if same_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    chance, (reader, writer) = Entropy(), os.pipe()
    held = chance.noise(1)
    child = os.fork()
    if child == 0:
        try:
            draw(held, [torch.empty(4)], 1.0)
        except RuntimeError:
            os.write(writer, draw(chance.noise(1), [torch.empty(4)], 1.0)[0].numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    drawn = os.read(reader, 64)
    os.close(reader)
    assert len(drawn) == 16
    assert drawn != draw(held, [torch.empty(4)], 1.0)[0].numpy().tobytes()


def test_how_much_was_drawn_is_counted() -> None:
    noise, counts = Seeded(1).noise(1), []
    for size in (1, 2, 5, 0):
        draw(noise, [torch.empty(size)], 1.0)
        counts.append(noise.drawn)
    assert counts == [2, 4, 10, 10]


def test_a_resumed_run_without_a_seed_draws_new_noise() -> None:
    like = [torch.empty(10)]
    assert not torch.equal(draw(Entropy().noise(3), like, 1.0)[0], draw(Entropy().noise(3), like, 1.0)[0])


def test_the_noise_of_single_precision_parameters_is_drawn_in_double_precision() -> None:
    for number in range(1, 4):
        single, double = (
            draw(Seeded(5).noise(number), [torch.zeros(1000, dtype=kind)], 1.0)[0]
            for kind in (torch.float32, torch.float64)
        )
        assert torch.equal(single, double.float())


def test_gradients_have_the_memory_format_of_their_parameters() -> None:
    """Fused optimizers read a gradient in its parameter's order."""
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    like = [conv.weight, torch.empty(5, 7).T, torch.empty(0, 3), torch.empty(())]
    plain = [torch.empty(t.shape) for t in like]
    for a, b, parameter in zip(draw(Seeded(1).noise(1), like, 1.0), draw(Seeded(1).noise(1), plain, 1.0), like):
        assert torch.equal(a, b)
        assert a.stride() == parameter.stride()
        assert not a.requires_grad
    before = conv.weight.detach().clone()
    optimizer = torch.optim.SGD(conv.parameters(), lr=1.0, fused=True)
    conv.weight.grad = draw(Seeded(1).noise(1), [conv.weight], 1.0)[0]
    optimizer.step()
    torch.testing.assert_close(conv.weight.detach(), before - plain_noise(conv.weight))


def plain_noise(parameter: Tensor) -> Tensor:
    return draw(Seeded(1).noise(1), [torch.empty(parameter.shape)], 1.0)[0]
