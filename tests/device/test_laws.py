"""The laws of the engine hold on a device that is not the host, with the host's results; it is hardly ever asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients.compiled.far import FarStream
from lmdp.gradients.contract import Example
from lmdp.guards import modules
from lmdp.methods import METHODS
from lmdp.private.noise import Entropy, Secure, Seeded
from lmdp.risk.shadow import Schedule
from tests.device.device import Crossings, counting
from tests.gradients.reference import captured, layer_norms, one_by_one, split
from tests.gradients.test_rule_table import inputs, records
from tests.private.probe import draw
from tests.private.test_sensitivity import aligned, moved, outlier
from tests.tables import certified, choices

TRANSFERS, BYTES_PER_LAYER = 2, 64


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.LayerNorm(12),
        nn.PReLU(12),  # by the generic rule
        nn.Linear(12, 3),
    )


class Text(nn.Module):
    """Embedding, attention over positions, dropout in a module that the generic rule runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.places = nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.block(x).mean(1))


def images(count: int = 40) -> TensorDataset:
    x = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, torch.arange(count) % 3)


def tokens(count: int = 40) -> TensorDataset:
    x = torch.randint(0, 30, (count, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(count) % 3)


Make = Callable[[], nn.Module]


def begin(
    make: Make,
    device: Any,
    data: TensorDataset,
    dtype: torch.dtype = torch.float64,
    secure: bool = False,
    **options: Any,
) -> tuple[lmdp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = make().to(dtype).to(device)
    if options.get("weights") == "public":
        options = {"public_data": tuple(t.flip(0) for t in data.tensors), "public_every": 3} | options
    engine = lmdp.PrivacyEngine(secure_mode=secure)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        data_loader=DataLoader(data, batch_size=14),
        max_grad_norm=1.0,
        **({"noise_multiplier": 0.7} | options),
    )
    return engine, model, optimizer, loader


def train(training: tuple[Any, ...], device: Any, steps: int) -> list[Crossings]:
    """So many steps more; of each what crossed over between device and host."""
    engine, model, optimizer, loader = training
    crossed, until = [], engine.steps + steps
    while engine.steps < until:
        for x, y in loader:
            x, y, before = x.to(device), y.to(device), engine.steps
            with counting(stacks=True) as crossings:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if engine.steps > before:
                crossed.append(crossings)
            if engine.steps == until:
                break
    return crossed


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def of_choice(method: str, source: str) -> dict[str, Any]:
    return {"method": method, "weights": source} if METHODS[method].sources else {"method": method}


@pytest.mark.parametrize(("rule", "example"), records())
def test_every_rule_is_exact_on_a_device(pretend: torch.device, rule: Any, example: Example) -> None:
    torch.manual_seed(0)
    module, batch = example.make().double(), inputs(example, torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        flat = (output[0] if isinstance(output, tuple) else output).reshape(len(batch), -1)
        return (flat.square() * torch.linspace(0.5, 1.5, flat.shape[1]).to(flat)).sum() / 2

    expected = one_by_one(module, loss, split(batch))
    gradients, layers = captured(copy.deepcopy(module).to(pretend), loss, batch.to(pretend))
    norms = gradients.squared_norms(layers).sqrt()
    assert norms.device == pretend
    torch.testing.assert_close(norms.cpu(), layer_norms(expected, layers), rtol=1e-8, atol=1e-12)
    scales = torch.rand(norms.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (sums,) = gradients.weighted_sums([scales.to(pretend)], layers)
    for name, at in layers.index.items():
        wanted = sum(scale * each[name] for scale, each in zip(scales[:, at], expected))
        torch.testing.assert_close(sums[name].cpu(), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("method", "source"), choices())
@pytest.mark.parametrize("make", [small, Text])
def test_a_seeded_training_gives_the_weights_that_the_host_gives(
    pretend: torch.device, make: Make, method: str, source: str
) -> None:
    data = images() if make is small else tokens()
    results = []
    for device in ("cpu", pretend):
        training = begin(make, device, data, seed=3, **of_choice(method, source))
        train(training, device, 5)
        results.append(weights_of(training[1]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("method", "source"), choices())
def test_a_step_asks_the_device_for_little_and_once_for_each_purpose(
    pretend: torch.device, method: str, source: str
) -> None:
    for make, data in ((small, images()), (Text, tokens())):
        training = begin(
            make, pretend, data, torch.float32 if make is Text else torch.float64, **of_choice(method, source)
        )
        for crossed in train(training, pretend, 9)[3:]:  # without looks, and without the first steps of each way
            told = "\n".join(map(str, crossed.crossings))
            assert crossed.to_host <= TRANSFERS, told
            assert crossed.synchronisations <= 2, told
            assert crossed.bytes_to_host <= BYTES_PER_LAYER * len(training[0].layers), told


@pytest.mark.parametrize(("method", "source"), certified())
def test_a_sound_training_on_a_device_is_certified_and_says_where_its_noise_is_made(
    pretend: torch.device, method: str, source: str
) -> None:
    training = begin(small, pretend, images(), **of_choice(method, source))
    train(training, pretend, 4)
    statement = training[0].privacy_statement(1e-3)
    assert statement.certified, statement
    assert "on pretend noise from bits of the device's own generator" in statement.noise_source


def test_in_secure_mode_no_bit_is_made_on_the_device(pretend: torch.device) -> None:
    training = begin(small, pretend, images(), secure=True)
    crossed = train(training, pretend, 6)[-1]
    assert crossed.to_host <= TRANSFERS
    assert crossed.bytes_to_device >= 8 * weights_of(training[1]).numel()
    statement = training[0].privacy_statement(1e-3)
    assert statement.certified, statement
    assert "own generator" not in statement.noise_source


@pytest.mark.parametrize(("method", "source"), certified())
def test_one_example_moves_what_is_released_by_no_more_than_its_sensitivity(
    pretend: torch.device, method: str, source: str
) -> None:
    batch = aligned(30, torch.Generator().manual_seed(0)).to(pretend)
    public = {"public_data": (batch[:8].cpu(), torch.zeros(8)), "public_every": 1} if source == "public" else {}
    for size in (1e-3, 1.0, 1e3):
        neighbour = torch.cat([batch, outlier(batch, size, 0)])
        gradient, statistic, sensitivity = moved(batch, neighbour, batch, **of_choice(method, source), **public)
        assert gradient <= sensitivity * (1 + 1e-9)
        assert statistic <= 1 + 1e-9


@pytest.mark.parametrize("randomness", [Entropy, Secure, lambda: Seeded(1)], ids=["entropy", "secure", "seeded"])
def test_noise_on_a_device_is_normal_and_of_the_right_size(pretend: torch.device, randomness: Any) -> None:
    source = randomness()
    like = [
        torch.empty(n, device=pretend, dtype=dtype) for n in (1, 100_001) for dtype in (torch.float32, torch.float64)
    ]
    first, second = (draw(source.noise(step), like, 0.3) for step in (1, 2))
    assert [(t.device, t.dtype) for t in first] == [(t.device, t.dtype) for t in like]
    values = torch.cat([t.double().cpu() for t in (*first, *second)]).numpy()
    assert stats.kstest(values / 0.3, "norm").pvalue > 1e-4
    assert len(set(values.tolist())) > 0.8 * len(values)  # steps and parameters have noise of their own
    tail = abs(values / 0.3) > 3
    assert stats.binomtest(int(tail.sum()), len(values), 2 * stats.norm.sf(3)).pvalue > 1e-4


def test_the_device_gets_seeds_that_nobody_else_has(pretend: torch.device) -> None:
    """Neither the global seed reaches the noise, nor does a copy or another engine draw the same."""
    like = [torch.empty(1000, device=pretend)]
    torch.manual_seed(0)
    one, two = Entropy(), Entropy()
    draws = [draw(source.noise(1), like, 1.0)[0] for source in (one, copy.deepcopy(one), two)]
    torch.manual_seed(0)
    draws.append(draw(Entropy().noise(1), like, 1.0)[0])
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def pool(seed: int) -> TensorDataset:
    """Little to learn from, so that it is learnt by heart."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(240, 1, 6, 6, generator=generator), torch.randint(0, 3, (240,), generator=generator)
    )


def test_an_audit_on_a_device_finds_what_it_finds_on_the_host(pretend: torch.device) -> None:
    torch.manual_seed(0)
    model = small().float()
    found = [
        lmdp.audit(copy.deepcopy(model).to(device), pool(1), pool(2), seed=0).to_dict() for device in ("cpu", pretend)
    ]
    for here, there in zip(*(each["layers"] for each in found)):
        assert here["name"] == there["name"]
        assert there["auc"] == pytest.approx(here["auc"], abs=0.02)  # rounding may change the order of a few scores


def test_risk_is_estimated_on_a_device_and_used_there(pretend: torch.device) -> None:
    profile = lmdp.estimate_risk(
        lambda: small().float().to(pretend), pool(3), schedule=Schedule(epochs=2), views=False, seed=0
    )
    assert list(profile.error_rates) == list(lmdp.LayerMap.of(small()).names)
    training = begin(small, pretend, images(), risk=profile.error_rates, method="lm")  # noise, and used as measured
    train(training, pretend, 4)
    assert training[0].privacy_statement(1e-3).certified


def test_no_bit_of_a_device_is_drawn_twice(pretend: torch.device) -> None:
    """Also if words are asked for once more after others have been drawn."""
    stream = FarStream(pretend, seed=1)
    first = stream.words(64)
    once = first()
    second = stream.words(64)()
    assert torch.equal(first(), once)
    third = stream.words(64)()
    every = torch.cat([once, second, third]).tolist()
    assert len(set(every)) == len(every)


class Halves(nn.Module):
    """One half on each device."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        model = small().double()
        self.first, self.second = model[:4].to(first), model[4:].to(second)
        self.at = second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.at))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, "cpu"), ("cpu", 1)], ids=str)
