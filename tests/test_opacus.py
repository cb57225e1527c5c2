"""From Opacus: its scripts run with other imports, its names work or say in a line what to write instead."""

from __future__ import annotations

import inspect
import io
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp import opacus as ours

opacus = pytest.importorskip("opacus")
accountants, data_loader, optimizers, validators = (
    pytest.importorskip(f"opacus.{name}") for name in ("accountants", "data_loader", "optimizers", "validators")
)

SCRIPTS = sorted((Path(__file__).parent / "ported").glob("[a-z]*.py"))
IMPORTS = {
    "from opacus import": "from lmdp import",
    "from opacus.utils.batch_memory_manager import": "from lmdp.opacus import",
    "from opacus.validators import": "from lmdp.opacus import",
    "from opacus.accountants.utils import": "from lmdp.opacus import",
    "from opacus.layers import": "from lmdp.opacus import",
}
ONE_LINE = {
    "cifar10": ('    clipping="flat",\n', '    clipping="flat", max_physical_batch_size=16,\n'),
    "char_lstm": (
        "    x = pad_sequence([name for name, _ in batch], batch_first=True)\n",
        "    x = nn.functional.pad(x := pad_sequence([n for n, _ in batch], True), (0, 9 - x.shape[1]))\n",
    ),
}
PAGE = Path(__file__).parents[1] / "docs" / "from-opacus.md"


def ported(script: Path) -> tuple[str, int]:
    """The script for lmdp, and how many of its lines are others."""
    text = script.read_text()
    new = text
    for theirs, mine in IMPORTS.items():
        new = new.replace(theirs, mine)
    new = new.replace(*ONE_LINE.get(script.stem, ("", "")))
    changed = sum(a != b for a, b in zip(text.splitlines(), new.splitlines(), strict=True))
    return new, changed


def run(script: Path) -> dict[str, Any]:
    names = runpy.run_path(str(script), run_name="ported")
    result: dict[str, Any] = names["result"]
    engine = names["privacy_engine"]
    return {
        **result,
        "certified": engine.privacy_statement(1e-3).reasons if hasattr(engine, "privacy_statement") else (),
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_theirs_runs_with_other_imports(script: Path, tmp_path: Path) -> None:
    text, changed = ported(script)
    imports = sum(line.startswith("from opacus") for line in script.read_text().splitlines())
    assert changed == imports + (script.stem in ONE_LINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        theirs = run(script)
    (tmp_path / script.name).write_text(text)
    mine = run(tmp_path / script.name)
    assert mine["certified"] == ()
    for key in ("compatible", "errors"):
        assert mine.get(key) == theirs.get(key)
    assert mine["epsilon"] <= 1.02 * theirs["epsilon"]
    if "sigma" in theirs:
        assert mine["sigma"] == pytest.approx(theirs["sigma"], rel=0.01)


def setup(**layers: Any) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=5),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }


def step(made: dict[str, Any], loader: Any) -> None:
    for x, y in loader:
        made["optimizer"].zero_grad()
        nn.functional.cross_entropy(made["module"](x), y).backward()
        made["optimizer"].step()
        return


@pytest.mark.parametrize(
    "argument",
    [
        *inspect.signature(opacus.PrivacyEngine.make_private).parameters,
        *inspect.signature(opacus.PrivacyEngine.make_private_with_epsilon).parameters,
        *inspect.signature(opacus.PrivacyEngine.__init__).parameters,
        *(name for name in vars(opacus.PrivacyEngine) if not name.startswith("_")),
    ],
)
def test_every_argument_and_method_of_theirs_is_met_and_on_the_page(argument: str) -> None:
    if argument in ("self", "kwargs"):
        return
    mine = {
        *inspect.signature(lmdp.PrivacyEngine.make_private).parameters,
        *inspect.signature(lmdp.PrivacyEngine.make_private_with_epsilon).parameters,
        *inspect.signature(lmdp.PrivacyEngine.__init__).parameters,
        *vars(lmdp.PrivacyEngine),
        *ours.ARGUMENTS,
    }
    page = PAGE.read_text()
    assert re.search(rf"`[^`]*\b{argument}\b[^`]*`", page), f"{argument} is not on the page"
    assert argument in mine


