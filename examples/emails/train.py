"""Fine-tune a sentence encoder on mails, privately: its head, LoRA or whole blocks, in a plain loop or by a trainer.

    python examples/emails/train.py --model MODEL --data emails.jsonl.gz --tune head --epsilon 3 --out runs/probe
    python examples/emails/train.py --model MODEL --data emails.jsonl.gz --tune lora --init runs/probe --out runs/lora
    python examples/emails/train.py --model MODEL --data emails.jsonl.gz --tune tangent --init runs/probe --out runs/t
    python examples/emails/train.py ... --loop trainer --method lm          # lmdp.integrations.DPTrainer, LM-DP-SGD
    python examples/emails/train.py ... --method sgd                        # not private, to compare with
    python examples/emails/train.py ... --quick                             # does it work here? seconds

Stopped at any time, the same command goes on from the last epoch; `--pieces 1` stops after every one.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mails import (
    PARTS,
    Settings,
    accuracy,
    bf16,
    build,
    load,
    mails,
    note,
    open_run,
    planted,
    quick,
    save,
    seen_below,
)
from tangent import Steered, Tangent
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lmdp
from lmdp import lineage

SUITS: dict[str, dict[str, Any]] = {
    "head": {"epochs": 30, "batch": 2000, "head_rate": 0.1},
    "lora": {"epochs": 4, "batch": 1000, "rate": 8e-3, "head_rate": 0.05, "epsilon": 7.2},
    "full": {"epochs": 4, "batch": 1000, "rate": 2e-4, "head_rate": 0.05, "epsilon": 7.2},
    "tangent": {"epochs": 30, "batch": 2000, "rate": 0.1, "clip": 0.3, "epsilon": 7.1},
}
"""Settings by what is tuned. docs/emails.md tells where they come from: 7.2, after a probe of epsilon 3, makes 8."""
PLAIN: dict[str, dict[str, Any]] = {
    "head": {"epochs": 40, "batch": 64, "head_rate": 0.02},
    "lora": {"epochs": 2, "batch": 64, "rate": 1e-3, "head_rate": 0.02},
    "full": {"epochs": 2, "batch": 64, "rate": 1e-4, "head_rate": 0.02},
    "tangent": {"epochs": 40, "batch": 64, "rate": 0.02},
}
"""The same without privacy."""


STOPPED = "stopped, as --pieces asked; the same command goes on"


def optimizer_for(module: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """The head begins at zero and has to go far; the encoder is good already."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    alone = settings.tune == "head"
    head = [p for name, p in trained.items() if alone or name.startswith("head.")]
    body = [p for name, p in trained.items() if not (alone or name.startswith("head."))]
    groups = [{"params": head, "lr": settings.head_rate}] if head else []
    groups += [{"params": body, "lr": settings.rate}] if body else []
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)


def privacy(settings: Settings) -> dict[str, Any]:
    """What the engine and the trainer are told alike."""
    return {
        "target_epsilon": settings.epsilon,
        "target_delta": settings.delta,
        "max_grad_norm": settings.clip,
        "method": settings.method,
        "layers": "block",
        "max_physical_batch_size": PARTS,
    }


