"""The layer map: one layer per module that owns parameters, norms joined, in execution order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmdp import LayerMap
from lmdp.models import ResNet18


class Backwards(nn.Module):
    """Registered in the opposite order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class Choosy(Backwards):
    """Cannot be traced: looks at the data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_layers_come_in_execution_order_with_norms_joined_to_what_they_follow() -> None:
    layers = LayerMap.of(Backwards())
    assert layers.names == ("body", "head")
    assert layers[0].modules == ("body", "norm")
    assert layers[0].parameters == ("body.weight", "body.bias", "norm.weight", "norm.bias")
    assert layers[0].tap == "norm"
    assert layers[1].tap == "head"


def test_a_model_that_cannot_be_traced_keeps_its_registration_order() -> None:
    assert LayerMap.of(Choosy()).names == ("head", "body")


def test_every_trainable_parameter_is_in_exactly_one_layer() -> None:
    model = ResNet18(width=8)
    model.blocks[0].conv1.weight.requires_grad_(False)
    listed = [name for layer in LayerMap.of(model) for name in layer.parameters]
    assert sorted(listed) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def test_shortcut_convolutions_are_layers_of_their_own() -> None:
    names = LayerMap.of(ResNet18(width=8)).names
    assert "blocks.2.shortcut.0" in names
    assert names[0] == "conv1"
    assert names[-1] == "fc"


def test_frozen_modules_are_no_layer_and_a_leading_norm_is_its_own() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    assert LayerMap.of(model).names == ("0", "2")


def test_tied_parameters_belong_to_the_first_module_that_uses_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 9, bias=False)
            self.inn = nn.Embedding(9, 4)
            self.out.weight = self.inn.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inn(x))

    assert [layer.parameters for layer in LayerMap.of(Tied())] == [("inn.weight",)]


def test_bare_parameters_and_opaque_modules_are_one_layer_each() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.token
            return self.attention(x, x, x)[0]

    layers = LayerMap.of(Mixed())
    assert layers.names == ("(root)", "attention")
    assert "attention.out_proj.weight" in layers[1].parameters


def test_a_forward_that_assigns_to_the_model_leaves_no_symbols_in_it() -> None:
    class Assigning(Backwards):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.last: object = None

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean + x.mean()
            self.last = x
            return super().forward(x)

    model = Assigning()
    assert LayerMap.of(model).names == ("body", "head")
    assert isinstance(model.mean, Tensor)
    assert model.last is None


def test_reading_the_layers_changes_nothing() -> None:
    model = Backwards().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    LayerMap.of(model)
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
