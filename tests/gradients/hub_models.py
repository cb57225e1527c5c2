"""Models of other people's libraries as they come, as small as they can be made: nothing is downloaded.

A record makes a model and a batch of it, and says what each example's loss is. Tests and the table of
`python -m tests.gradients.hub_table` read the same records.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp

WORDS, WIDTH, HEADS, CLASSES, SIDE, SAMPLES = 23, 16, 2, 3, 8, 160
Batch = dict[str, Tensor]
Each = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class HubModel:
    """One model as it comes.

    make      the model: by the way of computing attention, and if it is to be wide enough to be timed
    batch     number of examples, and of tokens → what it is called with; rows are examples
    each      model and batch → the loss of every example, [B]
    attention ways of computing attention that it has
    refusal   what the refusal says, of a training of this model as it comes
    mended    what the refusals then say is to be done to the model, and done here
    options   and to be passed to make_private
    library   that it is from
    """

    make: Callable[..., nn.Module]
    batch: Callable[[int, int], Batch]
    each: Each
    attention: tuple[str, ...] = ("eager", "sdpa")
    refusal: str = ""
    mended: Callable[[nn.Module], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    library: str = "transformers"

    def total(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.each(model, batch).sum()

    def mean(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.each(model, batch).mean()


class Pooled(nn.Module):
    """An encoder with a head of its own, as users build it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        width: int = encoder.config.hidden_size  # type: ignore[assignment, union-attr]
        self.head = nn.Linear(width, CLASSES)

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden = self.encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(2).to(hidden.dtype)
        logits: Tensor = self.head((hidden * mask).sum(1) / mask.sum(1))
        return logits


# -- batches ----------------------------------------------------------------------------------------------------------


