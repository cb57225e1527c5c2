"""How an encoder is tuned for texts: whole, by a head alone, or by adapters of rank 1 in the tangent of a head.

    Embedder   the mean over the words of a text is served; a head trains it
    Probe      the encoder is frozen, embeddings have length 1, the head begins at zero
    Tangent    a probe whose head was released, and small changes of the encoder that move embeddings along it

A released head of two classes says in which direction u of the embedding the classes lie apart. An adapter adds
d · (a · x) / s to what a linear layer gives out. Where it writes, d, is fixed: where u is reached best, as the mean
gradient over public texts says. Only a is trained. To first order the difference of the two scores moves by a · φ / s,

    φ(text) = sum over words of (gradient of u · embedding at the layer's output · d) times the layer's input.

So what a private training needs of a text is a row of fixed numbers, computed once and from this text alone: its
embedding, and φ of every adapter. `stage` makes rows. The model takes rows or texts; its parameters are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.models.encoder import mean_over
from lmdp.models.running import evaluation

TUNES = ALL, HEAD, TANGENT = "all", "head", "tangent"
BLOCKS = 3
"""How many blocks have adapters, from the last one."""
ALIKE = 1e-4
"""Public texts that differ by less than this share of their length tell nothing."""
AT_ONCE = 50
"""Texts that are in memory at once."""


def whole(x: Tensor) -> Tensor:
    """In single precision, at least."""
    return x if x.dtype == torch.float64 else x.float()


class Embedder(nn.Module):
    """An encoder whose mean over the words of a text is served, with a head to train it by."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        config: Any = encoder.config
        self.head = nn.Linear(config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(input_ids, attention_mask))
        return scores

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return mean_over(hidden, attention_mask)


class Probe(Embedder):
    """A frozen encoder, embeddings of length 1, and a linear head that begins at zero. Takes texts, or their rows."""

    exact = True
    """Whether rows give the scores that texts do, and not only to first order."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__(encoder.requires_grad_(False), classes)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Of texts and their mask; or of rows, which have none."""
        if attention_mask is None:
            return self.of_rows(input_ids)
        return self.of_embeddings(self.embed(input_ids, attention_mask))

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return F.normalize(whole(super().embed(input_ids, attention_mask)), dim=1)

    def of_rows(self, rows: Tensor) -> Tensor:
        return self.of_embeddings(rows)

    def of_embeddings(self, embeddings: Tensor) -> Tensor:
        scores: Tensor = self.head(embeddings)
        return scores

    @property
    def width(self) -> int:
        """Of a row."""
        return self.head.in_features

    def stage(self, texts: Mapping[str, Tensor]) -> Tensor:
        """Texts [B, T] → rows [B, width]."""
        with evaluation(self), torch.no_grad():
            return self.embed(**texts)


class Steered(nn.Module):
    """A frozen linear layer, and what is added to what it gives out: direction · (term · x) / scale.

    Of the head, x is an embedding, and the direction −½, ½. `centre` is what public texts have in this part of a row,
    on average; it is taken off the scores, since a layer of the encoder cannot do it.
    """

    direction: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.term = nn.Linear(base.in_features, 1, bias=False)
        nn.init.zeros_(self.term.weight)
        self.register_buffer("direction", torch.zeros(base.out_features))
        self.register_buffer("centre", torch.zeros(base.in_features))
        self.register_buffer("scale", torch.ones(()))
        self.to(base.weight)  # where the layer is, and as precise

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.term(x) / self.scale
        out: Tensor = self.base_layer(x) + self.direction * added
        return out

    def row(self, part: Tensor) -> Tensor:
        """[B, in] → [B, 1]: what the term adds to the difference of scores, by its part of the rows."""
        added: Tensor = self.term((part - self.centre) / self.scale)
        return added

    @property
    def shift(self) -> Tensor:
        """What `centre` takes off the difference of scores."""
        taken: Tensor = self.term.weight[0] @ self.centre
        return taken / self.scale

    # What adapters of peft offer, and `merged` asks for.

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def get_delta_weight(self) -> Tensor:
        return self.direction[:, None] * self.term.weight / self.scale

    @torch.no_grad()
    def merge(self) -> None:
        weight: Any = self.base_layer.weight
        weight += self.get_delta_weight()


