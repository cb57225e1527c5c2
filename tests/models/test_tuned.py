"""Encoders tuned by a head, and in the tangent of one: rows are made of each text alone, and say what texts would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmdp.layers import LayerMap
from lmdp.models import Probe, Tangent, fresh, merged, run
from tests.hub import DISTIL, TEXT, of, tokens

ENCODERS: dict[str, Any] = {
    "bert": lambda: of("BertModel", "BertConfig", **TEXT),
    "roberta": lambda: of("RobertaModel", "RobertaConfig", **TEXT, pad_token_id=0),
    "mpnet": lambda: of("MPNetModel", "MPNetConfig", **TEXT, pad_token_id=0),
    "distilbert": lambda: of("DistilBertModel", "DistilBertConfig", **DISTIL),
    "modernbert": lambda: of(
        "ModernBertModel", "ModernBertConfig", **TEXT, pad_token_id=0, global_attn_every_n_layers=1
    ),
}


def probe(encoder: str, classes: int = 2) -> Probe:
    """As if its head had been trained."""
    pytest.importorskip("transformers")
    made = fresh(lambda: Probe(ENCODERS[encoder](), classes), 0).double()
    with torch.no_grad():
        made.head.weight.copy_(torch.randn(made.head.weight.shape, generator=torch.Generator().manual_seed(1)))
        made.head.bias.copy_(torch.arange(classes) / 10)
    return made


def aimed(encoder: str) -> Tangent:
    model = Tangent(copy.deepcopy(probe(encoder)))
    model.aim(tokens(120))
    return model


def moved(model: Tangent, by: float) -> Tangent:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in [model.head, *model.adapters]:
            layer.term.weight.copy_(by * torch.randn(layer.term.weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("encoder", ENCODERS)
def test_rows_of_a_probe_give_the_scores_that_texts_give(encoder: str) -> None:
    model = probe(encoder, classes=3)
    rows = model.stage(tokens(5))
    assert rows.shape == (5, model.width)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5, dtype=rows.dtype))
    torch.testing.assert_close(model(rows), run(model.eval(), tokens(5)))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_tangent_begins_as_its_probe_and_small_changes_do_what_rows_say(encoder: str) -> None:
    model, texts = aimed(encoder).eval(), tokens(7)
    rows = model.stage(texts)
    assert rows.shape == (7, model.width)
    begun = run(probe(encoder).eval(), texts)
    torch.testing.assert_close(model(rows), begun)
    torch.testing.assert_close(run(model, texts), begun)
    assert model.adapters
    for layer in model.adapters:
        torch.testing.assert_close(layer.direction.norm(), torch.ones((), dtype=layer.direction.dtype))

    def apart(scores: Tensor) -> Tensor:  # what both move by together changes no probability
        return scores[:, 1] - scores[:, 0]

    def errors(by: float) -> tuple[Tensor, Tensor]:
        moved(model, by)
        told = apart(model(rows))
        return apart(run(model, texts)) - told, told - apart(begun)

    (far, _), (near, change) = errors(1e-3), errors(1e-4)
    assert change.abs().max() > 1e-5
    assert near.abs().max() < 1e-2 * change.abs().max()
    assert near.abs().max() < 0.02 * far.abs().max()  # of second order: a hundredth
    torch.testing.assert_close(model.stage(texts), rows)  # of the probe, whatever was trained since


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("make", [probe, aimed])
def test_a_row_follows_from_its_text_alone(encoder: str, make: Any) -> None:
    model, texts = make(encoder), tokens(9)
    rows = model.stage(texts)
    others = {name: column.clone() for name, column in texts.items()}
    others["input_ids"][1:] = others["input_ids"][1:].flip(0)
    assert torch.equal(model.stage(others)[0], rows[0])
    alone = model.stage({name: column[4:5] for name, column in texts.items()})
    torch.testing.assert_close(alone[0], rows[4])


@pytest.mark.parametrize("encoder", ENCODERS)
def test_adapters_are_merged_into_the_layers_that_they_adapt(encoder: str) -> None:
    model, texts = moved(aimed(encoder), 0.1).eval(), tokens(4)
    before, plain = model.embed(**texts), probe(encoder).eval()
    assert not torch.allclose(before, plain.embed(**texts))
    merged(model.encoder)
    assert set(model.encoder.state_dict()) == set(plain.encoder.state_dict())
    torch.testing.assert_close(model.embed(**texts), before)


def test_adapters_belong_to_the_layers_that_they_adapt_and_nothing_else_is_trained() -> None:
    model = aimed("bert")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.endswith(".term.weight") for name in trained)
    assert len(trained) == 1 + 3 * 2  # of two blocks value and what attention and feed-forward give out; the head
    blocks = LayerMap.of(model, "block").names
    assert blocks == ("encoder.encoder.layer.0", "encoder.encoder.layer.1", "head")
    modules = LayerMap.of(model).names
    assert len(modules) == len(trained)
    assert not any(name.endswith("term") for name in modules)


def test_a_tangent_needs_two_classes_a_head_that_says_something_and_blocks() -> None:
    with pytest.raises(ValueError, match=r"for 2 classes; there are 3\. Choose head"):
        Tangent(probe("bert", classes=3))
    silent = probe("bert")
    nn.init.ones_(silent.head.weight)
    with pytest.raises(ValueError, match=r"the head says nothing.*trained by tune = head"):
        Tangent(silent).aim(tokens(8))
    same = {name: rows[:1].expand(8, -1) for name, rows in tokens(8).items()}
    with pytest.raises(ValueError, match="8 public texts are all alike to the encoder"):
        Tangent(probe("bert")).aim(same)
    single = Probe(of("BertModel", "BertConfig", **{**TEXT, "num_hidden_layers": 1}), 2)
    with pytest.raises(ValueError, match="no block of BertModel has a linear layer of 16 outputs"):
        Tangent(single)


def test_a_layer_that_is_called_twice_is_refused() -> None:
    model = Tangent(probe("bert"))
    block: Any = model.encoder.get_submodule("encoder.layer.1")
    once = block.forward
    block.forward = lambda words, *rest, **named: once(once(words, *rest, **named), *rest, **named)
    with pytest.raises(ValueError, match="calls a layer more than once"):
        model.aim(tokens(8))
