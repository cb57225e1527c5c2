"""One unit is clipped as one: its rows are averaged first, and it moves what is released by at most the sensitivity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import lmdp
from lmdp.data.augment import AUGMENTATIONS, augmentation
from lmdp.guards import common_examples
from lmdp.methods import METHODS
from lmdp.units import COLUMNS
from tests.gradients.reference import layer_norms, one_by_one
from tests.private.probe import private_probe, step
from tests.tables import certified, choices, with_default_source

N, BATCH, K = 30, 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(torch.tanh(self.norm(self.conv(x))), 1))  # type: ignore[no-any-return]


def images(size: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


def views(size: int = N) -> lmdp.Views:
    return lmdp.Views(images(size), K, augmentation(["flip", "crop"]))


def users(size: int = N) -> lmdp.PerUser:
    """Every fourth has one row; others have several."""
    owners = [row // 4 if row % 4 else size + row for row in range(size)]
    return lmdp.PerUser(images(size), owners, K)


def private(loader: DataLoader[Any], **options: Any) -> tuple[lmdp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Net().double()
    engine = lmdp.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "looks_besides": True, "data_loader": loader} | options
    return engine, *engine.make_private(module=model, optimizer=optimizer, **chosen)


def train(model: nn.Module, optimizer: Any, loader: Any, passes: int = 1) -> None:
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", with_default_source())
def test_what_is_released_is_that_of_a_loop_which_averages_each_units_rows_and_then_clips(
    method: str, reduction: str
) -> None:
    torch.manual_seed(0)
    model, units = Net().double(), 5
    x, y = torch.randn(units * K, 1, 6, 6, dtype=torch.float64), torch.randint(0, 3, (units * K,))

    def mean(m: nn.Module, unit: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(unit[0]), unit[1])

    single = one_by_one(model, mean, list(zip(x.split(K), y.split(K))))
    C, rates, engine = 0.5, [0.2, 0.4], lmdp.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(images(), batch_size=BATCH),
        method=method,
        risk=rates,
        noise_multiplier=0,
        max_grad_norm=C,
        poisson_sampling=False,
        loss_reduction=reduction,  # type: ignore[arg-type]
        unit=lmdp.Unit("example", K),
    )
    w, formula = torch.tensor(rates, dtype=torch.float64), METHODS[method].scales
    assert formula is not None
    scale = formula(layer_norms(single, engine.layers), C) * (w / w.norm() if METHODS[method].reweighted else 1.0)
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    for name, at in engine.layers.index.items():
        expected = sum(scale[i, at] * single[i][name] for i in range(units)) / BATCH
        torch.testing.assert_close(model.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("method", "weights"), certified())
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(-6, 6), removed=st.integers(0, 5), rows=st.integers(1, 4))
def test_removing_any_unit_with_all_its_rows_moves_what_is_released_by_at_most_the_sensitivity(
    method: str, weights: str, seed: int, scale: float, removed: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(6, rows, 4, 3, generator=generator, dtype=torch.float64)
    batch[removed] *= 10.0**scale
    neighbour = torch.cat([batch[:removed], batch[removed + 1 :]])
    public = (torch.randn(8, 4, 3, generator=generator, dtype=torch.float64), torch.zeros(8))
    released = []
    for last in (batch, neighbour):
        engine, model, optimizer = private_probe(
            batch.flatten(0, 1), method=method, weights=weights, public_data=public, unit=lmdp.Unit("example", rows)
        )
        step(model, optimizer, batch.flatten(0, 1))
        released.append(step(model, optimizer, last.flatten(0, 1)))
    statement = engine.privacy_statement(1e-5)
    assert float((released[0] - released[1]).norm()) <= statement.sensitivity * (1 + 1e-9)


def test_one_row_too_many_of_a_unit_would_move_it_further_so_the_measurement_can_fail() -> None:
    """Rows that are taken for units of their own move the sum by as many sensitivities as there are rows."""
    batch = torch.ones(6, 4, 4, 3, dtype=torch.float64) * 100
    released = []
    for last in (batch, batch[1:]):
        engine, model, optimizer = private_probe(batch.flatten(0, 1), method="dpsgd")
        released.append(step(model, optimizer, last.flatten(0, 1)))
    assert float((released[0] - released[1]).norm()) > 3.9 * engine.privacy_statement(1e-5).sensitivity


@pytest.mark.parametrize(("method", "weights"), choices())
def test_handing_units_out_in_parts_splits_none_and_changes_nothing(method: str, weights: str) -> None:
    public = images(9).tensors if weights == "public" else None

    def run(part: int | None) -> Tensor:
        data = lmdp.Views(images(), K, augmentation(["crop"]), seed=5)
        engine, model, optimizer, loader = private(
            data.loader(BATCH),
            method=method,
            weights=weights,
            public_data=public,
            max_physical_batch_size=part,
            seed=3,
            check_mixing=False,
        )
        data.moment = lambda: engine.steps
        sizes = []
        for x, y in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert all(size % K == 0 for size in sizes)
        assert part is None or max(sizes) <= part * K
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = run(None)
    for part in (1, 4):
        torch.testing.assert_close(run(part), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("make", "name", "count"), [(views, "example", N), (users, "user", 16)])
def test_a_training_on_units_is_certified_and_speaks_of_them(make: Any, name: str, count: int) -> None:
    data = make()
    assert len(data) == count
    engine, model, optimizer, loader = private(data.loader(BATCH), method="dpsgd")
    train(model, optimizer, loader, passes=2)
    statement = engine.privacy_statement(1e-3)
    assert statement.certified, statement.reasons
    assert (statement.unit, statement.rows_per_unit) == (name, K)
    assert statement.neighbouring_relation == f"add or remove one {name}"
    assert statement.sample_rate == BATCH / count
    assert statement.expected_batch_size == pytest.approx(BATCH)
    assert f"one {name}: the gradients of its {K} rows are averaged" in str(statement)
    assert lmdp.PrivacyStatement.from_dict(statement.to_dict()) == statement
    assert f"the number of {name}s counts as public" in statement.verdicts["account"].how


class Averaging(Net):
    """Takes the mean over the rows off them: even the rows of one unit may not meet."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * x.mean(0, keepdim=True))


