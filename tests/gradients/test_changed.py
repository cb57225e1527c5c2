"""What is changed between backward() and step() moves nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.layers import LayerMap
from tests.gradients.reference import quadratic

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear, one position": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (6, 5)),
    "linear, norms by Gram matrices": (lambda: nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3)), (6, 2, 40)),
    "linear, gradients kept": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), (6, 9, 5)),
    "convolution by Gram matrices": (lambda: nn.Sequential(nn.Conv2d(24, 24, 3), nn.Conv2d(24, 4, 1)), (3, 24, 4, 4)),
    "convolution, gradients kept": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1)), (3, 1, 9, 9)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)), (6, 5)),
    "any other": (lambda: nn.Sequential(nn.PReLU(5), nn.Linear(5, 2)), (6, 5)),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(100),
    "through numpy": lambda x: x.numpy().__imul__(100),
    "through its data": lambda x: x.data.mul_(100),
    "through a view": lambda x: x[1:].fill_(100),
}


def sums(model: nn.Module, capture: Capture, size: int) -> dict[str, Tensor]:
    return capture.take().weighted_sums([torch.ones(size, len(capture.layers))], capture.layers)[0]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_changed_after_backward_does_not_move_the_sum(kind: str, write: str) -> None:
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    capture = Capture(model, LayerMap.of(model))
    quadratic(model, x).backward()
    expected = sums(model, capture, len(x))
    quadratic(model, x).backward()
    WRITES[write](x)
    for name, value in sums(model, capture, len(x)).items():
        assert torch.equal(value, expected[name]), name
    capture.detach()


def test_an_activation_or_a_gradient_changed_after_backward_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 5)
    capture = Capture(model, LayerMap.of(model))
    for change in ("activation", "gradient"):
        kept: dict[str, Tensor] = {}
        handle = model[1].register_forward_hook(lambda _, __, output: kept.update(activation=output))
        output = model(x)
        output.register_hook(lambda grad: kept.update(gradient=grad))
        output.square().sum().backward()
        handle.remove()
        with torch.no_grad():
            kept[change].mul_(3)
        with pytest.raises(RuntimeError, match=r"module '2' \(Linear\).*changed in place between backward\(\) and"):
            capture.take()
        capture.discard()
    capture.detach()
