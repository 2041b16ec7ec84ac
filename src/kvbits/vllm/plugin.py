"""What vLLM loads, in every one of its processes: ``register`` puts our backend in the place of the CPU's own.

vLLM logs an entry point that cannot be imported and goes on with its own cache. So this module imports nothing that can
be missing, and all that may go wrong goes wrong inside ``register``, whose errors vLLM passes on.
"""

from __future__ import annotations

import os

SCHEME = "KVBITS_VLLM_SCHEME"
"""The environment variable that names the scheme: vLLM takes no ``--kv-cache-dtype`` that it does not know."""


def register() -> None:
    """Register the backend if ``KVBITS_VLLM_SCHEME`` is set; otherwise leave vLLM as it is.

    Raises:
        ValueError: for a scheme that pages cannot hold.
        NotImplementedError: on another platform than the CPU.
    """
    name = os.environ.get(SCHEME, "").strip()
    if not name:
        return
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvbits.vllm.pages import paged_scheme

    scheme = paged_scheme(name)
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"{SCHEME}={name}: kvbits serves vLLM on its CPU platform only, and this is "
            f"{current_platform.device_name}; unset {SCHEME}"
        )
    # On this platform vLLM ignores which backend is selected, but asks these names for their classes.
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvbits.vllm.backend.PackedBackend")
    for latent in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        register_backend(latent, "kvbits.vllm.backend.NoLatentBackend")
    init_logger("vllm.kvbits").info_once("kvbits: the KV cache holds %s keys and %s values", scheme.key, scheme.value)
