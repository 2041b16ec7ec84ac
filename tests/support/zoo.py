"""Tiny random models of many families, one per cache and attention shape that kvbits must serve, or refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

from kvbits.backends import instruction_set
from kvbits.hf.attach import refuse_unless_served
from kvbits.hf.names import cache_name

VOCABULARY = 128
NOTHING_TO_STORE = "no attention layer|cache of its own making|takes no cache"


RUNS = f"kernel {'native' if instruction_set() else 'reference'}"
"""What an ordinary call on this machine runs on."""


@dataclass(frozen=True)
class Family:
    """How to make a tiny random model, and what its layers' last step should go through.

    Attributes:
        config: class of its configuration.
        options: for the configuration; ``attn_implementation`` among them is for the model.
        outcomes: what the packed layers report after a step over packed history.
        stock_layers: layers that keep the model's own type.
        lowest: both of these on the lowest supported release, where the model's code was another.
        refused: what the error says, for a family that kvbits can never serve.
        once_refused: early releases keep a cache of its own making, so it is refused there.
        auto: the ``AutoModel`` class.
    """

    config: str
    options: dict[str, Any]
    outcomes: frozenset[str] = frozenset({RUNS})
    stock_layers: int = 0
    lowest: tuple[frozenset[str], int] | None = None
    refused: str | None = None
    once_refused: bool = False
    auto: str = "AutoModelForCausalLM"


_LLAMA = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
_GPT = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6)
_MLA = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
)  # fmt: skip
_MLA_EXPERTS = dict(
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
    moe_intermediate_size=32,
)  # fmt: skip
_WINDOW_AND_FULL = ["sliding_attention", "full_attention"]
_KERNEL, _DECODED, _REFERENCE = frozenset({RUNS}), frozenset({"decoded"}), frozenset({"kernel reference"})
_EXPERTS = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_ENCODER_DECODER = dict(d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
                        decoder_attention_heads=6, encoder_ffn_dim=64, decoder_ffn_dim=64)  # fmt: skip

_TEXT = {**_LLAMA, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_VISION = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
               patch_size=14)  # fmt: skip
_SEEING, _NO_TOKEN = "AutoModelForImageTextToText", VOCABULARY + 1

FAMILIES: dict[str, Family] = {
    # Llama and its kin: multi-head, grouped and multi-query attention, head_dim 8 to 256
    "llama": Family("LlamaConfig", _LLAMA),
    "llama-mha-d8": Family("LlamaConfig", {**_LLAMA, "num_key_value_heads": 6}),
    "llama-mqa-d80": Family("LlamaConfig", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 80}),
    "llama-d256-eager": Family("LlamaConfig", {**_LLAMA, "head_dim": 256, "attn_implementation": "eager"}),
    "mistral": Family("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "mistral-window": Family("MistralConfig", {**_LLAMA, "sliding_window": 24}, frozenset(), stock_layers=2),
    "qwen2": Family("Qwen2Config", _LLAMA),
    "qwen3": Family("Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "phi3": Family("Phi3Config", {**_LLAMA, "pad_token_id": 0}),
    # Phi-4 is a Phi-3 with grouped queries and a partial rotary embedding
    "phi4": Family("Phi3Config", {**_LLAMA, "head_dim": 16, "partial_rotary_factor": 0.75}),
    "cohere": Family("CohereConfig", _LLAMA),
    "cohere2": Family("Cohere2Config", {**_LLAMA, "head_dim": 16, "sliding_window": 16,
                                        "layer_types": _WINDOW_AND_FULL}, stock_layers=1),
    "glm": Family("GlmConfig", {**_LLAMA, "head_dim": 16}),  # interleaved, partial rotary
    "glm4": Family("Glm4Config", {**_LLAMA, "head_dim": 16}),
    "stablelm": Family("StableLmConfig", _LLAMA),
    "olmo2": Family("Olmo2Config", _LLAMA),
    "granite": Family("GraniteConfig", {**_LLAMA, "attention_multiplier": 0.3}),
    "starcoder2": Family("Starcoder2Config", {**_LLAMA, "sliding_window": None}),
    "nemotron": Family("NemotronConfig", {**_LLAMA, "head_dim": 16}, lowest=(_DECODED, 0)),
    "smollm3": Family("SmolLM3Config", {**_LLAMA, "no_rope_layers": [1, 0]}),
    "mixtral": Family("MixtralConfig", {**_EXPERTS, "sliding_window": None}),
    "diffllama": Family("DiffLlamaConfig", _LLAMA, _DECODED),
    "hunyuan": Family("HunYuanDenseV1Config", {**_LLAMA, "head_dim": 16}),  # norms its keys after it has roped them
    "nanochat": Family("NanoChatConfig", _LLAMA),  # ropes by negative angles
    # sliding windows beside full attention, soft caps, attention sinks
    "gemma3": Family(
        "Gemma3TextConfig",
        {**_LLAMA, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16,
         "layer_types": _WINDOW_AND_FULL * 2},
        stock_layers=2,
    ),
    "gemma2-softcap": Family(
        "Gemma2Config",
        {**_LLAMA, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
         "attn_implementation": "eager", "layer_types": _WINDOW_AND_FULL},
        stock_layers=1,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {**_EXPERTS, "head_dim": 16, "sliding_window": 16, "layer_types": _WINDOW_AND_FULL},
        stock_layers=1,
    ),
    "llama4-chunked": Family(
        "Llama4TextConfig",
        {**_EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 64, "attention_chunk_size": 16,
         "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0],
         "num_experts_per_tok": 1},
        stock_layers=2,
    ),
    # layers that share keys and values with an earlier one
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {**_LLAMA, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 16, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention", "full_attention", *_WINDOW_AND_FULL],
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
         "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 5},
        stock_layers=3,
        lowest=(_KERNEL, 1),
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        {**_LLAMA, "num_hidden_layers": 5, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
         "sliding_window": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": VOCABULARY,
         "layer_types": ["sliding_attention", "full_attention", "full_attention", *_WINDOW_AND_FULL]},
        stock_layers=3,
    ),
    # code of their own around attention
    "falcon-mqa": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=False,
                                              multi_query=True, new_decoder_architecture=False), _DECODED),
    "falcon-new": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
                                              num_kv_heads=2, new_decoder_architecture=True), _DECODED),
    "falcon-alibi": Family("FalconConfig", dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
                                                alibi=True, multi_query=True), _DECODED),
    "bloom": Family("BloomConfig", dict(hidden_size=48, n_layer=2, n_head=6), _DECODED),
    "mpt": Family("MptConfig", dict(d_model=48, n_layers=2, n_heads=6, expansion_ratio=2, use_cache=True), _DECODED),
    "gpt-neox": Family("GPTNeoXConfig", _GPT),
    "gpt2": Family("GPT2Config", dict(n_embd=48, n_layer=2, n_head=6)),
    "gpt-j": Family("GPTJConfig", dict(n_embd=48, n_layer=2, n_head=6, rotary_dim=4), lowest=(_DECODED, 0)),
    "codegen": Family("CodeGenConfig", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8), lowest=(_DECODED, 0)),
    "gpt-bigcode": Family("GPTBigCodeConfig", dict(n_embd=48, n_layer=2, n_head=6)),
    "opt": Family("OPTConfig", dict(hidden_size=48, ffn_dim=64, num_hidden_layers=2, num_attention_heads=6,
                                    word_embed_proj_dim=48)),
    "gpt-neo": Family("GPTNeoConfig", dict(hidden_size=48, num_layers=2, num_heads=6, window_size=16,
                                           attention_types=[[["global", "local"], 1]]), _DECODED),
    "xglm": Family("XGLMConfig", dict(d_model=48, num_layers=2, attention_heads=6, ffn_dim=64), _DECODED),
    "bart-decoder": Family("BartConfig", {**_ENCODER_DECODER, "is_decoder": True, "is_encoder_decoder": False}),
    "roformer": Family("RoFormerConfig", {**_GPT, "is_decoder": True, "embedding_size": 48}, _DECODED),
    "bert-decoder": Family("BertConfig", {**_GPT, "is_decoder": True}),
    # multi-head latent attention
    # On early releases attention sees keys and values of their own, here with 12 channels: no multiple of 8.
    "deepseek-v2": Family("DeepseekV2Config", {**_MLA, **_MLA_EXPERTS}, _DECODED, lowest=(_REFERENCE, 0)),
    "deepseek-v3": Family("DeepseekV3Config", {**_MLA, **_MLA_EXPERTS}, _DECODED, lowest=(_REFERENCE, 0)),
    "minicpm3": Family("MiniCPM3Config", _MLA, _DECODED),
    # linear attention and state spaces beside attention
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {**_LLAMA, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
        stock_layers=1,
        once_refused=True,
    ),
    "lfm2": Family("Lfm2Config", {**_LLAMA, "layer_types": ["conv", "full_attention"]}, stock_layers=1,
                   once_refused=True),
    "jamba": Family(
        "JambaConfig",
        {**_LLAMA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
         "mamba_dt_rank": 8, "use_mamba_kernels": False},
        stock_layers=1,
        once_refused=True,
    ),
    "kimi-linear": Family(
        "KimiLinearConfig",
        {**_MLA, **_MLA_EXPERTS, "head_dim": 8,
         "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 4, "head_dim": 8,
                                "short_conv_kernel_size": 4}},
        _DECODED,
        stock_layers=1,
    ),
    "recurrent-gemma": Family(
        "RecurrentGemmaConfig",
        {**_LLAMA, "num_key_value_heads": 1, "lru_width": 48, "attention_window_size": 16,
         "block_types": ["recurrent", "attention"]},
        frozenset(),
        stock_layers=2,
        once_refused=True,
    ),
    # models that also see, given text alone
    "llava": Family("LlavaConfig", {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION,
                                    "image_token_id": _NO_TOKEN}, auto=_SEEING),
    "qwen2-vl": Family(  # positions of three dimensions
        "Qwen2VLConfig",
        {"text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1],
                                                      "rope_theta": 10000.0}},
         "vision_config": dict(depth=1, embed_dim=24, hidden_size=48, num_heads=2, mlp_ratio=1, patch_size=14),
         "image_token_id": _NO_TOKEN, "video_token_id": _NO_TOKEN, "vision_start_token_id": _NO_TOKEN,
         "vision_end_token_id": _NO_TOKEN},
        auto=_SEEING,
    ),
    "gemma3-vision": Family(
        "Gemma3Config",
        {"text_config": {**_TEXT, "head_dim": 16, "sliding_window": 16, "layer_types": _WINDOW_AND_FULL,
                         "query_pre_attn_scalar": 16},
         "vision_config": _VISION, "image_token_index": _NO_TOKEN, "mm_tokens_per_image": 4},
        stock_layers=1,
        auto=_SEEING,
    ),
    "paligemma": Family(  # attends in both directions over its prompt
        "PaliGemmaConfig",
        {"text_config": {**_TEXT, "head_dim": 8, "model_type": "gemma"}, "vision_config": _VISION, "hidden_size": 48,
         "projection_dim": 48, "image_token_id": _NO_TOKEN},
        _DECODED,
        auto=_SEEING,
    ),
    "mllama": Family(  # a layer that attends to the picture alone
        "MllamaConfig",
        {"text_config": {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1],
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
         "vision_config": {**_VISION, "attention_heads": 2, "num_global_layers": 1, "vision_output_dim": 48,
                           "intermediate_layers_indices": [0], "max_num_tiles": 1,
                           "supported_aspect_ratios": [[1, 1]]},
         "image_token_index": _NO_TOKEN},
        stock_layers=1,
        auto=_SEEING,
    ),
    # refused
    "t5": Family("T5Config", dict(d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6), refused="encoder-decoder",
                 auto="AutoModelForSeq2SeqLM"),
    "bart": Family("BartConfig", _ENCODER_DECODER, refused="encoder-decoder", auto="AutoModelForSeq2SeqLM"),
    "falcon-h1": Family(  # every layer is attention and state space at once
        "FalconH1Config",
        {**_LLAMA, "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8,
         "mamba_n_groups": 2, "mamba_chunk_size": 16, "mamba_expand": 2},
        refused=NOTHING_TO_STORE,
    ),
    "deepseek-v32": Family(  # every layer keeps the keys of its indexer, too
        "DeepseekV32Config",
        {**_MLA, **_MLA_EXPERTS, "head_dim": 8, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 16},
        refused=NOTHING_TO_STORE,
    ),
    "mamba": Family("MambaConfig", dict(hidden_size=48, num_hidden_layers=2, state_size=8),
                    refused=NOTHING_TO_STORE),
    "rwkv": Family("RwkvConfig", dict(hidden_size=48, num_hidden_layers=2, attention_hidden_size=48),
                   refused="no attention layer|cache of its own making"),
}  # fmt: skip

SERVED = [name for name, family in FAMILIES.items() if family.refused is None]
SLIDING = [
    name
    for name in SERVED
    if (FAMILIES[name].options.get("sliding_window") or FAMILIES[name].options.get("attention_chunk_size"))
]
"""Families some of whose layers see a window only."""
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None or family.once_refused]


def installed() -> tuple[int, ...]:
    """Release of the installed Transformers."""
    return tuple(int(part) for part in hf.__version__.split(".")[:2])


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> hf.PreTrainedModel:
    """The family's tiny model with fixed random weights, large enough that its attention is not uniform.

    Args:
        name: key of :data:`FAMILIES`; the test is skipped where the installed Transformers does not have it.
        dtype: of the weights.
        changes: other options for the configuration.
    """
    model = build_any(name, dtype, **changes)
    if FAMILIES[name].once_refused and installed() < (5, 24):
        try:
            refuse_unless_served(model)
        except ValueError as refusal:
            pytest.skip(f"refused with Transformers {hf.__version__}: {refusal}")
    return model


def build_any(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> hf.PreTrainedModel:
    """As :func:`build`, and also where this release of Transformers makes kvbits refuse the model."""
    family = FAMILIES[name]
    if not hasattr(hf, family.config):
        pytest.skip(f"Transformers {hf.__version__} does not have {name}")
    options = {
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None, **family.options, **changes,
    }  # fmt: skip
    implementation = options.pop("attn_implementation", None)
    torch.manual_seed(0)
    config = getattr(hf, family.config)(**options)
    make = getattr(hf, family.auto).from_config
    model: hf.PreTrainedModel = make(config, dtype=torch.float32, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.to(dtype)


def stock_cache(model: hf.PreTrainedModel) -> hf.DynamicCache:
    """The cache that the model would make for itself."""
    return hf.DynamicCache(config=model.config.get_text_config(decoder=True))


def prompt(batch: int = 1, tokens: int = 40, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, tokens]`` without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)


def padded_prompt(
    batch: int = 2, tokens: int = 40, padding: int = 7, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[batch, tokens]``; row ``b`` has ``padding * (batch - 1 - b)`` columns of left padding."""
    ids = prompt(batch, tokens, seed)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : padding * (batch - 1 - row)] = 0
    return ids * mask, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids as ``generate`` counts them: each row's own tokens are 0, 1, 2, ..."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def feed(
    model: hf.PreTrainedModel, cache: hf.Cache, ids: torch.Tensor, mask: torch.Tensor, chunks: tuple[int, ...]
) -> torch.Tensor:
    """Logits ``[B, T, V]`` of ``ids`` by plain forwards; ``mask`` is that of the first columns, the others are text."""
    assert sum(chunks) == ids.shape[1]
    mask = torch.cat([mask, mask.new_ones(ids.shape[0], ids.shape[1] - mask.shape[1])], dim=1)
    logits, done = [], 0
    for chunk in chunks:
        new = slice(done, done + chunk)
        done += chunk
        with torch.no_grad():
            result = model(
                input_ids=ids[:, new], attention_mask=mask[:, :done], position_ids=positions(mask)[:, new],
                use_cache=True, **{cache_name(model): cache},
            )  # fmt: skip
        logits.append(result.logits)
    return torch.cat(logits, dim=1)