def test_rows_that_meet_are_refused_whether_they_are_of_one_unit_or_of_several() -> None:
    torch.manual_seed(0)
    model = Averaging().double()
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), lmdp.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=views().loader(BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(RuntimeError, match="meet"):
        train(model, optimizer, loader, passes=2)


def test_mixing_what_a_loop_makes_of_several_units_is_found_by_the_looks() -> None:
    _, model, optimizer, loader = private(views().loader(BATCH), method="dpsgd")
    with pytest.raises(RuntimeError, match="meet"):
        train(model, optimizer, ((x + 0.5 * x.roll(K, 0), y) for x, y in loader))


def test_a_loop_that_makes_the_views_itself_says_so_by_the_unit() -> None:
    engine, model, optimizer, loader = private(
        DataLoader(images(), batch_size=BATCH), method="dpsgd", unit=lmdp.Unit("example", 2)
    )
    for _ in range(2):
        for x, y in loader:
            rows = torch.stack([x, x.flip(3)], dim=1).flatten(0, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(rows), y.repeat_interleave(2)).backward()
            optimizer.step()
    statement = engine.privacy_statement(1e-3)
    assert statement.certified, statement.reasons
    assert statement.rows_per_unit == 2


def test_a_loop_that_passes_other_rows_than_the_unit_has_is_refused() -> None:
    _, model, optimizer, loader = private(DataLoader(images(), batch_size=BATCH), unit=lmdp.Unit("example", 2))
    with pytest.raises((RuntimeError, ValueError), match=r"number of (rows|examples)"):
        train(model, optimizer, loader)


def test_a_run_goes_on_only_with_the_same_unit() -> None:
    states = []
    for rows in (1, 2):
        engine, *_ = private(DataLoader(images(), batch_size=BATCH), unit=lmdp.Unit("example", rows))
        states.append(engine.state_dict())
    with pytest.raises(ValueError, match="unit"):
        engine.load_state_dict(states[0])
    assert "unit" not in states[0]["identity"]  # states of earlier versions stay good


def test_the_views_of_an_example_follow_from_it_alone() -> None:
    data = views()
    data.moment = lambda: 7
    together = data.__lmdp_examples_at__(torch.tensor([4, 9, 2]))
    alone = data.__lmdp_examples_at__(torch.tensor([9]))
    assert torch.equal(together[0][K : 2 * K], alone[0])
    assert torch.equal(together[1][K : 2 * K], alone[1])
    data.moment = lambda: 8
    assert not torch.equal(data.__lmdp_examples_at__(torch.tensor([9]))[0], alone[0])


def test_the_numbers_that_views_are_drawn_from_are_uniform_and_unlike_each_other() -> None:
    data = lmdp.Views(images(2000), 4, augmentation(["flip"]), seed=1)
    data.moment = lambda: 0
    numbers = data._uniforms(torch.arange(2000)).double()
    assert numbers.shape == (8000, COLUMNS)
    assert torch.all((numbers.mean(0) - 0.5).abs() < 5 * (1 / 12 / 8000) ** 0.5)
    assert torch.all((torch.corrcoef(numbers.T) - torch.eye(COLUMNS)).abs() < 5 / 8000**0.5)
    assert len(torch.unique(numbers[:, 0])) > 7900


@pytest.mark.parametrize("name", AUGMENTATIONS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), side=st.integers(1, 9))
def test_every_augmentation_keeps_shapes_and_changes_a_row_by_its_own_numbers_only(
    name: str, seed: int, rows: int, side: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, side, side + 1, generator=generator)
    uniforms = torch.rand(rows, COLUMNS, generator=generator)
    change = augmentation([name])
    seen = change(x, uniforms)
    assert seen.shape == x.shape
    for i in range(rows):
        assert torch.equal(change(x[i : i + 1], uniforms[i : i + 1])[0], seen[i])
        assert torch.isin(seen[i], x[i]).all()


