"""One run of vLLM, in a process of its own: ``python vllm_job.py JOB FILE``, JSON in and JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SPACE_GB = 1


def save_tiny(folder: Path) -> str:
    """Two layers of random weights whose KV heads two ranks can share, with the same tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvbits.hf.loading import DEFAULT_MODEL, load_tokenizer

    tokenizer = load_tokenizer(DEFAULT_MODEL)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def environment(scheme: str | None) -> dict[str, str]:
    """Variables for a process of vLLM."""
    own = {"VLLM_CPU_KVCACHE_SPACE": str(SPACE_GB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    rest = {name: value for name, value in os.environ.items() if name != "KVBITS_VLLM_SCHEME"}
    return {**rest, **own, **({} if scheme is None else {"KVBITS_VLLM_SCHEME": scheme})}


def run(
    scheme: str | None,
    model: str,
    rounds: list[list[list[int]]],
    tokens: int,
    faults: list[str | None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Greedy continuations of ``rounds`` of prompts of token ids, one round after the other.

    Args:
        scheme: None is vLLM's own cache.
        model: a folder.
        rounds: of prompts.
        tokens: after each prompt.
        faults: where a :mod:`vllm_witness` shall watch, what it plants in each round.
        options: of ``vllm.LLM``.

    Returns:
        ``blocks`` and ``block_size`` of the cache; for each round and prompt ``tokens``, ``cached``, how many tokens of
        the prompt were there, and ``top``, the log-probabilities of the likeliest of each step; and ``found``, what the
        witness found in each round.
    """
    job = {"model": model, "rounds": rounds, "tokens": tokens, "scheme": scheme, "faults": faults, "options": options}
    own = {} if faults is None else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the witness sees its own process
    if ranks := options.get("tensor_parallel_size"):
        own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, json.dumps(job), str(found)]
        done = subprocess.run(
            command, env=environment(scheme) | own, capture_output=True, text=True, timeout=1200, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-6000:] + done.stderr[-6000:])
        result: dict[str, Any] = json.loads(found.read_text())
    return result


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, **job["options"]}
    engine = LLM(model=job["model"], **options)
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=5)

    def answers(prompts: list[list[int]]) -> list[dict[str, Any]]:
        out = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "cached": one.num_cached_tokens,
                "top": [{token: found.logprob for token, found in top.items()} for top in one.outputs[0].logprobs],
            }
            for one in out
        ]

    config = engine.llm_engine.vllm_config.cache_config
    told = {"blocks": config.num_gpu_blocks, "block_size": config.block_size}
    if job["faults"] is None:
        return {**told, "rounds": [answers(prompts) for prompts in job["rounds"]]}

    from kvbits.vllm.pages import paged_scheme
    from vllm_witness import BOUND, Witness, planted

    witness, rounds, found = Witness(paged_scheme(job["scheme"])), [], []
    with witness.watching(engine):
        for prompts, fault in zip(job["rounds"], job["faults"], strict=True):
            witness.bound = BOUND["reference" if fault == "reference" else "native"]
            with planted(fault):
                rounds.append(answers(prompts))
            read = [prompt + one["tokens"] for prompt, one in zip(prompts, rounds[-1], strict=True)]
            found.append(witness.finished(read))
            if fault is not None:
                engine.reset_prefix_cache()
                witness.forget()
    return {**told, "rounds": rounds, "found": found}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))
