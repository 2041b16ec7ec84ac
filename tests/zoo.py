"""Tiny random models of many families, one per cache and attention shape that kvbits must serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers as hf

VOCABULARY = 128


@dataclass(frozen=True)
class Family:
    """How to make a tiny random model, and what its layers' last step should go through.

    Attributes:
        outcomes: what the packed layers report after a step over packed history.
        stock_layers: layers that keep the model's own type.
    """

    config: str
    options: dict[str, object]
    outcomes: frozenset[str] = frozenset({"kernel reference"})
    stock_layers: int = 0
    since: tuple[int, ...] = (5, 0)


_LLAMA = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
_DECODED = frozenset({"decoded"})

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", _LLAMA),
    "llama-mha-d8": Family("LlamaConfig", {**_LLAMA, "num_key_value_heads": 6}),
    "llama-mqa-d80": Family("LlamaConfig", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 80}),
    "llama-d256-eager": Family("LlamaConfig", {**_LLAMA, "head_dim": 256, "attn_implementation": "eager"}),
    "mistral": Family("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "mistral-window": Family("MistralConfig", {**_LLAMA, "sliding_window": 24}, frozenset(), stock_layers=2),
    "qwen2": Family("Qwen2Config", _LLAMA),
    "qwen3": Family("Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "gemma3": Family(
        "Gemma3TextConfig",
        {**_LLAMA, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        stock_layers=2,
    ),
    "falcon-mqa": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=False,
                                              multi_query=True, new_decoder_architecture=False), _DECODED),
    "falcon-new": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
                                              num_kv_heads=2, new_decoder_architecture=True), _DECODED),
    "falcon-alibi": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
                                                alibi=True, multi_query=True), _DECODED),
    "phi3": Family("Phi3Config", {**_LLAMA, "pad_token_id": 0}),
    "gpt-neox": Family("GPTNeoXConfig", dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=6)),
    "bloom": Family("BloomConfig", dict(hidden_size=48, n_layer=2, n_head=6), _DECODED),
    "mpt": Family("MptConfig", dict(d_model=48, n_layers=2, n_heads=6, expansion_ratio=2, use_cache=True), _DECODED),
    "opt": Family("OPTConfig", dict(hidden_size=48, ffn_dim=64, num_hidden_layers=2, num_attention_heads=6,
                                    word_embed_proj_dim=48)),
    "gpt2": Family("GPT2Config", dict(n_embd=48, n_layer=2, n_head=6)),
    "gpt-oss": Family(
        "GptOssConfig",
        {**_LLAMA, "head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["sliding_attention", "full_attention"]},
        stock_layers=1,
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        dict(hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
             topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
             first_k_dense_replace=1, n_shared_experts=1),
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {**_LLAMA, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
        stock_layers=1,
        since=(5, 6),
    ),
    "gemma2-softcap": Family(
        "Gemma2Config",
        {**_LLAMA, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
         "attn_implementation": "eager", "layer_types": ["sliding_attention", "full_attention"]},
        stock_layers=1,
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    """The family's tiny model with fixed random weights, large enough that its attention is not uniform."""
    family = FAMILIES[name]
    installed = tuple(int(part) for part in hf.__version__.split(".")[:2])
    if installed < family.since:
        pytest.skip(f"{name} needs Transformers {'.'.join(map(str, family.since))}")
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, **family.options}
    implementation = options.pop("attn_implementation", None)
    torch.manual_seed(0)
    config = getattr(hf, family.config)(
        bos_token_id=1, eos_token_id=None, **{"pad_token_id": 0, **options}
    )
    make: Callable[..., hf.PreTrainedModel] = hf.AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def prompt(batch: int = 1, tokens: int = 40, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, tokens]`` without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)
