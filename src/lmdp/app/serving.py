"""A finished run, used: loaded, asked for embeddings, exported. No private data is needed for any of it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.app.config import Config
from lmdp.app.publishing import add_privacy, forget_places, places_of
from lmdp.app.runs import (
    AVERAGE,
    IMAGES,
    MODEL,
    NETWORK,
    NUMBERS,
    SHA,
    TEXTS,
    TOKENIZER,
    Card,
    Options,
    RunFolder,
    add_spent,
    digest,
    foreign,
    found_elsewhere,
    load_model,
    spent_for,
    statement_of,
    write,
    write_json,
)
from lmdp.app.runs.card import FILE as CARD
from lmdp.data import Images, Source, Texts
from lmdp.data.decode import Picture, decode, encoded
from lmdp.data.preprocess import fit
from lmdp.data.records import read_object
from lmdp.data.request import parse
from lmdp.data.texts import IDS, MASK
from lmdp.data.tokens import BUILT_IN, tokenizer_for
from lmdp.layers import LayerMap
from lmdp.lineage import Spending, append, digests, earlier
from lmdp.membership.served import embed
from lmdp.models import Inputs, Probe, build, encoder_of, fresh, merged, module_folder
from lmdp.models.hub import without_its_words
from lmdp.private import PrivacyStatement
from lmdp.report.card import exported
from lmdp.statement import NotCertifiedWarning

STATEMENTS = ("privacy.json", "privacy-card.md")
"""What is promised, for programs and for people; the card holds no results of attacks."""
FORMS = SENTENCES, PLAIN = "sentence-transformers", "safetensors"


@dataclass(frozen=True)
class Preprocess:
    """Raw inputs → what the model takes in, as it was in training. All of it is public: nothing follows from data."""

    card: Card

    def __call__(self, raw: Any) -> Inputs:
        """Of texts: a string or several. Of images: paths, bytes of files, images of Pillow, or arrays of bytes."""
        return {TEXTS: self._texts, IMAGES: self._images, NUMBERS: self._numbers}[self.card.kind](raw)

    def _texts(self, raw: str | Sequence[str]) -> Inputs:
        texts = [raw] if isinstance(raw, str) or not isinstance(raw, Iterable) else list(raw)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"text {i} is of type {type(text).__name__}; give a string, or a list of strings")
        ids, mask = tokenizer_for(self.card.tokenizer or "").encode(texts, self.card.shape[0])
        return {IDS: ids, MASK: mask}

    def _images(self, raw: Any) -> Inputs:
        channels, *size = self.card.shape
        if isinstance(raw, Tensor | np.ndarray):
            pixels = torch.as_tensor(raw)
        else:
            several = list(raw) if isinstance(raw, list | tuple) else [raw]
            pictures = [Picture(f"image {i}", _file(one, f"image {i}", channels)) for i, one in enumerate(several)]
            pixels = decode(pictures, size=size[0], channels=channels, crop=self.card.crop, say=lambda _: None)
        if pixels.dtype != torch.uint8 or pixels.dim() != 4:
            raise ValueError(
                f"images are {pixels.dtype} of shape {tuple(pixels.shape)}; they must be bytes (uint8) [N, C, H, W]"
            )
        images = fit(Images(pixels, torch.zeros(len(pixels), dtype=torch.int64)), size=size[0], channels=channels)
        return images.tensors()[0]

    def _numbers(self, raw: Any) -> Inputs:
        rows = torch.as_tensor(np.asarray(raw)).float()
        if tuple(rows.shape[1:]) != self.card.shape:
            raise ValueError(f"inputs have shape {tuple(rows.shape[1:])}; the model takes {self.card.shape}")
        return rows


@dataclass(frozen=True)
class Loaded:
    """A finished run: its model in evaluation mode, what it promises, what it takes in, what its scores and layers are.

    `preprocess` brings raw inputs to what the model takes in; `embed` gives what a layer makes of them.
    """

    model: nn.Module = field(repr=False)
    statement: PrivacyStatement = field(repr=False)
    preprocess: Preprocess
    classes: tuple[str, ...]
    layers: tuple[str, ...]
    by: str
    path: Path
    weights: str = MODEL

    def embed(self, raw: Any, layer: str | None = None, *, pooling: str = "mean") -> NDArray[np.float32]:
        """One vector for each raw input: of the layer before the last unless another is named."""
        return embed(self.model, self.preprocess(raw), self.layer(layer), pooling=pooling)

    def layer(self, name: str | None) -> str:
        return name or self.layers[max(0, len(self.layers) - 2)]


def load(path: str | Path, *, average: bool = False) -> Loaded:
    """The finished run in a folder, or what `lmdp export --form safetensors` made of one.

    `average`: with the moving average of its weights, which a run keeps that was trained with `--ema`.

    A model of one's own (`module:factory`) is named in its model.json, and that code is imported and called: load such
    folders only from whom you would run code of. No other file of a run holds or names code.

    Warns of weights that are not those of the statement, which then is not certified.
    """
    folder, weights = RunFolder(path), AVERAGE if average else MODEL
    _refuse_others(folder)
    if average and not (folder / AVERAGE).exists():
        raise ValueError(
            f"{path} has no {AVERAGE}: runs keep one that are trained with --ema DECAY. Leave average out for the last "
            "weights."
        )
    card = (Card.read(folder.path) or _card_of_old(folder)).at(folder.path)
    try:
        model = built(card)
    except ValueError as error:
        raise ValueError(f"{error}{found_elsewhere(folder.path)}") from error
    load_model(folder / weights, model)
    stranger = foreign(folder)
    if stranger:
        warnings.warn(f"{folder.path}: {stranger}. Its statement is not certified", NotCertifiedWarning, stacklevel=2)
    _remember(model, spent_for(folder / weights))
    kept = card.classes, card.layers, card.by
    return Loaded(model.eval(), statement_of(folder, stranger), Preprocess(card), *kept, folder.path, weights)


def _remember(model: nn.Module, spent: Sequence[Spending]) -> None:
    """Where the weights come from another machine: whoever trains on from them begins after what they cost."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if spent and not earlier(trained):
        append(set(digests(trained, casts=True)), spent)


