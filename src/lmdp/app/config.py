"""What a run is made of: one flat table of named values, read from TOML, checked here and nowhere else."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lmdp.accounting import ACCOUNTANTS, DEFAULT
from lmdp.app.rules import ALL, AUGMENTATIONS, TASKS, TUNES, USER, check_together
from lmdp.app.settings import Setting, meet_pieces, number, switch, text, whole
from lmdp.data.request import anchored
from lmdp.methods import METHODS, SOURCES

PROTOCOLS = ("heldout", "paper")
"""Those of `lmdp.risk`, which needs torch; a test holds the two together."""
NOISES = ("fast", "secure")
LAYERS = ("module", "block")
"""Those of `lmdp.layers`, which needs torch too."""
SPLITS = ("content", "position")
"""Those of `lmdp.data.splits`, which needs torch too."""
ACTIVATIONS = ("relu", "tanh")
"""Those of `lmdp.models`, which needs torch too."""
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine", "warmup")
"""Those of `lmdp.app.descent`, which needs torch too."""
TEXT_MODELS, HF = ("hf:", "hf-config:", "tiny-encoder"), "hf:"
"""How models of texts are called."""
TOKENIZERS = ("bytes", "words")
"""Those of `lmdp.data.tokens`, which needs torch too."""
PRECISIONS = ("float32", "bf16")
SUITED, FALLING = 0.6, 0.25
"""q where neither it nor the batch size is given: SUITED / examples^FALLING. 0.1 for a thousand, 0.04 for 54,000."""
PLAIN = 0.01
"""The same of training without privacy, which needs no large batches."""
SHADOW = "digits"
"""The public data where none is named."""


@dataclass(frozen=True)
class Config:
    """A resolved configuration. Making one checks every value; an unknown or impossible one is refused by name."""

    model: str = text(
        "s-cnn",
        "s-cnn, d-cnn, resnet18, resnet18-imagenet, vgg16, tanh-cnn, tanh-cnn-deep, scatter-linear, scatter-cnn, or "
        "module:factory of your own; timm:NAME; for texts tiny-encoder, hf:FOLDER (public weights) or hf-config:FILE",
    )
    task: str = text(
        "classify",
        "of hf models: embed trains the encoder whose mean over words is served",
        choices=TASKS,
        unsaid="classify",
    )
    lora: int | None = whole(
        None,
        "of hf models: train low-rank adapters of this rank and the head, nothing else",
        low=1,
        high=4096,
        optional=True,
    )
    tune: str = text(
        ALL,
        "of hf models with task = embed: head trains a linear head on the frozen encoder; tangent, begun with the run "
        "of one (init), adapters of rank 1 to first order. Each text goes through the encoder once",
        choices=TUNES,
        unsaid=ALL,
    )
    init: str | None = text(
        None,
        "begin with the weights of a file, or of a run folder; they are taken to be public unless a private "
        "training is known to have released them",
        optional=True,
    )
    freeze: str | None = text(
        None,
        "parameters that are not trained: patterns of their names such as *embeddings*, separated by commas",
        optional=True,
    )
    device: str = text("cpu", "where to train: cpu, cuda, cuda:1", unsaid="cpu")
    precision: str = text(
        "float32",
        "of the forward and backward pass; bounds, sums and noise are float32 or better in either",
        choices=PRECISIONS,
        unsaid="float32",
    )
    activation: str | None = text(None, "the model's own unless given", choices=ACTIVATIONS, optional=True)
    weight_standardisation: bool = switch(
        False, "standardise the filters of the model's convolutions: mean zero, length one", unsaid=False
    )
    layers: str = text(
        None,
        "what counts as a layer: block, of models of texts unless said, takes the blocks of a network whole; module, "
        "of others, does not",
        choices=LAYERS,
        optional=True,
    )
    data: str = text("mnist-5k", "the private data: a SPEC such as mnist, npz:PATH, folder:PATH, jsonl:PATH")
    tokenizer: str | None = text(
        None, "of texts: words, bytes, or a folder of transformers; that of model hf:FOLDER unless given", optional=True
    )
    max_length: int | None = whole(
        None, "of texts: words that are read of each; 128 unless given", low=2, high=8192, optional=True
    )
    shadow: str | None = text(
        None, f"the public data on which risk is estimated: a SPEC; {SHADOW} unless given", optional=True
    )
    size: int | None = whole(None, "resize images to this many pixels a side", low=1, high=4096, optional=True)
    channels: int | None = whole(None, "1 (grey) or 3 (colour) channels", low=1, high=3, optional=True)
    classes: str | None = text(
        None,
        "how many classes the private data has, or their names, separated by commas: a public fact",
        listed=True,
        optional=True,
    )
    splits: str = text(
        "content", "how parts of the data are chosen; position is for runs of old, and not certified", choices=SPLITS
    )
    unit: str | None = text(
        None,
        "whose privacy is kept: user:COLUMN of jsonl: and csv: is all rows of one person; one example unless given",
        optional=True,
    )
    user_rows: int = whole(
        8, "of unit = user:COLUMN: rows of a user in a step, whose mean is clipped; a public number", low=1, unsaid=8
    )
    holdout: float = number(
        0.1,
        "the share of the private data that is kept out of training, as non-members for audits; about 10,000 at most",
        low=0,
        high=0.9,
    )
    canaries: int = whole(
        0, "plant about so many canaries for the audit, each in or out by a coin; they cost accuracy", low=0, unsaid=0
    )
    canary_kind: str = text(
        "noise",
        "noise, mislabelled (private examples with a wrong label), or a SPEC of canaries of your own",
        unsaid="noise",
    )

    method: str = text("lm", "bound on gradients; dpsgd in doubt or without risk; sgd is not private", choices=METHODS)
    weights: str = text("private", "where the layer weights of lm come from; batch is not certified", choices=SOURCES)
    emphasis: float = number(1.0, "r: how strongly a layer's risk counts", low=0, high=100)
    unit_gain: bool = switch(
        False, "divide the gradient that lm releases by the layer weights: layers keep their step size", unsaid=False
    )
    risk: str | None = text(None, "a risk.json for lm; without it every layer counts alike", optional=True)
    risk_as_measured: bool = switch(False, "weigh layers by the risk as measured, noise and all")
    public: str | None = text(
        None,
        "public data for weights = public, the shadow data unless given; and for tune = tangent, sklearn-docs unless "
        "given",
        optional=True,
    )
    epsilon: float = number(5.0, "the privacy budget", low=0, open_low=True)
    delta: float = number(1e-5, "the delta of (epsilon, delta)", low=0, high=1, open_low=True, open_high=True)
    allow_large_delta: bool = switch(False, "allow a delta of 1 / examples or more: not certified")
    public_size: bool = switch(True, "whether the number of private examples is public; if not, not certified")
    accountant: str = text(DEFAULT, "rdp is faster, and needs about a twentieth more noise", choices=ACCOUNTANTS)
    noise: str = text("fast", "secure keeps the key of the noise from being copied", choices=NOISES)

    epochs: float = number(40.0, "expected passes over the private data", low=0, open_low=True, high=1e6)
    sample_rate: float | None = number(
        None,
        "q: the chance of each example to be in a batch; unless this or batch_size is given, "
        f"{SUITED:g} / examples^{FALLING:g}",
        low=0,
        open_low=True,
        high=1,
        optional=True,
    )
    batch_size: int | None = whole(
        None, "the expected size of a batch, instead of sample_rate: q is this / examples", low=1, optional=True
    )
    optimizer: str = text("sgd", "what makes steps of released gradients", choices=OPTIMIZERS, unsaid="sgd")
    schedule: str = text(
        "constant",
        "the learning rate over the steps: cosine falls to 0 at the end, warmup rises at first",
        choices=SCHEDULES,
        unsaid="constant",
    )
    warmup: float | None = number(
        None,
        "the share of the steps over which the learning rate rises; 0.05 for schedule = warmup, 0 for cosine",
        low=0,
        high=1,
        optional=True,
    )
    weight_decay: float = number(0.0, "weight decay of the optimizer; decoupled in adamw", low=0, unsaid=0.0)
    ema: float | None = number(
        None,
        "keep an exponential moving average of the weights with this decay (0.99 to 0.9999), beside the last ones",
        low=0,
        high=1,
        open_low=True,
        open_high=True,
        optional=True,
    )
    augment: str | None = text(
        None,
        f"train on random views of images: {', '.join(AUGMENTATIONS)}, or several, separated by commas",
        listed=True,
        optional=True,
    )
    views: int = whole(
        1, "views of an example in every step of it: their gradients are averaged, then clipped as one", low=1, unsaid=1
    )
    learning_rate: float | None = number(
        None,
        "step size of the private methods; unless given, chosen by examples, epsilon and model, and told",
        low=0,
        open_low=True,
        optional=True,
    )
    sgd_learning_rate: float = number(
        0.05, "step size of method sgd, whose gradients have any length", low=0, open_low=True
    )
    momentum: float = number(0.0, "momentum of optimizer = sgd", low=0, high=1, open_high=True)
    clip_norm: float = number(1.0, "C: the most that one example may contribute", low=0, open_low=True)
    unit_clip: bool = switch(
        False, "divide the released gradient by clip_norm, so that a learning rate suits every clip_norm", unsaid=False
    )
    max_physical_batch_size: int | None = whole(
        None,
        "hand batches out in parts of at most this many examples; unless given, chosen by the model, and told",
        low=1,
        optional=True,
    )
    evaluate_every: int = whole(1, "epochs between evaluations, each with a checkpoint", low=1)
    keep_checkpoints: int = whole(3, "how many checkpoints to keep", low=1, high=1000)
    seed: int | None = whole(None, "reproducible, therefore not certified", low=0, high=2**31 - 1, optional=True)

    shadow_models: int = whole(1, "how many shadow models; 2 or more calibrate per example", low=1, high=256, unsaid=1)
    shadow_epochs: int = whole(100, "at most this many epochs for a shadow model", low=1, high=100_000, unsaid=100)
    shadow_enough: float = number(
        0.99,
        "a shadow model is trained until it has learnt this share of its half; 2: through all epochs",
        low=0,
        open_low=True,
        high=2,
        unsaid=0.99,
    )
    protocol: str = text("heldout", "adversaries' scores; paper: in-sample too", choices=PROTOCOLS, unsaid="heldout")

    def __post_init__(self) -> None:
        if str(self.method) not in METHODS or str(self.weights) not in SOURCES:
            meet_pieces(self.model)
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, setting.check(name, getattr(self, name)))
        if not self.layers:
            object.__setattr__(self, "layers", self._layers_unsaid)
        check_together(self)
        if self.public_is_shadow and self.shadow is None:
            object.__setattr__(self, "shadow", SHADOW)

    @property
    def declared_classes(self) -> int | tuple[str, ...] | None:
        """How many classes there are, or their names."""
        if self.classes is None or (self.classes.isascii() and self.classes.isdigit() and len(self.classes) < 7):
            return int(self.classes) if self.classes else None
        return tuple(name.strip() for name in self.classes.split(","))

    @property
    def user_column(self) -> str | None:
        """The column that says whose each row is, where users are protected."""
        return None if self.unit is None else self.unit.removeprefix(USER)

    @property
    def public_is_shadow(self) -> bool:
        """Whether layer weights come from the shadow data."""
        needed = METHODS[self.method].reweighted and SOURCES[self.weights].needs_public_data
        return needed and self.public is None

    def anchored(self) -> Config:
        """The same with absolute paths, so that it means the same wherever one stands."""
        specs = {key: getattr(self, key) for key in ("data", "shadow", "public", "canary_kind")}
        seen = {key: anchored(spec) for key, spec in specs.items() if spec is not None}
        paths = {key: getattr(self, key) for key in ("risk", "init", "tokenizer")}
        seen |= {key: str(Path(path).absolute()) for key, path in paths.items() if path not in (None, *TOKENIZERS)}
        kind, colon, path = self.model.partition(":")
        if f"{kind}:" in TEXT_MODELS:
            seen["model"] = f"{kind}{colon}{Path(path).expanduser().absolute()}"
        return self.changed(**seen)

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Their names, in the order in which they are made."""
        return tuple(name.strip() for name in (self.augment or "").split(",") if name.strip())

    @property
    def model_options(self) -> dict[str, Any]:
        """What `lmdp.models.build` takes besides name, shape and classes."""
        return {
            "activation": self.activation,
            "standardised": self.weight_standardisation,
            "task": self.task,
            "lora": self.lora,
            "tune": self.tune,
        }

    @property
    def data_options(self) -> dict[str, Any]:
        """What `lmdp.data.load` takes for texts."""
        folder = self.model.removeprefix(HF) if self.model.startswith(HF) else None
        return {"tokenizer": self.tokenizer or folder, "length": self.max_length}

    @property
    def _layers_unsaid(self) -> str:
        return "block" if self.model.startswith(TEXT_MODELS) else "module"

    def rate_for(self, examples: int) -> float:
        """q of so many examples, where nobody says another."""
        return min(1.0, SUITED / examples**FALLING) if METHODS[self.method].private else PLAIN

    def batch_for(self, examples: int) -> int:
        """The expected size of a batch of so many examples."""
        if self.batch_size is None:
            return max(1, round((self.sample_rate or self.rate_for(examples)) * examples))
        if self.batch_size > examples:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at most {examples}, the number of examples")
        return self.batch_size

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str = "configuration") -> Config:
        for key in values:
            if key not in SETTINGS:
                near = difflib.get_close_matches(key, SETTINGS, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(SETTINGS)}."
                raise ValueError(f"{origin}: unknown key {key!r}.{hint}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None

    @classmethod
    def load(cls, path: str | Path, **unless_set: Any) -> Config:
        """From a TOML file; `unless_set` takes the place of defaults."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_bytes().decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        return cls.of({**unless_set, **values}, str(path))

    def changed(self, **values: Any) -> Config:
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """What is set; values that are none, or go without saying, are left out."""
        values = {name: getattr(self, name) for name in SETTINGS}
        if self.risk is not None and not self.public_is_shadow:
            values["shadow"] = None  # the risk came from elsewhere
        unsaid = {name: setting.unsaid for name, setting in SETTINGS.items()} | {"layers": self._layers_unsaid}
        return {name: value for name, value in values.items() if value not in (None, unsaid[name])}

    def to_toml(self) -> str:
        # JSON strings and numbers are TOML too, but for DEL, which JSON leaves as it is and TOML forbids.
        values = {
            key: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            for key, value in self.to_dict().items()
        }
        return "".join(f"{key} = {value}\n" for key, value in values.items())


SETTINGS: dict[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Config) if f.default is not MISSING}
