"""What the processes of :mod:`ranks` do. Each function runs in all of them and returns JSON data."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import kvbits
from kvbits import parallel
from kvbits.hf.names import cache_name

SMALL = "residual=32,block=32"
SCHEMES = (
    f"int4,{SMALL}",
    f"kivi2,{SMALL}",
    f"rot4,{SMALL}",
    f"int4,pre-rope,{SMALL}",
    f"k=int4-channel,v=int4,centred,{SMALL}",
    f"int4,sinks=4+4,{SMALL}",
    f"int4-static,{SMALL}",
    f"exact,{SMALL}",
)
NEW_TOKENS = 24


def schemes() -> tuple[str, ...]:
    """All of them, and where many processes share a machine, some."""
    return SCHEMES if dist.get_world_size() == 2 else SCHEMES[1:4]


def tiny(**options: Any) -> PreTrainedModel:
    """A small random Llama of 8 heads over 4 KV heads, the same in every process."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()


def prompt(tokens: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def generated(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, **options)
    return out[:, ids.shape[1] :].tolist()


def blocks_here(cache: kvbits.KVCache) -> list[int]:
    return [sum(layer.core.store.counts) for layer in cache.packed_layers]


@contextmanager
def most_computed(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens this rank computes in each call."""
    counts: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    yield counts
    hook.remove()


def refusal(action: Any, *arguments: Any, **options: Any) -> str:
    """What an action that must be refused says."""
    try:
        action(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# -- one context on several ranks --------------------------------------------------------------------------------------


def generation() -> dict[str, Any]:
    """``generate`` under many schemes, alone and together."""
    model, ids, found = tiny(), prompt(300), {}
    for scheme in schemes():
        alone_cache, cache = kvbits.cache_for(model, scheme), parallel.cache_for(model, scheme, run=2)
        alone = generated(model, ids, alone_cache)
        with most_computed(model) as computed:
            together = generated(model, ids, cache)
        found[scheme] = {
            "alone": alone, "together": together, "of": blocks_here(alone_cache), "here": blocks_here(cache),
            "bytes": cache.nbytes.total, "bytes_alone": alone_cache.nbytes.total, "computed": max(computed),
        }  # fmt: skip
    return found


def sliced() -> dict[str, Any]:
    """A prompt that each rank reads a slice of, in chunks, before and within ``generate``; alone in the same chunks."""
    model, ids, found = tiny(), prompt(701), {}
    for scheme in schemes()[-4:]:
        alone_cache, cache = kvbits.cache_for(model, scheme), parallel.cache_for(model, scheme, run=1)
        parallel.prefill(model, ids[:, :-1], cache, chunk_tokens=200)
        with torch.no_grad():
            for chunk in ids[:, :-1].split(200, dim=1):
                model(chunk, **{cache_name(model): alone_cache})
        read = cache.tokens.tolist() == ids[:, :-1].tolist()
        alone, together = generated(model, ids, alone_cache), generated(model, ids, cache)
        within_cache = parallel.cache_for(model, scheme, run=1)
        with patch("kvbits.parallel.cache.CHUNK_TOKENS", 200):
            within = generated(model, ids, within_cache)
        read = read and within_cache.tokens.tolist() == cache.tokens.tolist()
        found[scheme] = {
            "alone": alone, "together": together, "within": within, "read": read, "here": blocks_here(cache)
        }  # fmt: skip
    return found


def lengths() -> dict[str, Any]:
    """Last logits of prompts of all lengths around a chunk, and of fewer tokens than ranks: how far they are from those
    of one process that reads the same chunks."""
    model, scheme, world, found = tiny(), f"int2,{SMALL}", dist.get_world_size(), {}
    for chunk, tokens in ((4096, 300), *((64, n) for n in (1, world - 1, 63, 64, 65, 66, 127, 128, 129, 193))):
        ids, whole = prompt(tokens, 2), chunk // world * world
        alone_cache, cache = kvbits.cache_for(model, scheme), parallel.cache_for(model, scheme, run=1)
        before_cache = parallel.cache_for(model, scheme, run=1)
        with torch.no_grad(), patch("kvbits.parallel.cache.CHUNK_TOKENS", chunk):
            for piece in ids.split(whole, dim=1):
                alone = model(piece, **{cache_name(model): alone_cache}).logits[:, -1]
            together = model(ids, logits_to_keep=1, **{cache_name(model): cache}).logits[:, -1]
            parallel.prefill(model, ids, before_cache, chunk_tokens=chunk)
            next_ = [model(prompt(1, 2), **{cache_name(model): x}).logits for x in (alone_cache, cache, before_cache)]
        off = [(x - y).abs().max().item() for x, y in ((alone, together), *((next_[0], x) for x in next_[1:]))]
        found[f"{tokens} in {chunk}"] = off
    return found


def positions() -> dict[str, Any]:
    """Positions that a call names are those that its slices would not have."""
    model, ids, found = tiny(), prompt(150), []
    for cache in (kvbits.cache_for(model, f"int4,{SMALL}"), parallel.cache_for(model, f"int4,{SMALL}", run=1)):
        with torch.no_grad():
            places = 100 + 3 * torch.arange(150)[None]
            call = {"position_ids": places, "logits_to_keep": 1, cache_name(model): cache}
            found.append(model(ids, **call).logits)
    return {"off": (found[0] - found[1]).abs().max().item()}


def features() -> dict[str, Any]:
    """Beams, drafts that are taken back, forks, a second turn, and sampling with the same seed."""
    model, scheme, found = tiny(), f"int4,{SMALL}", {}
    for name, batch, options in (
        ("beams", 2, {"num_beams": 3}),
        ("several", 1, {"num_return_sequences": 2, "num_beams": 2}),
        ("lookup", 1, {"prompt_lookup_num_tokens": 6}),
        ("sampling", 1, {"do_sample": True}),
    ):
        ids, both = prompt(200, batch), []
        for cache in (kvbits.cache_for(model, scheme), parallel.cache_for(model, scheme, run=1)):
            torch.manual_seed(3)
            both.append(generated(model, ids, cache, **options))
        found[name] = {"alone": both[0], "together": both[1]}
    ids, both = prompt(200), []
    for cache in (kvbits.cache_for(model, scheme), parallel.cache_for(model, scheme, run=1)):
        with torch.no_grad():
            model(ids[:, :150], **{cache_name(model): cache})
        twin = cache.fork()
        first = generated(model, ids, twin)
        again = torch.cat([ids, torch.tensor(first), prompt(60, seed=5)], dim=1)
        both.append([first, generated(model, again, twin), generated(model, ids[:, :180], cache)])
    found["forks"] = {"alone": both[0], "together": both[1]}
    return found


def calls() -> dict[str, Any]:
    """Prompts that no slices are read of: at positions of one's own, with a mask of the new ids alone."""
    model, ids, found = tiny(), prompt(300), {}
    positions = torch.cat([torch.arange(150), torch.arange(400, 550)])[None]
    for name, cache in (
        ("alone", kvbits.cache_for(model, SCHEMES[0])),
        ("together", parallel.cache_for(model, SCHEMES[0])),
    ):
        call = {"logits_to_keep": 1, cache_name(model): cache}
        with torch.no_grad(), most_computed(model) as computed:
            logits = model(ids, position_ids=positions, **call).logits
            told = refusal(model, prompt(50), attention_mask=torch.ones(1, 50), **call)
        found[name] = {
            "logits": logits[0, -1].tolist(),
            "told": told,
            "columns": cache.get_seq_length(),
            "computed": computed,
        }
    return found


def refusals() -> dict[str, Any]:
    """What is refused, on every rank alike, and that the cache is as it was."""
    model, rank = tiny(), dist.get_rank()
    ids, cache = prompt(300), parallel.cache_for(model, f"int4,{SMALL}", run=1)
    name = cache_name(model)
    with torch.no_grad():
        model(ids, **{name: cache})
        mask = torch.ones(1, 310, dtype=torch.int64)
        mask[:, 300] = 0
        found = {
            "save": refusal(kvbits.save, cache, "unused"),
            "crop": refusal(cache.crop, -100),
            "padding": refusal(model, prompt(10), attention_mask=mask, **{name: cache}),
            "embeddings": refusal(model, inputs_embeds=torch.zeros(1, 1, 128), **{name: cache}),
            "ids": refusal(model, prompt(4, seed=rank), **{name: cache}),
            "prefill": refusal(parallel.prefill, model, ids, kvbits.cache_for(model, "int4")),
            "run": refusal(parallel.cache_for, model, run=0),
            "mesh": refusal(parallel.cache_for, model, mesh="tp"),
            "weights": refusal(model, prompt(1), output_attentions=True, **{name: cache}),
        }
        here = torch.ones(1, 310, dtype=torch.int64)
        here[:, 300] = 1 - rank
        found["padding here"] = refusal(model, prompt(10), attention_mask=here, **{name: cache})
        found["scheme"] = refusal(parallel.cache_for, model, ("int4", "kivi2")[rank])
        found["other run"] = refusal(parallel.cache_for, model, "int4", run=1 + rank)
        other = tiny()
        other.model.layers[1].mlp.up_proj.weight.add_(rank)
        found["model"] = refusal(parallel.cache_for, other, "int4")
        elsewhere = refusal(model, prompt(1), **{name: cache}) if rank else refusal(parallel.cache_for, model, "int4")
        found["elsewhere"] = elsewhere
        found["columns"] = str(cache.get_seq_length())
    return found


def dies() -> dict[str, Any]:
    """Rank 1 ends in the middle of a text, without a word."""
    model, ids = tiny(), prompt(300)
    cache, steps = parallel.cache_for(model, f"int4,{SMALL}", run=1), 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6 and dist.get_rank() == 1:
            os._exit(3)

    model.model.layers[1].register_forward_pre_hook(count)
    generated(model, ids, cache)
    return {}


def stalls() -> dict[str, Any]:
    """Rank 1 does not come: the others wait for two seconds."""
    model = tiny()
    cache = parallel.cache_for(model, f"int4,{SMALL}", timeout_seconds=2)
    if dist.get_rank() == 1:
        time.sleep(8)
        os._exit(0)
    generated(model, prompt(300), cache)
    return {}


# -- heads on several ranks --------------------------------------------------------------------------------------------


def _folder() -> Path:
    """Where the tiny model is, saved by rank 0."""
    folder = Path(os.environ["SCENE_FOLDER"])
    if dist.get_rank() == 0 and not (folder / "model").exists():
        tiny().save_pretrained(folder / "model")
        kvbits.calibrate(tiny(), prompt(160, 2), [f"nuq3,{SMALL}"], out=folder / "calibration")
    dist.barrier()
    return folder


def tensor() -> dict[str, Any]:
    """Tensor parallel: under many schemes, calibrated, saved and loaded."""
    folder, rank, world = _folder(), dist.get_rank(), dist.get_world_size()
    whole, spread = tiny(), LlamaForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    ids, found = prompt(300), {}
    for scheme in (*schemes()[:5], f"nuq3,{SMALL}"):
        known = {"calibration": folder / "calibration"} if scheme.startswith("nuq") else {}
        cache = kvbits.cache_for(spread, scheme, **known)
        found[scheme] = {
            "alone": generated(whole, ids, kvbits.cache_for(whole, scheme, **known)),
            "together": generated(spread, ids, cache),
            "heads": [layer.core.keys.shape[1] for layer in cache.packed_layers],
        }
    steps = []
    for model in (whole, spread):
        growing = kvbits.cache_for(model, f"int4,{SMALL}")
        with torch.no_grad():
            model(ids[:, :-1], **{cache_name(model): growing})
        steps.append(generated(model, ids, kvbits.freeze(growing, 400)))
    found["frozen"] = {"alone": steps[0], "together": steps[1]}
    name = str(folder / f"of{world}.{{rank}}.kv")
    own = kvbits.save(cache, name)
    read = [*ids[0].tolist(), *found[scheme]["together"][0]]
    more = torch.cat([torch.tensor([read]), prompt(5, seed=9)], dim=1)
    dist.barrier()
    loaded = kvbits.load(name, spread)
    found["load"] = {"alone": generated(spread, more, cache), "together": generated(spread, more, loaded)}
    found["refused"] = {
        "other rank": refusal(kvbits.load, folder / f"of{world}.{(rank + 1) % world}.kv", spread),
        "one process": refusal(kvbits.load, own, whole),
        "one name": refusal(kvbits.save, cache, folder / "all.kv"),
        "calibrate": refusal(kvbits.calibrate, spread, prompt(160, 2), f"nuq3,{SMALL}"),
        "store": refusal(kvbits.PrefixStore, folder / "store", 2**20, spread),
    }
    found["explain"] = {"told": str(kvbits.explain(spread, "int4"))}
    return found


def both() -> dict[str, Any]:
    """A mesh of two dimensions: heads over one, the context over the other."""
    folder, ids, found = _folder(), prompt(701), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tp"))
    config = DistributedConfig(tp_size=2, dp_replicate_size=2)
    spread = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=config).eval()
    whole = tiny()
    for scheme in (f"kivi2,{SMALL}", f"nuq3,{SMALL}"):
        known = {"calibration": folder / "calibration"} if scheme.startswith("nuq") else {}
        cache, alone_cache = (
            parallel.cache_for(spread, scheme, mesh=mesh["sequence"], run=1, **known),
            kvbits.cache_for(whole, scheme, **known),
        )
        parallel.prefill(spread, ids[:, :-1], cache, chunk_tokens=200)
        with torch.no_grad():
            for chunk in ids[:, :-1].split(200, dim=1):
                whole(chunk, **{cache_name(whole): alone_cache})
        found[scheme] = {
            "alone": generated(whole, ids, alone_cache), "together": generated(spread, ids, cache),
            "heads": [layer.core.keys.shape[1] for layer in cache.packed_layers], "here": blocks_here(cache),
        }  # fmt: skip
    return found
