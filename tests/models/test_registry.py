"""Models by name, for any image size and number of classes, and a user's own factory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lmdp.models import MODELS, build


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shape,classes", [((1, 28, 28), 10), ((3, 33, 20), 2), ((3, 16, 17), 7)])
def test_every_model_takes_any_size_and_number_of_classes(name: str, shape: tuple[int, ...], classes: int) -> None:
    assert build(name, shape, classes)(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_model_mixes_examples(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (3, 16, 16), 4)
    x = torch.randn(4, 3, 16, 16)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


@pytest.mark.parametrize(
    "name,shape,classes,said",
    [
        ("s-cmn", (1, 28, 28), 10, "Did you mean 's-cnn'"),
        ("s-cnn", (1, 8, 8), 10, "at least 14x14"),
        ("d-cnn", (3, 7, 32), 10, "at least 8x8"),
        ("vgg16", (3, 15, 15), 10, "at least 16x16"),
        ("s-cnn", (30,), 10, "shape"),
        ("s-cnn", (1, 28, 28), 0, "at least 1 class"),
        ("no_such_module:make", (1, 28, 28), 2, "no_such_module"),
        ("json:make", (1, 28, 28), 2, "no callable 'make'"),
        ("json:loads", (1, 28, 28), 2, "failed when called"),
        ("builtins:dict", (1, 28, 28), 2, "made a dict"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(name: str, shape: tuple[int, ...], classes: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(name, shape, classes)


def test_a_factory_is_found_in_the_current_folder_and_given_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\ndef small(classes, shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    model = build("my_nets:small", (1, 5, 6), 3)
    assert isinstance(model[1], nn.Linear)
    assert model[1].weight.shape == (3, 30)


@pytest.mark.parametrize(
    "text, said",
    [
        ("def make(:\n", r"your module 'my_wrong\d*' \(.*my_wrong\d*.py:1\) failed when it was imported: SyntaxError"),
        ("\nx = undefined\n", r"my_wrong\d*.py:2\) failed when it was imported: NameError: name 'undefined'"),
        ("raise RuntimeError('hm')\n", r"my_wrong\d*.py:1\) failed when it was imported: RuntimeError: hm"),
        ("def make():\n    raise KeyError('x')\n", r"my_wrong\d*.py:2\) failed when called with {}: KeyError: 'x'"),
    ],
)
def test_an_error_in_a_module_of_ones_own_has_file_line_and_type(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"my_wrong{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        build(f"{name}:make", (4,), 3)


def test_a_factory_without_a_parameter_for_what_is_asked_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_styles.py").write_text(
        "from torch import nn\n"
        "def styled(classes, activation='relu'): return nn.Sequential(nn.Linear(4, classes), nn.Tanh())\n"
        "def plain(classes): return nn.Linear(4, classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert isinstance(build("my_styles:styled", (4,), 3, activation="tanh"), nn.Sequential)
    for options, said in (({"activation": "tanh"}, "activation is 'tanh'"), ({"standardised": True}, "standardised")):
        with pytest.raises(ValueError, match=f"{said}.*has no parameter for. Leave it out, or give the factory"):
            build("my_styles:plain", (4,), 3, **options)  # type: ignore[arg-type]
