"""Tiny models of transformers, sentence-transformers and peft, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.certified.case import EXAMPLES
from tests.certified.parts import CLASSES, LENGTH, VOCABULARY, WIDTH, generator, texts

COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
ATTENTION = {"num_attention_heads": 2, "max_position_embeddings": 4 * LENGTH}
SAMPLING = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def transformer(kind: str, **options: Any) -> nn.Module:
    """A model of transformers by the name of its class, with a configuration as small as it can be."""
    import transformers

    config = CONFIGS[next(family for family in CONFIGS if kind.startswith(family))]
    name, values = config
    settings = getattr(transformers, name)(**{**values, "num_labels": CLASSES, **options})
    model: nn.Module = getattr(transformers, kind)(settings)
    return model.train()


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {**COMMON, **ATTENTION, "num_key_value_heads": 2, **SAMPLING}),
    "Mistral": ("MistralConfig", {**COMMON, **ATTENTION, "num_key_value_heads": 1, **SAMPLING}),
    "Qwen2": ("Qwen2Config", {**COMMON, **ATTENTION, "num_key_value_heads": 1, **SAMPLING}),
    "GPT2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 4 * LENGTH, **SAMPLING},
    ),
    "Roberta": ("RobertaConfig", {**COMMON, **ATTENTION, **SAMPLING}),
    "DistilBert": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": WIDTH, "n_layers": 1, "n_heads": 2},
    ),
    "Bert": ("BertConfig", {**COMMON, **ATTENTION}),
    "Electra": ("ElectraConfig", {**COMMON, **ATTENTION, "embedding_size": WIDTH}),
    "T5": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 1, "num_heads": 2},
    ),
    "ViT": (
        "ViTConfig",
        {
            **{key: value for key, value in {**COMMON, **ATTENTION}.items() if key.startswith(("hid", "int", "num"))},
            "image_size": 8,
            "patch_size": 4,
        },
    ),
}


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    shared = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**shared, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2},
        vision_config={**shared, "image_size": 8, "patch_size": 4},
        projection_dim=WIDTH,
    )
    model: nn.Module = CLIPModel(config)
    return model.train()


def positions(tokens: Tensor) -> Tensor:
    """Looked up for every example, so that nothing but the case itself is unusual."""
    return torch.arange(tokens.shape[1]).expand(tokens.shape)


class Encoder(nn.Module):
    """What sentence-transformers calls a Transformer module, without a tokenizer."""

    def __init__(self, *, expand: bool) -> None:
        super().__init__()
        self.auto_model = transformer("BertModel")
        self.auto_model.pooler = None
        self.expand = expand

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = features["input_ids"]
        told = {
            "attention_mask": features["attention_mask"],
            "position_ids": positions(tokens) if self.expand else None,
        }
        output = self.auto_model(tokens, **told)
        return {**features, "token_embeddings": output.last_hidden_state}


def sentence_loss(name: str, *, expand: bool = False, **options: Any) -> nn.Module:
    """A loss module of sentence-transformers around a tiny model of theirs; `expand`: positions for every example."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = SentenceTransformer(modules=[Encoder(expand=expand), Pooling(WIDTH)], device="cpu")
    loss: nn.Module = getattr(losses, name)(model, **options)
    return loss.train()


class Sentences(Dataset[dict[str, Any]]):
    """Columns of texts and a label, as a sentence-transformers data collator would give them."""

    def __init__(self, columns: int = 2, *, labels: str = "score") -> None:
        self.columns = [texts(EXAMPLES * columns).tensors[i].view(columns, EXAMPLES, LENGTH) for i in range(2)]
        g = generator()
        self.labels = {
            "score": torch.rand(EXAMPLES, generator=g),
            "pair": torch.randint(0, 2, (EXAMPLES,), generator=g),
            "class": torch.randint(0, CLASSES, (EXAMPLES,), generator=g),
            "vector": torch.randn(EXAMPLES, WIDTH, generator=g),
        }[labels]

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, mask = self.columns
        columns = [{"input_ids": t[index], "attention_mask": m[index]} for t, m in zip(tokens, mask)]
        return {"columns": columns, "label": self.labels[index]}


def of_columns(loss: nn.Module, batch: dict[str, Any]) -> Tensor:
    """One step's loss, as sentence-transformers' trainer computes it."""
    value: Tensor = loss([dict(column) for column in batch["columns"]], batch["label"])
    return value
