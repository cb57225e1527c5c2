"""Layers by block: the blocks of a network whole, what stands before them as one, adapters with what they adapt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients import Capture
from lmdp.layers import BLOCK, CUSTOM, GROUPINGS, MODULE, ROOT, Layer, LayerMap
from lmdp.membership import leak
from lmdp.models import DCNN, SCNN, VGG16, ResNet18, main_tensor, run
from tests import hub
from tests.gradients.reference import layer_norms, one_by_one
from tests.hub import FAMILIES

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def listed(layers: LayerMap) -> list[str]:
    return sorted(name for layer in layers for name in layer.parameters)


def trained(model: nn.Module) -> list[str]:
    return sorted(name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_layers_and_what_stands_before_them_is_one(name: str) -> None:
    family = FAMILIES[name]
    assert LayerMap.of(family.make(), "block").names == family.layers


@pytest.mark.parametrize("by", GROUPINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_trainable_parameter_is_in_exactly_one_layer(name: str, by: str) -> None:
    model = FAMILIES[name].make()
    layers = LayerMap.of(model, by)
    assert listed(layers) == trained(model)
    assert len(set(layers.names)) == len(layers)
    assert layers.by == by
    layers.check(model)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.in_order])
def test_layers_by_block_come_in_the_order_in_which_they_run(name: str) -> None:
    family = FAMILIES[name]
    model, events = family.make(), []
    for layer in LayerMap.of(model, "block", frozen=True):
        tap = model.get_submodule(layer.tap)

        def note(*_: Any, at: str = layer.name) -> None:
            events.append(at)

        if layer.reads == "input":
            tap.register_forward_pre_hook(note)
        else:
            tap.register_forward_hook(note)
    with torch.no_grad():
        run(model, family.batch())
    assert list(dict.fromkeys(events)) == list(LayerMap.of(model, "block", frozen=True).names)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_are_trained_have_the_same_name_and_place_in_an_audit(name: str) -> None:
    model = FAMILIES[name].make()
    every = {layer.name: layer for layer in LayerMap.of(model, "block", frozen=True)}
    for layer in LayerMap.of(model, "block"):
        assert (every[layer.name].tap, every[layer.name].reads) == (layer.tap, layer.reads)


def test_frozen_blocks_are_no_layers_of_a_training_and_stay_in_audits() -> None:
    model = hub.bert()
    model.get_submodule("bert.encoder.layer.0").requires_grad_(False)
    model.get_submodule("bert.embeddings").requires_grad_(False)
    assert LayerMap.of(model, "block").names == hub.BERT[2:]
    assert LayerMap.of(model, "block", frozen=True).names == hub.BERT


def test_what_stands_before_the_blocks_is_read_as_the_first_block_is_given_it() -> None:
    model, batch = hub.bert(), hub.tokens()
    seen = []
    model.get_submodule("bert.embeddings").register_forward_hook(lambda _, __, output: seen.append(output))
    layer = LayerMap.of(model, "block")[0]
    model.get_submodule(layer.tap).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(**batch)
    assert layer.reads == "input"
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("make", "layer", "parts"),
    [
        (lambda: hub.lora(), "query", ("lora_A.default.weight", "lora_B.default.weight")),
        (
            lambda: hub.lora(use_dora=True),
            "value",
            ("lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"),
        ),
        (
            lambda: hub.adapted(hub.bert(), "IA3Config", target_modules=["query"], feedforward_modules=[]),
            "query",
            ("ia3_l.default",),
        ),
    ],
    ids=["LoRA", "DoRA", "IA3"],
)
def test_what_an_adapter_adds_is_one_layer_with_its_host(
    make: Callable[[], nn.Module], layer: str, parts: tuple[str, ...]
) -> None:
    model = make()
    host = f"base_model.model.bert.encoder.layer.1.attention.self.{layer}"
    (one,) = (each for each in LayerMap.of(model) if each.name == host)
    assert sorted(one.parameters) == sorted(f"{host}.{part}" for part in parts)
    assert one.tap == host
    (audited,) = (each for each in LayerMap.of(model, frozen=True) if each.name == host)
    assert f"{host}.base_layer.weight" in audited.parameters


@pytest.mark.parametrize(
    "make", [SCNN, DCNN, VGG16, lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))]
)
def test_a_model_without_blocks_has_the_same_layers_either_way(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert LayerMap.of(model, "block").layers == LayerMap.of(model).layers


def test_residual_blocks_and_torchs_transformer_layers_are_blocks() -> None:
    resnet = LayerMap.of(ResNet18(width=8), "block")
    assert resnet.names == ("conv1", *(f"blocks.{i}" for i in range(8)), "fc")
    assert resnet[0].modules == ("conv1", "norm1")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, nn.LayerNorm(8))
    assert LayerMap.of(encoder, "block").names == ("layers.0", "layers.1", "layers.2", "norm")


def test_of_lists_within_lists_the_outermost_counts_and_a_list_of_plain_layers_is_none() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Experts(), Experts()), nn.ModuleList([nn.Linear(4, 4)] * 2))
    assert LayerMap.of(inner, "block").names == ("0", "1.0", "1.1", "2.0")


def test_adapters_on_a_list_of_plain_layers_make_no_blocks_of_them() -> None:
    """Else what stands before them would become one layer, which it is not without adapters."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = hub.adapted(plain, "LoraConfig", r=2, target_modules=["2.0", "2.1"])
    model.requires_grad_(True)
    names = tuple(f"base_model.model.{name}" for name in ("0", "1", "2.0", "2.1"))
    assert LayerMap.of(model, "block").names == LayerMap.of(model).names == names


