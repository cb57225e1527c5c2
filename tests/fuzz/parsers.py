"""Every reader of a file that somebody else may have made: a valid file, how to make it wrong, and how it is read."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lmdp.app import reports
from lmdp.app.bounds import load_bounds
from lmdp.app.config import Config
from lmdp.app.runs import Card, Checkpoint, Coins, Members, RunFolder, load_model, spent_for
from lmdp.app.runs import checkpoint as checkpoints
from lmdp.app.serving import built
from lmdp.audit import EpsilonBound
from lmdp.audit.embeddings import read_embeddings
from lmdp.audit.results import AuditReport
from lmdp.data import load
from lmdp.data.celeba import read_attribute, read_partition
from lmdp.data.cifar import LAYOUTS, members_of, parse_records
from lmdp.data.decode import Picture, decode
from lmdp.data.download import Remote, _checked
from lmdp.data.faces import read_landmarks
from lmdp.data.idx import _unpacked, parse_idx
from lmdp.data.records import read_object
from lmdp.data.svhn import parse_mat
from lmdp.layers import LayerMap, error_rates_for
from lmdp.lineage import Spending, metadata
from lmdp.private import PrivacyStatement
from lmdp.report import render
from lmdp.report.audit_page import render as render_audit
from lmdp.report.epsilon import figure
from lmdp.risk import RiskProfile
from tests.data import files
from tests.fuzz import mutate as m
from tests.private.test_engine import private
from tests.report import sample

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Parser:
    """`valid` are the bytes of a good file called `name`; `read` is given the path of a mutated one."""

    name: str
    valid: bytes
    mutate: m.Mutate
    read: Read


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in sample.LAYERS))


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def picture(kind: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.fromarray(files.random_images(9, 7, 3)).convert(mode).save(out, kind)
    return out.getvalue()


def read_npz(path: Path) -> object:
    return load(f"npz:{path}").train.tensors()


def read_picture(path: Path) -> object:
    return decode([Picture(path.name, path)], size=None, channels=None, say=lambda _: None)


def read_idx(path: Path) -> object:
    return parse_idx(_unpacked(path), path.name, dimensions=3)


def read_cifar(path: Path) -> object:
    names = ("train.bin", "names.txt")
    members = members_of(path, names)
    return parse_records([members["train.bin"]], LAYOUTS["cifar10"], str(path))


@functools.cache
def a_mat() -> bytes:
    return files.mat(X=files.random_images(4, 4, 3, 3), y=np.array([[1], [10], [3]], np.uint8))


def read_svhn(path: Path) -> object:
    """As the data sources do: SciPy's reader can crash on forged files, so only verified ones reach it."""
    return parse_mat(_checked(path, Remote(path.name, ("https://x",), hashlib.sha256(a_mat()).hexdigest())))


def read_risk(path: Path) -> object:
    profile = RiskProfile.load(path)
    str(profile)
    return error_rates_for(profile, LayerMap.of(small_model()))


def read_config(path: Path) -> object:
    config = Config.load(path)
    path.write_text(config.to_toml(), encoding="utf-8")
    assert Config.load(path) == config
    return config


def read_audit(path: Path) -> object:
    report = AuditReport.load(path)
    str(report)
    return render_audit(report)


def read_privacy(path: Path) -> object:
    statement = PrivacyStatement.from_dict(read_object(path, "a privacy statement"))
    assert statement.certified is not bool(statement.reasons)
    return str(statement)


def a_bound() -> EpsilonBound:
    details = {"threshold": 0.5, "false_positives": 3}
    return EpsilonBound(math.inf, 0.4, 1e-5, 0.95, "repeated", "dirac", 1, 100, "dpsgd", "rdp", details)


def read_bounds(path: Path) -> object:
    bounds = load_bounds(path)
    return figure(bounds), [bound.to_dict() for bound in bounds]


@functools.cache
def a_checkpoint() -> bytes:
    engine, model, optimizer, _ = private(method="lm")
    rows = [{**row, "test_examples": 10} for row in sample.metrics(0.9, 3.0, (0.5, 0.5))]
    return checkpoints.encode(Checkpoint(5, model.state_dict(), optimizer.state_dict(), engine.state_dict(), rows))


