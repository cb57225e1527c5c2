"""What values of a configuration must hold together: each was checked by itself before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmdp.methods import METHODS, SOURCES, check_unit_gain

if TYPE_CHECKING:
    from lmdp.app.config import Config

USER = "user:"
AUGMENTATIONS = ("flip", "crop")
"""Those of `lmdp.data.augment`, which needs torch."""
FEWEST_CANARIES = 300
"""That of `lmdp.audit.planting`, which needs torch too."""
TASKS = CLASSIFY, EMBED = "classify", "embed"
TUNES = ALL, HEAD, TANGENT = "all", "head", "tangent"
"""Those of `lmdp.models`, which needs torch too."""
TUNED = ("hf:", "hf-config:")


def check_together(config: Config) -> None:
    """Refuse, by name and with a remedy, values that do not go together."""
    if config.tune != ALL:
        _check_tune(config)
    names = config.declared_classes
    if names == 0 or (isinstance(names, tuple) and len(set(names)) < len(names)):
        raise ValueError(f"classes is {config.classes!r}; it must be a number of at least 1, or names, each once")
    if config.unit is not None and not (config.unit.startswith(USER) and config.user_column):
        raise ValueError(f"unit is {config.unit!r}; it must be {USER}COLUMN, the column that says whose each row is")
    if config.unit is not None and config.canaries and config.canary_kind == "mislabelled":
        raise ValueError("canaries = mislabelled are rows of users; with unit = user:COLUMN plant noise, or a SPEC")
    if 0 < config.canaries < FEWEST_CANARIES:
        raise ValueError(
            f"canaries is {config.canaries}; it must be 0 or at least {FEWEST_CANARIES}: with fewer there are not "
            "enough in and out of the training to attack"
        )
    if config.batch_size is not None and config.sample_rate is not None:
        raise ValueError(
            f"batch_size is {config.batch_size} and sample_rate is {config.sample_rate:g}; give one: it says the other"
        )
    if config.momentum and config.optimizer != "sgd":
        raise ValueError(
            f"momentum is {config.momentum:g}, which is of optimizer sgd; {config.optimizer} has one of its own: set "
            "momentum = 0"
        )
    if config.warmup is not None and config.schedule == "constant":
        raise ValueError(
            f"warmup is {config.warmup:g}, but schedule = constant has none; choose schedule = warmup or cosine"
        )
    if unknown := [name for name in config.augmentations if name not in AUGMENTATIONS]:
        raise ValueError(f"augment names {unknown[0]!r}; it must be among {', '.join(AUGMENTATIONS)}")
    if config.views > 1 and config.augment is None:
        raise ValueError(
            f"views is {config.views}, but nothing makes them differ; say how, for example augment = "
            f"{','.join(AUGMENTATIONS)}"
        )
    if config.channels == 2:
        raise ValueError("channels is 2; it must be 1 (grey) or 3 (colour)")
    if config.noise == "secure" and config.seed is not None:
        raise ValueError(f"seed is {config.seed}, but noise = secure draws noise that nobody can repeat; choose one")
    method = METHODS[config.method]
    if method.reweighted and config.weights not in method.sources:
        needed = (f"{name} ({'not ' if SOURCES[name].refuted else ''}certified)" for name in method.sources)
        raise ValueError(f"weights is {config.weights!r}; method {method.name} needs {' or '.join(needed)}")
    if config.unit_gain:
        check_unit_gain(method, config.weights)


def _check_tune(config: Config) -> None:
    wanted = {
        "model": (config.model, config.model.startswith(TUNED), "hf:FOLDER, an encoder with weights"),
        "task": (config.task, config.task == EMBED, EMBED),
        "lora": (config.lora, config.lora is None, "left out: it trains adapters of another kind"),
        "augment": (config.augment, config.augment is None, "left out: texts have no views"),
        "init": (config.init, config.init is not None or config.tune != TANGENT, f"the run of a probe (tune = {HEAD})"),
    }
    for name, (value, right, remedy) in wanted.items():
        if not right:
            raise ValueError(f"tune is {config.tune!r}, and {name} is {value!r}; it must be {remedy}")
    names = config.declared_classes
    classes = len(names) if isinstance(names, tuple) else names
    if config.tune == TANGENT and classes not in (None, 2):
        raise ValueError(f"tune is {TANGENT!r}, which is for 2 classes; classes says {classes}. Choose {HEAD!r}")
