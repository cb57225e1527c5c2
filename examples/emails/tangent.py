"""LoRA of rank 1, trained in the tangent of a probe: each mail goes through the network once, as for a probe.

A probe that was released says in which direction u of the embedding spam lies. An adapter of rank 1 in a linear layer
adds d · (a · x) to what the layer gives out. Its direction d is fixed: the one in which u is reached best, as the mean
gradient over public texts says. Only a is trained, and to first order the logit moves by a · φ, where

    φ(mail) = sum over words of (gradient of the logit at the layer's output · d) times the layer's input

is computed once for each mail. So the private training is that of a linear model on φ and the embedding, less what they
are on public texts, with as few weights as the layers have inputs; and what it finds is written into the adapters.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from mails import PARTS, Classifier, Settings, bf16, public_texts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Taken = dict[str, tuple[Tensor, Tensor]]
"""Adapted layer → what it takes in [B, T, i], and the gradient of the logit at what it gives out [B, T, o]."""


class Steered(nn.Module):
    """The released head, frozen, and a linear term for the embedding and for every adapter. [B, D] → [B, 2]."""

    def __init__(self, head: nn.Linear, sizes: dict[str, int]) -> None:
        super().__init__()
        self.head, self.sizes = head.requires_grad_(False), sizes
        self.terms = nn.ModuleDict({name: nn.Linear(size, 1, bias=False) for name, size in sizes.items()})
        for term in self.terms.values():
            nn.init.zeros_(term.weight)  # type: ignore[arg-type]

    def forward(self, given: Tensor) -> Tensor:
        width = self.head.in_features
        parts = given[:, width:].float().split(list(self.sizes.values()), dim=1)
        logit = sum(term(part) for term, part in zip(self.terms.values(), parts))
        return self.head(given[:, :width].float()) + torch.cat([-logit / 2, logit / 2], dim=1)


class Tangent:
    """Of a classifier whose head was released: directions, φ, and what is subtracted from it, by public texts alone."""

    def __init__(self, model: Classifier, settings: Settings) -> None:
        self.model = model
        self.layers = {name: m for name, m in model.blocks.named_modules() if hasattr(m, "lora_A")}
        self.direction = (model.head.weight[1] - model.head.weight[0]).detach().float()
        public = model.below(public_texts(settings))
        taken = [self._taken(part)[1] for part in public.split(PARTS)]
        sums = {name: sum(each[name][1].sum((0, 1)) for each in taken) for name in self.layers}
        self.directions = {name: F.normalize(total, dim=0) for name, total in sums.items()}
        rows = self._rows(public)
        self.centre = [part.mean(0) for part in rows]
        self.scale = [(part - centre).norm(dim=1).median() for part, centre in zip(rows, self.centre)]

    @property
    def sizes(self) -> dict[str, int]:
        inside = {name.replace(".", "_"): layer.in_features for name, layer in self.layers.items()}
        return {"embedding": len(self.direction), **inside}

    def _taken(self, given: Tensor) -> tuple[Tensor, Taken]:
        """Embeddings, and what each adapted layer takes in and is asked for."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = []
        for name, layer in self.layers.items():

            def added(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> Tensor:
                nothing = torch.zeros_like(output, requires_grad=True)
                seen[name] = inputs[0].detach().float(), nothing
                return output + nothing

            hooks.append(layer.register_forward_hook(added))
        with torch.enable_grad(), bf16():
            embedding = self.model.embed(given)
            gradients = torch.autograd.grad((embedding.float() @ self.direction).sum(), [g for _, g in seen.values()])
        for hook in hooks:
            hook.remove()
        return embedding.detach().float(), {
            name: (inputs, gradient.float()) for (name, (inputs, _)), gradient in zip(seen.items(), gradients)
        }

    def _rows(self, given: Tensor) -> list[Tensor]:
        """Of every mail: its embedding, and φ of every adapter."""
        rows = []
        for part in given.split(PARTS):
            embedding, taken = self._taken(part)
            phis = [torch.einsum("bto,o,bti->bi", g, self.directions[name], x) for name, (x, g) in taken.items()]
            rows.append([embedding, *phis])
        return [torch.cat(column) for column in zip(*rows)]

    def seen(self, data: TensorDataset, folder: Path | None = None) -> TensorDataset:
        """Mails as `Steered` takes them, each by itself: the embedding as it is, then all parts, centred.

        Kept in a folder, where one is named, for another run that begins with the same head.
        """
        told = [data.tensors[0], self.direction, *self.directions.values()]
        name = hashlib.blake2b(b"".join(t.view(torch.uint8).numpy().tobytes() for t in told), digest_size=8).hexdigest()
        path = None if folder is None else folder / f"tangent-{name}.safetensors"
        kept = {} if path is None or not path.exists() else load_file(path)
        rows = [kept[key] for key in sorted(kept)] or self._rows(data.tensors[0])
        if path is not None and not kept:
            save_file({f"{i:02d}": part.contiguous() for i, part in enumerate(rows)}, path)
        parts = [(part - centre) / scale for part, centre, scale in zip(rows, self.centre, self.scale)]
        return TensorDataset(torch.cat([rows[0], *parts], dim=1), data.tensors[1])

    def write(self, trained: Steered) -> None:
        """Into the adapters and the head of the classifier what was trained."""
        weights = [term.weight.detach()[0] for term in trained.terms.values()]  # type: ignore[union-attr, index]
        weights = [w / scale for w, scale in zip(weights, self.scale)]
        shift = -sum(float(w @ centre) for w, centre in zip(weights, self.centre))
        with torch.no_grad():
            for name, a in zip(self.layers, weights[1:]):
                layer = self.layers[name]
                layer.lora_A["default"].weight.copy_(a[None] / layer.scaling["default"])
                layer.lora_B["default"].weight.copy_(self.directions[name][:, None])
            halves = torch.tensor([-0.5, 0.5])
            self.model.head.weight += halves[:, None] * weights[0]
            self.model.head.bias += halves * shift
