"""What users of Opacus know, met here: arguments, names and attributes that work, or say in a line what to write.

`from lmdp import PrivacyEngine` takes the place of theirs; the rest of their names is in this file.
`docs/from-opacus.md` has both sides in two columns.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lmdp.accounting import calibrate_noise
from lmdp.guards import Stated, check_model, check_optimizer, make_compatible

F = TypeVar("F", bound=Callable[..., Any])
Place = str | os.PathLike[str] | IO[bytes]

DPLSTM, DPGRU, DPRNN, DPMultiheadAttention = nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention
"""Torch's own layers train privately as they are."""

CLIPPINGS = {"flat": "dpsgd", "per_layer": "perlayer"}
SAME_RESULT = ("hooks", "ew", "functorch")
DEFAULT_METHOD = "lm"


def familiar(make_private: F) -> F:
    """`make_private` that also takes the arguments of Opacus, and puts on the optimizer what theirs tells."""
    names = set(inspect.signature(make_private).parameters) - {"self"}

    @functools.wraps(make_private)
    def met(engine: Any, **given: Any) -> Any:
        three = make_private(engine, **_translated(given, names))
        _state(engine, three[1])
        return three

    return cast(F, met)


def _translated(given: dict[str, Any], names: set[str]) -> dict[str, Any]:
    options = {key: value for key, value in given.items() if key not in ARGUMENTS}
    for key, meet in ARGUMENTS.items():
        if key in given:
            meet(given[key], options)
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise TypeError(f"make_private has no argument {key!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    _check_norm(options.get("max_grad_norm"))
    _check_reduction(options.get("criterion"), options.get("loss_reduction", "mean"))
    return options


def _clipping(value: Any, options: dict[str, Any]) -> None:
    if value not in CLIPPINGS:
        taken = ", ".join(map(repr, CLIPPINGS))
        raise ValueError(
            f"clipping is {value!r}; here it is {taken}. For a bound that needs no tuning: method='autos'."
        )
    method = CLIPPINGS[value]
    if options.setdefault("method", method) != method:
        raise ValueError(f"clipping={value!r} is method={method!r} here, but method is {options['method']!r}; give one")


def _grad_sample_mode(value: Any, options: dict[str, Any]) -> None:
    if value not in SAME_RESULT:
        raise ValueError(
            f"grad_sample_mode is {value!r}; leave it out: every layer takes its fastest exact rule, three values are "
            "returned, and the loss is called as it is"
        )


def _noise_generator(value: Any, options: dict[str, Any]) -> None:
    if value is not None:
        raise ValueError("noise_generator: noise comes from the operating system's entropy; for tests write seed=0")


def _batch_first(value: Any, options: dict[str, Any]) -> None:
    if value is not True:
        raise ValueError(
            "batch_first=False: give the model its batch first, and construct layers with batch_first=True"
        )


def _accepted(value: Any, options: dict[str, Any]) -> None:
    """Makes no difference: nothing is wrapped, and empty batches are steps of noise alone."""


ARGUMENTS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "clipping": _clipping,
    "grad_sample_mode": _grad_sample_mode,
    "noise_generator": _noise_generator,
    "batch_first": _batch_first,
    "wrap_model": _accepted,
    "rand_on_empty": _accepted,
}
"""Of their `make_private`, beyond those that are ours too."""


PARTS = "pass max_physical_batch_size= to make_private; the loader then hands batches out in parts, and all are stepped"
NOT_OFFERED = {
    "signal_skip_step": PARTS,
    "virtual_step": PARTS,
    "attach_step_hook": "torch's optimizer.register_step_post_hook runs after a step; engine.steps counts them",
}
"""Of their optimizer, and what to write instead."""