def test_a_user_with_more_rows_has_some_left_out_at_random_and_one_with_fewer_has_rows_again() -> None:
    data = lmdp.PerUser(TensorDataset(torch.arange(9)), list("aaaaaabbc"), rows=3, seed=0)
    torch.manual_seed(0)
    drawn = [sorted(int(row[0]) for row in data[0]) for _ in range(200)]
    assert all(len(set(rows)) == 3 and set(rows) <= set(range(6)) for rows in drawn)
    assert len({tuple(rows) for rows in drawn}) == 20  # all ways to leave three of six out
    assert {tuple(sorted(int(row[0]) for row in data[1])) for _ in range(50)} == {(6, 6, 7), (6, 7, 7)}
    assert [int(row[0]) for row in data[2]] == [8, 8, 8]


@pytest.mark.parametrize("make", [views, users])
def test_what_is_drawn_for_a_unit_cannot_be_told_from_torchs_seed(make: Any) -> None:
    """Training scripts seed torch with a constant; what nobody may know must not follow from it."""
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        data = make()
        seen.append([float(row[0].sum()) for unit in range(len(data)) for row in data[unit]])
    assert seen[0] != seen[1]


def test_what_is_no_unit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="1 row or more"):
        lmdp.Unit("user", 0)
    with pytest.raises(ValueError, match="one user for each row"):
        lmdp.PerUser(images(), [1, 2], 3)
    with pytest.raises(TypeError, match=r"lmdp\.Unit"):
        private(DataLoader(images(), batch_size=BATCH), unit="user")
    with pytest.raises(ValueError, match="leave unit out"):
        private(views().loader(BATCH), unit=lmdp.Unit("user", 2))
    with pytest.raises(ValueError, match="flip"):
        augmentation(["flop"])


def column(names: list[int]) -> Any:
    """As a table of Hugging Face hands it out when it is asked for tensors."""
    datasets = pytest.importorskip("datasets", reason="an optional extra")
    return datasets.Dataset.from_dict({"user": names}).with_format("torch")["user"]


NAMED_ALIKE: dict[str, Any] = {
    "a list": list,
    "a tensor": torch.tensor,
    "an array": np.array,
    "tensors without dimensions": lambda names: [torch.tensor(name) for name in names],
    "tensors of one number": lambda names: [torch.tensor([name]) for name in names],
    "numbers of numpy": lambda names: [np.int64(name) for name in names],
    "a column of tensors": column,
    "texts of numpy": lambda names: np.array([f"user {name}" for name in names]),
    "texts": lambda names: [f"user {name}" for name in names],
    "bytes": lambda names: [b"%d" % name for name in names],
    "tuples": lambda names: [("a", name) for name in names],
}


