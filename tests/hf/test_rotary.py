"""Rotary embeddings: found in every family, undone to rounding, and followed through padding, crops and beams."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import zoo
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.hf.rotation.frequencies import CannotUnrope
from kvbits.hf.rotation.rotary import Rotaries, rotaries
from kvbits.numerics import rope
from kvbits.store.rows import Rows, Run
from kvbits.transform.rotary import Rotary

pytestmark = pytest.mark.usefixtures("one_thread")

EARLY = zoo.installed() < (5, 24)

# Of each layer: how many channels are roped; i: interleaved pairs; -: none.
FOUND = {
    "llama": "8 8", "llama-mha-d8": "8 8", "llama-mqa-d80": "80 80", "llama-d256-eager": "256 256", "mistral": "8 8",
    "mistral-window": "8 8", "qwen2": "8 8", "qwen3": "16 16", "phi3": "8 8", "phi4": "12 12", "cohere": "8i 8i",
    "cohere2": "16i -", "glm": "8i 8i", "glm4": "8i 8i", "stablelm": "2 2", "olmo2": "8 8", "granite": "8 8",
    "starcoder2": "8 8", "nemotron": "8 8", "smollm3": "8 -", "mixtral": "8 8", "diffllama": "8 8", "hunyuan": "16 16",
    "nanochat": "8 8", "gemma3": "16 16 16 16", "gemma2-softcap": "16 16", "gpt-oss": "16 16",
    "llama4-chunked": "16i - 16i -", "gemma3n": "16 16 16" if EARLY else "16 16 16 - -", "gemma4": "16 32 32 - -",
    "falcon-mqa": "8 8", "falcon-new": "8 8", "falcon-alibi": "- -", "bloom": "- -", "mpt": "- -", "gpt-neox": "2 2",
    "gpt2": "- -", "gpt-j": "4i 4i", "codegen": "8i 8i", "gpt-bigcode": "- -", "opt": "- -", "gpt-neo": "- -",
    "xglm": "- -", "bart-decoder": "- -", "bert-decoder": "- -", "roformer": "? ?",
    "deepseek-v2": "? ?" if EARLY else "- -",  # later releases cache the latent, which is not roped
    "deepseek-v3": "? ?" if EARLY else "- -", "minicpm3": "- -", "qwen3-next": "- 4", "lfm2": "- 8", "jamba": "- -",
    "kimi-linear": "- -", "recurrent-gemma": "- 4", "llava": "8 8", "qwen2-vl": "8 8", "gemma3-vision": "16 16",
    "paligemma": "8 8", "mllama": "8 - 8",
}  # fmt: skip

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "factor": 16.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 6.0, 20.0]},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
}  # fmt: skip


def scaled(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> hf.PreTrainedModel:
    parameters = {"rope_theta": 10000.0, **SCALINGS[name]}
    return zoo.build("llama", dtype, rope_parameters=parameters, **changes)


def described(found: Rotaries) -> str:
    """As in :data:`FOUND`; ``?`` for a layer that is refused."""
    words = []
    for layer in found.layers:
        if isinstance(layer, Rotary):
            words.append(f"{layer.channels}{'i' if layer.interleaved else ''}")
        else:
            words.append("-" if layer is None else "?")
    return " ".join(words)


def angles(rotary: Rotary, rows: Rows, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float64 ``[count, R/2]``, of the first own tokens of a row."""
    positions, epochs = rows.positions(row, torch.arange(count))
    radians = positions.double()[:, None] * torch.stack(rotary.epochs)[epochs]
    return radians.cos(), radians.sin()


def far(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).norm() / right.norm())


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.SERVED)
def test_families(name: str, dtype: torch.dtype) -> None:
    found = rotaries(zoo.build(name, dtype))
    assert described(found) == FOUND[name]
    assert len(found) == len(FOUND[name].split())


