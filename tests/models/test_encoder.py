"""Models of texts: padding changes nothing, words stay whole numbers, adapters are all that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lmdp.layers import LayerMap
from lmdp.models import TASKS, TEXT_MODELS, build, fresh, main_tensor, merged, run

WORDS = 40
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def texts(length: int = 7, padding: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, WORDS, (5, length), generator=generator)
    pad = torch.zeros(5, padding, dtype=torch.int64)
    return {"input_ids": torch.cat([ids, pad], 1), "attention_mask": torch.cat([torch.ones_like(ids), pad], 1)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("config")
    kind = transformers.BertConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=16)
    kind.architectures = ["BertModel"]
    kind.save_pretrained(folder)
    return folder / "config.json"


def made(name: str, **options: object) -> nn.Module:
    return fresh(lambda: build(name, (7,), 3, vocabulary=WORDS, **options), 0).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_gives_the_same_scores_whatever_it_is_padded_with(name: str) -> None:
    model = made(name)
    plain, padded = (main_tensor(run(model, texts(padding=padding))) for padding in (0, 4))
    assert plain is not None
    assert padded is not None
    torch.testing.assert_close(plain, padded)
    assert LayerMap.of(model, "block").names == ("words", "blocks.0", "blocks.1", "head")


@pytest.mark.parametrize("task", TASKS)
def test_a_configuration_makes_a_model_for_every_task(config: Path, task: str) -> None:
    model = made(f"hf-config:{config}", task=task)
    scores = main_tensor(run(model, texts()))
    assert scores is not None
    assert scores.shape == (5, 3)
    torch.testing.assert_close(scores, main_tensor(run(model, texts(padding=3))))


@pytest.mark.parametrize("task", TASKS)
def test_adapters_and_the_head_are_all_that_is_trained_and_can_be_merged(config: Path, task: str) -> None:
    model = made(f"hf-config:{config}", task=task, lora=2)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in trained)
    assert {name.split(".")[0] for name in trained if "lora" not in name} == {
        "classifier" if task != "embed" else "head"
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = main_tensor(run(model, texts()))
    names = set(made(f"hf-config:{config}", task=task).state_dict())
    assert set(merged(model).state_dict()) == names
    torch.testing.assert_close(before, main_tensor(run(model, texts())))


def test_the_weights_of_a_folder_are_begun_with(config: Path, tmp_path: Path) -> None:
    encoder = made(f"hf-config:{config}", task="embed").float()
    encoder.encoder.save_pretrained(tmp_path / "there")  # type: ignore[operator, union-attr]
    begun = fresh(lambda: build(f"hf:{tmp_path / 'there'}", (7,), 3, vocabulary=WORDS, task="embed"), 5)
    given = encoder.encoder.state_dict()  # type: ignore[operator, union-attr]
    assert all(torch.equal(tensor, given[name]) for name, tensor in begun.encoder.state_dict().items())  # type: ignore[operator, union-attr]


def test_what_does_not_fit_is_refused_with_a_remedy(config: Path) -> None:
    name = f"hf-config:{config}"
    for shape, options, said in [
        ((7,), {"vocabulary": WORDS + 1}, r"has 40 words and the tokenizer 41; use the tokenizer .*--tokenizer"),
        ((17,), {"vocabulary": WORDS}, "at most 16 words; max_length is 17. Lower it"),
        ((3, 8, 8), {}, "takes texts"),
        ((7,), {"vocabulary": WORDS, "activation": "tanh"}, "activation is 'tanh', which is not for model"),
    ]:
        with pytest.raises(ValueError, match=said):
            build(name, shape, 3, **options)  # type: ignore[arg-type]
    for other, options in (("tiny-encoder", {"lora": 2}), ("s-cnn", {"task": "embed"})):
        with pytest.raises(ValueError, match=f"which is not for model '{other}'; leave it out"):
            build(other, (1, 14, 14), 3, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tiny-encoder' takes texts"):
        build("tiny-encoder", (1, 14, 14), 3)
    with pytest.raises(ValueError, match="nothing-there is not there"):
        build("hf:nothing-there", (7,), 3, vocabulary=WORDS)


def test_timm_models_take_images_of_any_number_of_channels() -> None:
    try:
        import timm  # noqa: F401
    except Exception as error:  # torchvision, which it needs, may not load beside a CPU build of torch
        pytest.skip(f"timm cannot be imported: {type(error).__name__}: {error}")
    model = build("timm:resnet10t", (1, 32, 32), 3)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ValueError, match=r"timm:x needs the package timm, .* pip install 'lmdp\[timm\]'"):
        build("timm:x", (1, 32, 32), 3)
