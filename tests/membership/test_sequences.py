"""Texts by name, with an attention mask: what is read of a sequence, and what padding can and cannot change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lmdp
from lmdp.membership.compaction import compact_inputs
from lmdp.membership.examples import content_keys, gather, refuse_overlap
from lmdp.membership.instrument import augmentations, untrained_twin
from lmdp.membership.leak import POOLINGS
from lmdp.membership.representations import record
from lmdp.models import ResNet18, run
from lmdp.risk.estimate import _as_taken
from tests import hub

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

N = 240
Batch = dict[str, Tensor]


def texts(size: int = N, *, seed: int = 0, left: bool = False) -> Batch:
    """Of two to six words, padded with zeros, on the right or on the left."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, hub.WORDS, (size, hub.LENGTH), generator=generator)
    lengths = torch.randint(2, hub.LENGTH + 1, (size, 1), generator=generator)
    place = torch.arange(hub.LENGTH)
    mask = place >= hub.LENGTH - lengths if left else place < lengths
    return {"input_ids": words * mask, "attention_mask": mask.long()}


def states(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """What stands before the first block, and after each: the model's own account of it."""
    with torch.no_grad():
        return tuple(model(**batch, output_hidden_states=True).hidden_states)


def by_hand(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One example at a time, without its padding."""
    kept = [row[here.bool()] for row, here in zip(hidden, mask)]
    if pooling == "cls":
        return hidden[:, 0]
    return torch.stack([row.mean(0) if pooling == "mean" else row[-1] for row in kept])


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_block_is_read_after_it_and_pooled_over_the_words_that_are_there(pooling: str, left: bool) -> None:
    model, batch = hub.bert(), texts(300, left=left)
    recorded = record(model, batch, layers="block", pooling=pooling).layers
    assert tuple(recorded) == hub.BERT
    for name, hidden in zip(hub.BERT[:3], states(model, batch)):
        expected = by_hand(hidden, batch["attention_mask"], pooling)
        np.testing.assert_allclose(recorded[name], expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_padding_holds_changes_nothing_that_is_pooled(pooling: str) -> None:
    model, batch = hub.bert(), texts(40)
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 17)}
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    plain, padded = (record(model, each, layers="block", pooling=pooling).layers for each in (batch, other))
    assert all(np.array_equal(plain[name], padded[name]) for name in plain)
    seen, altered = (record(model, each, layers="block").layers for each in (batch, other))
    assert not np.array_equal(seen["bert.encoder.layer.1"], altered["bert.encoder.layer.1"])


def test_without_a_mask_every_position_counts() -> None:
    model, words = hub.bert(), {"input_ids": texts(40)["input_ids"]}
    (_, _, hidden) = states(model, words)
    for pooling, expected in (("mean", hidden.mean(1)), ("last", hidden[:, -1]), ("cls", hidden[:, 0])):
        rows = record(model, words, layers=["bert.encoder.layer.1"], pooling=pooling).layers["bert.encoder.layer.1"]
        np.testing.assert_allclose(rows, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_decoder_is_pooled_over_its_own_mask() -> None:
    model, batch = hub.FAMILIES["T5"].make(), texts(40)
    shorter = texts(40, seed=1)
    batch |= {"decoder_input_ids": shorter["input_ids"], "decoder_attention_mask": shorter["attention_mask"]}
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    rows = record(model, batch, layers="block", pooling="mean").layers
    for name, hidden, mask in (
        ("encoder.block.0", output.encoder_hidden_states[1], batch["attention_mask"]),
        ("decoder.block.0", output.decoder_hidden_states[1], batch["decoder_attention_mask"]),
    ):
        np.testing.assert_allclose(rows[name], by_hand(hidden, mask, "mean").numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["best", "max", ""])
def test_an_unknown_pooling_is_refused_with_those_there_are(pooling: str) -> None:
    batch = texts()
    with pytest.raises(ValueError, match="it must be one of mean, cls, last, or None"):
        lmdp.audit(hub.bert(), batch, batch, pooling=pooling)
    with pytest.raises(ValueError, match="it must be one of mean, cls, last, or None"):
        lmdp.estimate_risk(hub.bert, (batch, torch.zeros(N)), pooling=pooling)


def test_a_mask_that_does_not_fit_the_positions_is_refused_and_the_remedies_help() -> None:
    pytest.importorskip("peft")
    model = hub.adapted(hub.bert(), "PromptTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3)
    batch = texts(40)
    block = "base_model.bert.encoder.layer.0"
    with pytest.raises(ValueError, match=rf"'{block}' has 9 positions and the attention mask 6: .* pooling='cls'"):
        record(model, batch, layers=[block], pooling="mean")
    for pooling in ("cls", None):
        assert len(record(model, batch, layers=[block], pooling=pooling).layers[block]) == 40
    unpadded = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert len(record(model, unpadded, layers=[block], pooling="mean").layers[block]) == 40


class Texts(Dataset[Any]):
    """As most text datasets hand out their examples: a mapping of lists, with the label in it or beside it."""

    def __init__(self, batch: Batch, labels: Tensor, *, beside: bool) -> None:
        self.batch, self.labels, self.beside = batch, labels, beside

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        example = {name: rows[i].tolist() for name, rows in self.batch.items()}
        label = int(self.labels[i])
        return (example, label) if self.beside else {**example, "labels": label}


def halves(seed: int = 0) -> list[tuple[Batch, Tensor]]:
    """Members and non-members: different texts, with labels."""
    batch = texts(2 * N, seed=seed)
    keys = list(dict.fromkeys(content_keys(batch)))
    assert len(keys) > 1.9 * N
    labels = batch["input_ids"][:, 0] % 2
    return [({name: rows[part] for name, rows in batch.items()}, labels[part]) for part in (slice(N), slice(N, None))]


def test_however_texts_and_labels_are_given_the_audit_is_the_same() -> None:
    model, sides = hub.bert(), halves()
    forms = [
        sides,
        [{**batch, "labels": labels} for batch, labels in sides],
        [Texts(batch, labels, beside=True) for batch, labels in sides],
        [Texts(batch, labels, beside=False) for batch, labels in sides],
        [[Texts(batch, labels, beside=False)[i] for i in range(N)] for batch, labels in sides],
    ]
    options: Any = {"layers": "block", "pooling": "mean", "controls": False}
    reports = [lmdp.audit(model, *form, **options).to_dict() | {"seconds": 0} for form in forms]
    assert all(report == reports[0] for report in reports)
    assert reports[0]["by"] == "block"
    assert reports[0]["pooling"] == "mean"
    assert [leak["name"] for leak in reports[0]["layers"]] == list(hub.BERT)
    assert reports[0]["reference"] is not None


def test_a_report_says_how_it_was_made_and_older_ones_are_read(tmp_path: Any) -> None:
    model, (inside, outside) = hub.bert(), halves()
    report = lmdp.audit(model, inside, outside, layers="block", pooling="cls", controls=False)
    report.to_json(tmp_path / "audit.json")
    assert lmdp.AuditReport.load(tmp_path / "audit.json").by == "block"
    plain = lmdp.audit(ResNet18(1, 2, width=4), *(torch.rand(120, 1, 8, 8) for _ in range(2)), controls=False)
    assert not {"by", "pooling"} & set(plain.to_dict())
    plain.to_json(tmp_path / "plain.json")
    read = lmdp.AuditReport.load(tmp_path / "plain.json")
    assert (read.by, read.pooling) == ("module", None)


def test_a_table_of_positions_is_refused_by_module_and_part_of_what_stands_before_the_blocks() -> None:
    model, (inside, outside) = hub.bert(), halves()
    with pytest.raises(ValueError, match=r"position_embeddings' gives out another number of rows .* layers='block'"):
        lmdp.audit(model, inside, outside)
    assert lmdp.audit(model, inside, outside, layers="block", controls=False).layers[0].name == "bert.embeddings"


def test_words_that_members_prefer_are_seen_by_the_control_that_sees_no_network() -> None:
    (batch, labels), (other, others) = halves()
    favourite = torch.rand(N, hub.LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    preferred = {**batch, "input_ids": torch.where(favourite, 5, batch["input_ids"]) * batch["attention_mask"]}
    options: Any = {"layers": "block", "pooling": "mean"}
    report = lmdp.audit(hub.bert(), (preferred, labels), (other, others), **options)
    assert next(control for control in report.controls if control.name == "(input)").fires
    fair = lmdp.audit(hub.bert(), (batch, labels), (other, others), **options)
    assert not any(control.fires for control in fair.controls)


def test_the_control_that_sees_no_network_does_not_see_padding() -> None:
    batch = texts(40)
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 17)}
    assert np.array_equal(compact_inputs(batch), compact_inputs(other))


def test_a_model_of_sentence_transformers_is_audited_as_it_is() -> None:
    pytest.importorskip("sentence_transformers")
    family = hub.FAMILIES["sentence-transformers"]
    inside, outside = halves()
    report = lmdp.audit(family.make(), inside, outside, layers="block", pooling="mean", controls=False)
    assert tuple(leak.name for leak in report.layers) == family.layers


@pytest.mark.parametrize("name", ["GPT-2, tied", "Llama", "ViT", "wav2vec 2.0", "LoRA", "DoRA", "ModernBERT", "T5"])
def test_every_layer_by_block_has_a_row_for_each_example(name: str) -> None:
    family = hub.FAMILIES[name]
    model, batch = family.make(), family.batch()
    recorded = record(model, batch, layers="block", pooling="cls").layers
    assert tuple(recorded) == lmdp.LayerMap.of(model, "block", frozen=True).names
    assert all(len(rows) == 3 and np.isfinite(rows).all() for rows in recorded.values())


def test_feature_maps_after_a_residual_block_keep_their_channels() -> None:
    model, x = ResNet18(1, 2, width=4).eval(), torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        places = model.blocks[0](torch.relu(model.norm1(model.conv1(x)))).flatten(2)
    rows = record(model, x, layers="block", width=4096).layers["blocks.0"]  # so wide that nothing is averaged
    assert np.array_equal(rows, torch.cat([places.flatten(1), places.amax(2)], dim=1).numpy())


def test_inputs_go_where_the_model_is() -> None:
    model = nn.Linear(3, 2, device="meta")
    assert run(model, torch.zeros(4, 3)).device.type == "meta"

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2, device="meta")

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.head(first + second)

    assert run(Named(), {"second": torch.zeros(4, 3), "first": torch.zeros(4, 3)}).device.type == "meta"


def test_word_numbers_stay_whole_in_risk_and_bytes_of_pictures_do_not() -> None:
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2))
    assert _as_taken(words, torch.zeros(5, 2, dtype=torch.long)).dtype == torch.long  # type: ignore[union-attr]
    pixels = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
    assert _as_taken(ResNet18(1, 2, width=4), pixels).dtype == torch.float32  # type: ignore[union-attr]
    named = _as_taken(words, {"ids": torch.zeros(5, 2, dtype=torch.long), "x": torch.zeros(5, 2).double()})
    assert (named["ids"].dtype, named["x"].dtype) == (torch.long, torch.float32)  # type: ignore[index]


def test_texts_in_both_shadow_and_private_data_are_seen_however_they_are_padded() -> None:
    public, private = texts(40), texts(30, seed=1)
    refuse_overlap(public, private)
    longer = {
        name: torch.cat([public[name][:3], torch.full((3, 2), value)], 1)
        for name, value in (("input_ids", 9), ("attention_mask", 0))
    }
    with pytest.raises(ValueError, match="3 examples are in both"):
        refuse_overlap(longer, public)


def test_examples_by_name_of_different_lengths_are_refused_with_the_remedy() -> None:
    ragged = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}]
    with pytest.raises(ValueError, match=r"'input_ids' of shapes \(3,\) and \(2,\).* Pad them, with an attention_mask"):
        gather(ragged)
    with pytest.raises(ValueError, match="as many rows under every name"):
        gather({"a": torch.zeros(3, 1), "b": torch.zeros(2, 1)})
    with pytest.raises(TypeError, match="examples are a str"):
        gather("texts")


def test_labels_that_are_texts_stay_with_the_inputs() -> None:
    inputs, labels = gather({"input_ids": torch.zeros(4, 3), "labels": torch.ones(4, 2)})
    assert labels is None
    assert set(inputs) == {"input_ids", "labels"}  # type: ignore[arg-type]


def test_pictures_by_name_are_augmented_and_words_are_not() -> None:
    assert augmentations(texts(4)) == []
    (alter, *_) = augmentations(hub.pictures() | {"kind": torch.zeros(3, dtype=torch.long)})
    altered = alter(hub.pictures() | {"kind": torch.ones(3, dtype=torch.long)})
    assert not torch.equal(altered["pixel_values"], hub.pictures()["pixel_values"])  # type: ignore[index]
    assert torch.equal(altered["kind"], torch.ones(3, dtype=torch.long))  # type: ignore[index]


def test_an_untrained_twin_has_scales_to_see_by() -> None:
    """Those of a normalisation without a rule of its own are all alike, and would be drawn as zeros."""
    twin = untrained_twin(hub.FAMILIES["Llama"].make(), 0)
    assert float(twin.get_parameter("model.norm.weight").detach().min()) == 1.0