@pytest.mark.parametrize(("method", "source"), choices())
def test_a_model_may_be_spread_over_devices(pretend: torch.device, order: Any, method: str, source: str) -> None:
    first, second = (torch.device("pretend", at) if isinstance(at, int) else torch.device(at) for at in order)
    results = []
    for places in (("cpu", "cpu"), (first, second)):
        torch.manual_seed(0)
        model = Halves(*places)
        engine = lmdp.PrivacyEngine()
        data = images()
        public = {"public_data": tuple(t.flip(0) for t in data.tensors)} if source == "public" else {}
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
            data_loader=DataLoader(data, batch_size=14),
            noise_multiplier=0.0,  # bits are drawn device by device
            max_grad_norm=1.0,
            seed=2,
            **of_choice(method, source),
            **public,
        )
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(places[0])), y.to(places[1])).backward()
                optimizer.step()
        results.append(weights_of(model))
        assert {str(p.grad.device) for p in model.parameters()} == {str(p.device) for p in model.parameters()}
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_a_training_on_a_device_resumes_where_it_was(pretend: torch.device) -> None:
    whole = begin(small, pretend, images(), seed=3)
    train(whole, pretend, 6)
    first = begin(small, pretend, images(), seed=3)
    train(first, pretend, 3)
    saved = copy.deepcopy([part.state_dict() for part in first[:3]])
    first[0].detach()
    second = begin(small, pretend, images(), seed=3)
    for part, state in zip((second[1], second[2], second[0]), (saved[1], saved[2], saved[0])):
        part.load_state_dict(state)
    train(second, pretend, 3)
    torch.testing.assert_close(weights_of(second[1]), weights_of(whole[1]), rtol=1e-9, atol=1e-9)


