"""`python -m tests.device.table`: what crosses between a device and the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import SCNN
from tests.device.device import counting, load
from tests.device.test_laws import Text, images, of_choice, small, tokens
from tests.tables import choices

STEPS = 24


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=30, **sizes, num_labels=3))


def digits() -> TensorDataset:
    return TensorDataset(torch.randn(40, 1, 28, 28), torch.arange(40) % 10)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset]]] = {
    "conv + norm + generic": (lambda: small().float(), lambda: TensorDataset(images()[:][0].float(), images()[:][1])),
    "embedding + attention": (Text, tokens),
    "S-CNN": (SCNN, digits),
    "BERT (transformers)": (bert, tokens),
}


def measured(make: Callable[[], nn.Module], data: TensorDataset, device: torch.device, **options: Any) -> list[str]:
    """Worst of ordinary steps; and the whole look that is due after step 16."""
    torch.manual_seed(0)
    model = make().to(device)
    if options.get("weights") == "public":
        options = {"public_data": tuple(t.flip(0) for t in data.tensors), "public_every": 3} | options
        options["criterion"] = lambda output, labels: F.cross_entropy(getattr(output, "logits", output), labels)
    engine = lmdp.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data_loader=DataLoader(data, batch_size=14),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    ordinary, look = [], []
    while engine.steps < STEPS:
        for x, y in loader:
            x, y, before = x.to(device), y.to(device), engine.steps
            with counting() as crossed:
                optimizer.zero_grad()
                output = model(x)
                F.cross_entropy(getattr(output, "logits", output), y).backward()
                optimizer.step()
            if engine.steps > before and 3 < engine.steps <= 16:
                ordinary.append(crossed)
            elif engine.steps == before == 16:
                look.append(crossed)
            if engine.steps == STEPS:
                break
    worst = [max(getattr(c, name) for c in ordinary) for name in ("to_host", "bytes_to_host", "synchronisations")]
    statement = engine.privacy_statement(1e-3)
    bound = 64 * len(engine.layers)
    return [
        *map(str, worst),
        str(bound),
        str(max(c.bytes_to_device for c in ordinary)),
        str(sum(c.to_host for c in look)),
        "yes" if statement.certified else "no",
    ]


def main() -> None:
    device = load()
    heads = ["to host", "bytes", "waits", "64·L", "bytes to device", "transfers of a look", "certified"]
    print(f"{'model':24s} {'method':24s} " + " ".join(f"{head:>{max(7, len(head))}s}" for head in heads))  # noqa: T201
    for name, (make, data) in MODELS.items():
        for method, source in choices():
            row = measured(make, data(), device, **of_choice(method, source))
            cells = " ".join(f"{cell:>{max(7, len(head))}s}" for cell, head in zip(row, heads))
            print(f"{name:24s} {f'{method} {source}':24s} {cells}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
