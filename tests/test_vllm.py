"""vLLM itself over packed pages: `make vllm` builds the environment that this runs in; elsewhere it is skipped."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

import vllm_job
from kvbits.codecs import Codec
from kvbits.numerics import hadamard
from kvbits.scheme import Scheme
from kvbits.vllm.pages import paged_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 32
CHUNK = 96
TOKENS = 24
NOISE = 1e-4
"""What the native kernel's sums are off by, at most a few times (docs/kernels.md), and so the next layer's keys."""

COPIES = 8
"""Of each prompt, through Transformers: the first as it is, the others with noise. An element that lies between two
codes gets another one for the least reason, and few bits make much of that; a token counts where all copies agree."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vllm_job.save(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def model(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def text(folder: str) -> list[int]:
    """Token ids of this project's own pages."""
    docs = Path(__file__).parents[1] / "docs"
    pages = "".join((docs / name).read_text(encoding="utf-8") for name in ("decisions.md", "chat.md"))
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(pages)["input_ids"]
    assert len(ids) > 4000
    return ids


# -- the same through Transformers -------------------------------------------------------------------------------------


def stored(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """What tokens ``[B, H, T, D]`` are once stored, each by itself."""
    matrix = hadamard.rotation(x.shape[-1]) if codec.rotates else torch.eye(x.shape[-1])
    rotated = x @ matrix
    padded = torch.cat([rotated, rotated.new_zeros(*x.shape[:2], -x.shape[2] % 8, x.shape[3])], dim=2)
    return codec.decode(codec.encode(padded, {}), {})[:, :, : x.shape[2]] @ matrix.T


def cache_of(scheme: Scheme) -> Cache:
    """Exact new tokens, and before them what is stored: what pages hold, without pages. Rows in turn are COPIES."""

    class Layer(DynamicLayer):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            seen = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
            self.keys = torch.cat([self.keys, stored(scheme.key, noisy(key_states))], dim=2)
            self.values = torch.cat([self.values, stored(scheme.value, noisy(value_states))], dim=2)
            return seen

    return Cache(layer_class_to_replicate=Layer)


def noisy(x: torch.Tensor) -> torch.Tensor:
    noise = NOISE * torch.randn_like(x)
    noise[::COPIES] = 0
    return x * (1 + noise)


@torch.no_grad()
def greedy(
    model: PreTrainedModel, prompts: list[list[int]], cache: Cache, chunk: int = 10_000
) -> list[tuple[list[int], int]]:
    """Tokens after prompts of one length, of which the cache may hold a part, and how many of them are certain."""
    torch.manual_seed(0)
    ids = torch.tensor(prompts).repeat_interleave(COPIES, 0)
    steps = []
    for new in ids[:, cache.get_seq_length() :].split(chunk, dim=1):
        logits = model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    for _ in range(TOKENS):
        steps.append(logits.argmax(-1))
        logits = model(steps[-1][:, None], past_key_values=cache).logits[:, -1]
    tokens = torch.stack(steps, dim=1).unflatten(0, (-1, COPIES))  # [prompts, COPIES, TOKENS]
    agreed = (tokens == tokens[:, :1]).all(dim=1).int().cumprod(-1).sum(-1)
    return list(zip(tokens[:, 0].tolist(), agreed.tolist(), strict=True))


def certain(tokens: list[int], expected: tuple[list[int], int]) -> int:
    """How many tokens were certain; fails unless these are as expected."""
    wanted, count = expected
    assert tokens[:count] == wanted[:count]
    return count


# -- offline -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "fp8", "rot4"])
def test_greedy_tokens_are_those_of_transformers(
    name: str, folder: str, model: PreTrainedModel, text: list[int]
) -> None:
    """A prompt in chunks, the same from its cached prefix, and short ones of different lengths at once."""
    long, short = text[:250], [text[300 + 50 * i :][: 9 + 3 * i] for i in range(4)]
    limits = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK}
    done = vllm_job.run(name, folder, [[long], [long], short], TOKENS, **limits)
    first, again, others = done["rounds"]
    scheme = paged_scheme(name)

    cache = cache_of(scheme)
    counts = [certain(first[0]["tokens"], greedy(model, [long], cache, CHUNK)[0])]
    kept = (len(long) - 1) // BLOCK * BLOCK
    assert (first[0]["cached"], again[0]["cached"]) == (0, kept)
    cache.crop(kept - cache.get_seq_length())
    counts.append(certain(again[0]["tokens"], greedy(model, [long], cache)[0]))
    for prompt, one in zip(short, others, strict=True):
        counts.append(certain(one["tokens"], greedy(model, [prompt], cache_of(scheme))[0]))
    assert sum(counts) >= TOKENS * len(counts) / 2  # else this would show little