THEIRS = {
    **{f"optimizer.{name}": torch.optim.Optimizer for name in dir(optimizers.DPOptimizer)},
    **{f"model.{name}": nn.Module for name in dir(opacus.GradSampleModule)},
    **{f"loader.{name}": DataLoader for name in dir(data_loader.DPDataLoader)},
    **{f"accountant.{name}": object for name in dir(accountants.RDPAccountant)},
    **{f"validator.{name}": object for name in dir(validators.ModuleValidator)},
    **{f"checkpoint.{name}": object for name in inspect.signature(opacus.PrivacyEngine.load_checkpoint).parameters},
}


@pytest.mark.parametrize("name", [name for name, plain in THEIRS.items() if not hasattr(plain, name.split(".")[1])])
def test_every_public_name_of_their_objects_stands_on_the_page(name: str) -> None:
    attribute = name.split(".")[1]
    if attribute.startswith("_") or attribute == "self":
        return
    assert re.search(rf"`[^`]*\b{attribute}\b[^`]*`", PAGE.read_text()), f"{name} is not on the page"


def test_the_accountant_tells_what_the_engine_has_counted() -> None:
    made, engine = setup(), lmdp.PrivacyEngine(accountant="rdp")
    assert engine.accountant
    assert engine.accountant.history == []
    *_, loader = engine.make_private(**made)
    step(made, loader)
    assert engine.accountant.get_epsilon(delta=1e-3) == engine.get_epsilon(1e-3) > 0
    assert engine.accountant.get_privacy_spent(delta=1e-3) == (engine.get_epsilon(1e-3), None)
    assert engine.accountant.history == [(1.0, 0.25, 1)]
    assert (len(engine.accountant), engine.accountant.mechanism(), str(engine.accountant)) == (1, "rdp", "rdp")
    with pytest.raises(AttributeError, match=r"optimizer.step\(\) counts the steps"):
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize("name", ours.NOT_OFFERED)
def test_what_their_optimizer_has_and_ours_has_not_says_what_to_write_until_it_is_detached(name: str) -> None:
    made, engine = setup(), lmdp.PrivacyEngine()
    engine.make_private(**made)
    with pytest.raises(RuntimeError, match=re.escape(f"optimizer.{name}: {ours.NOT_OFFERED[name]}")):
        getattr(made["optimizer"], name)()
    engine.detach()
    assert not hasattr(made["optimizer"], name)


def test_their_own_manager_of_batches_is_refused_with_what_to_write() -> None:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    made = setup()
    *_, loader = lmdp.PrivacyEngine().make_private(**made)
    their = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=made["optimizer"])
    with pytest.raises(RuntimeError, match=r"from lmdp\.opacus import BatchMemoryManager"), their as parts:
        list(parts)


def test_a_checkpoint_is_not_loaded_over_steps_that_it_does_not_hold(tmp_path: Path) -> None:
    made, engine = setup(), lmdp.PrivacyEngine()
    *_, loader = engine.make_private(**made)
    before = tmp_path / "before.pt"
    engine.save_checkpoint(path=before, module=made["module"], optimizer=made["optimizer"])
    step(made, loader)
    weights = made["module"].weight.detach().clone()
    with pytest.raises(ValueError, match="has made 1 steps of its own"):
        engine.load_checkpoint(path=before, module=made["module"], optimizer=made["optimizer"])
    assert torch.equal(made["module"].weight, weights)
    assert engine.steps == 1
    made["module"].load_state_dict(torch.load(before)["module_state_dict"])
    assert not torch.equal(made["module"].weight, weights)


def test_padding_to_the_longest_of_a_batch_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (script,) = (path for path in SCRIPTS if path.stem == "char_lstm")
    text = ported(script)[0].replace(*reversed(ONE_LINE["char_lstm"]))
    text = text.replace("torch.randint(3, 10, (160,))", "torch.arange(160) // 10 + 3")  # differs in batches
    text = text.replace("in range(3)", "in range(12)")  # three looks make it sure; fewer leave it not certified
    (tmp_path / script.name).write_text(text)
    with pytest.raises(RuntimeError, match="Pad to one public length"):
        run(tmp_path / script.name)


def test_the_loader_of_another_training_is_refused_with_the_remedy() -> None:
    made = setup()
    *_, loader = lmdp.PrivacyEngine().make_private(**made)
    with pytest.raises(ValueError, match="pass the loader that you gave it"):
        lmdp.PrivacyEngine().make_private(**{**setup(), "data_loader": loader})