def _refuse_others(folder: RunFolder) -> None:
    """Folders that are no finished runs, nor exports that are read as these are."""
    if (folder / "modules.json").exists():
        raise ValueError(
            f"{folder.path} is a folder of sentence-transformers, as lmdp export makes them. Read it with "
            f'SentenceTransformer("{folder.path}"), or name the run folder that it was made of.'
        )
    if not folder.finished:
        raise ValueError(f"{folder.path} holds no finished run: it has no {MODEL}. Make one with lmdp train.")
    if not folder.has_run and not (folder / CARD).exists():
        raise ValueError(
            f"{folder.path} holds weights, but neither {CARD} nor config.toml, which say of what. Name "
            "the run folder, or what lmdp export --form safetensors made of it."
        )


def built(card: Card) -> nn.Module:
    options: dict[str, Any] = vars(card.options)
    return fresh(lambda: build(card.model, card.shape, len(card.classes), vocabulary=card.vocabulary, **options), 0)


def write_card(folder: RunFolder, config: Config, source: Source, model: nn.Module) -> None:
    """Of a run that begins; one that goes on has it."""
    if folder.has_run:
        return
    card, tokenizer = card_of(config, source, model), source.tokenizer
    if card.kind == TEXTS and tokenizer is not None and card.tokenizer == TOKENIZER:
        tokenizer.save(folder / TOKENIZER)
    described: Any = getattr(encoder_of(model), "config", None)
    if described is not None and hasattr(described, "save_pretrained"):
        described.save_pretrained(str(folder / NETWORK))
    card.save(folder.path)


def card_of(config: Config, source: Source, model: nn.Module) -> Card:
    examples, tokenizer = source.train, source.tokenizer
    pixels = isinstance(examples, Images) and examples.pixels.dtype == torch.uint8
    named = None if tokenizer is None else tokenizer.name if tokenizer.name in BUILT_IN else TOKENIZER
    spec = parse(config.data)
    return Card(
        format=1,
        model=config.model,
        kind=TEXTS if isinstance(examples, Texts) else IMAGES if pixels else NUMBERS,
        shape=examples.shape,
        classes=source.classes,
        layers=LayerMap.of(model, config.layers, frozen=True).names,
        by=config.layers,
        options=Options(**config.model_options),
        crop=spec.options.get("crop") == "1" or spec.kind == "celeba",
        tokenizer=named,
        vocabulary=None if tokenizer is None else tokenizer.vocabulary,
        module_at=module_folder(config.model),
    )


def _card_of_old(folder: RunFolder) -> Card:
    """Of a run that kept none: its data must be read once more, to learn what the model takes in."""
    from lmdp.app.network import fresh_model
    from lmdp.app.pipeline import parted_data
    from lmdp.app.progress import Show

    config = folder.config()
    source = parted_data(config, Show(quiet=True))
    return card_of(config, source, fresh_model(config, source))