def resigned(rng: random.Random, raw: bytes) -> bytes:
    """A checkpoint with other content and a digest that fits it: not damage, but forgery."""
    if rng.random() < 0.3:
        return m.by_safetensors(rng, raw)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"]["state"] = m.by_json(rng, header["__metadata__"]["state"].encode()).decode(
        "utf-8", "replace"
    )
    from safetensors.torch import load as load_tensors

    header["__metadata__"]["digest"] = checkpoints._digest(load_tensors(raw), header["__metadata__"]["state"])
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + raw[8 + length :]


def read_checkpoint(path: Path) -> object:
    """As far as a resumed training takes it in."""
    checkpoint = checkpoints.decode(path.read_bytes(), str(path))
    engine, model, optimizer, _ = private(method="lm")
    from lmdp.app.training import restore

    restore(checkpoint, model, optimizer, engine)
    return engine.privacy_statement(1e-5)


def read_model(path: Path) -> object:
    spent_for(path)
    return load_model(path, small_model())


def read_members(path: Path) -> object:
    folder = RunFolder(path.parent / "run")
    (folder / "private").mkdir(parents=True, exist_ok=True)
    (folder / "private/members.txt").write_bytes(path.read_bytes())
    try:
        return Members.read(folder)
    finally:
        shutil.rmtree(folder.path)


def read_coins(path: Path) -> object:
    folder = RunFolder(path.parent / "run")
    (folder / "private").mkdir(parents=True, exist_ok=True)
    (folder / "private/canaries.txt").write_bytes(path.read_bytes())
    try:
        return Coins.read(folder)
    finally:
        shutil.rmtree(folder.path)


A_LIST_OF_COINS = b"PRIVATE\nkey %064x\nin %032x\nout %032x\n" % (1, 2, 3)


@functools.cache
def a_list_of_members() -> bytes:
    digests = "".join(f"train {number:032x}\n" for number in range(9))
    return f"PRIVATE\nkey {1:064x}\nrun {2:032x}\n{digests}test {3:032x}\nholdout {4:032x}\n".encode()


@functools.cache
def a_run() -> dict[str, bytes]:
    """The files of a run folder that a report is made from."""
    told = sample.lm()
    rows = [{**row, "test_examples": 10} for row in told.metrics]
    assert told.audit is not None
    return {
        "config.toml": Config(epsilon=8.0, seed=1).to_toml().encode(),
        "metrics.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows),
        "privacy.json": json.dumps(told.privacy).encode(),
        "audit.json": json.dumps(sample.with_canaries(told.audit, 0.7, shown=sample.bound()).to_dict()).encode(),
        "risk.json": json.dumps(sample.risk("paper").to_dict()).encode(),
    }


KINDS: dict[str, m.Mutate] = {"toml": m.by_toml, "jsonl": m.by_json_lines, "json": m.by_json}


def mutated_run(rng: random.Random, _: bytes) -> bytes:
    """One file of a run folder mutated; packed as JSON, for `read_run` to lay out."""
    held = dict(a_run())
    for name in rng.sample(sorted(held), rng.choice([1, 1, 2])):
        held[name] = KINDS[name.split(".")[1]](rng, held[name])
        if rng.random() < 0.05:
            del held[name]
    return json.dumps({name: data.decode("latin1") for name, data in held.items()}).encode()


def read_run(path: Path) -> object:
    """What `lmdp compare` and `lmdp audit` read of a folder, and the report they make of it."""
    folder = RunFolder(path.parent / "run")
    folder.path.mkdir(exist_ok=True)
    for old in folder.path.iterdir():
        old.unlink()
    for name, text in json.loads(path.read_bytes()).items():
        (folder / name).write_bytes(text.encode("latin1"))
    risk = RiskProfile.load(folder / "risk.json") if (folder / "risk.json").exists() else None
    reports.summary(folder)
    return render(reports.story([folder], "lmdp", risk))


def read_metrics(path: Path) -> object:
    path.rename(path.with_name("metrics.jsonl"))
    folder = RunFolder(path.parent)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints/step-00000005.safetensors").write_bytes(a_checkpoint())
    checkpoint = folder.latest(lambda _: None)
    assert checkpoint is not None
    assert checkpoint.step >= 5
    return folder.metrics()


ATTRIBUTES = b"2\nSmiling Young\n000001.jpg  1 -1\n000002.jpg -1  1\n"
LANDMARKS = b"2\nlefteye_x lefteye_y\n" + b"".join(
    b"%06d.jpg 69 109 106 113 77 142 73 152 108 154\n" % i for i in (1, 2)
)


