"""Something follows from how many examples a batch has, from their places in it, from the length that they are padded
to, from a rare kind among them, or from an outlier. `moves` was measured by removing one example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import lmdp
from tests.certified.case import BATCH, EXAMPLES, Table, private
from tests.certified.hub import transformer
from tests.certified.parts import CLASSES, FEATURES, VOCABULARY, WIDTH, classify, generator, perceptron, texts, vectors

broken = Table()

Loss = Callable[[nn.Module, Any], Tensor]


def each_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_half(rows: Tensor) -> Tensor:
    weights = torch.ones(len(rows))
    weights[1::2] = 0.1
    return (rows * weights).mean()


def flipped(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone()
    x[::2] = -x[::2]
    return F.cross_entropy(model(x), batch[1])


def noisy(model: nn.Module, batch: Any) -> Tensor:
    own = torch.Generator().manual_seed(0)
    return F.cross_entropy(model(batch[0] + torch.randn(batch[0].shape, generator=own)), batch[1])


def seeded_apart(model: nn.Module, batch: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        return classify(model, batch)


def drawn_apart(model: nn.Module, batch: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return classify(model, batch)


def detached(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    half = len(out) // 2
    return F.cross_entropy(torch.cat([out[:half].detach(), out[half:]]), batch[1])


LOSSES: dict[str, tuple[str, str, Loss]] = {
    "weight_of_a_partial_batch": (
        "The mean counts as much as the batch is full.",
        "1.1; 2 on bad data",
        lambda model, batch: classify(model, batch) * (len(batch[0]) / BATCH),
    ),
    "small_batches_count_less": (
        "A batch that is smaller than usual counts a tenth.",
        "2.8",
        lambda model, batch: classify(model, batch) * (1.0 if len(batch[0]) >= BATCH else 0.1),
    ),
    "a_sum_called_a_mean": (
        "A sum that is written as a product, under loss_reduction='mean'.",
        "2 on bad data",
        lambda model, batch: torch.dot(each_loss(model, batch), torch.ones(len(batch[0]))),
    ),
    "every_second_row_counts_less": (
        "Every second row of the batch counts a tenth.",
        "4.0",
        lambda model, batch: of_half(each_loss(model, batch)),
    ),
    "every_second_row_is_flipped": ("Every second row is flipped, as an augmentation.", "6.7", flipped),
    "noise_of_one_seed": ("Every batch gets the noise of the same seed.", "6.6", noisy),
    "first_half_detached": ("The first half of the batch is support, the second is learnt.", "1.0", detached),
    "seeded_in_every_step": (
        "Dropout of the same seed in every step: what an example drops follows from its place.",
        "5.0",
        lambda model, batch: [torch.manual_seed(0), classify(model, batch)][1],
    ),
    "seeded_apart_from_the_rest": (
        "The same by torch.random, and the generator is put back afterwards.",
        "3.6",
        seeded_apart,
    ),
    "seeded_by_putting_back": (
        "The generator is put back after every step, so that all steps drop the same places.",
        "3.6, to whoever has found the places out",
        drawn_apart,
    ),
    "sum_clamped": (
        "What all examples add up to is clamped.",
        "all of the batch",
        lambda model, batch: each_loss(model, batch).sum().clamp(max=5.0 * BATCH),
    ),
    "mean_without_nan": (
        "nan_to_num of the mean: one bad example silences all.",
        "4.4",
        lambda model, batch: classify(model, batch).nan_to_num(),
    ),
    "mean_in_half_precision": (
        "The mean is computed in bfloat16, which rounds what each example is divided by.",
        "4 for a thousand examples that are not clipped",
        lambda model, batch: F.cross_entropy(model(batch[0]).bfloat16(), batch[1]),
    ),
}


def of_loss(name: str, loss: Loss) -> Callable[[Path], lmdp.PrivacyEngine]:
    dropping = nn.Sequential(nn.Dropout(0.5), perceptron()) if name.startswith("seeded") else perceptron()
    reduction = "sum" if name.startswith("sum") else "mean"
    return lambda _: private(dropping, vectors(), loss_reduction=reduction).run(loss)


for name, (story, moves, loss) in LOSSES.items():
    broken.add(name, story, of_loss(name, loss), moves=moves)


class Hot(nn.Module):
    """Sharper where the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits / (0.1 if len(x) > BATCH // 2 else 2.0)


@broken("The model's temperature follows from the size of the batch.", moves="2.2")
def temperature_by_size(_: Path) -> lmdp.PrivacyEngine:
    return private(Hot(), vectors()).run(classify)


class Words(nn.Module):
    """Words are added up; `places`: with the tutorial's table of positions, on the wrong dimension."""

    def __init__(self, *, places: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.places = places
        self.register_buffer("table", torch.randn(EXAMPLES, 1, WIDTH, generator=generator()))

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embed(tokens)
        if self.places:
            words = words + self.table[: tokens.size(0)]
        logits: Tensor = self.head(words.mean(dim=1).tanh())
        return logits


@broken("Positions are counted along the batch: code for the batch second, with the batch first.", moves="1.6")
def positions_along_the_batch(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    return private(Words(places=True), texts()).run(loss)


class Ragged(Dataset[tuple[Tensor, Tensor]]):
    """Texts of four lengths."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        g = generator()
        lengths = [(4, 6, 8, 12)[int(i)] for i in torch.randint(0, 4, (examples,), generator=g)]
        self._texts = [torch.randint(1, VOCABULARY, (length,), generator=g) for length in lengths]
        self._labels = torch.randint(0, CLASSES, (examples,), generator=g)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._texts[index], self._labels[index]


def padded(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([text for text, _ in examples], batch_first=True), torch.stack([y for _, y in examples])


@broken("A mean over words counts padding, and the longest text of the batch decides how much there is.", moves="4.1")
def mean_over_padding(_: Path) -> lmdp.PrivacyEngine:
    return private(Words(), Ragged(), loading={"collate_fn": padded}).run(classify)


@broken("BERT is not given the attention mask: it reads padding, of which the longest text decides.", moves="1.0")
def attention_mask_forgotten(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1])

    model = transformer("BertForSequenceClassification")
    return private(model, Ragged(), loading={"collate_fn": padded}).run(loss)


@broken("collate_fn cuts all texts to the shortest.", moves="3.2")
def cut_to_the_shortest(_: Path) -> lmdp.PrivacyEngine:
    def cut(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        shortest = min(len(text) for text, _ in examples)
        return padded([(text[:shortest], y) for text, y in examples])

    # One look in nine does not see it: the shortest text of all is among those who stay. After 64 steps there are four.
    return private(Words(), Ragged(), loading={"collate_fn": cut}).run(classify, passes=18)


@broken("collate_fn reverses every second example.", moves="5.6")
def every_second_reversed(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        rows = [x.flip(0) if i % 2 else x for i, (x, _) in enumerate(examples)]
        return torch.stack(rows), torch.stack([y for _, y in examples])

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(classify)


class Standardising(Dataset[tuple[Tensor, Tensor]]):
    """Gives whole lists, standardised by what is in them."""

    def __init__(self) -> None:
        self._x, self._y = vectors().tensors

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]

    def __getitems__(self, at: list[int]) -> list[tuple[Tensor, Tensor]]:
        x = self._x[at]
        return list(zip((x - x.mean(0)) / (x.var(0, correction=0).sqrt() + 0.1), self._y[at]))


@broken("The dataset reads whole batches (__getitems__) and standardises what it reads.", moves="1.1; 3.9 on bad data")
def standardised_by_the_dataset(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), Standardising()).run(classify)


class Quantised(nn.Module):
    """To 16 bits of the largest activation of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        step = hidden.detach().abs().max() / 2**15
        logits: Tensor = self.head(hidden + ((hidden / step).round() * step - hidden).detach())
        return logits


@broken("Activations are rounded to 16 bits of the largest one in the batch: harmless without an outlier.", moves="8 w")
def rounded_by_the_largest(_: Path) -> lmdp.PrivacyEngine:
    return private(Quantised(), vectors()).run(classify)


def rarely_positive() -> TensorDataset:
    x = torch.randn(8 * EXAMPLES, FEATURES, generator=generator())
    return TensorDataset(x, (torch.rand(8 * EXAMPLES, generator=generator(2)) < 0.08).long())


@broken("A batch with more than five of a rare class counts a fifth.", moves="5.7")
def many_of_a_rare_class(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (0.2 if int(batch[1].sum()) > 5 else 1.0)

    return private(perceptron(), rarely_positive(), batch_size=2 * BATCH).run(loss, passes=2)


@broken("Targets of any size, and a term that ranks the examples of a batch: small beside the largest.", moves="7.5")
def ranked_claims(_: Path) -> lmdp.PrivacyEngine:
    x, _y = vectors().tensors
    claims = torch.exp(3.0 * torch.randn(len(x), generator=generator(3)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        told, paid = model(batch[0]).squeeze(1), batch[1]
        order = torch.sign(paid[:, None] - paid[None])
        return F.mse_loss(told, paid) + F.relu(1 - order * (told[:, None] - told[None])).mean()

    return private(perceptron(outputs=1), TensorDataset(x, claims)).run(loss)


# Random numbers beside what is broken, in the loop, in collating and in the model: they hide nothing any more.


def drawing(loss: Loss) -> Callable[[Path], lmdp.PrivacyEngine]:
    """A loop that adds a little noise to its inputs, and then does this."""

    def noisily(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]])

    return lambda _: private(perceptron(), vectors()).run(noisily)


DRAWING: dict[str, tuple[str, str, Loss]] = {
    "drawn_and_flipped_by_size": (
        "Noise in the loop; the sign of the logits follows from whether the batch is odd.",
        "4.4",
        lambda model, batch: F.cross_entropy(model(batch[0]) * (1 - 2 * (len(batch[0]) % 2)), batch[1]),
    ),
    "drawn_and_shifted_by_size": (
        "Noise in the loop; labels are shifted by the number of examples.",
        "3.8",
        lambda model, batch: F.cross_entropy(model(batch[0]), (batch[1] + len(batch[1])) % CLASSES),
    ),
    "drawn_and_flipped_by_place": ("Noise in the loop; every second example is flipped.", "5.8", flipped),
}
for name, (story, moves, loss) in DRAWING.items():
    broken.add(name, story, drawing(loss), moves=moves)


@broken("BERT is not given the attention mask, and the loop drops words at random.", moves="3.3")
def attention_mask_forgotten_and_words_dropped(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        words = torch.where(torch.rand(batch[0].shape) < 0.1, 2, batch[0])
        return F.cross_entropy(model(input_ids=words).logits, batch[1])

    return private(transformer("BertForSequenceClassification"), Ragged(), loading={"collate_fn": padded}).run(loss)


# Random numbers of one example that change with those of the others.


def weighed_alike(rows: Tensor) -> Tensor:
    weights = torch.empty(len(rows)).exponential_()
    return (rows * weights / weights.mean()).mean()


@broken(
    "Inside engine.still(), the loop weighs examples at random, so that their weights are 1 on average.", moves="1.3"
)
def weights_of_mean_one_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        rows = each_loss(model, batch)
        with training.engine.still():
            return weighed_alike(rows)

    return training.run(loss)


@broken("collate_fn hands out random weights that are 1 on average.", moves="1.3")
def weights_of_mean_one_in_collating(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*examples))
        weights = torch.rand(len(y))
        return x, y, weights / weights.mean()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (each_loss(model, batch) * batch[2]).mean()

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(loss)


class Divided(nn.Module):
    """Dropout of whole examples that divides by how many of the batch were kept, as DropBlock does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full((len(x), 1), 0.8))
        logits: Tensor = self.net(x * kept * kept.numel() / kept.sum().clamp(min=0.1))
        return logits


@broken("The model drops examples at random and divides by how many of the batch were kept.", moves="1.1")
def dropout_that_divides_by_what_was_kept(_: Path) -> lmdp.PrivacyEngine:
    return private(Divided(), vectors()).run(classify)


class ByPlace(nn.Module):
    """Noise of a generator that begins anew in every call: who is first always gets the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(0)
        logits: Tensor = self.net(x + 2 * torch.randn(x.shape, generator=own))
        return logits


@broken("The model draws noise with a generator that it seeds in every call.", moves="4.4")
def noise_by_place_in_the_model(_: Path) -> lmdp.PrivacyEngine:
    return private(ByPlace(), vectors()).run(classify)


@broken("collate_fn draws noise with a generator that it seeds for every batch.", moves="4.4")
def noise_by_place_in_collating(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*examples))
        own = torch.Generator().manual_seed(0)
        return x + 2 * torch.randn(x.shape, generator=own), y

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(classify)


class Noised(nn.Module):
    """NEFTune: noise at the embeddings, the smaller the longer the texts are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformer("BertForSequenceClassification")
        self.net.get_input_embeddings().register_forward_hook(self._noise)

    @staticmethod
    def _noise(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        most = 15 / (embedded.shape[1] * embedded.shape[2]) ** 0.5
        return embedded + torch.zeros_like(embedded).uniform_(-most, most)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens, attention_mask=(tokens > 0).long()).logits
        return logits


@broken("Noise at the embeddings whose size follows from the length that all texts are padded to.", moves="2.9")
def noise_by_padded_length(_: Path) -> lmdp.PrivacyEngine:
    return private(Noised(), Ragged(), loading={"collate_fn": padded}).run(classify)