def export(path: str | Path, to: Path, form: str | None = None, *, average: bool = False) -> str:
    """Write what may be published of a run into a new folder, in the form that others read; returns the form.

    sentence-transformers: the encoder with its adapters merged in, and the mean over words. safetensors: the weights as
    they are and how to use them, which `lmdp.load` reads. Neither holds private/, checkpoints or audits. What was spent
    for the weights stands in their header, and merged ones are noted with it on this machine. Refused where the weights
    are not those that the statement speaks of.
    """
    _refuse_others(RunFolder(path))
    if stranger := foreign(RunFolder(path)):
        raise ValueError(f"{path}: {stranger}. An export would carry a statement that is not of its weights.")
    loaded = load(path, average=average)
    encoder = encoder_of(loaded.model)
    form = form or (PLAIN if encoder is None or loaded.preprocess.card.tokenizer in BUILT_IN else SENTENCES)
    if form not in FORMS:
        raise ValueError(f"the form is {form!r}; it must be one of {', '.join(FORMS)}")
    if to.exists():
        raise ValueError(f"{to} exists; choose another name, or remove it")
    beside = to.with_name(f".{to.name}.part")
    beside.mkdir(parents=True)
    try:
        if form == SENTENCES:
            _sentence_transformer(loaded, encoder, beside)
        else:
            _plain(loaded, beside)
        _statements(loaded.path, beside, loaded.weights)
        add_privacy(beside, loaded.statement)
        run = RunFolder(path)
        forget_places(beside, {beside.absolute(), run.path.absolute().parent, *_places(run)})
        beside.rename(to)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return form


def _places(run: RunFolder) -> set[Path]:
    return places_of(run.config()) if run.has_run else set()


def _statements(run: Path, to: Path, weights: str) -> None:
    """What is promised, of the weights that are exported: by their SHA-256, and without files that stay behind."""
    held, trained = {file.name: digest(file) for file in sorted(to.glob("*.safetensors"))}, digest(run / weights)
    privacy = read_object(run / STATEMENTS[0], "a privacy statement")
    if SHA in privacy:
        made_of = {} if held.get(MODEL) == trained else {"made_of": trained}
        privacy = {**privacy, SHA: held, **made_of}
    write_json(to / STATEMENTS[0], privacy)
    if (run / STATEMENTS[1]).exists():
        write(to / STATEMENTS[1], exported((run / STATEMENTS[1]).read_text(encoding="utf-8"), held, trained))


def _plain(loaded: Loaded, to: Path) -> None:
    for name in (NETWORK, TOKENIZER):
        if (loaded.path / name).is_dir():
            shutil.copytree(loaded.path / name, to / name)
    replace(Card.read(loaded.path) or loaded.preprocess.card, module_at=None).save(to)
    shutil.copyfile(loaded.path / loaded.weights, to / MODEL)


def _sentence_transformer(loaded: Loaded, encoder: nn.Module | None, to: Path) -> None:
    card = loaded.preprocess.card
    if encoder is None or card.kind != TEXTS or card.tokenizer in BUILT_IN:
        raise ValueError(
            f"{loaded.path} is no model of transformers with its own tokenizer, which sentence-transformers needs; "
            f"export it with --form {PLAIN}"
        )
    try:
        import transformers
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    except ImportError as error:
        raise ValueError(f"form {SENTENCES} needs the package: pip install 'lmdp[hf]'") from error
    held = loaded.model.state_dict()
    spent = spent_for(loaded.path / loaded.weights) or earlier(held)
    before = set(digests(held, casts=True))  # known since the training, or public
    described: Any = merged(encoder)
    append(set(digests(described.state_dict(), casts=True)) - before, spent)
    parts = to / ".parts"
    with without_its_words(transformers):
        described.save_pretrained(str(parts))
        tokenizer_for(card.tokenizer or "").save(parts)
        words = Transformer(str(parts), max_seq_length=card.shape[0])
        length = [Normalize()] if isinstance(loaded.model, Probe) else []
        SentenceTransformer(modules=[words, Pooling(described.config.hidden_size), *length], device="cpu").save(str(to))
    shutil.rmtree(parts)
    for file in to.glob("*.safetensors"):
        add_spent(file, spent)


def _file(one: Any, name: str, channels: int) -> Path | bytes:
    from PIL.Image import Image

    if isinstance(one, Image):
        return encoded(one, name, channels)
    if not isinstance(one, bytes | str | Path):
        raise TypeError(
            f"{name} is of type {type(one).__name__}; give a path, the bytes of a file, an image of Pillow, or all of "
            "them as one array of bytes [N, C, H, W]"
        )
    return one if isinstance(one, bytes) else Path(one)