def _refusing(why: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(why)

    return refuse


def _check_norm(norm: Any) -> None:
    if isinstance(norm, torch.Tensor):
        if norm.numel() == 1:
            raise TypeError(
                f"max_grad_norm is a tensor; it must be a number, which is public: write max_grad_norm={norm.item():g}"
            )
        norm = norm.flatten().tolist()
    if isinstance(norm, list | tuple):
        whole = math.sqrt(sum(float(each) ** 2 for each in norm))
        raise TypeError(
            f"max_grad_norm is a list of {len(norm)}; perlayer gives each of L layers max_grad_norm / sqrt(L): write "
            f"max_grad_norm={whole:.4g}, which has the same sensitivity"
        )


def _check_reduction(criterion: Any, wanted: str) -> None:
    given = getattr(criterion, "reduction", wanted)
    if given != wanted:
        raise ValueError(f"criterion has reduction {given!r}, but loss_reduction is {wanted!r}; make them the same")


def _state(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """What their optimizer tells of itself; to change it afterwards is refused in the next step."""
    mechanism, attachment = engine.mechanism, engine._attached.capture.attachment
    told = {
        "noise_multiplier": mechanism.noise_multiplier,
        "max_grad_norm": mechanism.clip_norm,
        "expected_batch_size": mechanism.expected_batch_size,
    }
    for name, value in told.items():
        attachment.set(optimizer, name, Stated(value))
    for name, remedy in NOT_OFFERED.items():
        attachment.set(optimizer, name, _refusing(f"optimizer.{name}: {remedy}"))


class Account:
    """What their `engine.accountant` tells: of the steps that the engine has counted. It counts none itself."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self.name = engine, name

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """`engine.get_epsilon(delta)`."""
        return float(self._engine.get_epsilon(delta))

    def get_privacy_spent(self, *, delta: float, **_: Any) -> tuple[float, None]:
        """Epsilon, and in the place of their best order nothing."""
        return self.get_epsilon(delta), None

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sample rate and number of steps, once there are steps."""
        if not self._engine.attached or not self._engine.steps:
            return []
        mechanism = self._engine.mechanism
        return [(mechanism.noise_multiplier, mechanism.sample_rate, self._engine.steps)]

    def mechanism(self) -> str:
        """The name: pld or rdp."""
        return self.name

    def __len__(self) -> int:
        return len(self.history)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"engine.accountant has no {name!r} here: optimizer.step() counts the steps, and engine.state_dict() and "
            "engine.load_state_dict() keep them. It has get_epsilon(delta), history, mechanism() and name."
        )


def is_compatible(engine: Any, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
    """Whether `make_private` would take them; `validate` says why not."""
    try:
        validate(engine, module=module, optimizer=optimizer, data_loader=data_loader)
    except ValueError:
        return False
    return True


def validate(engine: Any, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
    """Raise what `make_private` would say against them."""
    check_model(module)
    if optimizer is not None:
        check_optimizer(module, optimizer)
    if data_loader is not None and isinstance(data_loader.dataset, IterableDataset):
        raise ValueError(
            f"data_loader iterates over a {type(data_loader.dataset).__name__}, from which no example can be drawn by "
            "itself; use a dataset with __len__ and __getitem__"
        )


def save_checkpoint(
    engine: Any,
    *,
    path: Place,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    checkpoint_dict: dict[str, Any] | None = None,
    module_state_dict_kwargs: dict[str, Any] | None = None,
    torch_save_kwargs: dict[str, Any] | None = None,
) -> None:
    """Model, optimizer, and the account of the steps so far, in one file that holds no code."""
    weights = module.state_dict(**(module_state_dict_kwargs or {}))
    content = {**(checkpoint_dict or {}), "module_state_dict": weights, "engine": engine.state_dict()}
    if optimizer is not None:
        content["optimizer_state_dict"] = optimizer.state_dict()
    torch.save(content, path, **(torch_save_kwargs or {}))


def load_checkpoint(
    engine: Any,
    *,
    path: Place,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    module_load_dict_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Continue from such a file, after `make_private` with the same numbers; returns what else was saved."""
    content: dict[str, Any] = torch.load(path, **{**(torch_load_kwargs or {}), "weights_only": True})
    missing = {"module_state_dict", "engine"} - set(content)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; engine.save_checkpoint writes such files")
    if engine.attached and engine.steps:
        raise ValueError(
            f"this engine has made {engine.steps} steps of its own, which the account in {path} does not hold. Load it "
            "with a new engine; for the weights alone: model.load_state_dict(torch.load(path)['module_state_dict'])"
        )
    module.load_state_dict(content["module_state_dict"], **(module_load_dict_kwargs or {}))
    if optimizer is not None and "optimizer_state_dict" in content:
        optimizer.load_state_dict(content["optimizer_state_dict"])
    engine.load_state_dict(content["engine"])
    return content


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
) -> float:
    """The smallest noise multiplier that keeps so many steps within the target; more exactly than any tolerance."""
    if (steps is None) == (epochs is None):
        raise ValueError("give either steps or epochs")
    count = steps if steps is not None else int((epochs or 0) / sample_rate)
    return calibrate_noise(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=count,
        accountant=accountant,
    )


def DifferentiallyPrivateDistributedDataParallel(model: nn.Module) -> nn.Module:
    """The model itself: under `torchrun`, `make_private` sees the processes, and all begin with the first's weights."""
    return model


class ModuleValidator:
    """Theirs, by what is checked here."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """What stands against training it privately; with `strict`, raised."""
        try:
            check_model(module)
        except ValueError as error:
            if strict:
                raise
            return [error]
        return []

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        return not ModuleValidator.validate(module)

    @staticmethod
    def fix(module: nn.Module, **_: Any) -> nn.Module:
        return make_compatible(module)

    @staticmethod
    def fix_and_validate(module: nn.Module, **_: Any) -> nn.Module:
        fixed = make_compatible(module)
        check_model(fixed)
        return fixed


@contextmanager
def BatchMemoryManager(
    *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: torch.optim.Optimizer
) -> Iterator[DataLoader[Any]]:
    """The loader itself, which already hands batches out in parts if `make_private` was told to."""
    parts = getattr(data_loader.batch_sampler, "max_part", None)
    if parts is None or parts > max_physical_batch_size:
        raise ValueError(
            f"BatchMemoryManager: write make_private(..., max_physical_batch_size={max_physical_batch_size}); the "
            "loader then hands batches out in parts, and optimizer.step() waits for the last"
        )
    yield data_loader
