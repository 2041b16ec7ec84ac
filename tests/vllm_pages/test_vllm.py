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
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_job
from kvbits.vllm.pages import paged_scheme
from vllm_twin import TOKENS, Told, cache_of, told
from vllm_witness import FAULTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 32
CHUNK = 96
LENGTHS = (17, 32, 45, 70)

Many: TypeAlias = tuple[list[list[int]], dict[str, Any]]


@pytest.fixture(scope="session")
def folder(smollm2_folder: Path) -> str:
    return str(smollm2_folder)


@pytest.fixture(scope="session")
def model(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def text(folder: str) -> list[int]:
    """Token ids of this project's own pages."""
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text(encoding="utf-8") for name in ("decisions.md", "chat.md"))
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(pages)["input_ids"]
    assert len(ids) > 4000
    return ids


def no_further_than_noise(found: list[Told], times: float = 2) -> bool:
    """Whether vLLM is as far from Transformers as noise of a kernel's size takes Transformers from itself.

    Were two runs within e of each other in every log-probability, then what one finds likeliest is within 2 e of the
    likeliest of the other; e is the furthest that any copy moves at any step. One step that is far off makes that
    loose. So vLLM must also not move further than ``times`` what the copy does that moves furthest, neither in half of
    the steps nor in nine tenths: two, since docs/kernels.md has errors of one to two NOISE.
    """
    ours, copies, short = (torch.cat([getattr(one, name) for one in found]) for name in ("ours", "copies", "short"))
    shares = torch.tensor([0.5, 0.9])
    moved, may = ours.quantile(shares), times * copies.quantile(shares, dim=0).amax(-1)
    print(f"moved {moved.tolist()}, may {may.tolist()}, {int((short > 0).sum())} of {len(short)} tokens differ")
    return bool((short <= 2 * copies.max()).all() and (moved <= may).all())


@pytest.mark.parametrize("name", ["int4", "fp8", "rot4"])
def test_greedy_tokens_are_those_of_transformers(
    name: str, folder: str, model: PreTrainedModel, text: list[int]
) -> None:
    """A prompt in chunks, the same from its cached prefix, and short ones of different lengths at once."""
    long, short = text[:250], [text[300 + 50 * i :][: 9 + 3 * i] for i in range(4)]
    limits = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "num_gpu_blocks_override": 64}
    done = vllm_job.run(name, folder, [[long], [long], short], TOKENS, faults=[None, None, None], **limits)
    first, again, others = done["rounds"]
    print(name, done["found"])
    assert [wrong(found) for found in done["found"]] == [{}, {}, {}]
    scheme = paged_scheme(name)

    cache = cache_of(scheme)
    found = [told(model, [long], first, cache, CHUNK)]
    kept = (len(long) - 1) // BLOCK * BLOCK
    assert (first[0]["cached"], again[0]["cached"]) == (0, kept)
    cache.crop(kept - cache.get_seq_length())
    found.append(told(model, [long], again, cache))
    for prompt, one in zip(short, others, strict=True):
        found.append(told(model, [prompt], [one], cache_of(scheme)))
    assert no_further_than_noise(found)


# -- what the backend was given, and what it made of it ----------------------------------------------------------------


def crowded(text: list[int]) -> list[list[int]]:
    """64 prompts, some of which share pages with one that comes in the same step."""
    alone = [text[60 * i :][: LENGTHS[i % 4]] for i in range(56)]
    return alone + [prompt[:64] + text[40 * i :][:9] for i, prompt in enumerate(alone[3:32:4])]


@pytest.mark.parametrize(("name", "dtype"), [("int4", "float32"), ("int4", "bfloat16"), ("k=fp8,v=rot4", "bfloat16")])
def test_pages_have_the_bits_of_codecs_and_attention_is_that_of_float64(
    name: str, dtype: str, folder: str, text: list[int]
) -> None:
    """For the very keys, values and queries that came in: in chunks, between decode steps, in pages used before.

    Bits are equal, and answers are off by rounding: of sixteen-bit factors, or of float32 where the slow twin of the
    kernel computes. Under int4 faults are planted next, each of which has to be found.
    """
    prompts, others = crowded(text), ["reference", *FAULTS] if (name, dtype) == ("int4", "float32") else []
    rounds = [prompts, *(prompts[:4] for _ in others)]
    limits = {"block_size": BLOCK, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 90, "dtype": dtype}
    first, *found = vllm_job.run(name, folder, rounds, 12, faults=[None, *others], **limits)["found"]
    print(name, dtype, first)
    assert wrong(first) == {}
    assert first["written"] > 90_000 and first["over_history"] > 20_000  # 30 layers, 12 tokens, 64 requests
    assert first["mixed"] > 5 and first["reused"] > 0
    for fault, counts in zip(others, found, strict=True):
        if fault == "reference":
            assert wrong(counts) == {}
        else:
            assert FAULTS[fault][3] in wrong(counts), fault


