"""The plan says which rule every module uses and why; no choice of rule, block or budget changes a result."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients import Capture, compiled
from lmdp.gradients import rows as pieces
from lmdp.gradients.contract import Sizes
from lmdp.gradients.plan import Choices, by_cost, forms_again, rule_for
from lmdp.layers import LayerMap
from tests.gradients.reference import compare, one_by_one, quadratic, split
from tests.gradients.test_rules import DOUBLE, KINDS, made

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's, of a kind


class Sequences(nn.Module):
    """Every kind of line that a plan can have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.grouped = nn.Conv1d(16, 16, 3, padding=1, groups=4)
        self.wide = nn.Linear(16, 1200)
        self.norm = nn.LayerNorm(1200)
        self.narrow = nn.Linear(1200, 16)
        self.twice = nn.Linear(16, 16)
        self.act = nn.PReLU()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.grouped(self.table(x).transpose(1, 2)).transpose(1, 2)
        h = self.narrow(self.norm(torch.tanh(self.wide(h))))
        h = self.twice(torch.tanh(self.twice(h)))
        return self.head(self.act(h).mean(1))


def private(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> tuple[lmdp.PrivacyEngine, torch.optim.SGD]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = lmdp.PrivacyEngine()
    settings: dict[str, Any] = {"noise_multiplier": 0, "max_grad_norm": 1.0, "method": "dpsgd"}
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        poisson_sampling=False,
        **(settings | options),
    )
    return engine, optimizer


def released(model: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def clipped_by_hand(model: nn.Module, x: Tensor, y: Tensor, expected_batch_size: int) -> dict[str, Tensor]:
    def loss(m: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(pair[0]), pair[1], reduction="sum")

    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for gradient in one_by_one(model, loss, [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]):
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        for name, g in gradient.items():
            total[name] += g * min(1.0, 1.0 / float(norm)) / expected_batch_size
    return total


def test_the_plan_names_every_module_its_rule_and_the_reason() -> None:
    torch.manual_seed(0)
    model, x, y = Sequences(), torch.randint(0, 20, (6, 5)), torch.randint(0, 3, (6,))
    engine, optimizer = private(model, x, y)
    assert {m.rule for m in engine.plan().modules if m.kind == "Linear"} == {"either"}
    released(model, optimizer, x, y)
    plan = engine.plan(numbers=True)
    rules = {m.name: m.rule for m in plan.modules}
    assert rules == {
        "table": "touched rows",
        "grouped": "formed",
        "wide": "gram",
        "norm": "formed",
        "narrow": "gram",
        "twice": "formed",
        "act": "generic",
        "head": "either",  # it took in one position an example, which leaves no choice
    }
    text = str(plan)
    for module in plan.modules:
        assert module.reason
        assert any(line.startswith(module.name) and module.reason in line for line in text.splitlines())
    assert "no memory budget" in text
    assert text.splitlines()[-1] == compiled.description()


def test_a_plan_without_numbers_is_the_same_whatever_the_batches_were() -> None:
    plans = {}
    for length in (1, 2, 5, 9):
        torch.manual_seed(0)
        model, x, y = Sequences(), torch.randint(0, 20, (6, length)), torch.randint(0, 3, (6,))
        for budget in (None, 10**6):
            engine, optimizer = private(model, x, y, memory_budget=budget)
            released(model, optimizer, x, y)
            plans[length, budget] = str(engine.plan())
            assert "not private" in str(engine.plan(numbers=True))
            engine.detach()
    assert len({plans[length, None] for length, _ in plans}) == 1
    assert len({plans[length, 10**6] for length, _ in plans}) == 1
    assert "not private" not in plans[5, None]


@pytest.mark.parametrize("module", [nn.Linear(32, 48), nn.Linear(300, 300), nn.Conv2d(8, 16, 3, stride=2)], ids=str)
def test_the_plan_tells_up_to_which_length_norms_come_from_gram_matrices(module: nn.Module) -> None:
    capture = Capture(module, LayerMap.of(module))
    (line,) = capture.plan().modules
    capture.detach()
    (limit,) = [int(word) for word in line.reason.split() if word.isdigit()]
    features, weights = rule_for(module).features(module), module.weight.numel()
    for positions, gram in ((limit, True), (limit + 1, False)):
        assert by_cost(Sizes(positions, features, weights, 1, 1)) is gram


def test_the_plan_says_whether_its_inner_loops_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "vector_bytes", lambda: 32)
    assert compiled.description() == "inner loops: compiled, for vectors of 32 bytes"
    monkeypatch.setattr(compiled, "vector_bytes", lambda: None)
    assert "C compiler" in compiled.description()
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.description() == "inner loops: PyTorch (LMDP_COMPILED=0)"


