"""Tiny models of transformers, sentence-transformers and peft by family, with random weights and an input for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH = 23, 6
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 24}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 24}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS, "max_position_embeddings": 24}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
WAVES = {**SIZES, **CONVOLUTIONS, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 8}
Batch = dict[str, Tensor]


def tokens(size: int = 3) -> Batch:
    """The last examples are shorter than the others."""
    generator = torch.Generator().manual_seed(size)
    mask = torch.ones(size, LENGTH, dtype=torch.long)
    mask[size // 2 :, LENGTH - 2 :] = 0
    return {"input_ids": torch.randint(3, WORDS, (size, LENGTH), generator=generator), "attention_mask": mask}


def pictures(size: int = 3) -> Batch:
    return {"pixel_values": torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(size))}


def waves(size: int = 3) -> Batch:
    return {"input_values": torch.randn(size, 64, generator=torch.Generator().manual_seed(size))}


def translated(size: int = 3) -> Batch:
    return tokens(size) | {"decoder_input_ids": tokens(size + 1)["input_ids"][:size]}


def of(kind: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return model.eval()


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> nn.Module:
    return of(kind, "BertConfig", **TEXT, **settings)


def saved_encoder(folder: Path, words: Sequence[str], **settings: Any) -> Path:
    """A tiny encoder with random weights, and a tokenizer that knows these words."""
    import transformers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, **settings, "vocab_size": len(vocabulary)})
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def adapted(model: nn.Module, config: str, **settings: Any) -> nn.Module:
    import peft

    wrapped: nn.Module = peft.get_peft_model(model, getattr(peft, config)(**settings))  # type: ignore[arg-type]
    return wrapped.eval()


def lora(**settings: Any) -> nn.Module:
    return adapted(bert(), "LoraConfig", r=2, target_modules=["query", "value"], **settings)


def clip() -> nn.Module:
    text = {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 24, **SPECIAL}
    vision = {**TOWER, "image_size": 8, "patch_size": 4}
    return of("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)


class Sentences(nn.Module):
    """What sentence-transformers calls a Transformer module, without a tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = bert("BertModel", num_labels=2)
        self.auto_model.pooler = None

    def forward(self, features: Batch) -> Batch:
        hidden = self.auto_model(features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": hidden}


def sentence_transformer() -> nn.Module:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    return SentenceTransformer(modules=[Sentences(), Pooling(16)], device="cpu").eval()


@dataclass(frozen=True)
class Family:
    """How a model of it is made, what it takes, and the layers that it has by block."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    layers: tuple[str, ...]
    in_order: bool = True  # whether its layers run one after the other, in the order of the map


def _two(prefix: str) -> tuple[str, str]:
    return f"{prefix}.0", f"{prefix}.1"


BERT = ("bert.embeddings", *_two("bert.encoder.layer"), "bert.pooler.dense", "classifier")
ADAPTED = (*_two("base_model.model.bert.encoder.layer"), "base_model.model.classifier")
FAMILIES = {
    "BERT": Family(bert, tokens, BERT),
    "BERT, one block": Family(
        lambda: of("BertModel", "BertConfig", **{**TEXT, "num_hidden_layers": 1}),
        tokens,
        ("embeddings", "encoder.layer.0", "pooler.dense"),
    ),
    "RoBERTa": Family(
        lambda: of("RobertaForSequenceClassification", "RobertaConfig", **TEXT, **SPECIAL),
        tokens,
        ("roberta.embeddings", *_two("roberta.encoder.layer"), "classifier.dense", "classifier.out_proj"),
    ),
    "DistilBERT": Family(
        lambda: of("DistilBertModel", "DistilBertConfig", **DISTIL), tokens, ("embeddings", *_two("transformer.layer"))
    ),
    "ModernBERT": Family(
        lambda: of("ModernBertForSequenceClassification", "ModernBertConfig", **TEXT, **SPECIAL),
        tokens,
        (
            "model.embeddings.tok_embeddings",
            *_two("model.layers"),
            *("model.final_norm", "head.dense", "classifier"),
        ),
    ),
    "GPT-2, tied": Family(
        lambda: of("GPT2LMHeadModel", "GPT2Config", **GPT2, bos_token_id=1, eos_token_id=2),
        tokens,
        ("transformer.embeddings", *_two("transformer.h"), "transformer.ln_f"),
    ),
    "Llama": Family(
        lambda: of("LlamaForCausalLM", "LlamaConfig", **TEXT),
        tokens,
        ("model.embed_tokens", *_two("model.layers"), "model.norm", "lm_head"),
    ),
    "T5": Family(
        lambda: of("T5ForConditionalGeneration", "T5Config", **T5),
        translated,
        (
            *("encoder.embed_tokens", *_two("encoder.block"), "encoder.final_layer_norm"),
            *(*_two("decoder.block"), "decoder.final_layer_norm"),
        ),
    ),
    "ViT": Family(
        lambda: of("ViTForImageClassification", "ViTConfig", **SIZES, image_size=8, patch_size=4),
        pictures,
        ("vit.embeddings", *_two("vit.layers"), "vit.layernorm", "classifier"),
    ),
    "CLIP": Family(
        clip,
        lambda: tokens() | pictures(),
        (
            *("(root)", "text_model.embeddings", *_two("text_model.encoder.layers"), "text_model.final_layer_norm"),
            *("vision_model.embeddings", *_two("vision_model.encoder.layers"), "vision_model.post_layernorm"),
            *("visual_projection", "text_projection"),
        ),
        in_order=False,  # its towers run in the order of its forward, which cannot be traced
    ),
    "wav2vec 2.0": Family(
        lambda: of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **WAVES),
        waves,
        ("wav2vec2.embeddings", *_two("wav2vec2.encoder.layers"), "projector", "classifier"),
    ),
    "sentence-transformers": Family(
        sentence_transformer, tokens, ("0.auto_model.embeddings", *_two("0.auto_model.encoder.layer"))
    ),
    "LoRA": Family(lambda: lora(modules_to_save=["classifier"]), tokens, ADAPTED),
    "DoRA": Family(lambda: lora(use_dora=True), tokens, ADAPTED[:2]),
    "IA3": Family(
        lambda: adapted(
            bert(),
            "IA3Config",
            target_modules=["key", "intermediate.dense"],
            feedforward_modules=["intermediate.dense"],
        ),
        tokens,
        ADAPTED[:2],
    ),
    "LoRA on an embedding": Family(
        lambda: adapted(
            of("GPT2LMHeadModel", "GPT2Config", **GPT2, bos_token_id=1, eos_token_id=2),
            *("LoraConfig",),
            r=2,
            target_modules=["wte", "c_attn"],
            fan_in_fan_out=True,
        ),
        tokens,
        ("base_model.model.transformer.embeddings", *_two("base_model.model.transformer.h")),
    ),
}
