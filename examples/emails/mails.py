"""What the scripts here share: mails as tokens, the encoder with a head, canaries, and the folder of a run.

RUN/settings.json         how it was trained (public)
RUN/weights.safetensors   what was trained: the head, and LoRA or the encoder
RUN/privacy.json          the statement of a private run
RUN/result.json           accuracy on the test mails, and minutes
RUN/private/              coins of canaries, and what an interrupted run goes on from: as private as the mails
"""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from transformers import AutoModel, AutoTokenizer

import lmdp

NORMAL, SPAM = 0, 1
PADDING = 0
PUBLIC = "sklearn-docs"
"""Public texts that install with a package."""
PARTS = 64
"""Mails that are in memory at once."""


@dataclass(frozen=True)
class Settings:
    """Of one run.

    tune      head (a probe of the frozen encoder), lora, tangent (of rank 1, in the tangent of a probe), or full: all
              weights of the trained blocks
    blocks    how many blocks are trained, from the last one
    method    of clipping; sgd is not private
    init      folder of a run whose head this one begins with; what a private one spent is added to the statement
    rate      of what is trained in the encoder; head_rate of the head
    judge     so many of the training mails are kept out of it and judged by, and no test mail is looked at
    """

    model: str
    data: str
    tune: str = "lora"
    method: str = "dpsgd"
    loop: str = "plain"
    epsilon: float = 8.0
    delta: float = 1e-5
    epochs: int = 4
    batch: int = 500
    clip: float = 1.0
    rate: float = 2e-3
    head_rate: float = 0.2
    rank: int = 8
    blocks: int = 3
    init: str = ""
    length: int = 64
    train: int = 4000
    canaries: int = 0
    judge: int = 0
    seed: int = 0

    @property
    def private(self) -> bool:
        return self.method != "sgd"


class Classifier(nn.Module):
    """A sentence encoder, the mean over its words, normalised, and a linear head that begins at zero.

    It takes words [B, T], or what its frozen blocks made of them (`below`): the same for every epoch, so that each mail
    goes through them once.
    """

    def __init__(self, folder: str, trained_blocks: int) -> None:
        super().__init__()
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, **still).requires_grad_(False)
        self.frozen = self.encoder.config.num_hidden_layers - trained_blocks
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.encoder.layer

    def below(self, input_ids: Tensor) -> Tensor:
        """[B, T] words → [B, T, d + 1]: what the frozen blocks say of each, and whether it is a word at all."""
        mask = input_ids != PADDING
        words = self.encoder.embeddings(input_ids=input_ids)
        for block in self.blocks[: self.frozen]:
            words = block(words, attention_mask=hidden(mask))
        return torch.cat([words.float(), mask.unsqueeze(2)], dim=2)

    def embed(self, given: Tensor) -> Tensor:
        """[B, d], each of length 1: what is served."""
        given = given if given.is_floating_point() else self.below(given)
        words, mask = given[..., :-1].float(), given[..., -1]
        for block in self.blocks[self.frozen :]:
            words = block(words, attention_mask=hidden(mask))
        return F.normalize((words.float() * mask.unsqueeze(2)).sum(1), dim=1)  # points where the mean does

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.embed(given)).float()


def hidden(mask: Tensor) -> Tensor:
    """[B, T], 1 at words → what is added to attention, so that nobody looks at padding."""
    return (1 - mask[:, None, None].float()) * -1e4


def build(settings: Settings) -> Classifier:
    """The encoder as it was published, with what is to be trained: weights that begin at random follow the seed."""
    torch.manual_seed(settings.seed)
    model = Classifier(settings.model, 0 if settings.tune == "head" else settings.blocks)
    trained = model.blocks[model.frozen :]
    if settings.tune == "lora":
        lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules=["query", "value"])
        for block in trained:
            inject_adapter_in_model(lora, block)
    elif settings.tune == "tangent":
        one = LoraConfig(r=1, lora_alpha=1, target_modules=["value", "output.dense"])
        for block in trained:
            inject_adapter_in_model(one, block)
    elif settings.tune == "full":
        trained.requires_grad_(True)
    torch.seed()  # what is drawn from here on is nobody's to know
    return model


@dataclass(frozen=True)
class Mails:
    """Mails as tokens: those to train on, and those that are kept out of it, to test and to compare with."""

    train: TensorDataset
    test: TensorDataset