@pytest.mark.parametrize("kind", NAMED_ALIKE)
def test_rows_of_one_user_are_together_however_users_are_named(kind: str) -> None:
    data = lmdp.PerUser(images(), NAMED_ALIKE[kind]([row // 6 for row in range(N)]), rows=2)
    assert len(data) == 5
    assert [len(data.stored(user)) for user in range(5)] == [6] * 5


class Frame:
    """What a table of pandas or polars has in common: its length is that of its rows, and it iterates its columns."""

    columns = ("user",) * N

    def __len__(self) -> int:
        return N


NAMED_UNLIKE: dict[str, tuple[Any, str]] = {
    "nan": (np.full(N, np.nan), "row 0 has the user nan"),
    "none": ([0] * 4 + [None] * (N - 4), "row 4 has the user None.*leave them out"),
    "objects": ([object() for _ in range(N)], "row 0 has the user .*as text or whole numbers"),
    "rows of a matrix": (torch.zeros(N, 2), "row 0 has the user"),
    "tensors of two": ([torch.zeros(2)] * N, "row 0 has the user"),
    "tuples of tensors": ([(torch.tensor(1),)] * N, "row 0 has the user"),
    "a dictionary": (dict.fromkeys(range(N), 0), "users is a dict.*order of the rows"),
    "a set": (set(range(N)), "users is a set"),
    "one text": ("a" * N, "users is a str"),
    "a table": (Frame(), "users is a Frame"),
    "a generator": ((0 for _ in range(N)), "users is a generator"),
    "numbers and their digits": ([7] * 4 + ["7"] * (N - 4), "row 0 has 7, row 4 has '7'.*Name all alike"),
}


@pytest.mark.parametrize("kind", NAMED_UNLIKE)
def test_users_of_whom_nobody_can_tell_whether_they_are_the_same_are_refused(kind: str) -> None:
    users, told = NAMED_UNLIKE[kind]
    with pytest.raises(TypeError, match=told):
        lmdp.PerUser(images(), users, rows=2)


def test_names_that_look_alike_are_one_person() -> None:
    """A letter with its mark can be written as one sign or as two, and a space at the end is not seen."""
    users = ["Zo\u00eb", "Zoe\u0308", " Zo\u00eb ", *["Max"] * (N - 3)]
    assert len(lmdp.PerUser(images(), users, rows=2)) == 2
    assert len(lmdp.PerUser(images(), [(name, 1) for name in users], rows=2)) == 2


def unchanged(rows: Tensor, uniforms: Tensor) -> Tensor:
    return rows


def repeated(kind: str) -> Dataset[Any]:
    plain = images()
    again = {"joined": ConcatDataset([plain, plain]), "named": Subset(plain, [*range(N), 0, 0])}
    return again[kind]


@pytest.mark.parametrize("kind", ["joined", "named"])
def test_views_of_repeated_examples_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="Take each once"):
        lmdp.Views(repeated(kind), K, unchanged)
    later = views()
    later.dataset = repeated(kind)
    with pytest.raises(ValueError, match="Take each once"):
        private(later.loader(BATCH))


@pytest.mark.parametrize("make", [views, users])
def test_datasets_of_units_that_are_joined_are_refused_and_the_remedy_trains(make: Any) -> None:
    first = make()
    joined: ConcatDataset[Any] = ConcatDataset([first, Subset(make(), [0])])
    for wrapped in (joined, Subset(joined, [0, 1])):
        with pytest.raises(ValueError, match=f"Join the rows first: lmdp.{type(first).__name__}"):
            private(DataLoader(wrapped, batch_size=BATCH, collate_fn=first.collate), unit=first.unit)
    rows: ConcatDataset[Any] = ConcatDataset([images(), images()])
    remedy = lmdp.PerUser(rows, [*range(N), *range(N)], K) if make is users else lmdp.Views(rows, K, unchanged)
    _, model, optimizer, loader = private(remedy.loader(BATCH))
    train(model, optimizer, loader)


def test_some_of_the_users_are_users() -> None:
    data = users()
    loader: DataLoader[Any] = DataLoader(Subset(data, range(9)), batch_size=3, collate_fn=data.collate)
    engine, *_ = private(loader)
    assert (engine.mechanism.unit, engine.mechanism.rows_per_unit, engine.mechanism.sample_rate) == ("user", K, 1 / 3)


@pytest.mark.parametrize("make", [views, users])
def test_what_a_seed_that_is_given_draws_is_not_certified(make: Any) -> None:
    """It follows from the place in the data, which one unit less changes for those behind it."""
    data = make()
    seeded = (
        lmdp.PerUser(images(), list(range(N)), K, seed=5)
        if make is users
        else lmdp.Views(images(), K, augmentation(["flip"]), seed=5)
    )
    for each, state in ((data, "holds"), (seeded, "not established")):
        loader: DataLoader[Any] = DataLoader(Subset(each, range(12)), batch_size=4, collate_fn=each.collate)
        engine, *_ = private(loader, allow_large_delta=True)
        verdict = engine.privacy_statement(1e-2).verdicts["numbers"]
        assert verdict.state == state
        assert ("a seed (5) and its place" in verdict.how) == (each is seeded)


def test_a_name_for_rows_of_which_nobody_knows_whose_they_are_is_refused_and_the_remedy_trains() -> None:
    with pytest.raises(ValueError, match=r"lmdp.PerUser\(dataset, users, rows=1, name='patient'\)"):
        private(DataLoader(images(), batch_size=BATCH), unit=lmdp.Unit("patient"))
    remedy = lmdp.PerUser(images(), range(N), rows=1, name="patient")
    engine, model, optimizer, loader = private(remedy.loader(BATCH))
    train(model, optimizer, loader)
    assert engine.mechanism.neighbouring_relation == "add or remove one patient"


class Wrapped(Dataset[Any]):
    """A dataset of a user's own around another."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]


ALL = images()
ROWS_OF = ALL.tensors
PAIRS: dict[str, tuple[Any, Any, int]] = {
    "the same": (ALL, ALL, N),
    "its tensors": (ALL, ROWS_OF, N),
    "some of its rows": (ALL, tuple(tensor[:7] for tensor in ROWS_OF), 7),
    "its inputs with other labels": (ALL, (ROWS_OF[0], torch.zeros(N)), N),
    "a loader": (ALL, DataLoader(ALL, batch_size=3), N),
    "parts that overlap": (Subset(ALL, range(20)), Subset(ALL, range(15, N)), 5),
    "parts that are joined": (ConcatDataset([Subset(ALL, [0]), images()]), Subset(ALL, [0, 1]), 1),
    "wrapped": (ALL, Wrapped(ALL), N),
    "behind views": (lmdp.Views(ALL, K, unchanged), ALL, N),
    "behind some views": (Subset(lmdp.Views(ALL, K, unchanged), [0, 1]), Subset(ALL, [1, 2]), 1),
    "behind users": (lmdp.PerUser(ALL, range(N), K), ALL, N),
    "behind some users": (Subset(lmdp.PerUser(ALL, range(N), K), [0]), Subset(ALL, range(4)), 4),
    "views of it": (ALL, lmdp.Views(ALL, K, unchanged), N),
    "other parts": (Subset(ALL, range(20)), Subset(ALL, range(20, N)), 0),
    "other parts, behind views": (lmdp.Views(Subset(ALL, range(20)), K, unchanged), Subset(ALL, range(20, N)), 0),
    "other examples with the same labels": (ALL, (images().tensors[0], ROWS_OF[1]), 0),
    "a constant beside both": (
        *(TensorDataset(images().tensors[0], torch.zeros(1, 4).expand(N, 4)) for _ in range(2)),
        0,
    ),
    "none": (ALL, None, 0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_public_data_that_are_private_data_are_found_whatever_they_are_wrapped_in(name: str) -> None:
    dataset, public, expected = PAIRS[name]
    assert common_examples(public, dataset) == expected


@pytest.mark.parametrize("make", [lambda: ALL, lambda: lmdp.Views(ALL, K, unchanged)])
def test_public_data_that_are_private_data_are_refused(make: Any) -> None:
    dataset = make()
    collate = getattr(dataset, "collate", None)
    with pytest.raises(ValueError, match=f"public_data has {N} examples of the private dataset itself"):
        private(DataLoader(dataset, batch_size=BATCH, collate_fn=collate), weights="public", public_data=ROWS_OF)