class Tangent(Probe):
    """A probe of two classes, with an adapter in linear layers of its last blocks, and one in its head.

    As it is made it does what the probe does. `aim` fixes where adapters write, by texts that are public.
    """

    exact = False

    def __init__(self, probe: Probe) -> None:
        if (classes := probe.head.out_features) != 2:
            raise ValueError(
                f"tune is {TANGENT}, which is for 2 classes; there are {classes}. Choose {HEAD}, or {ALL} with lora"
            )
        super().__init__(probe.encoder, 2)
        adapted = list(_adapted(self.encoder))
        for name, layer in adapted:
            self.encoder.set_submodule(name, Steered(layer))
        self.names = tuple(name for name, _ in adapted)
        steered = Steered(probe.head)
        steered.direction.copy_(torch.tensor([-0.5, 0.5]))
        self.head: Any = steered

    @property
    def adapters(self) -> list[Steered]:
        return [layer for name in self.names if isinstance(layer := self.encoder.get_submodule(name), Steered)]

    @property
    def width(self) -> int:
        return sum(layer.base_layer.in_features for layer in [self.head, *self.adapters])

    def of_rows(self, rows: Tensor) -> Tensor:
        steered = [self.head, *self.adapters]
        parts = rows.split([layer.base_layer.in_features for layer in steered], dim=1)
        added = sum(layer.row(part) for layer, part in zip(steered, parts))
        scores: Tensor = self.head.base_layer(parts[0]) + self.head.direction * added
        return scores

    def of_embeddings(self, embeddings: Tensor) -> Tensor:
        taken = sum(layer.shift for layer in [self.head, *self.adapters])
        scores: Tensor = self.head(embeddings) - self.head.direction * taken
        return scores

    def stage(self, texts: Mapping[str, Tensor]) -> Tensor:
        embeddings, seen = self._seen(texts)
        weights = [
            (gradient * layer.direction).sum(2, keepdim=True) for layer, (_, gradient) in zip(self.adapters, seen)
        ]
        return torch.cat([embeddings, *((w * taken).sum(1) for w, (taken, _) in zip(weights, seen))], dim=1)

    def aim(self, texts: Mapping[str, Tensor]) -> None:
        """Directions, and what a row has on average and how long it is, from public texts and the released head."""
        direction = self._apart()
        if not direction.any():
            raise ValueError(
                f"tune is {TANGENT}, and the head says nothing: all its weights are alike. Begin with the run of a "
                f"probe, trained by tune = {HEAD} on the same model (init = RUN)"
            )
        parts = [dict(zip(texts, part)) for part in zip(*(rows.split(AT_ONCE) for rows in texts.values()))]
        sums: list[Tensor] = [torch.zeros_like(layer.direction) for layer in self.adapters]
        for part in parts:
            for total, (_, gradient) in zip(sums, self._seen(part)[1]):
                total += gradient.sum((0, 1))
        for layer, total in zip(self.adapters, sums):
            layer.direction.copy_(F.normalize(total, dim=0))
        rows = torch.cat([self.stage(part) for part in parts])
        steered = [self.head, *self.adapters]
        for layer, part in zip(steered, rows.split([layer.base_layer.in_features for layer in steered], dim=1)):
            layer.centre.copy_(part.mean(0))
            length = (part - layer.centre).norm(dim=1).median()
            if not length > ALIKE * part.norm(dim=1).median():
                raise ValueError(
                    f"tune is {TANGENT}, but the {len(part)} public texts are all alike to the encoder: they tell "
                    "nothing of what private ones have in common. Name others whose words it knows (public = SPEC)"
                )
            layer.scale.copy_(length)

    def _apart(self) -> Tensor:
        weight: Tensor = self.head.base_layer.weight
        return (weight[1] - weight[0]).detach()

    def _seen(self, texts: Mapping[str, Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Embeddings of the probe; of every adapted layer what it takes in, and what is asked of what it gives out.

        Of the encoder as it was before it was trained: what is trained counts for nothing here.
        """
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

        def added(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if layer in seen or output.dim() != 3:
                how = "more than once" if layer in seen else f"with outputs of shape {tuple(output.shape)}"
                raise ValueError(
                    f"tune is {TANGENT}, but the encoder calls a layer {how}; it must be once, [texts, words, "
                    f"numbers]. Choose {HEAD}, or {ALL} with lora"
                )
            nothing = torch.zeros_like(output, requires_grad=True)
            seen[layer] = whole(inputs[0].detach()), nothing
            return output + nothing

        with evaluation(self), _hooked(self.adapters, added), torch.enable_grad():
            embeddings = self.embed(**texts)
            inside = [seen[layer.base_layer] for layer in self.adapters]
            asked = (embeddings * self._apart()).sum()
            gradients = torch.autograd.grad(asked, [nothing for _, nothing in inside], materialize_grads=True)
        return embeddings.detach(), [(taken, whole(gradient)) for (taken, _), gradient in zip(inside, gradients)]


@contextmanager
def _hooked(adapters: list[Steered], hook: Any) -> Iterator[None]:
    """Inside, adapters add what the hook does and nothing else."""
    handles = [layer.base_layer.register_forward_hook(hook) for layer in adapters]
    directions = [layer.direction.clone() for layer in adapters]
    try:
        for layer in adapters:
            layer.direction.zero_()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, direction in zip(adapters, directions):
            layer.direction.copy_(direction)


def _adapted(encoder: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers of the last blocks that give out as many numbers as an embedding has, but for queries and keys."""
    config: Any = encoder.config
    towers = ((name, m) for name, m in encoder.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    name, tower = next(towers, ("", nn.ModuleList()))
    layers = [
        (f"{name}.{i}.{inside}", layer)
        for i, block in list(enumerate(tower))[-BLOCKS:]
        for inside, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.out_features == config.hidden_size
        and not inside.rpartition(".")[2].startswith(("q", "k"))
    ]
    if not layers:
        raise ValueError(
            f"tune is {TANGENT}, but no block of {type(encoder).__name__} has a linear layer of "
            f"{config.hidden_size} outputs to adapt; choose {HEAD}, or {ALL} with lora"
        )
    yield from layers


KINDS: dict[str, Any] = {ALL: Embedder, HEAD: Probe, TANGENT: lambda *given: Tangent(Probe(*given))}
"""How each is made of an encoder and a number of classes."""