def test_twenty_four_blocks_are_twenty_four_layers_between_embeddings_and_pooler() -> None:
    model = hub.of("BertModel", "BertConfig", **{**hub.TEXT, "num_hidden_layers": 24})
    assert len(LayerMap.of(model, "block")) == 26


def test_an_unknown_grouping_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="grouped by 'stage'; it must be one of module, block"):
        LayerMap.of(SCNN(), "stage")
    with pytest.raises(TypeError, match="layers is a list; pass module or block, or a LayerMap"):
        LayerMap.chosen(SCNN(), ["conv1"])  # type: ignore[arg-type]


def test_what_is_typed_twice_for_want_of_torch_agrees() -> None:
    from lmdp.app.config import LAYERS

    assert LAYERS == GROUPINGS == (MODULE, BLOCK)
    assert (*GROUPINGS, CUSTOM) == leak.BY


@pytest.mark.parametrize("name", ["RoBERTa", "GPT-2, tied", "T5", "ViT", "LoRA", "DoRA"])
def test_the_norm_of_a_block_is_that_of_all_its_gradients_of_one_example(name: str) -> None:
    """Against one example at a time; tied parameters and all."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make().double()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in family.batch().items()}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = main_tensor(run(model, batch))
        assert output is not None
        return (output.square() * torch.linspace(0.5, 1.5, output.shape[-1]).double()).sum()

    examples = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    layers = LayerMap.of(model, "block")
    expected = layer_norms(one_by_one(model, loss, examples), layers)
    capture = Capture(model, layers)
    try:
        loss(model, batch).backward()
        norms = capture.take().squared_norms(layers).sqrt()
    finally:
        capture.detach()
    torch.testing.assert_close(norms, expected, rtol=1e-8, atol=1e-12)


def attach(model: nn.Module, **options: Any) -> lmdp.PrivacyEngine:
    engine = lmdp.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,))), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    return engine


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def changed(change: Callable[[list[Layer]], list[Layer]]) -> LayerMap:
    return LayerMap(tuple(change(list(LayerMap.of(small())))))


def pair(weight: str, bias: str) -> list[Layer]:
    return [Layer("w", ("0",), (weight,), "0"), Layer("b", ("0",), (bias,), "0")]


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        (changed(lambda ls: ls[1:]), r"lacks parameters that are trained: 0\.weight, 0\.bias"),
        (changed(lambda ls: [*ls, replace(ls[0], name="again")]), r"has parameters more than once: 0\.weight, 0\.bias"),
        (changed(lambda ls: [*ls, Layer("x", (), ("9.weight",), "")]), r"does not have or train: 9\.weight"),
        (changed(lambda ls: [*pair("0.weight", "0.bias"), *ls[1:]]), r"divides modules .*: 0\b"),
        (changed(lambda ls: [*ls, Layer("x", (), (), "")]), r"layers \['x'\] of the layer map have 0 parameters"),
        (changed(lambda ls: [replace(ls[0], name="2"), *ls[1:]]), "two layers of the same name"),
        (changed(lambda ls: [replace(ls[0], tap="nowhere"), *ls[1:]]), r"reads modules \['nowhere'\]"),
    ],
)
def test_a_layer_map_that_is_none_of_the_model_is_refused_with_what_is_wrong(layers: LayerMap, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        attach(small(), layers=layers)
    if "same name" not in complaint:
        assert "Begin with LayerMap.of(model), and join layers of it." in str(caught.value)


def test_a_layer_map_joined_from_the_models_own_is_what_training_uses() -> None:
    """The remedy, followed."""
    model = small()
    first, *rest = LayerMap.of(model)
    joined = replace(
        first, name="body", modules=first.modules + rest[0].modules, parameters=first.parameters + rest[0].parameters
    )
    layers = LayerMap((joined, rest[1]))
    engine = attach(model, layers=layers, method="lm", risk={"body": 0.4, "4": 0.2})
    assert engine.layers == layers
    assert layers.by == CUSTOM
    engine.detach()


def test_frozen_parameters_in_a_layer_map_are_refused() -> None:
    model = small()
    layers = LayerMap.of(model)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"does not have or train: 0\.weight, 0\.bias"):
        attach(model, layers=layers)


def test_bare_parameters_of_the_root_stand_in_a_map_of_their_own() -> None:
    assert LayerMap.of(hub.clip(), "block")[0].name == ROOT