def test_what_cannot_be_trained_is_told_by_the_engine_too() -> None:
    engine, made, model = lmdp.PrivacyEngine(), setup(), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert not engine.is_compatible(module=model, optimizer=None, data_loader=None)
    with pytest.raises(ValueError, match="BatchNorm1d"):
        engine.validate(module=model, optimizer=None, data_loader=None)
    fixed = lmdp.PrivacyEngine.get_compatible_module(model)
    engine.validate(module=fixed, optimizer=None, data_loader=made["data_loader"])


@pytest.mark.parametrize(
    "argument, remedy",
    [
        ({"clipping": "adaptive"}, "method='autos'"),
        ({"clipping": "flat", "method": "lm"}, "give one"),
        ({"grad_sample_mode": "ghost"}, "leave it out"),
        ({"noise_generator": torch.Generator()}, "seed=0"),
        ({"batch_first": False}, "batch_first=True"),
        ({"max_grad_norm": [3.0, 4.0], "clipping": "per_layer"}, "max_grad_norm=5"),
        ({"max_grad_norm": torch.tensor([3.0, 4.0]), "clipping": "per_layer"}, "max_grad_norm=5"),
        ({"max_grad_norm": torch.tensor(1.5)}, "it must be a number, which is public: write max_grad_norm=1.5"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "make them the same"),
        ({"noise_multiplyer": 1.0}, "did you mean 'noise_multiplier'"),
    ],
)
def test_what_is_not_taken_says_in_a_line_what_to_write(argument: dict[str, Any], remedy: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(remedy)) as error:
        lmdp.PrivacyEngine().make_private(**{**setup(), **argument})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argument, method",
    [({"clipping": "flat"}, "dpsgd"), ({"clipping": "per_layer"}, "perlayer"), ({"wrap_model": False}, "lm")],
)
@pytest.mark.parametrize("mode", ours.SAME_RESULT)
def test_what_makes_no_difference_is_taken(argument: dict[str, Any], method: str, mode: str) -> None:
    engine = lmdp.PrivacyEngine(accountant="prv")
    engine.make_private(**setup(), **argument, grad_sample_mode=mode, criterion=nn.CrossEntropyLoss())
    assert engine.mechanism.method == method
    assert engine.accountant.name == "pld"


def test_an_accountant_that_can_state_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="use 'pld'"):
        lmdp.PrivacyEngine(accountant="gdp")


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size"])
def test_what_the_optimizer_tells_can_be_read_and_not_be_changed(name: str) -> None:
    made, engine = setup(), lmdp.PrivacyEngine()
    *_, loader = engine.make_private(**made)
    assert getattr(made["optimizer"], name) == {"expected_batch_size": 5.0}.get(name, 1.0)
    step(made, loader)
    setattr(made["optimizer"], name, 0.01)
    with pytest.raises(RuntimeError, match="Call engine"):
        step(made, loader)
    assert engine.steps == 1
    engine.detach()
    assert not hasattr(made["optimizer"], name)


def test_a_checkpoint_goes_on_with_its_account_and_holds_no_code() -> None:
    torch.manual_seed(0)
    made, engine, file = setup(), lmdp.PrivacyEngine(), io.BytesIO()
    *_, loader = engine.make_private(**made)
    step(made, loader)
    engine.save_checkpoint(path=file, module=made["module"], optimizer=made["optimizer"], checkpoint_dict={"epoch": 3})
    file.seek(0)
    other, again = setup(), lmdp.PrivacyEngine()
    again.make_private(**other)
    told = again.load_checkpoint(path=file, module=other["module"], optimizer=other["optimizer"])
    assert told["epoch"] == 3
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > 0
    assert torch.equal(other["module"].weight, made["module"].weight)
    torch.save({"module_state_dict": {}}, bare := io.BytesIO())
    bare.seek(0)
    with pytest.raises(ValueError, match="lacks engine"):
        again.load_checkpoint(path=bare, module=other["module"])


def test_the_validator_finds_and_mends_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert not ours.ModuleValidator.is_valid(model)
    with pytest.raises(ValueError, match="BatchNorm2d mixes"):
        ours.ModuleValidator.validate(model, strict=True)
    assert ours.ModuleValidator.is_valid(ours.ModuleValidator.fix_and_validate(model))


def test_a_memory_manager_without_parts_says_what_to_write() -> None:
    made, engine = setup(), lmdp.PrivacyEngine()
    *_, loader = engine.make_private(**made)
    with (
        pytest.raises(ValueError, match=r"make_private\(..., max_physical_batch_size=2\)"),
        ours.BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=made["optimizer"]),
    ):
        pass