class Watched:
    """A model whose keys are kept as they are just before the rotary embedding.

    Attributes:
        keys: of each layer that has them: ``[B, H, T, D]`` of each call.
    """

    def __init__(self, model: hf.PreTrainedModel) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}
        for attention in model.modules():
            if not isinstance(getattr(attention, "layer_idx", None), int):
                continue
            last = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
            if last is not None:
                keep = functools.partial(self._keep, attention.layer_idx, getattr(attention, "head_dim", 0))
                last.register_forward_hook(keep)

    def _keep(self, layer: int, size: int, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.ndim == 3:
            output = output.unflatten(-1, (-1, size)).transpose(1, 2)
        elif output.shape[1] != 2:  # heads of all the models here
            output = output.transpose(1, 2)
        self.keys.setdefault(layer, []).append(output.detach())


PLAIN = [
    "llama", "llama-d256-eager", "mistral", "qwen2", "qwen3", "cohere", "cohere2", "glm", "glm4", "stablelm",
    "olmo2", "granite", "starcoder2", "nemotron", "smollm3", "mixtral", "diffllama", "gemma3", "gemma2-softcap",
    "gpt-oss", "gemma3n", "gemma4", "qwen3-next", "recurrent-gemma", "llava", "qwen2-vl", "gemma3-vision", "paligemma",
]  # fmt: skip
"""Families whose keys come from a ``k_norm`` or a ``k_proj`` and are roped next."""


def attention_scaling(model: hf.PreTrainedModel) -> float:
    """What yarn and longrope multiply cosines and sines by."""
    modules = (module for module in model.modules() if hasattr(module, "attention_scaling"))
    return float(next((module.attention_scaling for module in modules), 1))


def assert_undone(model: hf.PreTrainedModel, dtype: torch.dtype) -> None:
    """Stored keys, unroped, are the model's own from before its rotary embedding, times its attention scaling."""
    found, watched, scale = rotaries(model), Watched(model), attention_scaling(model)
    cache = hf.DynamicCache(config=model.config.get_text_config(decoder=True))
    ids, first = zoo.prompt(2, 12), 3
    with torch.no_grad():
        position_ids = torch.arange(first, first + 12).expand(2, -1)
        model(input_ids=ids, position_ids=position_ids, use_cache=True, **{cache_name(model): cache})
    rows = Rows(2, 12, None, ((Run(0, first),),) * 2)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    checked = 0
    for layer, rotary in enumerate(found.layers):
        if layer not in watched.keys or not getattr(cache.layers[layer], "is_initialized", True):
            continue
        keys, right = cache.layers[layer].keys.double(), scale * watched.keys[layer][0].double()
        if isinstance(rotary, Rotary):
            cos, sin = angles(rotary, rows, 0, 12)
            assert far(keys, right) > 0.05
            back = rope.unrope(keys, cos, sin, rotary.interleaved)
            assert far(back, right) < tolerance
            assert far(rope.apply(back, cos, sin, rotary.interleaved), keys) < 1e-12
        else:
            assert far(keys, right) < tolerance
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_unroped_keys_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    assert_undone(zoo.build(name, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(name: str, dtype: torch.dtype) -> None:
    model = scaled(name, dtype)
    assert described(rotaries(model)) == "8 8"
    assert_undone(model, dtype)


@pytest.mark.model
def test_smollm2(smollm2: Any) -> None:
    model, _ = smollm2
    found = rotaries(model)
    assert len(found) == 30
    assert len(set(found.layers)) == 1
    rotary = found[0]
    assert rotary is not None
    assert torch.equal(rotary.epochs[0], model.model.rotary_emb.inv_freq.double())
    assert not rotary.interleaved


def test_layers_that_share_an_embedding_share_the_object() -> None:
    first, second, third, fourth = rotaries(zoo.build("gemma3")).layers
    assert first is third
    assert second is fourth
    assert first is not second


def test_two_types_of_layers_stay_apart_where_their_frequencies_are_equal_at_first() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    model = zoo.build("gemma3", rope_parameters={"sliding_attention": plain, "full_attention": plain})
    found = rotaries(model)
    assert found[0] is not found[1]
    assert found[0] is found[2]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_after_the_rotary_embedding_is_refused(dtype: torch.dtype) -> None:
    model = zoo.build("hunyuan", dtype)
    with torch.no_grad():
        model.model.layers[1].self_attn.key_layernorm.weight[0] = 3
    found = rotaries(model)
    assert found[0] is not None
    with pytest.raises(CannotUnrope, match=r"HunYuan\w+, layer 1: its keys depend on positions.*norm"):
        found[1]


def test_roped_last_channels_are_refused() -> None:
    if not EARLY:
        pytest.skip("the cache gets the latent")
    with pytest.raises(CannotUnrope, match="layer 0: the last 8 of the 24 channels"):
        rotaries(zoo.build("deepseek-v3"))[0]


def test_a_rotary_embedding_that_the_model_does_not_show_is_refused() -> None:
    with pytest.raises(CannotUnrope, match=r"RoFormer.*layer 1: .*shows no rotary frequencies"):
        rotaries(zoo.build("roformer"))[1]


def test_a_model_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("pixel_values")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    found = rotaries(model)
    for layer in (0, 1):
        with pytest.raises(CannotUnrope, match=r"cannot read one token of text by itself.*pixel_values"):
            found[layer]


# -- the probe ---------------------------------------------------------------------------------------------------------


def state_of(model: hf.PreTrainedModel) -> list[Any]:
    """Whatever a forward may leave behind."""
    state: list[Any] = [torch.get_rng_state().tolist(), dict(vars(model.config))]
    for module in model.modules():
        state.append({k: v for k, v in vars(module).items() if not k.startswith("_") and not torch.is_tensor(v)})
        state.append({k: (id(v), None if v is None else v.tolist()) for k, v in module._buffers.items()})
        state.append([len(vars(module)[hooks]) for hooks in ("_forward_hooks", "_forward_pre_hooks")])
    return state


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["llama", "longrope", "dynamic", "gemma3", "gpt-oss", "recurrent-gemma", "qwen2-vl"])
def test_the_probe_leaves_no_trace(name: str, training: bool) -> None:
    model = scaled(name) if name in SCALINGS else zoo.build(name)
    with torch.no_grad():  # leaves the model as a long text does
        model(input_ids=zoo.prompt(1, 700), use_cache=False)
    model.train(training)
    model.lm_head.train()
    before = state_of(model)
    found = rotaries(model)
    assert state_of(model) == before
    assert all(p.grad is None for p in model.parameters())
    assert not [key for key in vars(model) if "kvbits" in key]
    assert rotaries(model) is found


def test_the_probe_runs_under_inference_mode_autocast_and_hooks_of_ours() -> None:
    model = zoo.build("llama")
    cache = kvbits.cache_for(model, "exact")
    with torch.no_grad():
        model(input_ids=zoo.prompt(), **{cache_name(model): cache})
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found = rotaries(model)
    assert described(found) == "8 8"
    rotary = found[0]
    assert rotary is not None
    assert torch.equal(rotary.epochs[0], model.model.rotary_emb.inv_freq.double())
    assert cache.get_seq_length() == 40
    kvbits.disable(model)
    assert rotaries(model) is not found  # the model may be another by then


# -- where tokens are --------------------------------------------------------------------------------------------------


class Reader:
    """A model and a cache that follows positions, and the keys that the model had before it roped them."""

    def __init__(self, model: hf.PreTrainedModel) -> None:
        self.model, self.watched = model, Watched(model)
        self.cache = self.new_cache()
        self.found = rotaries(model)
        self.watched.keys.clear()

    def new_cache(self) -> KVCache:
        cache = kvbits.cache_for(self.model, "exact")
        cache.columns.rotaries, cache.columns.strict = rotaries(self.model), True
        return cache

    @property
    def rows(self) -> Rows:
        return self.cache.columns.rows

    def read(self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> None:
        given = {"attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            self.model(input_ids=ids, use_cache=True, **given, **{cache_name(self.model): self.cache})

    def assert_followed(self, crops: dict[int, int] | None = None, tolerance: float = 2e-5) -> None:
        """What every row stores, unroped by its positions, is what the model had.

        ``crops[i]``: columns that were taken back after the i-th call.
        """
        for layer, calls in self.watched.keys.items():
            columns = calls[0][:, :, :0]
            for index, call in enumerate(calls):
                columns = torch.cat([columns, call], dim=2)
                gone = (crops or {}).get(index, 0)
                columns = columns[:, :, : columns.shape[2] - gone]
            rotary, core = self.found[layer], self.cache.packed_layers[layer].core
            assert rotary is not None
            assert columns.shape[2] == self.rows.columns
            for row, count in enumerate(self.rows.counts):
                own = columns[row] if self.rows.valid is None else columns[row][:, self.rows.valid[row]]
                assert core.keys is not None
                keys = core.keys[row, :, :count].double()
                back = rope.unrope(keys, *angles(rotary, self.rows, row, count), rotary.interleaved)
                assert count == 0 or far(back, own.double()) < tolerance


@pytest.fixture
def llama() -> Reader:
    return Reader(zoo.build("llama"))


def left_padded(columns: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return zoo.padded_prompt(3, columns, padding=5)


def ones(mask: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.cat([mask, mask.new_ones(len(mask), columns)], dim=1)


def masks() -> dict[str, torch.Tensor]:
    found = {"whole": torch.ones(3, 30, dtype=torch.int64), "left": left_padded(30)[1]}
    found["holes"] = found["whole"].clone()
    found["holes"][0, [0, 3, 4, 12, 20, 29]] = found["holes"][1, :22] = 0
    return found


@pytest.mark.parametrize(
    "mask, given, runs",
    [
        ("whole", False, None),
        ("whole", True, None),
        ("left", True, None),
        ("left", False, ((Run(0, 10),), (Run(0, 5),), (Run(0, 0),))),
        ("holes", False, ((Run(0, 1), Run(2, 5), Run(9, 13), Run(16, 21)), (Run(0, 22),), (Run(0, 0),))),
    ],
)
def test_a_run_begins_where_positions_do_not_go_on_by_one(llama: Reader, mask: str, given: bool, runs: Any) -> None:
    """A call with positions counts text alone, one without them counts padding too."""
    text, done = masks()[mask], 0
    positions = torch.arange(30)[None] if mask == "whole" else zoo.positions(text)
    for chunk in (20, 1, 1, 8):
        new = slice(done, done + chunk)
        done += chunk
        options = None if mask == "whole" else text[:, :done], positions[:, new] if given else None
        llama.read((zoo.prompt(3, 30) * text)[:, new], *options)
    assert llama.rows.runs == runs
    llama.assert_followed()


def test_a_resumed_chat(llama: Reader) -> None:
    """A second turn, the positions of which go on; and a third one that jumps."""
    ids, mask = left_padded()
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = {cache_name(llama.model): llama.cache}
    first = llama.model.generate(ids, attention_mask=mask, **options, **cache).sequences
    again = torch.cat([first, zoo.prompt(3, 7, seed=5)], dim=1)
    llama.model.generate(again, attention_mask=ones(mask, 11), **options, **cache)
    assert llama.rows.runs is None
    llama.assert_followed()
    columns = llama.rows.columns
    llama.read(zoo.prompt(3, 2), ones(mask, columns - 18), torch.tensor([[100, 101]]))
    assert llama.rows.runs is not None
    assert [row[-1].position for row in llama.rows.runs] == [100] * 3
    llama.assert_followed()


def test_a_failed_call_is_taken_back(llama: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded()
    llama.read(ids, mask)
    before = llama.rows
    with monkeypatch.context() as patch:
        patch.setattr(llama.model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama.read(ids[:, :2], ones(mask, 2), torch.tensor([[90, 91]]))
    assert llama.rows is before
    llama.watched.keys = {layer: calls[:1] for layer, calls in llama.watched.keys.items()}
    llama.read(ids[:, :2], ones(mask, 2))
    assert llama.rows.runs == before.runs
    llama.assert_followed()


def test_a_copied_cache_goes_its_own_way(llama: Reader) -> None:
    llama.read(zoo.prompt(2, 10))
    twin = copy.deepcopy(llama.cache)
    assert twin.columns.rotaries is llama.found
    llama.read(zoo.prompt(2, 1), None, torch.tensor([[60]]))
    assert twin.columns.rows.runs is None
    assert llama.rows.runs == ((Run(0, 0), Run(10, 60)),) * 2


def test_caches_that_need_no_positions_follow_none() -> None:
    model = zoo.build("llama")
    cache = kvbits.cache_for(model, "exact")
    ids, mask = left_padded()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_name(model): cache})
    assert cache.columns.rows.runs is None


def test_positions_of_several_dimensions() -> None:
    """Those of text are the same in all of them; those of a picture are refused, and nothing changes."""
    reader = Reader(zoo.build("qwen2-vl"))
    ids, mask = left_padded()
    options = dict(max_new_tokens=3, do_sample=False)
    reader.model.generate(ids, attention_mask=mask, **options, **{cache_name(reader.model): reader.cache})
    assert reader.rows.runs is None
    before = reader.rows
    positions = torch.arange(30, 32).expand(3, 3, 2).clone()
    positions[1, 0, 1] = 35
    with pytest.raises(ValueError, match="positions of several dimensions"):
        reader.read(ids[:, :2], ones(mask, 4), positions)
    assert reader.rows is before
    positions[1, 0, 1] = 31
    reader.read(ids[:, :2], ones(mask, 4), positions)
    assert reader.rows.runs is not None
    assert all(row[-1].position == 30 for row in reader.rows.runs)
    reader.watched.keys = {layer: [*calls[:3], calls[-1]] for layer, calls in reader.watched.keys.items()}
    reader.assert_followed()


# -- frequencies that change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_longrope_begins_its_second_epoch_at_the_right_token(mode: Any) -> None:
    with mode():
        reader = Reader(scaled("longrope"))
        scaling = reader.model.model.rotary_emb.attention_scaling
        ids = zoo.prompt(1, 70)
        reader.read(ids[:, :60])
        for column in range(60, 70):
            reader.read(ids[:, column : column + 1])
        assert reader.rows.runs == ((Run(0, 0, 0), Run(64, 64, 1)),)
        reader.watched.keys = {layer: [scaling * x for x in calls] for layer, calls in reader.watched.keys.items()}
        reader.assert_followed()
        rotary = reader.found[0]
        assert rotary is not None
        long = 1 / (torch.tensor([1.5, 2.0, 6.0, 20.0]) * 10000 ** (torch.arange(4) / 4))
        torch.testing.assert_close(rotary.epochs[1].float(), long)
        # A short text begins anew in the first epoch, and a long one in the second; no epoch is kept twice.
        for columns, epoch in ((20, 0), (66, 1), (30, 0)):
            cache = reader.cache = reader.new_cache()
            reader.watched.keys.clear()
            reader.read(ids[:, :columns])
            assert cache.columns.rows.last_epoch == epoch
            reader.watched.keys = {layer: [scaling * x for x in calls] for layer, calls in reader.watched.keys.items()}
            reader.assert_followed()
        assert len(rotary.epochs) == 2


def test_layers_of_two_types_count_the_same_epochs() -> None:
    if zoo.installed() == (5, 0):
        pytest.skip("this release fails by itself where a type of layers has longrope")
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    scaling = {**SCALINGS["longrope"], "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = zoo.build("gemma3", rope_parameters={"sliding_attention": plain, "full_attention": scaling})
    reader = Reader(model)
    local, whole = reader.found[0], reader.found[1]
    assert local is not None
    assert whole is not None
    reader.read(zoo.prompt(1, 80))
    assert reader.rows.last_epoch == 1
    assert torch.equal(local.epochs[1], local.epochs[0])
    torch.testing.assert_close(whole.epochs[1], whole.epochs[0] / 4)


def test_dynamic_scaling_begins_few_epochs() -> None:
    reader = Reader(scaled("dynamic", max_position_embeddings=64))
    rotary, ids = reader.found[0], zoo.prompt(1, 200)
    assert rotary is not None
    reader.read(ids[:, :60])
    assert reader.rows.runs is None
    reader.assert_followed()
    for column in range(60, 100):
        reader.read(ids[:, column : column + 1])
    assert reader.rows.runs is not None
    assert reader.rows.runs[0][1].token in range(65, 72)  # soon after the first change
    assert len(rotary.epochs) < 16
    epochs = len(rotary.epochs)
    for _ in range(3):  # a long call at once is in an epoch of its own, always the same
        reader.cache = reader.new_cache()
        reader.watched.keys.clear()
        reader.read(ids)
        assert reader.rows.runs == ((Run(0, 0, reader.rows.last_epoch),),)
        reader.assert_followed(tolerance=0.05)
    assert len(rotary.epochs) == epochs + 1


def test_a_probe_after_a_long_text_begins_with_the_short_frequencies() -> None:
    model = scaled("longrope")
    short = model.model.rotary_emb.inv_freq.double().clone()
    with torch.no_grad():
        model(input_ids=zoo.prompt(1, 80), use_cache=False)
    assert not torch.equal(model.model.rotary_emb.inv_freq.double(), short)
    rotary = rotaries(model)[0]
    assert rotary is not None
    assert torch.equal(rotary.epochs[0], short)


# -- what is stored ----------------------------------------------------------------------------------------------------


def constant_keys(**changes: Any) -> hf.PreTrainedModel:
    """A model whose keys are the same for every token until it ropes them: a key's bias is all there is."""
    model = zoo.build("qwen2", **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
            bias = layer.self_attn.k_proj.bias
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    return model


def read_twice(
    model: hf.PreTrainedModel, scheme: str, chunks: tuple[int, ...], mask: torch.Tensor | None = None
) -> tuple[KVCache, KVCache]:
    """The same text in a cache under ``scheme`` and in an exact one. Without positions: as the model counts them."""
    caches = kvbits.cache_for(model, scheme), kvbits.cache_for(model, "exact")
    ids, embedding = zoo.prompt(3, sum(chunks)), model.model.rotary_emb
    short = embedding.inv_freq.clone()
    for cache in caches:
        done = 0
        # Dynamic scaling remembers the longest text so far; on early releases even after a short one.
        embedding.register_buffer("inv_freq", short.clone(), persistent=False)
        embedding.max_seq_len_cached = embedding.original_max_seq_len
        for chunk in chunks:
            done += chunk
            given = {"attention_mask": None if mask is None else mask[:, :done], cache_name(model): cache}
            with torch.no_grad():
                model(input_ids=ids[:, done - chunk : done], use_cache=True, **given)
    return caches


def key_error(caches: tuple[KVCache, KVCache]) -> float:
    """Of the keys of text, relative, of the worst layer."""
    errors = []
    for layer, exact in zip(*(cache.packed_layers for cache in caches), strict=True):
        assert layer.core.store is not None
        assert layer.core.store.longest > 0
        got, right, valid = layer.keys, exact.keys, exact.core.rows.valid
        assert got is not None
        assert right is not None
        text = torch.ones(got.shape[0], got.shape[2], dtype=torch.bool) if valid is None else valid
        errors.append(far(got.transpose(1, 2)[text], right.transpose(1, 2)[text]))
    return max(errors)


SCENARIOS: dict[str, tuple[tuple[int, ...], int]] = {
    "one-call": ((150,), 0), "steps": ((50, *(1,) * 50), 0), "left-padding": ((100,), 9),
    "left-padding-and-steps": ((50, *(1,) * 50), 9),
}  # fmt: skip
"""Chunks, and columns of left padding that each row has more than the next one."""


def mask_of(chunks: tuple[int, ...], padding: int) -> torch.Tensor | None:
    return zoo.padded_prompt(3, sum(chunks), padding=padding)[1] if padding else None


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_constant_keys_take_no_bits_before_their_rotary_embedding(scenario: str, scaling: str) -> None:
    """Two bits hold them to the rounding of their scales, if and only if positions and frequencies are right."""
    chunks, padding = SCENARIOS[scenario]
    original = {"original_max_position_embeddings": 120} if scaling == "longrope" else {}
    parameters = {"rope_theta": 10000.0, **SCALINGS[scaling], **original}
    model = constant_keys(rope_parameters=parameters, max_position_embeddings=120 if scaling == "dynamic" else 512)
    mask = mask_of(chunks, padding)
    assert key_error(read_twice(model, "kivi2,pre-rope,residual=4,block=32", chunks, mask)) < 1e-3
    assert key_error(read_twice(model, "kivi2,residual=4,block=32", chunks, mask)) > 0.05


@pytest.mark.parametrize("scaling", ["default", "longrope", "dynamic"])
@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("chunks", [(150,), (50, *(1,) * 40), (30, 40, 7, 60), (110, 3, *(1,) * 30)], ids=len)
def test_keys_are_right_whatever_becomes_of_the_frequencies(
    chunks: tuple[int, ...], padding: int, scaling: str
) -> None:
    """Unroped and roped by the same angles, also in a text that grows long."""
    model = scaled(scaling, max_position_embeddings=64 if scaling == "dynamic" else 512)
    caches = read_twice(model, "exact,pre-rope,residual=4,block=32", chunks, mask_of(chunks, padding))
    assert key_error(caches) < 1e-5
    for cache in caches:
        cache.crop(-2)  # exact tokens
        cache.crop(-35)  # into a packed block
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([4, 1, 2, 2, 0, 5]))
        cache.batch_select_indices(torch.tensor([0, 1, 4, 2]))
    assert key_error(caches) < 1e-5
    ids, mask = zoo.prompt(4, 40, seed=3), mask_of(chunks, padding)
    if mask is not None:
        mask = ones(mask[[2, 0, 0, 1], : sum(chunks) - 37], 40)
    logits = []
    for cache in caches:
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask, use_cache=True, **{cache_name(model): cache}).logits)
    assert key_error(caches) < 1e-5
    assert far(logits[0], logits[1]) < 1e-5


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_follow_any_positions() -> None:
    """Against a plain list of the position of every own token."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(200):
        batch = 1 + draw(3)
        rows, right, calls = Rows(), [[] for _ in range(batch)], []  # type: ignore[var-annotated]
        for _ in range(6):
            if draw(5) == 0 and rows.columns:
                gone = draw(rows.columns + 1)
                rows = rows.crop(gone)
                kept = torch.cat(calls, dim=1)[:, : rows.columns] if calls else torch.ones(batch, 0, dtype=torch.bool)
                calls = [kept]
                right = [places[: int(kept[row].sum())] for row, places in enumerate(right)]
                continue
            columns, epoch = 1 + draw(4), draw(2)
            text = torch.rand(batch, columns, generator=generator) > (0.3 if draw(2) else -1)
            start = torch.randint(3, (batch, 1), generator=generator) + (0 if draw(3) else 10)
            places = start + torch.arange(columns) + (draw(2) * torch.arange(columns) // 2)
            if draw(2):
                places = places[:1]
            rows = rows.extend(batch, columns, None if text.all() and draw(2) else text, places, epoch)
            calls.append(text)
            for row in range(batch):
                own = places.expand(batch, -1)[row][text[row]].tolist()
                right[row] += [(place, epoch) for place in own]
        picked = torch.randint(batch, (2,), generator=generator)
        if rows.batch:
            rows, right = rows.select(picked), [right[row] for row in picked.tolist()]
            for row, places in enumerate(right):
                positions, epochs = rows.positions(row, torch.arange(len(places)))
                assert list(zip(positions.tolist(), epochs.tolist(), strict=True)) == places


# -- schemes that can do without ---------------------------------------------------------------------------------------


def test_a_mean_is_taken_as_keys_come_where_their_rotary_embedding_is_not_known() -> None:
    """``centred`` says so and goes on; ``pre-rope`` refuses."""
    model = zoo.build("roformer")
    with pytest.warns(UserWarning, match=r"RoFormer.*their mean is taken as they come"):
        cache = kvbits.cache_for(model, "lm4,centred,residual=0,block=32")
    assert all(layer.core.rotary is None for layer in cache.packed_layers)
    ids, _ = left_padded(45)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=True).logits
        for chunk in ids.split(40, dim=1):
            found = model(input_ids=chunk, use_cache=True, **{cache_name(model): cache}).logits
    assert cache.packed_layers[0].core.store.longest == 1
    assert torch.allclose(found[:, -1], exact[:, -1], atol=0.3) and not torch.equal(found[:, -1], exact[:, -1])
    with pytest.raises(CannotUnrope, match="RoFormer"):
        kvbits.cache_for(model, "nf4,pre-rope")


def test_positions_of_pictures_do_not_stop_a_centred_scheme() -> None:
    model = zoo.build("qwen2-vl")
    cache = kvbits.cache_for(model, "lm4,centred,residual=0,block=32")
    ids, _ = left_padded()
    positions = torch.arange(ids.shape[1]).expand(3, len(ids), -1).clone()
    positions[1, :, 3] += 7
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=True, **{cache_name(model): cache})
    assert cache.get_seq_length() == ids.shape[1]