class Dropped(nn.Module):
    """Dropout and a parameter in one module: the generic rule must draw the same mask again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(36, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten(1), 0.5, self.training) @ self.weight


def test_dropout_under_the_generic_rule_is_drawn_again(pretend: torch.device) -> None:
    training = begin(Dropped, pretend, images(), noise_multiplier=0.0, poisson_sampling=False)
    before = weights_of(training[1])
    train(training, pretend, 3)
    assert not torch.equal(weights_of(training[1]), before)


def test_numbers_that_are_not_finite_count_for_nothing_on_a_device(pretend: torch.device) -> None:
    data = images()
    data.tensors[0][::2] = torch.nan
    training = begin(small, pretend, data, noise_multiplier=0.0, seed=1)
    train(training, pretend, 3)
    assert torch.isfinite(weights_of(training[1])).all()


def test_what_is_changed_on_a_device_behind_the_optimizer_is_seen(pretend: torch.device) -> None:
    training = begin(small, pretend, images())
    train(training, pretend, 3)
    with torch.no_grad():
        next(training[1].parameters()).add_(1)
    train(training, pretend, 2)
    assert "trained parameters were changed" in training[0].privacy_statement(1e-3).verdicts["content"].how


def test_a_mean_over_labels_that_do_not_all_count_is_refused_before_anything_is_released(pretend: torch.device) -> None:
    data = images()
    data.tensors[1][::2] = -100
    training = begin(small, pretend, data)
    before = weights_of(training[1])
    with pytest.raises(RuntimeError, match="mean with ignore_index"):
        train(training, pretend, 1)
    assert torch.equal(weights_of(training[1]), before)
    assert not training[0].privacy_statement(1e-3).certified


def test_examples_that_meet_on_a_device_are_refused(pretend: torch.device) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x.mean(0))

    training = begin(Centred, pretend, images())
    with pytest.raises(RuntimeError, match="examples of a batch meet"):
        train(training, pretend, 3)


def test_a_device_without_double_precision_is_refused_by_name(
    pretend: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "mps" in modules.WITHOUT_DOUBLE
    monkeypatch.setattr(modules, "WITHOUT_DOUBLE", {"pretend"})
    with pytest.raises(ValueError, match=r"on pretend, which has no float64.*model\.to\('cpu'\)"):
        begin(small, pretend, images())
    begin(small, "cpu", images())