def test_64_requests_at_once_give_what_each_gives_alone(folder: str, model: PreTrainedModel, text: list[int]) -> None:
    lengths = (17, 32, 45, 70)
    prompts = [text[60 * i :][: lengths[i % 4]] for i in range(64)]
    done = vllm_job.run("int4", folder, [prompts], TOKENS, block_size=BLOCK, max_num_batched_tokens=4096)
    scheme, count = paged_scheme("int4"), 0
    for which, _ in enumerate(lengths):
        expected = greedy(model, prompts[which::4], cache_of(scheme))
        for one, wanted in zip(done["rounds"][0][which::4], expected, strict=True):
            count += certain(one["tokens"], wanted)
    assert count >= TOKENS * len(prompts) / 2


def test_the_cache_holds_more_by_the_ratio_of_bytes(folder: str, text: list[int]) -> None:
    blocks = {}
    for name in (None, "int4"):
        done = vllm_job.run(name, folder, [[text[:40]]], 1, block_size=128)
        blocks[name] = done["blocks"]
    bytes_per_token = {None: 2 * 64 * 4, "int4": 2 * (64 // 2 + 2 + 2)}  # of a KV head, in float32
    for name, count in blocks.items():
        assert count == vllm_job.SPACE_GB * 2**30 // (30 * 3 * 128 * bytes_per_token[name])
    assert blocks["int4"] / blocks[None] == pytest.approx(512 / 72, rel=1e-3)


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--block-size", str(BLOCK), "--enforce-eager", "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        running = subprocess.Popen(command, env=vllm_job.environment("int4"), stdout=out, stderr=subprocess.STDOUT)
        try:
            for _ in range(400):  # a minute, where nothing else runs
                assert running.poll() is None, log.read_text()[-6000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                    break
                except OSError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()


def complete(address: str, folder: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": folder, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_openai_server_answers_64_at_once(
    server: str, folder: str, model: PreTrainedModel, text: list[int]
) -> None:
    prompts = [text[60 * i :][:30] for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda prompt: complete(server, folder, prompt), prompts))
    expected = greedy(model, prompts, cache_of(paged_scheme("int4")))
    found = [one["choices"][0]["token_ids"] for one in answers]
    assert sum(map(certain, found, expected)) >= TOKENS * len(prompts) / 2


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sliding_window": 512}, "sliding window of 512"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "decoders are served"),
        ({"attn_type": "encoder_decoder"}, "decoders are served"),
        ({"kv_cache_dtype": "fp8"}, "the scheme says how tokens are stored"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "reads the cache of another"),
        ({"head_size": 36}, "head_dim 36 is not a multiple of 8"),
        ({"sinks": torch.zeros(4)}, "unknown options of attention: sinks"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_layer_that_would_be_served_wrongly_is_refused(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from kvbits.vllm.backend import PackedAttention

    monkeypatch.setenv("KVBITS_VLLM_SCHEME", "int4")
    with set_current_vllm_config(VllmConfig()):
        PackedAttention(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
        with pytest.raises(NotImplementedError, match=why):
            PackedAttention(**{"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **changes})


def test_pages_of_other_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kvbits.vllm.backend import NoLatentBackend, PackedBackend

    monkeypatch.setenv("KVBITS_VLLM_SCHEME", "int4")
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    spec = PackedBackend.customize_spec(FullAttentionSpec(**shape))
    assert spec.page_size_bytes == 2 * 32 * 72
    assert PackedBackend.customize_spec(spec) == spec
    with pytest.raises(ValueError, match="pages of 16 tokens"):
        PackedBackend.customize_spec(FullAttentionSpec(**{**shape, "block_size": 16}))
    with pytest.raises(NotImplementedError, match="SlidingWindowSpec"):
        PackedBackend.customize_spec(SlidingWindowSpec(**shape, sliding_window=64))
    with pytest.raises(NotImplementedError, match="latent"):
        NoLatentBackend.get_impl_cls()


def test_a_scheme_that_cannot_be_had_ends_vllm(folder: str, text: list[int]) -> None:
    with pytest.raises(RuntimeError, match="kivi2 cannot fill pages: int2-channel has scales that tokens share"):
        vllm_job.run("kivi2", folder, [[text[:10]]], 1)