@pytest.mark.parametrize("budget", [1, 60_000, 150_000, 10**9])
@pytest.mark.filterwarnings("ignore:memory_budget is")
def test_a_memory_budget_moves_layers_to_the_lean_rule_and_releases_the_same(budget: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Flatten(), nn.Linear(640, 3))
    model, x, y = model.double(), torch.randn(8, 20, 32, dtype=torch.float64), torch.randint(0, 3, (8,))
    expected = clipped_by_hand(model, x, y, len(x))
    engine, optimizer = private(model, x, y, memory_budget=budget)
    for _ in range(3):
        for name, value in released(model, optimizer, x, y).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
    plan = engine.plan(numbers=True)
    formed, gram = 8 * 8 * 32 * 48, 8 * 8 * 20 * (32 + 48)
    assert gram > formed  # here the per-example gradients are the leaner of the two
    assert len(x) * plan.kept_bytes <= max(budget, 2 * formed)
    assert all(m.rule == "formed" for m in plan.modules if m.kept_bytes is not None)


def test_a_tight_budget_takes_gram_where_it_is_lean_and_says_what_it_costs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Flatten(), nn.Linear(64 * 30, 3))
    model, x, y = model.double(), torch.randn(4, 30, 64, dtype=torch.float64), torch.randint(0, 3, (4,))
    expected = clipped_by_hand(model, x, y, len(x))
    formed, gram = 4 * 8 * 64 * 96, 4 * 8 * 30 * (64 + 96)
    for budget, rules in (
        (2 * formed, ["formed", "formed"]),
        (formed + gram, ["formed", "gram"]),
        (2 * gram, ["gram"] * 2),
    ):
        engine, optimizer = private(model, x, y, memory_budget=budget)
        for _ in range(2):
            for name, value in released(model, optimizer, x, y).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        plan = engine.plan(numbers=True)
        chosen = [m for m in plan.modules if m.kept_bytes is not None]
        assert sorted(m.rule for m in chosen) == rules
        assert all("% more work" in m.reason for m in chosen if m.rule == "gram")
        assert len(x) * plan.kept_bytes <= budget
        engine.detach()


def test_a_budget_that_cannot_be_met_says_so_once_and_one_of_no_bytes_is_refused() -> None:
    plan = Choices(memory_budget=100)
    plan.prefers_gram("layer", Sizes(3, 10, 50, 40, 2))
    with pytest.warns(UserWarning, match="leanest rules keep more .* max_physical_batch_size"):
        plan.begin(2)
    plan.begin(3)
    with pytest.raises(ValueError, match="memory_budget is 0"):
        private(nn.Linear(2, 2), torch.zeros(2, 2), torch.zeros(2).long(), memory_budget=0)


def test_long_sequences_are_formed_and_short_ones_of_wide_features_are_not() -> None:
    def sizes(positions: int, width: int, batch: int = 8) -> Sizes:
        return Sizes(positions, 2 * width, width**2, 2 * width * positions, batch)

    assert [by_cost(sizes(t, 256)) for t in (2, 16, 1024, 8192)] == [True, True, False, False]
    assert by_cost(sizes(128, 4096, batch=64))


def test_long_gradients_are_formed_twice_where_what_they_are_formed_from_is_much_less_and_nobody_set_a_budget() -> None:
    def sizes(positions: int, inputs: int, outputs: int, able: bool = True) -> Sizes:
        features = inputs + outputs
        return Sizes(positions, features, inputs * outputs, positions * features, 16, can_form_again=able)

    assert forms_again(sizes(128, 384, 1536))
    assert not forms_again(sizes(128, 384, 1536, able=False))
    assert not forms_again(sizes(256, 384, 1536))  # x and g are nearly as much
    assert not forms_again(sizes(16, 128, 128))  # few numbers
    free, bounded = Choices(), Choices(memory_budget=2**40)
    for choices in (free, bounded):
        choices.prefers_gram("layer", sizes(200, 1024, 1024))
        choices.begin(16)
    assert free.forms_again(sizes(200, 1024, 1024))
    assert not bounded.forms_again(sizes(200, 1024, 1024))
    assert free.kept == 16 * 4 * 200 * 2048
    assert bounded.kept == 16 * 4 * 1024**2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "linear" in kind or kind.startswith("called")])