def tokens(size: int, length: int) -> Batch:
    """Sentences of different lengths, the first of three words."""
    generator = torch.Generator().manual_seed(size * 100 + length)
    words = torch.randint(3, WORDS, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[0, 3:] = 0
    return {"input_ids": words, "attention_mask": mask}


def translated(size: int, length: int) -> Batch:
    return tokens(size, length) | {"labels": tokens(size, length + 1)["input_ids"]}


def pictures(size: int, length: int, side: int = SIDE) -> Batch:
    generator = torch.Generator().manual_seed(size)
    return {"pixel_values": torch.randn(size, 3, side, side, generator=generator)}


def sounds(size: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    return {"input_values": torch.randn(size, SAMPLES, generator=generator)}


# -- losses -----------------------------------------------------------------------------------------------------------


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Half the squared output, weighted by position."""
    output = model(**batch)
    if not isinstance(output, Tensor):
        output = output["logits"] if "logits" in output else output[0]
    weights = torch.linspace(0.5, 1.5, output.shape[-1]).to(output.dtype)
    return (output.square() * weights).flatten(1).sum(1) / 2


def words(model: nn.Module, batch: Batch) -> Tensor:
    """Of a language model: the mean over an example's tokens that count."""
    logits = model(**batch).logits
    mask = batch["attention_mask"].to(logits.dtype)
    terms = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"], reduction="none")
    return (terms * mask).sum(1) / mask.sum(1)


def translation(model: nn.Module, batch: Batch) -> Tensor:
    """Of a model that writes: the decoder is given the labels, and tells them."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, decoder_input_ids=batch["labels"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


# -- transformers -----------------------------------------------------------------------------------------------------

MAMBA = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3}
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 24}
VISION |= {"image_size": SIDE, "patch_size": 4}
DISTIL = {"dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 24, "vocab_size": WORDS}
DISTIL |= {"max_position_embeddings": 40}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 40, "pad_token_id": 0}
T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": HEADS}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 40}
BART |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "pad_token_id": 0}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 2}
OPT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "ffn_dim": 24, "num_attention_heads": HEADS}
OPT |= {"max_position_embeddings": 40, "word_embed_proj_dim": WIDTH, "pad_token_id": 0}
XLNET = {"vocab_size": WORDS, "d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 24}
XLNET |= {"use_mems_eval": False}
DEBERTA = TEXT | {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
DEBERTA |= {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
WAV2VEC2 = VISION | {"vocab_size": WORDS, "conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2)}
WAV2VEC2 |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
WAV2VEC2 |= {"mask_time_length": 2, "num_adapter_layers": 1}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 16}


WIDE = {"hidden_size": 256, "d_model": 256, "n_embd": 256, "dim": 256, "embedding_size": 256, "d_kv": 64}
WIDE |= dict.fromkeys(
    ("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 1024
)
WIDE |= dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4)
WIDE |= dict.fromkeys(("max_position_embeddings", "n_positions"), 128) | {"word_embed_proj_dim": 256, "d_inner": 1024}
"""Settings that take the place of small ones, so that the time of a step is spent in computing."""


def of(kind: str, config: str, values: dict[str, Any], **more: Any) -> Callable[..., nn.Module]:
    """A model of transformers by the names of its class and of its configuration."""

    def make(attention: str | None = None, *, wide: bool = False) -> nn.Module:
        import transformers

        chosen = {} if attention is None else {"attn_implementation": attention}
        settings = {**values, "num_labels": CLASSES, **more}
        if wide and not isinstance(settings.get("num_heads"), list):
            settings |= {name: value for name, value in WIDE.items() if name in settings}
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings, **chosen))
        if kind.endswith("Model") and getattr(model, "pooler", None) is not None:
            model.pooler.requires_grad_(False)  # type: ignore[union-attr]
        return model

    return make


def pooled(*settings: Any, **more: Any) -> Callable[..., nn.Module]:
    return lambda attention=None, wide=False: Pooled(of(*settings, **more)(attention, wide=wide))


def still(model: nn.Module) -> None:
    """Without dropout."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(module, nn.Dropout) or (name.endswith("dropout") and isinstance(value, float)):
                setattr(module, "p" if isinstance(module, nn.Dropout) else name, 0.0)


def without_chance(model: nn.Module) -> None:
    """Sounds are not masked and layers not left out by numbers that are drawn for the whole batch."""
    model.config.layerdrop, model.config.apply_spec_augment = 0.0, False  # type: ignore[union-attr]


def whole(*names: str) -> dict[str, Any]:
    """Of modules in which rows are not the examples."""
    return {"refusal": re.escape(f"generic={list(names)}"), "mended": still, "options": {"generic": names}}


def masked() -> dict[str, Any]:
    """Of models that mask sounds, and leave layers out, by chance."""
    return {"refusal": "masked_spec_embed", "mended": without_chance}


ONE = ("eager",)
TRANSFORMERS = {
    "BERT with a head": HubModel(pooled("BertModel", "BertConfig", TEXT), tokens, squares),
    "BERT, classes": HubModel(of("BertForSequenceClassification", "BertConfig", TEXT), tokens, squares),
    "BERT, masked words": HubModel(of("BertForMaskedLM", "BertConfig", TEXT), tokens, words),
    "DistilBERT": HubModel(pooled("DistilBertModel", "DistilBertConfig", DISTIL), tokens, squares),
    "RoBERTa": HubModel(of("RobertaForMaskedLM", "RobertaConfig", TEXT), tokens, words),
    "ELECTRA": HubModel(
        of("ElectraForSequenceClassification", "ElectraConfig", TEXT, embedding_size=8), tokens, squares
    ),
    "ALBERT": HubModel(of("AlbertForSequenceClassification", "AlbertConfig", TEXT, embedding_size=8), tokens, squares),
    "MPNet": HubModel(pooled("MPNetModel", "MPNetConfig", TEXT), tokens, squares, ONE),
    "ModernBERT": HubModel(of("ModernBertForMaskedLM", "ModernBertConfig", TEXT), tokens, words),
    "DeBERTa": HubModel(
        of("DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA),
        tokens,
        squares,
        ONE,
        **whole("deberta.encoder"),
    ),
    "XLNet": HubModel(
        of("XLNetForSequenceClassification", "XLNetConfig", XLNET),
        *(tokens, squares, ONE),
        **whole("transformer") | {"refusal": "mask_emb"},
    ),
    "XLNet without a head": HubModel(
        of("XLNetModel", "XLNetConfig", XLNET), *(tokens, squares, ONE), **whole("") | {"refusal": "mask_emb"}
    ),
    "Mamba": HubModel(
        of("MambaForCausalLM", "MambaConfig", MAMBA),
        *(tokens, words, ONE),
        **whole("backbone.layers.0.mixer", "backbone.layers.1.mixer"),
    ),
    "GPT-2": HubModel(of("GPT2LMHeadModel", "GPT2Config", GPT2), tokens, words),
    "Llama": HubModel(of("LlamaForCausalLM", "LlamaConfig", TEXT), tokens, words),
    "Mistral": HubModel(of("MistralForCausalLM", "MistralConfig", TEXT, num_key_value_heads=1), tokens, words),
    "Qwen2": HubModel(of("Qwen2ForCausalLM", "Qwen2Config", TEXT, num_key_value_heads=1), tokens, words),
    "OPT": HubModel(of("OPTForCausalLM", "OPTConfig", OPT), tokens, words, **whole("model.decoder")),
    "T5 encoder": HubModel(pooled("T5EncoderModel", "T5Config", T5), tokens, squares, ONE),
    "T5": HubModel(of("T5ForConditionalGeneration", "T5Config", T5), translated, translation, ONE),
    "BART": HubModel(of("BartForConditionalGeneration", "BartConfig", BART), translated, translation),
    "ViT": HubModel(of("ViTForImageClassification", "ViTConfig", VISION), pictures, squares),
    "DeiT": HubModel(of("DeiTForImageClassification", "DeiTConfig", VISION), pictures, squares),
    "DINOv2": HubModel(of("Dinov2ForImageClassification", "Dinov2Config", VISION), pictures, squares),
    "BEiT": HubModel(
        of("BeitForImageClassification", "BeitConfig", VISION, use_relative_position_bias=True), pictures, squares
    ),
    "Swin": HubModel(
        of("SwinForImageClassification", "SwinConfig", SWIN),
        lambda size, _: pictures(size, 0, 16),
        squares,
        ("sdpa",),
        **whole("swin.encoder.layers.0.blocks.0", "swin.encoder.layers.0.blocks.1"),
    ),
    "ConvNeXt": HubModel(
        of("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT),
        lambda size, _: pictures(size, 0, 16),
        squares,
        ONE,
    ),
    "CLIP's tower of texts": HubModel(
        of("CLIPTextModelWithProjection", "CLIPTextConfig", TEXT, projection_dim=6), tokens, squares
    ),
    "CLIP's tower of pictures": HubModel(
        of("CLIPVisionModelWithProjection", "CLIPVisionConfig", VISION, projection_dim=6), pictures, squares
    ),
    "wav2vec2, layer norms": HubModel(
        of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2, feat_extract_norm="layer"),
        sounds,
        squares,
        **masked(),
    ),
    "wav2vec2": HubModel(
        of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2), sounds, squares, **masked()
    ),
    "wav2vec2, letters": HubModel(of("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2), sounds, squares, **masked()),
    "HuBERT": HubModel(of("HubertForSequenceClassification", "HubertConfig", WAV2VEC2), sounds, squares, **masked()),
}


# -- peft -------------------------------------------------------------------------------------------------------------


def tuned(kind: str, base: Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """A model with an adapter of peft, by the name of its configuration; weights that begin at zero are moved."""

    def make(attention: str | None = None, *, wide: bool = False) -> nn.Module:
        import peft

        model: nn.Module = peft.get_peft_model(base(attention, wide=wide), getattr(peft, kind)(**options))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return model

    return make


CLASSIFIER = of("BertForSequenceClassification", "BertConfig", TEXT)
WRITER = of("LlamaForCausalLM", "LlamaConfig", TEXT)
QUERIES = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
PROMPT = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
PEFT = {
    "LoRA": HubModel(tuned("LoraConfig", CLASSIFIER, **QUERIES, r=2), tokens, squares),
    "rsLoRA": HubModel(tuned("LoraConfig", CLASSIFIER, **QUERIES, r=2, use_rslora=True), tokens, squares, ONE),
    "DoRA": HubModel(tuned("LoraConfig", CLASSIFIER, **QUERIES, r=2, use_dora=True), tokens, squares, ONE),
    "LoRA on embeddings": HubModel(
        tuned("LoraConfig", WRITER, task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "q_proj"]),
        *(tokens, words, ONE),
    ),
    "LoRA on GPT-2": HubModel(
        tuned("LoraConfig", of("GPT2LMHeadModel", "GPT2Config", GPT2), task_type="CAUSAL_LM", r=2, fan_in_fan_out=True),
        *(tokens, words, ONE),
    ),
    "LoRA on a picture's patches": HubModel(
        tuned("LoraConfig", of("ViTForImageClassification", "ViTConfig", VISION), r=2, target_modules=["projection"]),
        *(pictures, squares, ONE),
    ),
    "LoRA on T5": HubModel(
        tuned("LoraConfig", of("T5ForConditionalGeneration", "T5Config", T5), task_type="SEQ_2_SEQ_LM", r=2),
        *(translated, translation, ONE),
    ),
    "LoRA and all of the head": HubModel(
        tuned("LoraConfig", CLASSIFIER, **QUERIES, r=2, modules_to_save=["classifier"], bias="lora_only"),
        *(tokens, squares, ONE),
    ),
    "AdaLoRA": HubModel(
        tuned("AdaLoraConfig", CLASSIFIER, **QUERIES, init_r=2, target_r=1, total_step=10), tokens, squares, ONE
    ),
    "LoHa": HubModel(tuned("LoHaConfig", CLASSIFIER, **QUERIES, r=2), tokens, squares, ONE),
    "LoKr": HubModel(tuned("LoKrConfig", CLASSIFIER, **QUERIES, r=2), tokens, squares, ONE),
    "VeRA": HubModel(tuned("VeraConfig", CLASSIFIER, **QUERIES, r=2), tokens, squares, ONE),
    "OFT": HubModel(tuned("OFTConfig", CLASSIFIER, **QUERIES, oft_block_size=4), tokens, squares, ONE),
    "AdaptionPrompt": HubModel(
        tuned("AdaptionPromptConfig", WRITER, task_type="CAUSAL_LM", adapter_layers=1, adapter_len=3),
        *(tokens, words, ONE),
    ),
    "IA3": HubModel(
        tuned(
            *("IA3Config", CLASSIFIER),
            task_type="SEQ_CLS",
            target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"],
        ),
        *(tokens, squares, ONE),
    ),
    "prompt tuning": HubModel(tuned("PromptTuningConfig", CLASSIFIER, **PROMPT), tokens, squares),
    "prompt tuning of Llama": HubModel(
        tuned("PromptTuningConfig", WRITER, task_type="CAUSAL_LM", num_virtual_tokens=3),
        *(tokens, lambda m, b: squares(m, b), ONE),
    ),
    "p-tuning": HubModel(tuned("PromptEncoderConfig", CLASSIFIER, **PROMPT), tokens, squares, ONE),
    "prefix tuning": HubModel(tuned("PrefixTuningConfig", CLASSIFIER, **PROMPT), tokens, squares),
    "prefix tuning of Llama": HubModel(
        tuned("PrefixTuningConfig", WRITER, task_type="CAUSAL_LM", num_virtual_tokens=3),
        *(tokens, lambda m, b: squares(m, b), ONE),
    ),
    "prefix tuning with a projection": HubModel(
        tuned("PrefixTuningConfig", CLASSIFIER, **PROMPT, prefix_projection=True), tokens, squares, ONE
    ),
    "layer norms": HubModel(
        tuned("LNTuningConfig", CLASSIFIER, task_type="SEQ_CLS", target_modules=["LayerNorm"]), tokens, squares, ONE
    ),
}

PEFT = {name: replace(case, library="peft") for name, case in PEFT.items()}


# -- sentence-transformers --------------------------------------------------------------------------------------------


def sentences(*, pooling: str, head: bool = False) -> Callable[..., nn.Module]:
    """A model of sentence-transformers, read from a folder as theirs are."""

    def make(attention: str | None = None, *, wide: bool = False) -> nn.Module:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
        from transformers import BertTokenizer

        with tempfile.TemporaryDirectory() as folder:
            names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            vocabulary = {name: i for i, name in enumerate([*names, *(f"word{i}" for i in range(WORDS - len(names)))])}
            BertTokenizer(vocab=vocabulary).save_pretrained(folder)
            of("BertModel", "BertConfig", TEXT)(attention, wide=wide).save_pretrained(folder)  # type: ignore[operator]
            encoder = Transformer(folder)
        width = encoder.get_word_embedding_dimension()
        modules: list[nn.Module] = [encoder, Pooling(width, pooling_mode=pooling)]
        if head:
            modules += [Dense(width, 6), Normalize()]
        model: nn.Module = SentenceTransformer(modules=modules, device="cpu")
        model.get_submodule("0.auto_model").pooler = None
        return model

    return make


def embedded(model: nn.Module, batch: Batch) -> Tensor:
    """Half the squared distance of an embedding from a point."""
    embedding: Tensor = model(dict(batch))["sentence_embedding"]
    return (embedding - torch.linspace(0, 1, embedding.shape[1]).to(embedding)).square().sum(1) / 2


SENTENCES = {
    "sentence encoder, means": HubModel(sentences(pooling="mean"), tokens, embedded, library="sentence_transformers"),
    "sentence encoder, first token and a head": HubModel(
        sentences(pooling="cls", head=True), tokens, embedded, library="sentence_transformers"
    ),
}


# -- timm -------------------------------------------------------------------------------------------------------------


def picture_model(name: str, **options: Any) -> Callable[..., nn.Module]:
    def make(attention: str | None = None, *, wide: bool = False) -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return model

    return make


def shown(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch["pixel_values"])
    return (output.square() * torch.linspace(0.5, 1.5, CLASSES).to(output)).sum(1) / 2


def big(size: int, length: int) -> Batch:
    return pictures(size, length, 32)


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM = {
    "timm: ViT": picture_model("vit_tiny_patch16_224", **SMALL_VIT),
    "timm: ViT, registers and layer scale": picture_model(
        "vit_tiny_patch16_224", **SMALL_VIT, reg_tokens=2, init_values=0.1
    ),
    "timm: ResNet, made compatible": lambda *_, **__: lmdp.make_compatible(picture_model("resnet18")()),
    "timm: ConvNeXt": picture_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
}
TIMM_MODELS = {name: HubModel(make, big, shown, ONE, library="timm") for name, make in TIMM.items()}
TIMM_MODELS["timm: Swin"] = HubModel(
    picture_model(
        "swin_tiny_patch4_window7_224", img_size=32, patch_size=2, window_size=4, embed_dim=8, depths=(2, 1),
        num_heads=(2, 2),
    ),
    big,
    shown,
    ONE,
    library="timm",
    **whole("layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"),
)  # fmt: skip

MODELS = {**TRANSFORMERS, **PEFT, **SENTENCES, **TIMM_MODELS}
