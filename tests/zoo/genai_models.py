"""Small models with random weights, written by the builder of onnxruntime-genai: one for each of its architectures."""

from __future__ import annotations

import contextlib
import io
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from onnxruntime_genai.models import builder

WORDS = 97
"""Size of the vocabulary."""

WINDOW = 4
"""Positions that a layer with a sliding window sees."""

SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

HEADS = {"head_dim": 16}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_HEADS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0},
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _text(kind: str, **settings: Any) -> Callable[[], Any]:
    """Return a maker of a language model of transformers: ``kind`` begins the names of its classes."""

    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _with_images(kind: str, text: dict[str, Any], vision: dict[str, Any], **settings: Any) -> Callable[[], Any]:
    """Return a maker of a model of text and images."""

    def make() -> Any:
        made = getattr(transformers, f"{kind}Config")(
            text_config=SIZES | text, vision_config=vision, **NO_HEADS | settings
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(made)

    return make


def _gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES | HEADS | SLIDING))


MODELS: dict[str, Callable[[], Any]] = {
    "Ernie4_5ForCausalLM": _text("Ernie4_5", **HEADS),
    "GemmaForCausalLM": _text("Gemma", **HEADS),
    "Gemma2ForCausalLM": _text("Gemma2", query_pre_attn_scalar=16, **HEADS, **SLIDING),
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _with_images("Gemma3", HEADS | SLIDING, SIGLIP, image_token_index=90),
    "GptOssForCausalLM": _text("GptOss", num_local_experts=4, num_experts_per_tok=2, **HEADS, **SLIDING),
    "GraniteForCausalLM": _text("Granite"),
    "GraniteMoeHybridForCausalLM": _text(
        "GraniteMoeHybrid", layer_types=["attention"] * 2, num_local_experts=0, shared_intermediate_size=96
    ),
    "HunYuanDenseV1ForCausalLM": _text("HunYuanDenseV1", **HEADS),
    "Lfm2ForCausalLM": _text("Lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "Lfm2MoeForCausalLM": _text(
        "Lfm2Moe", layer_types=["conv", "full_attention"], num_experts=4, num_dense_layers=1, **EXPERTS
    ),
    "Lfm2VlForConditionalGeneration": _with_images(
        "Lfm2Vl", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, SIGLIP
    ),
    "LlamaForCausalLM": _text("Llama"),
    "MistralForCausalLM": _text("Mistral", sliding_window=None),
    "Mistral3ForConditionalGeneration": _with_images(
        "Mistral3", HEADS | {"model_type": "mistral"}, SIGLIP | {"model_type": "pixtral"}
    ),
    "NemotronForCausalLM": _text("Nemotron", hidden_size=128, norm_eps=1e-6),  # the builder does not read norm_eps
    "OlmoForCausalLM": _text("Olmo"),
    "PhiForCausalLM": _text("Phi", hidden_size=128),
    "Phi3ForCausalLM": _text("Phi3", original_max_position_embeddings=64),
    "Phi3ForCausalLM with two rotary caches": _text("Phi3", original_max_position_embeddings=32, rope_parameters=LONG),
    "Qwen2ForCausalLM": _text("Qwen2"),
    "Qwen2_5_VLForConditionalGeneration": _with_images("Qwen2_5_VL", {"rope_parameters": SECTIONS}, VISION),
    "Qwen3ForCausalLM": _text("Qwen3", **HEADS),
    "Qwen3VLForConditionalGeneration": _with_images("Qwen3VL", HEADS | {"rope_parameters": SECTIONS}, VISION),
    "Qwen3_5ForConditionalGeneration": _with_images("Qwen3_5", HEADS | LINEAR, VISION),
    "Qwen3_5MoeForConditionalGeneration": _with_images(
        "Qwen3_5Moe",
        HEADS | LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
        VISION,
    ),
    "SmolLM3ForCausalLM": _text("SmolLM3"),
}
"""Makers of models of transformers, by the name that the builder's list of architectures has.

Left out: Gemma 4, whose configuration in the newest transformers the builder does not read; and the models that need
code from a repository (ChatGLM, InternLM 2, LFM2-Audio, Phi 3 small, Phi 3 vision, Phi 4 multimodal, VideoChat-Flash),
a GPU (Phi MoE) or audio (Whisper).
"""


def checkpoint(name: str, folder: Path) -> Any:
    """Write a model of transformers and a tokenizer to a folder; return the model."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    )
    fast.save_pretrained(folder)
    return model


def _as_written_before(details: dict[str, Any]) -> dict[str, Any]:
    """Change a configuration of transformers 5 to the older form that the builder reads for Gemma 3 and Phi 3."""
    config = details["hf_config"]
    for own in (config, getattr(config, "text_config", config)):
        ropes = getattr(own, "rope_parameters", None) or {}
        if "sliding_attention" in ropes and own.model_type.startswith("gemma3"):
            own.rope_local_base_freq = ropes["sliding_attention"]["rope_theta"]
            own.rope_parameters = dict(ropes["full_attention"])
        elif ropes.get("rope_type") == "longrope":
            own.rope_parameters = ropes | {"type": "longrope"}
    return details


def build(
    source: Path, folder: Path, precision: str = "fp32", options: Sequence[str] = (), device: str = "cpu"
) -> Path:
    """Run the builder on a folder of transformers; return the path of its model.

    Args:
        source: The folder of transformers.
        folder: The folder to write.
        precision: "fp32", "fp16", "bf16", "int8" or "int4".
        options: Further options of the builder, each ``key=value``.
        device: The execution provider that the builder writes for.
    """
    read = builder.get_hf_details
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with (
        quiet[0],
        quiet[1],
        unittest.mock.patch.object(builder, "get_hf_details", lambda *given: _as_written_before(read(*given))),
    ):
        arguments = None, str(source), str(folder), precision, device, str(folder / "cache")
        settings = builder.parse_extra_options(*arguments, list(options))
        builder.create_model(*arguments, **settings)
    return folder / "model.onnx"
