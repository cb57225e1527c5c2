"""`accelerated`: a loop of one's own with Accelerate, made private.

account, model, optimizer, loader = accelerated(accelerator, model, optimizer, loader, privacy=privacy, epochs=3,
                                                output_dir="runs/mail")
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(criterion(model(batch[0]), batch[1]))
        optimizer.step()
account.close()
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from lmdp.integrations.account import TrainerAccount, draw_secret_seeds
from lmdp.integrations.arguments import Refusal
from lmdp.integrations.loading import TrainerLoader
from lmdp.integrations.privacy import Privacy
from lmdp.processes import sample_rate_of, steps_per_pass

REFUSALS = (
    Refusal(
        "num_processes",
        lambda accelerator: accelerator.num_processes > 1,
        "each process would state its own epsilon, and together they spend more",
        "Start it with accelerate launch --num_processes 1, or with python.",
    ),
    Refusal(
        "gradient_accumulation_steps",
        lambda accelerator: accelerator.gradient_accumulation_steps > 1,
        "gradients of several batches would be added up before they are clipped",
        "Leave it out, multiply the batch_size of the data loader by it, and pass Privacy(max_physical_batch_size=...) "
        "with the batch_size before.",
    ),
    Refusal(
        "mixed_precision",
        lambda accelerator: accelerator.mixed_precision not in ("no", "bf16"),
        "a GradScaler scales by what it sees in private gradients, and leaves out steps",
        "Use 'bf16', or 'no'.",
    ),
)


def accelerated(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    privacy: Privacy,
    epochs: float,
    output_dir: str | Path,
) -> tuple[TrainerAccount, nn.Module, Any, TrainerLoader]:
    """The account, and the three as `accelerator.prepare` gives them, except the loader: it is Poisson-sampled, and one
    that Accelerate makes of it would not be.

    As with `make_private_with_epsilon`, batches that are only looked at take the place of others: a pass has as many
    batches as before, and a schedule that is stepped with each of them fits. It ends early where no further step may be
    made. `accelerator.save_state` and `load_state` keep the account. Call `account.close()` at the end: it writes
    privacy.json into `output_dir`.
    """
    for refusal in (each for each in REFUSALS if each.applies(accelerator, privacy)):
        raise ValueError(f"Accelerator({refusal.setting}): {refusal.why}. {refusal.remedy}")
    account = TrainerAccount(privacy, output_dir)
    prepared, stepping = accelerator.prepare(model, optimizer)
    bare = getattr(stepping, "optimizer", stepping)
    steps = math.ceil(epochs * steps_per_pass(sample_rate_of(loader)[0]) - 1e-9)
    account.attach(prepared, bare, loader, steps=steps, looks_besides=False)
    if privacy.options.get("seed") is None:  # what is saved of generators then tells neither of steps before nor after
        accelerator.register_save_state_pre_hook(lambda *_: draw_secret_seeds())
    accelerator.register_for_checkpointing(account)
    place = partial(send_to_device, device=accelerator.device)
    return account, prepared, stepping, TrainerLoader(loader, account, place=place)