def wrong(found: dict[str, Any]) -> dict[str, int]:
    return {what: count for what, count in found.items() if what.startswith("wrong_") and count}


# -- offline -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(folder: str, text: list[int]) -> Many:
    """64 prompts of four lengths, and what vLLM makes of all of them at once."""
    prompts = [text[60 * i :][: LENGTHS[i % 4]] for i in range(64)]
    return prompts, vllm_job.run("int4", folder, [prompts], TOKENS, block_size=BLOCK, max_num_batched_tokens=4096)


def test_64_requests_at_once_get_what_transformers_gives(many: Many, model: PreTrainedModel) -> None:
    prompts, answers = many[0], many[1]["rounds"][0]
    groups = range(len(LENGTHS))
    found = [told(model, prompts[i::4], answers[i::4], cache_of(paged_scheme("int4"))) for i in groups]
    assert no_further_than_noise(found)


@pytest.mark.parametrize("fault", ["another codec", "one bit less", "a token unseen"])
def test_answers_of_a_wrong_cache_are_further_off_than_noise(fault: str, many: Many, model: PreTrainedModel) -> None:
    """The same comparison, with the fault in Transformers' cache: so the test above can fail."""
    prompts, answers = many[0], many[1]["rounds"][0]
    other = {"another codec": "nf4", "one bit less": "int3"}.get(fault, "int4")
    cache = cache_of(paged_scheme(other), unseen=fault == "a token unseen")
    assert not no_further_than_noise([told(model, prompts[::4], answers[::4], cache)])


def test_the_cache_holds_more_by_the_ratio_of_bytes(many: Many, folder: str, text: list[int]) -> None:
    own = vllm_job.run(None, folder, [[text[:40]]], 1, block_size=BLOCK, dtype="bfloat16")["blocks"]
    of_a_token = {"own": 2 * 64 * 2, "int4": 2 * (64 // 2 + 2 + 2)}  # bytes of a KV head
    for name, count in {"own": own, "int4": many[1]["blocks"]}.items():
        assert count == vllm_job.SPACE_GB * 2**30 // (30 * 3 * BLOCK * of_a_token[name])
    assert many[1]["blocks"] / own == pytest.approx(256 / 72, rel=1e-3)


# -- two ranks ---------------------------------------------------------------------------------------------------------


def test_two_ranks_have_half_the_heads_each(tmp_path: Path) -> None:
    """Tensor parallel: twice the tokens in the same bytes of each rank, and what one process of Transformers gives."""
    folder = vllm_job.save_tiny(tmp_path)
    prompts = [[(7 * i + 13 * j) % 4000 + 5 for j in range(40)] for i in range(6)]
    done = vllm_job.run("fp8", folder, [prompts], TOKENS, block_size=BLOCK, tensor_parallel_size=2)
    assert done["blocks"] == vllm_job.SPACE_GB * 2**30 // (2 * 1 * BLOCK * 2 * (64 + 2))  # layers, heads of a rank
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = told(model, prompts, done["rounds"][0], cache_of(paged_scheme("fp8")))
    assert no_further_than_noise([found])
    assert not found.short.any()  # of fp8, every token is the likeliest


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
    """An answer as :func:`vllm_job.run` gives it."""
    body: dict[str, Any] = {
        "model": folder,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 5}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    tops = [{int(name.split(":")[1]): x for name, x in top.items()} for top in choice["logprobs"]["top_logprobs"]]
    return {"tokens": choice["token_ids"], "top": tops}


def test_the_openai_server_answers_64_at_once(
    server: str, folder: str, model: PreTrainedModel, text: list[int]
) -> None:
    prompts = [text[60 * i :][:30] for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda prompt: complete(server, folder, prompt), prompts))
    assert no_further_than_noise([told(model, prompts, answers, cache_of(paged_scheme("int4")))])


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