class Training:
    """A plain loop. `module` is what is trained: the classifier, or its head alone on embeddings."""

    def __init__(self, settings: Settings, run: Path, module: nn.Module, data: Dataset[Any]) -> None:
        self.settings, self.module, self.path = settings, module, run / "private" / "state.pt"
        self.optimizer: Any = optimizer_for(module, settings)
        self.loader: Any = DataLoader(data, batch_size=settings.batch, shuffle=True)
        self.engine = lmdp.PrivacyEngine() if settings.private else None
        self.epoch, self.seconds, self.steps = 0, 0.0, settings.epochs * len(self.loader)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.engine is not None:
            self.module, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
                module=module,
                optimizer=self.optimizer,
                data_loader=self.loader,
                epochs=settings.epochs,
                looks_besides=True,
                **privacy(settings),
            )
        if self.path.exists():
            self.restore()

    def slow_down(self) -> None:
        """Rates fall in a straight line to zero, by the number of steps alone; that of a probe stays."""
        done = self.engine.steps / self.steps if self.engine else self.epoch / self.settings.epochs
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * (1 if self.settings.tune == "head" else 1 - done)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.slow_down()
        self.optimizer.zero_grad()
        with bf16():
            logits = self.module(inputs)
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()

    def finish(self, pieces: int) -> None:
        """All epochs, or as many as one call may make."""
        until = min(self.epoch + pieces, self.settings.epochs)
        while self.epoch < until:
            start = time.process_time()
            for inputs, labels in self.loader:
                self.step(inputs, labels)
            self.epoch += 1
            self.seconds += time.process_time() - start
            self.keep()
            spent = f", epsilon {self.engine.get_epsilon(self.settings.delta):.2f}" if self.engine else ""
            cost = f"{self.seconds / 60:.1f} minutes of one core"
            print(f"epoch {self.epoch} of {self.settings.epochs}{spent}, {cost}", flush=True)
        if until < self.settings.epochs:
            raise SystemExit(STOPPED)

    def keep(self) -> None:
        """What an interrupted run goes on from; after the last weights are written whole, it takes their place."""
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"engine": self.engine.state_dict()} if self.engine else {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state | {"epoch": self.epoch, "seconds": self.seconds}, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def restore(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.engine:
            self.engine.load_state_dict(state["engine"])
        self.epoch, self.seconds = state["epoch"], state["seconds"]


def in_a_plain_loop(settings: Settings, run: Path, module: nn.Module, data: Dataset[Any], pieces: int) -> float:
    """Minutes of processor time."""
    training = Training(settings, run, module, data)
    training.finish(pieces)
    if training.engine:
        say(run, training.engine.privacy_statement(settings.delta))
        training.engine.detach()
    return training.seconds / 60


def say(run: Path, statement: lmdp.PrivacyStatement) -> None:
    note(run, "privacy.json", statement.to_dict())
    verdict = "certified" if statement.certified else f"not certified: {'; '.join(statement.reasons)}"
    print(f"epsilon {statement.epsilon:.3f} at delta {statement.delta:g}, {verdict} (privacy.json)", flush=True)


class Named(Dataset[dict[str, Tensor]]):
    """Mails as a trainer of transformers takes them."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, label = self.data[i]
        return {"given": ids, "labels": label}


def by_the_trainer(settings: Settings, run: Path, module: nn.Module, data: Dataset[Any], pieces: int) -> float:
    """Minutes of processor time. `DPTrainer` has batches, account, checkpoints and privacy.json of its own."""
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from lmdp.integrations import DPTrainer, Privacy

    folder = run / "private" / "trainer"

    class Pieces(TrainerCallback):  # type: ignore[misc]
        epochs = 0

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.epochs += 1
            control.should_training_stop |= self.epochs == pieces

    trainer = DPTrainer(
        model=module,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=settings.batch,
            num_train_epochs=settings.epochs,
            lr_scheduler_type="linear",
            save_strategy="epoch",
            save_total_limit=1,
            bf16=True,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Named(data),
        optimizers=(optimizer_for(module, settings), None),
        compute_loss_func=lambda logits, labels, **_: F.cross_entropy(logits.float(), labels),
        callbacks=[Pieces()],
        privacy=Privacy(**privacy(settings), compose=bool(settings.init)),
    )
    start = time.process_time()
    newest = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=newest)
    if trainer.state.global_step < trainer.state.max_steps:
        raise SystemExit(STOPPED)
    say(run, trainer.privacy_statement)
    return (time.process_time() - start) / 60


def arguments() -> tuple[Settings, Path, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in fields(Settings):
        kind = {"str": str, "float": float, "int": int}[str(each.type)]
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, required=each.default is MISSING)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--quick", action="store_true", help="to see that it works, not how well")
    parser.add_argument("--pieces", type=int, default=sys.maxsize, help="epochs to make now, of all that are to make")
    given = vars(parser.parse_args())
    out, hurry, pieces = given.pop("out"), given.pop("quick"), given.pop("pieces")
    said = {name: value for name, value in given.items() if value is not None}
    suited = (PLAIN if said.get("method") == "sgd" else SUITS)[said.get("tune", "lora")]
    settings = Settings(**suited | said)
    return quick(settings) if hurry else settings, out, pieces


def main() -> None:
    settings, run, pieces = arguments()
    open_run(run, settings)
    model, data = build(settings), mails(settings)
    if settings.init:
        before, probe = load(Path(settings.init))
        if before.tune != "head":
            raise SystemExit(f"--init is {settings.init}, a run of --tune {before.tune}; begin with one of --tune head")
        if before.private and settings.private and not lineage.earlier(dict(probe.head.named_parameters())):
            raise SystemExit(
                f"what {settings.init} cost is not in the index of released weights, and would not be added up: set "
                "LMDP_LINEAGE to the folder that it was trained with, or train it again"
            )
        model.head.load_state_dict(probe.head.state_dict())
    elif settings.tune == "tangent":
        raise SystemExit("--tune tangent follows the head of a probe: name its run with --init")
    kept, begun = run.parent / "private", time.process_time()
    members = planted(settings, run, data.train).dataset if settings.canaries else data.train
    train = by_the_trainer if settings.loop == "trainer" else in_a_plain_loop
    given = seen_below(model, members, kept)
    module: nn.Module = model.head if settings.tune == "head" else model
    once = 0.0
    if settings.tune == "tangent":
        tangent = Tangent(model, settings)
        module, given = Steered(copy.deepcopy(model.head), tangent.sizes), tangent.seen(given, kept)
        once = (time.process_time() - begun) / 60
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    print(f"{len(given):,} mails, {trained:,} weights to train, {settings.tune} by {settings.method}", flush=True)
    minutes = once + train(settings, run, module, given, pieces)
    if isinstance(module, Steered):
        tangent.write(module)
    save(model, run)
    right = accuracy(model.head if settings.tune == "head" else model, seen_below(model, data.test, kept))
    result = {"accuracy": right, "minutes": minutes, **asdict(settings)}
    note(run, "result.json", result)
    print(f"test accuracy {right:.1%} after {minutes:.1f} minutes of one core: {run}")


if __name__ == "__main__":
    main()
