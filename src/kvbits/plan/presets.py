"""Well-known models by short names, for planning without the hub: what their public ``config.json`` says of sizes.

The shapes that follow from it are in ``presets.json``, so that nothing needs to be built to plan one of them:
``python docs/presets.py`` writes that file.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbits.plan.shapes import Shape, from_json

SHAPES = Path(__file__).with_name("presets.json")


@dataclass(frozen=True)
class Preset:
    """A model.

    Attributes:
        title: as it is written.
        hub: whose ``config.json`` this is.
        config: the fields that bear on memory.
    """

    title: str
    hub: str
    config: dict[str, Any]


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "max_position_embeddings")  # fmt: skip
_FP16: dict[str, Any] = {"dtype": "float16"}
_BF16: dict[str, Any] = {"dtype": "bfloat16"}
_TIED: dict[str, Any] = {"tie_word_embeddings": True, **_BF16}
_WIDE: dict[str, Any] = {"head_dim": 128, **_BF16}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, **_WIDE}
_GEMMA_2: dict[str, Any] = {"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, **_TIED}
_GEMMA_3: dict[str, Any] = {"head_dim": 128, "sliding_window": 1024, "query_pre_attn_scalar": 168, **_TIED}
_GPT_OSS: dict[str, Any] = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_MISTRAL: dict[str, Any] = {"sliding_window": None, **_BF16}
_MIXTRAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, **_MISTRAL}

# fmt: off
_TABLE: tuple[tuple[str, str, str, str, tuple[int, ...], dict[str, Any]], ...] = (
    ("llama-7b", "LLaMA 7B", "huggyllama/llama-7b", "llama", (4096, 11008, 32, 32, 32, 32000, 2048), _FP16),
    ("llama-13b", "LLaMA 13B", "huggyllama/llama-13b", "llama", (5120, 13824, 40, 40, 40, 32000, 2048), _FP16),
    ("llama-30b", "LLaMA 30B", "huggyllama/llama-30b", "llama", (6656, 17920, 60, 52, 52, 32000, 2048), _FP16),
    ("llama-65b", "LLaMA 65B", "huggyllama/llama-65b", "llama", (8192, 22016, 80, 64, 64, 32000, 2048), _FP16),
    ("llama-2-7b", "Llama 2 7B", "meta-llama/Llama-2-7b-hf", "llama", (4096, 11008, 32, 32, 32, 32000, 4096), _FP16),
    ("llama-2-13b", "Llama 2 13B", "meta-llama/Llama-2-13b-hf", "llama", (5120, 13824, 40, 40, 40, 32000, 4096), _FP16),
    ("llama-2-70b", "Llama 2 70B", "meta-llama/Llama-2-70b-hf", "llama", (8192, 28672, 80, 64, 8, 32000, 4096), _FP16),
    ("llama-3.1-8b", "Llama 3.1 8B", "meta-llama/Llama-3.1-8B", "llama",
     (4096, 14336, 32, 32, 8, 128256, 131072), _BF16),
    ("llama-3.1-70b", "Llama 3.1 70B", "meta-llama/Llama-3.1-70B", "llama",
     (8192, 28672, 80, 64, 8, 128256, 131072), _BF16),
    ("llama-3.2-1b", "Llama 3.2 1B", "meta-llama/Llama-3.2-1B", "llama",
     (2048, 8192, 16, 32, 8, 128256, 131072), {"head_dim": 64, **_TIED}),
    ("mistral-7b", "Mistral 7B v0.3", "mistralai/Mistral-7B-v0.3", "mistral",
     (4096, 14336, 32, 32, 8, 32768, 32768), _MISTRAL),
    ("mixtral-8x7b", "Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1", "mixtral",
     (4096, 14336, 32, 32, 8, 32000, 32768), _MIXTRAL),
    ("qwen2.5-7b", "Qwen2.5 7B", "Qwen/Qwen2.5-7B", "qwen2", (3584, 18944, 28, 28, 4, 152064, 131072), _BF16),
    ("qwen2.5-72b", "Qwen2.5 72B", "Qwen/Qwen2.5-72B", "qwen2", (8192, 29568, 80, 64, 8, 152064, 131072), _BF16),
    ("qwen3-8b", "Qwen3 8B", "Qwen/Qwen3-8B", "qwen3", (4096, 12288, 36, 32, 8, 151936, 40960), _WIDE),
    ("qwen3-32b", "Qwen3 32B", "Qwen/Qwen3-32B", "qwen3", (5120, 25600, 64, 64, 8, 151936, 40960), _WIDE),
    ("qwen3-30b-a3b", "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B", "qwen3_moe",
     (2048, 6144, 48, 32, 4, 151936, 40960), _EXPERTS),
    ("gemma-2-9b", "Gemma 2 9B", "google/gemma-2-9b", "gemma2", (3584, 14336, 42, 16, 8, 256000, 8192), _GEMMA_2),
    ("gemma-3-27b", "Gemma 3 27B, text", "google/gemma-3-27b-pt", "gemma3_text",
     (5376, 21504, 62, 32, 16, 262208, 131072), _GEMMA_3),
    ("gpt-oss-20b", "gpt-oss 20B", "openai/gpt-oss-20b", "gpt_oss",
     (2880, 2880, 24, 64, 8, 201088, 131072), {**_GPT_OSS, **_BF16}),
    ("phi-4", "Phi-4", "microsoft/phi-4", "phi3", (5120, 17920, 40, 40, 10, 100352, 16384),
     {"pad_token_id": 0, **_BF16}),
    ("smollm2-135m", "SmolLM2 135M", "HuggingFaceTB/SmolLM2-135M", "llama", (576, 1536, 30, 9, 3, 49152, 8192), _TIED),
    ("smollm2-1.7b", "SmolLM2 1.7B", "HuggingFaceTB/SmolLM2-1.7B", "llama",
     (2048, 8192, 24, 32, 32, 49152, 8192), _TIED),
    # The rest of this one is what the config class of its type has by default.
    ("deepseek-v3", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", "deepseek_v3",
     (7168, 18432, 61, 128, 128, 129280, 163840), _BF16),
)
# fmt: on

PRESETS: dict[str, Preset] = {
    name: Preset(title, hub, {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **more})
    for name, title, hub, kind, sizes, more in _TABLE
}


@functools.cache
def _shapes() -> dict[str, Any]:
    return dict(json.loads(SHAPES.read_text(encoding="utf-8")))


def shape_of_preset(name: str, dtype: torch.dtype | None = None) -> Shape:
    """The shape of a preset, in its own dtype or another."""
    return from_json(_shapes()[name], dtype)