def read(path: str) -> tuple[list[str], Tensor]:
    """Texts and labels of a JSONL file, which may be packed by gzip."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        rows = [json.loads(line) for line in file]
    return [row["text"] for row in rows], torch.tensor([row["label"] for row in rows])


def tokens(texts: list[str], folder: str, length: int) -> Tensor:
    """[N, length]: each text by itself, cut and padded to a public length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(texts, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
    return given["input_ids"]


def mails(settings: Settings) -> Mails:
    texts, labels = read(settings.data)
    ids, n = tokens(texts, settings.model, settings.length), settings.train
    if len(ids) < n + 100:
        raise SystemExit(f"{settings.data} has {len(ids)} mails; {n} to train on and 100 to test with are needed")
    if settings.judge:
        ids, labels, n = ids[:n], labels[:n], n - settings.judge
    return Mails(TensorDataset(ids[:n], labels[:n]), TensorDataset(ids[n:], labels[n:]))


def public_texts(settings: Settings, number: int = 500) -> Tensor:
    """Tokens of documentation that anybody has."""
    texts = lmdp.data.load(PUBLIC, tokenizer=settings.model, length=settings.length).train
    return texts.tensors()[0]["input_ids"][:number]  # type: ignore[index, call-overload]


def planted(settings: Settings, run: Path, train: TensorDataset) -> lmdp.audit.planting.Planted:
    """Mails of random words, of either class by chance, each in the training or not by a coin, which the run keeps."""
    ids = train.tensors[0]
    generator = torch.Generator().manual_seed(settings.seed)
    words = torch.randint(int(ids.max()), (settings.canaries, ids.shape[1]), generator=generator) + 1
    words[:, 0] = ids[0, 0]  # every text begins with the same token
    labels = torch.randint(2, (settings.canaries,), generator=generator)
    coins = run / "private" / "coins.json"
    if not coins.exists():
        coins.parent.mkdir(parents=True, exist_ok=True)
        coins.write_text(json.dumps({"seed": secrets.randbits(60)}))
    seed = json.loads(coins.read_text())["seed"]
    return lmdp.plant_canaries(train, classes=2, kind=TensorDataset(words, labels), seed=seed)


def bf16() -> torch.autocast:
    """Products in bfloat16: about three times faster where the processor has them, and no matter for accuracy here."""
    return torch.autocast("cpu", torch.bfloat16)


def embeddings(model: Classifier, ids: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad(), bf16():
        return torch.cat([model.embed(part).float() for part in ids.split(PARTS)])


def accuracy(module: nn.Module, data: TensorDataset) -> float:
    given, labels = data.tensors
    module.eval()
    with torch.no_grad(), bf16():
        said = torch.cat([module(part) for part in given.split(PARTS)])
    return float((said.argmax(1) == labels).double().mean())


def save(model: nn.Module, run: Path) -> None:
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_file(trained, run / "weights.safetensors")


def load(run: Path) -> tuple[Settings, Classifier]:
    """A finished run: its settings and its model."""
    settings = Settings(**json.loads((run / "settings.json").read_text()))
    model = build(settings)
    missing = model.load_state_dict(load_file(run / "weights.safetensors"), strict=False).missing_keys
    untrained = {name for name, p in model.named_parameters() if p.requires_grad} & set(missing)
    if untrained:
        raise SystemExit(f"{run}/weights.safetensors lacks {sorted(untrained)[0]} and {len(untrained) - 1} others")
    return settings, model.eval()


def note(run: Path, name: str, values: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(json.dumps(values, indent=2) + "\n")


def open_run(run: Path, settings: Settings) -> None:
    """Begin a run, or go on with it; a folder with other settings is refused."""
    path = run / "settings.json"
    if path.exists() and json.loads(path.read_text()) != asdict(settings):
        raise SystemExit(f"{run} was begun with other settings ({path}). Name another folder with --out.")
    note(run, "settings.json", asdict(settings))


def quick(settings: Settings) -> Settings:
    """To see that everything works, not how well."""
    return replace(settings, epochs=2, train=600, batch=150, length=16, rank=2)


def seen_below(model: Classifier, data: Dataset[tuple[Tensor, Tensor]], folder: Path) -> TensorDataset:
    """Mails as the frozen, published part of the model hands them on, kept in a folder for the next run."""
    ids, labels = (torch.stack(each) for each in zip(*(data[i] for i in range(len(data)))))  # type: ignore[arg-type]
    name = hashlib.blake2b(ids.numpy().tobytes() + f"{model.frozen} {model.encoder.name_or_path}".encode()).hexdigest()
    path = folder / f"{name[:16]}.safetensors"
    if not path.exists():
        below = model.embed if model.frozen == len(model.blocks) else model.below
        with torch.no_grad(), bf16():
            states = torch.cat([below(part).to(torch.bfloat16) for part in ids.split(PARTS)])
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"states": states}, path)
    return TensorDataset(load_file(path)["states"], labels)
