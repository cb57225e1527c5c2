"""The models of the paper agree with one example at a time, through real losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.layers import LayerMap
from lmdp.models import DCNN, SCNN, VGG16, ResNet18
from tests.gradients.reference import compare

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "S-CNN": (SCNN, (4, 1, 28, 28), 10),
    "D-CNN": (DCNN, (4, 3, 32, 32), 10),
    "ResNet-18": (lambda: ResNet18(classes=100), (2, 3, 32, 32), 100),
    "ResNet-18, ImageNet stem": (lambda: ResNet18(classes=7, stem="imagenet", width=16), (2, 3, 64, 64), 7),
    "VGG-16": (lambda: VGG16(classes=2), (2, 3, 32, 32), 2),
}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_agree_with_one_example_at_a_time(name: str, dtype: torch.dtype, bound: float) -> None:
    make, shape, classes = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make().to(dtype), torch.randn(shape, dtype=dtype), torch.randint(0, classes, shape[:1])
    examples = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    assert compare(model, cross_entropy, (x, y), examples).worst <= bound


def test_the_layer_counts_are_those_of_the_paper() -> None:
    assert LayerMap.of(SCNN()).names == ("conv1", "conv2", "fc1", "fc2")
    assert len(LayerMap.of(DCNN())) == 8
    resnet = LayerMap.of(ResNet18())
    assert len([n for n in resnet.names if "shortcut" not in n and n != "fc"]) == 17
    assert len([n for n in LayerMap.of(VGG16()).names if n != "fc"]) == 13


@pytest.mark.parametrize("size", [14, 28, 32, 64])
def test_scnn_takes_any_size_that_its_strides_leave_something_of(size: int) -> None:
    assert SCNN(channels=3, classes=5, size=size)(torch.zeros(2, 3, size, size)).shape == (2, 5)


def test_scnn_refuses_a_size_that_vanishes_and_resnet_an_unknown_stem() -> None:
    with pytest.raises(ValueError, match="they are 8x8"):
        SCNN(size=8)
    with pytest.raises(ValueError, match="'tiny'"):
        ResNet18(stem="tiny")  # type: ignore[arg-type]
