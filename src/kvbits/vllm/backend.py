"""The attention backend that vLLM's CPU platform gets in the place of its own, once :mod:`kvbits.vllm.plugin` ran.

vLLM allocates, shares, evicts and addresses pages as ever; only what a page holds is ours. New tokens are written into
their pages first, since another request of the same step may read them as its prefix, and are exact for the step that
they come in, as everywhere in kvbits.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from kvbits.attend import native
from kvbits.schemes.scheme import BLOCKS
from kvbits.vllm.pages import Batch, Pages, paged_scheme
from kvbits.vllm.plugin import SCHEME


class PackedBackend(AttentionBackend):  # type: ignore[misc]  # a class of theirs, without annotations
    """Attention over packed pages. Named as the backend whose place it takes: vLLM looks it up by that name."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[PackedAttention]:
        return PackedAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return list(BLOCKS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # what a page holds of one head lies together

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes that a token takes in a page, for each KV head.

        Raises:
            ValueError: for pages of a length that no block has.
            NotImplementedError: for other than full attention.
        """
        if type(spec) is not FullAttentionSpec:
            raise _refusal(f"a layer asks for {type(spec).__name__}; layers with full attention are served")
        if spec.state_content_bytes is not None:
            return spec  # it was asked already
        pages = pages_of(spec.block_size, spec.head_size, spec.head_size_v, spec.dtype)
        return replace(spec, dtype=torch.uint8, state_content_bytes=pages.bytes_per_token)


class NoLatentBackend(PackedBackend):
    """In the place of backends for multi-head latent attention, which would keep their own cache."""

    @staticmethod
    def get_impl_cls() -> type[PackedAttention]:
        raise _refusal("the model has multi-head latent attention, whose cache has no heads of keys and values")

    @classmethod
    def is_mla(cls) -> bool:
        return True


@functools.cache
def pages_of(block: int, key_channels: int, value_channels: int, dtype: torch.dtype) -> Pages:
    """The layout of pages under the scheme of this process: one for all layers, and what kernels keep with it."""
    return Pages(paged_scheme(os.environ[SCHEME]), block, key_channels, value_channels, dtype)


def _refusal(reason: str) -> NotImplementedError:
    return NotImplementedError(f"{SCHEME}={os.environ.get(SCHEME)}: {reason}. Unset {SCHEME} for vLLM's own cache")


@dataclass
class Step:
    """What one step asks of every layer: batches, and which of its tokens are those of each, row by row."""

    tokens: list[torch.Tensor]
    batches: list[Batch]


class StepBuilder(AttentionMetadataBuilder[Step]):  # type: ignore[misc]  # a class of theirs, without annotations
    """Sorts the requests of a step: those with one new token each go together, and every other by itself."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        common = common_attn_metadata
        if common.causal is not True:
            raise _refusal("attention is not causal")
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        groups: dict[int, list[int]] = defaultdict(list)
        for request in range(common.num_reqs):
            queries = starts[request + 1] - starts[request]
            if queries:
                groups[0 if queries == 1 else request + 1].append(request)
        step = Step([], [])
        for requests in groups.values():
            queries = starts[requests[0] + 1] - starts[requests[0]]
            firsts = torch.tensor([starts[request] for request in requests])
            packed = [lengths[request] - queries for request in requests]
            step.tokens.append((firsts[:, None] + torch.arange(queries)).flatten())
            table = common.block_table_tensor[torch.tensor(requests)]
            step.batches.append(Batch.of(table, packed, queries, self.block))
        return step


class PackedAttention(AttentionImpl[Step]):  # type: ignore[misc]  # a class of theirs, without annotations
    """One layer: writes new tokens into packed pages, and attends to them.

    Raises:
        NotImplementedError: for a layer, or an engine, that it would serve wrongly.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        reasons = {
            f"--kv-cache-dtype is {kv_cache_dtype}, but the scheme says how tokens are stored": kv_cache_dtype
            != "auto",
            f"attention of type {attn_type}; decoders are served": attn_type != AttentionType.DECODER,
            f"a layer has a sliding window of {sliding_window} tokens": sliding_window is not None,
            "ALiBi, which kernels do not add to scores": alibi_slopes is not None,
            "the layer reads the cache of another": kv_sharing_target_layer_name is not None,
            f"unknown options of attention: {', '.join(sorted(others))}": any(x is not None for x in others.values()),
            f"head_dim {head_size} is not a multiple of 8 up to 512": head_size % 8 != 0 or head_size > 512,
            **_reasons_of(get_current_vllm_config()),
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise _refusal("; ".join(found))
        native.warn_if_missing()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Encode the new tokens, ``[T, H, D]``, into their slots; those at -1 are padding."""
        real = slot_mapping >= 0
        count = slot_mapping.shape[0]
        if bool(real.all()):
            key, value = key[:count], value[:count]
        else:
            slot_mapping, key, value = slot_mapping[real], key[:count][real], value[:count][real]
        if slot_mapping.numel():
            self._pages(kv_cache, key, value).write(_pool(kv_cache), slot_mapping.to(torch.int64), key, value)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [T, Hq, D]`` into ``output [T, Hq, D]``."""
        if output_scale is not None or output_block_scale is not None:
            raise _refusal("outputs of attention are to be quantized")
        if attn_metadata is None:  # vLLM warms up, without a cache
            return output.zero_()
        pages, pool = self._pages(kv_cache, key, value), _pool(kv_cache)
        for tokens, batch in zip(attn_metadata.tokens, attn_metadata.batches, strict=True):
            q, k, v = (x[tokens].unflatten(0, (-1, batch.queries)).transpose(1, 2) for x in (query, key, value))
            out = pages.attend(pool, batch, q, k, v, self.scale, self.softcap)  # [B, Hq, q, D]
            output[tokens] = out.transpose(1, 2).flatten(0, 1)
        return output

    def _pages(self, kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Pages:
        pages = pages_of(kv_cache.shape[2], key.shape[-1], value.shape[-1], key.dtype)
        assert kv_cache.shape[3] == pages.bytes_per_token, "the pages that customize_spec asked for"
        return pages


def _pool(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's pages ``[P, H, block, bytes of a token]`` as ``[P, H, record bytes]``, where they lie."""
    return kv_cache.view(*kv_cache.shape[:2], -1)


def _reasons_of(config: VllmConfig) -> dict[str, bool]:
    """Reasons against an engine, and whether they hold."""
    model, parallel = config.model_config, config.parallel_config
    shards = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    return {
        "layers that are not attention share its pages": model is not None and bool(model.is_hybrid),
        "parts of the prompt see what comes after them": model is not None and bool(model.is_mm_prefix_lm),
        "a context is spread over several ranks": shards > 1,
        "pages go to other engines, which may not know how to read them": config.kv_transfer_config is not None,
    }
