"""One run of vLLM, in a process of its own: ``python vllm_job.py JOB FILE``, JSON in and JSON out.

``save`` writes the small model as a folder that vLLM reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SPACE_GB = 1


def save(folder: Path) -> str:
    """SmolLM2-135M-Instruct in float32, and its tokenizer; what was read from GGUF cannot be saved as it is."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbits.hf.loading import DEFAULT_MODEL, load_model, load_tokenizer

    read = load_model(DEFAULT_MODEL, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    load_tokenizer(DEFAULT_MODEL).save_pretrained(folder)
    return str(folder)


def environment(scheme: str | None) -> dict[str, str]:
    """Variables for a process of vLLM."""
    own = {"VLLM_CPU_KVCACHE_SPACE": str(SPACE_GB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    rest = {name: value for name, value in os.environ.items() if name != "KVBITS_VLLM_SCHEME"}
    return {**rest, **own, **({} if scheme is None else {"KVBITS_VLLM_SCHEME": scheme})}


def run(scheme: str | None, model: str, rounds: list[list[list[int]]], tokens: int, **options: Any) -> dict[str, Any]:
    """Greedy continuations of ``rounds`` of prompts of token ids, one round after the other.

    Returns:
        ``blocks`` and ``block_size`` of the cache, and for each round and prompt ``tokens`` and ``cached``, how many
        tokens of the prompt were there.
    """
    job = {"model": model, "rounds": rounds, "tokens": tokens, "options": options}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, json.dumps(job), str(found)]
        done = subprocess.run(
            command, env=environment(scheme), capture_output=True, text=True, timeout=1200, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-6000:] + done.stderr[-6000:])
        result: dict[str, Any] = json.loads(found.read_text())
    return result


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, **job["options"]}
    engine = LLM(model=job["model"], **options)
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    rounds = []
    for prompts in job["rounds"]:
        out = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        rounds.append([{"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens} for one in out])
    config = engine.llm_engine.vllm_config.cache_config
    return {"blocks": config.num_gpu_blocks, "block_size": config.block_size, "rounds": rounds}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))