def test_gradients_that_are_formed_twice_are_the_same_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "FEW", 1)
    monkeypatch.setattr(pieces, "SMALL", 1)  # so that there are several blocks
    monkeypatch.setattr(Choices, "prefers_gram", lambda self, name, sizes: False)
    found = []
    for again in (True, False):
        monkeypatch.setattr(Choices, "forms_again", lambda self, sizes, again=again: again)
        model, batch = made(kind, torch.float32)
        layers = LayerMap.of(model)
        capture = Capture(model, layers)
        quadratic(model, batch).backward()
        gradients = capture.take()
        capture.detach()
        size = gradients.batch_size
        scales = torch.rand(2, size, len(layers), generator=torch.Generator().manual_seed(0)).unbind()
        dropped = torch.arange(size) == 1
        sums = gradients.weighted_sums(scales, layers) + gradients.without(dropped).weighted_sums(scales, layers)
        rows = {name: t for named in gradients.pieces for name, t in named.piece.per_example().items()}
        found.append([gradients.squared_norms(layers), *(t for each in (*sums, rows) for t in each.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_last_sums_are_the_same_and_let_go_of_each_gradient_in_turn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 7), nn.LayerNorm(7))
    layers = LayerMap.of(model)
    capture = Capture(model, layers)
    model(torch.randn(5, 3, 8)).square().sum().backward()
    gradients = capture.take()
    capture.detach()
    scales = [torch.rand(5, len(layers)) for _ in range(2)]
    same = replace(gradients, pieces=list(gradients.pieces))
    for total, last in zip(gradients.weighted_sums(scales, layers), same.last_sums(scales, layers), strict=True):
        assert total.keys() == last.keys()
        assert all(torch.equal(total[name], last[name]) for name in total)
    assert not same.pieces
    del same
    alive = [weakref.ref(tensor) for named in gradients.pieces for tensor in named.piece.kept]
    left = [sum(ref() is not None for ref in alive) for _ in gradients.each_sum(scales[:1], layers)]
    assert left == [len(alive)] * len(left)  # not the last ones: they stay
    left = [sum(ref() is not None for ref in alive) for _ in gradients.each_sum(scales[:1], layers, last=True)]
    assert left[-1] == 0
    assert len(set(left)) == 3  # modules


def test_a_larger_batch_makes_a_plan_of_its_own() -> None:
    plan = Choices(memory_budget=4 * 1000 * 64)
    small, large = (Sizes(20, 64, 1000, 800, b) for b in (64, 70))
    assert plan.prefers_gram("layer", small)  # lean until all layers are known
    plan.begin(64)
    assert not plan.prefers_gram("layer", small)
    plan.begin(70)
    assert plan.prefers_gram("layer", large)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith(("linear on", "conv", "group", "layer", "called"))])
@pytest.mark.parametrize("chunk", [1, 500])
def test_the_size_of_a_block_changes_nothing(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    monkeypatch.setattr(pieces, "FEW", 1)
    monkeypatch.setattr(pieces, "SMALL", chunk)
    monkeypatch.setattr(pieces, "SHORT", 2)
    monkeypatch.setattr(pieces, "LONG", 4)
    model, batch = made(kind, torch.float64)
    assert compare(model, quadratic, batch, split(batch)).worst <= DOUBLE


@pytest.mark.parametrize("chunk", [3000, 2**20])
def test_a_batch_of_another_size_finds_nothing_of_an_earlier_one(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is used again and again, within a step and between steps; an old value in it would be another's data."""
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, stride=2, padding=2), nn.GroupNorm(1, 5), nn.Tanh(), nn.Flatten(), nn.Linear(125, 3)
    ).double()
    x, y = torch.randn(9, 2, 7, 7, dtype=torch.float64), torch.randint(0, 3, (9,))
    _, optimizer = private(model, x, y)
    for size in (9, 4, 0, 7, 1, 9, 0, 2):
        found = released(model, optimizer, x[:size], y[:size]) if size else empty_step(model, optimizer, x, y)
        for name, value in clipped_by_hand(model, x[:size], y[:size], 9).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
        torch.full((500_000,), torch.nan)  # whoever reads memory that is not its own finds this


def empty_step(model: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    optimizer.zero_grad()
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