A_CARD = {
    "format": 1,
    "model": "tiny-encoder",
    "kind": "texts",
    "shape": [8],
    "classes": ["ham", "spam"],
    "layers": ["words", "head"],
    "by": "block",
    "options": {"task": "classify"},
    "tokenizer": "words",
    "vocabulary": 30,
}
TEXTS = "".join(json.dumps({"text": f"letter {i}", "label": i % 2}) + "\n" for i in range(6))


def read_card(path: Path) -> object:
    """And what follows from it: the model that it describes."""
    card = Card.read(path.parent)
    return None if card is None or max(card.shape, default=0) > 64 or (card.vocabulary or 0) > 99 else built(card)


def read_texts(path: Path) -> object:
    kind = "csv" if "csv" in path.name else "jsonl"
    return load(f"{kind}:{path}", tokenizer="words", length=8, classes=2)


@functools.cache
def parsers() -> tuple[Parser, ...]:
    images, labels = files.random_images(6, 5, 5), np.arange(6) % 3
    model = io.BytesIO()
    from safetensors.torch import save

    header = metadata([Spending("a", 1.0, 0.1, 5, "data")])
    model.write(save({name: tensor.clone() for name, tensor in small_model().state_dict().items()}, header))
    archive = files.tar_gz(
        {"names.txt": b"a b c", "train.bin": files.records(files.random_images(3, 3, 32, 32), [0, 1, 2])}
    )
    digits = a_mat()
    run = a_run()
    by_zip = m.in_zip(m.by_npy)
    return (
        Parser("risk.json", run["risk.json"], m.by_json, read_risk),
        Parser("config.toml", run["config.toml"], m.by_toml, read_config),
        Parser("audit.json", run["audit.json"], m.by_json, read_audit),
        Parser("privacy.json", run["privacy.json"], m.by_json, read_privacy),
        Parser("epsilon.json", json.dumps([a_bound().to_dict()] * 2).encode(), m.by_json, read_bounds),
        Parser("rows.jsonl", run["metrics.jsonl"], m.by_json_lines, read_metrics),
        Parser("folder.json", b"", mutated_run, read_run),
        Parser("checkpoint.safetensors", a_checkpoint(), resigned, read_checkpoint),
        Parser("model.safetensors", model.getvalue(), m.by_safetensors, read_model),
        Parser("members.txt", a_list_of_members(), m.by_bytes, read_members),
        Parser("canaries.txt", A_LIST_OF_COINS, m.by_bytes, read_coins),
        Parser("model.json", json.dumps(A_CARD).encode(), m.by_json, read_card),
        Parser("texts.jsonl", TEXTS.encode(), m.by_json_lines, read_texts),
        Parser("texts.csv", b'text,label\n"a, b",1\nc,0\n', m.by_bytes, read_texts),
        Parser("data.npz", npz(x_train=images, y_train=labels, x_test=images, y_test=labels), by_zip, read_npz),
        Parser("counted.npz", npz(x_train=images, y_train=labels, num_classes=np.int64(3)), by_zip, read_npz),
        Parser("embeddings.npz", npz(member=images.reshape(6, -1) / 9, nonmember=np.eye(25)), by_zip, read_embeddings),
        Parser("a.png", picture("PNG"), m.by_bytes, read_picture),
        Parser("a.jpg", picture("JPEG"), m.by_bytes, read_picture),
        Parser("a.gif", picture("GIF", "P"), m.by_bytes, read_picture),
        Parser("a.bmp", picture("BMP"), m.by_bytes, read_picture),
        Parser("a.tiff", picture("TIFF"), m.by_bytes, read_picture),
        Parser("idx.gz", files.idx_gz(images), m.in_gzip(m.by_bytes), read_idx),
        Parser("cifar.tar.gz", archive, m.in_tar, read_cifar),
        Parser("svhn.mat", digits, m.by_bytes, read_svhn),
        Parser("attributes.txt", ATTRIBUTES, m.by_bytes, lambda path: read_attribute(path, "Smiling")),
        Parser("partition.txt", b"000001.jpg 0\n000002.jpg 2\n", m.by_bytes, read_partition),
        Parser("landmarks.txt", LANDMARKS, m.by_bytes, read_landmarks),
    )  # fmt: skip


def outcome(parser: Parser, raw: bytes, folder: Path) -> str:
    """'read' or 'refused'; any other exception passes through."""
    path: Any = folder / parser.name
    path.write_bytes(raw)
    try:
        parser.read(path)
    except (ValueError, OSError):
        return "refused"
    finally:
        path.unlink(missing_ok=True)
    return "read"
