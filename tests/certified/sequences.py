"""Texts of any length through recurrent layers, packed and padded, and through bags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

import lmdp
from tests.certified.case import Table, private
from tests.certified.nets import Recurrent
from tests.certified.parts import CLASSES, VOCABULARY, WIDTH, Texts, texts

sound, broken = Table(), Table()
Run = Callable[[Path], lmdp.PrivacyEngine]


class Packed(nn.Module):
    """Packs what it embeds, and reads the last states."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), kind(WIDTH, WIDTH, **options)  # type: ignore[call-arg]
        self.head = nn.Linear(WIDTH, CLASSES)

    def packed(self, tokens: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        last = self.cell(self.packed(tokens, lengths))[1]
        logits: Tensor = self.head((last[0] if isinstance(last, tuple) else last)[-1])
        return logits


class PackedMean(Packed):
    """Pads the outputs again, and takes their mean over each text."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        outputs, counts = pad_packed_sequence(self.cell(self.packed(tokens, lengths))[0], batch_first=True)
        logits: Tensor = self.head(outputs.sum(1) / counts[:, None])
        return logits


class PackedTwice(Packed):
    """Two layers, with dropout between them that is drawn for padded outputs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dropout, self.second = nn.Dropout(0.3), nn.GRU((1 + self.cell.bidirectional) * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = self.cell(self.packed(tokens, lengths))[0]
        outputs, _ = pad_packed_sequence(packed, batch_first=True, total_length=tokens.shape[1])
        again = pack_padded_sequence(self.dropout(outputs), lengths, batch_first=True, enforce_sorted=False)
        logits: Tensor = self.head(self.second(again)[1][-1])
        return logits


class SortedByHand(Packed):
    """Puts the longest first itself, and the outputs back: the layer's rows are other examples than the table's."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(self.embed(tokens)[order], lengths[order].cpu(), batch_first=True)
        logits: Tensor = self.head(self.cell(packed)[1][0][-1][order.argsort()])
        return logits


class BatchSecond(Recurrent):
    """Its layer takes the batch second, as it does unless told otherwise."""

    def __init__(self) -> None:
        super().__init__(nn.GRU)
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.embed(tokens).transpose(0, 1))[0][-1])
        return logits


class Offsets(nn.Module):
    """Lays the words of all texts in one row, each text a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        logits: Tensor = self.head(self.embed(tokens[inside], lengths.cumsum(0) - lengths))
        return logits


class Table2D(nn.Module):
    """A bag for every row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(VOCABULARY, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def ragged(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded to the longest text of the batch; how long each is; classes."""
    kept = [e["input_ids"][e["attention_mask"] > 0] for e in examples]
    tokens = pad_sequence(kept, batch_first=True)
    return tokens, torch.tensor([len(text) for text in kept]), torch.stack([e["labels"] for e in examples])


def by_length(make: Callable[[], nn.Module]) -> Run:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return lambda _: private(make(), Texts(), loading={"collate_fn": ragged}).run(loss)


def by_tokens(make: Callable[[], nn.Module], *, padded_to_the_longest: bool = False) -> Run:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    if padded_to_the_longest:
        return lambda _: private(make(), Texts(), loading={"collate_fn": ragged}).run(loss)
    return lambda _: private(make(), texts()).run(loss)


sound.add("packed_lstm", "An LSTM reads packed texts, and its last state is classified.", by_length(Packed))
sound.add(
    "packed_gru", "A GRU reads packed texts, and its outputs are padded again.", by_length(lambda: PackedMean(nn.GRU))
)
sound.add(
    "packed_with_dropout_between",
    "Texts are packed, padded, thinned out and packed again, in both directions.",
    by_length(lambda: PackedTwice(bidirectional=True)),
)
sound.add("batch_second", "A GRU takes the batch second.", by_tokens(BatchSecond))
sound.add("bags_with_offsets", "All words are laid in one row, and each text is a bag of them.", by_length(Offsets))
sound.add("bags_of_a_table", "Each row of a padded table is a bag.", by_tokens(Table2D, padded_to_the_longest=True))

broken.add(
    "last_padded_position",
    "An LSTM's output is read at the last place, up to which the longest text of the batch has it read padding.",
    by_tokens(lambda: Recurrent(nn.LSTM), padded_to_the_longest=True),
)
broken.add("rows_sorted_by_hand", "The model sorts its rows by length for an LSTM, and back.", by_length(SortedByHand))


@broken("Packed sequences are given to the model itself, and nothing shows whose rows are whose.", taints=False)
def packed_by_collation(_: Path) -> lmdp.PrivacyEngine:
    class Given(Packed):
        def forward(self, packed: PackedSequence) -> Tensor:  # type: ignore[override]
            embedded = PackedSequence(self.embed(packed.data), *packed[1:])
            logits: Tensor = self.head(self.cell(embedded)[1][0][-1])
            return logits

    def collate(examples: list[dict[str, Tensor]]) -> tuple[PackedSequence, Tensor]:
        tokens, lengths, y = ragged(examples)
        return pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False), y

    training = private(Given(), Texts(), loading={"collate_fn": collate})
    return training.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


@broken("The words of all texts come from collation in one row, with offsets.", taints=False)
def bags_by_collation(_: Path) -> lmdp.PrivacyEngine:
    class Given(Offsets):
        def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embed(words, offsets))
            return logits

    def collate(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, lengths, y = ragged(examples)
        return tokens[tokens > 0], lengths.cumsum(0) - lengths, y

    training = private(Given(), Texts(), loading={"collate_fn": collate})
    return training.run(lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]))
