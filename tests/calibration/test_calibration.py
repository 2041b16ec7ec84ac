"""Calibration: gradients are those of plain autograd, fits see what a scheme encodes, files refuse what is wrong."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from typer.testing import CliRunner

import kvbits
import zoo
from kvbits import calibration
from kvbits.calibration import plan as plans
from kvbits.calibration.text import sample_ids
from kvbits.cli import app
from kvbits.files import ABOUT, TENSORS, Calibration, fingerprint
from kvbits.hf import collect as collecting
from kvbits.hf.names import cache_name
from kvbits.hf.rotation.frequencies import CannotUnrope
from kvbits.hf.rotation.rotary import rotaries
from kvbits.numerics import hadamard, rope
from kvbits.schemes.names import parse_codec
from kvbits.schemes.scheme import Scheme
from letters import WORDS, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SINKS = 4
CALIBRATED = parse_codec("int4-calibrated")
TEXT = " ".join(WORDS[(i * i) % len(WORDS)] for i in range(1000))


def ids(samples: int = 2, tokens: int = 68) -> torch.Tensor:
    return torch.cat([zoo.prompt(tokens=tokens, seed=seed) for seed in range(samples)])


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return zoo.build("llama")


@pytest.fixture(scope="module")
def calibrated(llama: PreTrainedModel) -> Calibration:
    return kvbits.calibrate(llama, ids(), tokenizer=tokenizer())


# -- gradients ---------------------------------------------------------------------------------------------------------


def split_separate(output: dict[str, torch.Tensor], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(output[name][0].unflatten(-1, (heads, -1)).transpose(0, 1) for name in ("k_proj", "v_proj"))  # type: ignore[return-value]


def split_phi3(output: dict[str, torch.Tensor], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = output["qkv_proj"][0]
    channels = 48 // 6
    key, value = whole[:, -2 * heads * channels :].chunk(2, -1)
    return tuple(x.unflatten(-1, (heads, channels)).transpose(0, 1) for x in (key, value))  # type: ignore[return-value]


def split_neox(output: dict[str, torch.Tensor], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = output["query_key_value"][0].unflatten(-1, (heads, 3, -1)).transpose(0, 1)
    return whole[:, :, 1], whole[:, :, 2]


PROJECTIONS = {
    "llama": (("k_proj", "v_proj"), split_separate, 2),
    "qwen2": (("k_proj", "v_proj"), split_separate, 2),
    "glm": (("k_proj", "v_proj"), split_separate, 2),
    "llama-d256-eager": (("k_proj", "v_proj"), split_separate, 2),
    "gpt-neox": (("query_key_value",), split_neox, 6),
    "phi3": (("qkv_proj",), split_phi3, 2),
}


def plainly(model: PreTrainedModel, sample: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Outputs of the projections and their gradients ``[H, T, D]``, by autograd through the stock model."""
    projections, split, heads = PROJECTIONS[name]
    outputs: list[dict[str, torch.Tensor]] = []
    hooks = []
    for layer in range(2):
        outputs.append({})
        for path, module in model.named_modules():
            if f".{layer}." in path and path.endswith(projections):

                def keep(_: Any, __: Any, output: torch.Tensor, store: Any = outputs[-1], path: str = path) -> None:
                    output.retain_grad()
                    store[path.rpartition(".")[2]] = output

                hooks.append(module.register_forward_hook(keep))
    with torch.enable_grad():
        logits = model(input_ids=sample[None], use_cache=False).logits[0]
        cross_entropy(logits[:-1].float(), sample[1:], reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for layer, output in enumerate(outputs):
        gradients = {path: x.grad for path, x in output.items() if x.grad is not None}
        for kind, tensors in (("", output), (".gradient", gradients)):
            for side, x in zip(("key", "value"), split(tensors, heads), strict=True):
                found[f"{layer}.{side}{kind}"] = x.detach().clone()
    model.zero_grad(set_to_none=True)
    return found


def before_rope(model: PreTrainedModel, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was collected, with keys and their gradients unroped."""
    turned = {name: x.float() for name, x in found.items()}
    for name in turned:
        layer, side = name.split(".")[:2]
        rotary = rotaries(model)[int(layer)]
        if side == "key" and rotary is not None:
            cos, sin = rotary.cos_sin(torch.arange(turned[name].shape[1]))
            turned[name] = rope.unrope(turned[name], cos, sin, rotary.interleaved)
    return turned


def close(x: torch.Tensor, right: torch.Tensor, error: float) -> bool:
    return bool((x.float() - right.float()).norm() <= error * right.float().norm()) and bool(right.any())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_gradients_are_those_of_plain_autograd(name: str, checkpointing: bool) -> None:
    """With respect to the outputs of k_proj and v_proj (KVQuant, appendix E), also where they are fused with q_proj."""
    model = zoo.build(name)
    right = plainly(model, ids()[0], name)
    found = before_rope(model, collecting.collect(model, ids()[0], checkpointing))
    assert found.keys() == right.keys()
    for part in found:
        # Gradients are stored in bfloat16.
        assert close(found[part], right[part], 2**-8 if part.endswith("gradient") else 1e-5), part


def test_bfloat16_gradients_are_close_to_those_of_float32() -> None:
    exact = before_rope(zoo.build("llama"), collecting.collect(zoo.build("llama"), ids()[0]))
    model = zoo.build("llama", torch.bfloat16)
    found = collecting.collect(model, ids()[0])
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    for part, x in before_rope(model, found).items():
        assert close(x, exact[part], 0.15), part
        assert torch.corrcoef(torch.stack([x.flatten(), exact[part].flatten()]))[0, 1] > 0.99, part


def test_float16_losses_are_scaled_down_until_gradients_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama", torch.float16)
    right = collecting.collect(model, ids()[0])
    scales, stock = [], collecting.loss_gradient

    def overflowing(logits: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        scales.append(scale)
        return stock(logits, tokens, scale) * (torch.inf if scale > 0.01 else 1)

    monkeypatch.setattr(collecting, "loss_gradient", overflowing)
    found = collecting.collect(model, ids()[0])
    assert scales == [1, 1 / 16, 1 / 256]
    assert all(close(found[part], right[part], 0.02) for part in right)
    with pytest.raises(ValueError, match="of layer 1 has a gradient that is not finite"):
        collecting.collect(zoo.build("llama"), ids()[0])


def test_the_gradient_of_the_loss_is_that_of_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LOGITS_TOKENS", 7)
    logits, tokens = torch.randn(1, 23, 50, requires_grad=True), torch.randint(50, (1, 23))
    (cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") * 0.5).backward()
    assert torch.allclose(collecting.loss_gradient(logits.detach(), tokens, 0.5), logits.grad, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_is_left_as_it_was(checkpointing: bool) -> None:
    model = zoo.build("llama").train()
    model.lm_head.weight.requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    runs = {"mlp": 0}
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.update(mlp=runs["mlp"] + 1))
    with torch.inference_mode():  # a caller's own mode does not matter
        collecting.collect(model, ids()[0], checkpointing)
    hook.remove()
    assert runs["mlp"] == 1 + checkpointing
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
    assert all(p.grad is None for p in model.parameters()) and all(m.training for m in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_weight_requires_a_gradient_meanwhile(llama: PreTrainedModel) -> None:
    seen = []
    hook = llama.model.norm.register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), any(p.requires_grad for p in llama.parameters())))
    )
    collecting.collect(llama, ids()[0])
    hook.remove()
    assert seen == [(True, False)]


@pytest.mark.parametrize("name", zoo.SERVED)
def test_every_family_is_calibrated(name: str) -> None:
    model, sample = zoo.build(name), ids(1)
    found = kvbits.calibrate(model, sample, Scheme(CALIBRATED, CALIBRATED))
    cache = collecting.DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(input_ids=sample, use_cache=True, **{cache_name(model): cache})
    attending = [i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    assert found.about["layers"] == attending != []
    for layer in attending:
        for side, held in (("key", cache.layers[layer].keys), ("value", cache.layers[layer].values)):
            scale = found.params(layer, side, CALIBRATED, pre_rope=False)["scale"]  # type: ignore[arg-type]
            assert scale.shape == held.shape[1::2] and bool((scale > 0).any())
    once, twice = (collecting.collect(model, sample[0], again) for again in (False, True))
    assert once.keys() == twice.keys()
    assert all(torch.allclose(once[part].float(), twice[part].float(), rtol=0.02, atol=1e-6) for part in once)


def test_keys_that_cannot_be_turned_back_are_calibrated_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    why = CannotUnrope("layer 0: the last channels of its keys are rotated")
    monkeypatch.setattr(rotaries(model), "layers", (why, rotaries(model).layers[1]))
    found = kvbits.calibrate(model, ids(1))
    nuq3 = parse_codec("nuq3-static")
    assert not found.has(0, "key", nuq3) and found.has(0, "key", nuq3, pre_rope=False) and found.has(1, "key", nuq3)
    with pytest.raises(ValueError, match="no key mean for layer 0"):
        found.mean(0)
    for scheme in ("nuq3", "k=nuq3-static,v=exact,post-rope,centred"):
        with pytest.raises(CannotUnrope, match="the last channels of its keys"):
            kvbits.calibrate(model, ids(1), scheme)


def test_frequencies_that_change_with_the_length_are_those_of_the_samples() -> None:
    """Phi-3 takes other frequencies beyond its original length; keys must be unroped by these."""
    factors = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
               "original_max_position_embeddings": 64}  # fmt: skip
    model = zoo.build("phi3", rope_parameters=factors, max_position_embeddings=128, original_max_position_embeddings=64)
    right = plainly(model, ids(1, 100)[0], "phi3")["0.key"]
    found = kvbits.calibrate(model, ids(1, 100), "k=nuq4,v=exact")
    scaling = (1 + torch.tensor(128 / 64).log() / torch.tensor(64.0).log()).sqrt()  # which stays on the keys
    assert torch.allclose(found.mean(0), scaling * right[:, SINKS:].mean(1), atol=1e-4)


# -- fits --------------------------------------------------------------------------------------------------------------


def samples_of(model: PreTrainedModel, name: str = "llama") -> dict[str, torch.Tensor]:
    """Keys before RoPE, values, and gradients of all samples ``[N, H, T, D]`` without sinks, by plain autograd."""
    each = [plainly(model, sample, name) for sample in ids()]
    return {part: torch.stack([one[part][:, SINKS:] for one in each]) for part in each[0]}


@pytest.mark.parametrize(
    ("scheme", "side"),
    [
        ("k=nuq3-static-1%,v=exact,pre-rope", "key"),
        ("k=nuq3-static,v=exact,post-rope", "key"),
        ("k=nuq2-static-1%-qnorm,v=exact,pre-rope,centred", "key"),
        ("k=nuq4-token,v=exact,post-rope,centred", "key"),
        ("k=fp8-calibrated,v=exact,pre-rope", "key"),
        ("k=rot4-calibrated,v=exact,centred", "key"),
        ("k=exact,v=nuq3-token-1%", "value"),
        ("k=exact,v=rot3-calibrated", "value"),
    ],
)
def test_a_codec_is_fitted_to_what_its_scheme_encodes(llama: PreTrainedModel, scheme: str, side: str) -> None:
    """Pre- or post-RoPE, centred, rotated; weighted by squared gradients in that very basis; in blocks."""
    parsed, layer = Scheme.parse(scheme), 1
    found = kvbits.calibrate(llama, ids(), parsed)
    samples = samples_of(llama)
    x, gradient = samples[f"{layer}.{side}"], samples[f"{layer}.{side}.gradient"]
    codec = parsed.key if side == "key" else parsed.value
    if side == "key":
        mean = x.mean((0, 2))
        assert torch.allclose(found.mean(layer), mean, atol=1e-5)
        x = x - mean[:, None] if parsed.centred else x
        if not parsed.pre_rope:
            rotary = rotaries(llama)[layer]
            assert rotary is not None
            cos, sin = rotary.cos_sin(torch.arange(SINKS, SINKS + x.shape[2]))
            x, gradient = (rope.apply(part, cos, sin, rotary.interleaved) for part in (x, gradient))
    if codec.rotates:
        x, gradient = (part @ hadamard.rotation(x.shape[-1]) for part in (x, gradient))
    right = codec.fit(x, gradient.square())
    pair = found.of_layer(layer, parsed.for_layer(layer, 2))
    fitted = {name: value for name, value in pair[side == "value"].items() if name != "mean"}
    assert fitted.keys() == right.keys()
    for name, value in right.items():
        assert torch.allclose(fitted[name], value, rtol=0.02, atol=0.02 * float(value.abs().amax())), name
    assert pair[side == "key"] == {} and ("mean" in pair[0]) == parsed.centred


def test_weights_matter(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = kvbits.calibrate(llama, ids(), "nuq2")
    stock = collecting.collect

    def without(*args: Any) -> dict[str, torch.Tensor]:
        return {name: torch.ones_like(x) if "gradient" in name else x for name, x in stock(*args).items()}

    monkeypatch.setattr(collecting, "collect", without)
    plain = kvbits.calibrate(llama, ids(), "nuq2")
    name = "1.key.pre.nuq2-static.table"
    assert not torch.allclose(weighted.tensors[name], plain.tensors[name], atol=1e-2)


def test_sinks_are_left_out(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right, stock = kvbits.calibrate(llama, ids(), sinks=3), collecting.collect

    def with_sinks(*args: Any) -> dict[str, torch.Tensor]:
        found = stock(*args)
        for name in found:
            if not name.endswith("frequencies"):
                found[name][:, :3] = 1000
        return found

    monkeypatch.setattr(collecting, "collect", with_sinks)
    assert equal(kvbits.calibrate(llama, ids(), sinks=3), right)
    assert not equal(kvbits.calibrate(llama, ids(), sinks=2), right)


def test_layers_may_have_codecs_of_their_own(llama: PreTrainedModel) -> None:
    found = kvbits.calibrate(llama, ids(), "nuq3,layers[-1]=int4-calibrated")
    three, four = parse_codec("nuq3-static"), parse_codec("int4-calibrated")
    assert found.has(0, "key", three) and not found.has(1, "key", three)
    assert found.has(1, "key", four) and not found.has(0, "key", four)


def test_the_default_covers_the_catalogue(calibrated: Calibration) -> None:
    for entry in kvbits.CATALOGUE:
        scheme = Scheme.parse(entry.name)
        if scheme.needs_calibration:
            for layer in (0, 1):
                pair = calibrated.of_layer(layer, scheme)
                needs = [codec.needs_calibration for codec in (scheme.key, scheme.value)]
                assert [bool(params) for params in pair] == needs, entry.name
    assert calibrated.of_layer(0, Scheme.parse("int4")) == ({}, {})
    assert calibrated.of_layer(0, Scheme.parse("int4,centred"))[0].keys() == {"mean"}
    assert "nuq2-static-1%-qnorm (pre)" in repr(calibrated)


@pytest.mark.parametrize(
    ("scheme", "says"), [("int5", "unknown scheme"), ("int4", "int4 needs no calibration"), ("kivi2", "needs no cal")]
)
def test_wrong_schemes_are_refused(llama: PreTrainedModel, scheme: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvbits.calibrate(llama, ids(), scheme)


def test_what_was_not_fitted_is_named(calibrated: Calibration) -> None:
    with pytest.raises(ValueError, match=r"no key nuq3-static-2% \(pre\) for layer 0, but key nuq4.*kvbits calibrate"):
        calibrated.params(0, "key", parse_codec("nuq3-static-2%"))
    with pytest.raises(ValueError, match=r"no key nuq3-static \(pre-centred\) for layer 0"):
        calibrated.params(0, "key", parse_codec("nuq3-static"), centred=True)
    with pytest.raises(ValueError, match="has no layer 2"):
        calibrated.params(2, "value", parse_codec("nuq3-token"))
    with pytest.raises(ValueError, match="side='keys'"):
        calibrated.params(0, "keys", parse_codec("nuq3-token"))  # type: ignore[arg-type]


# -- interruptions -----------------------------------------------------------------------------------------------------


class Count:
    """Counts forwards of a model, and interrupts at one of them."""

    def __init__(self, model: PreTrainedModel, stop: int | None = None) -> None:
        self.forwards, self.stop = 0, stop
        self.hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("input_ids") is not None and kwargs["input_ids"].shape == (1, 68):  # not a probe
            self.forwards += 1
            if self.forwards == self.stop:
                raise KeyboardInterrupt

    def done(self) -> int:
        self.hook.remove()
        return self.forwards


def equal(a: Calibration, b: Calibration) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(x, b.tensors[n]) for n, x in a.tensors.items())


def test_an_interrupted_run_goes_on_where_it_stopped(llama: PreTrainedModel, tmp_path: Path) -> None:
    whole = kvbits.calibrate(llama, ids(4), "nuq3")
    first = Count(llama, stop=3)
    with pytest.raises(KeyboardInterrupt):
        kvbits.calibrate(llama, ids(4), "nuq3", out=tmp_path)
    assert first.done() == 3
    with pytest.raises(FileNotFoundError, match="is not finished: the same command goes on"):
        kvbits.load_calibration(tmp_path)
    # As if it had been killed while writing, and the disk had lost the end of a file.
    (tmp_path / "samples" / ".0002.safetensors.1.part").write_bytes(b"half")
    damaged = tmp_path / "samples" / "0001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    steps, second = [], Count(llama)
    again = kvbits.calibrate(llama, ids(4), "nuq3", out=tmp_path, report=lambda *step: steps.append(step))
    assert second.done() == 3
    assert steps[:4] == [("collecting", done, 4) for done in (1, 2, 3, 4)] and steps[-1] == ("fitting", 2, 2)
    assert equal(again, whole) and equal(kvbits.load_calibration(tmp_path), whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ABOUT, TENSORS]


def test_samples_of_another_run_are_not_mixed_in(llama: PreTrainedModel, tmp_path: Path) -> None:
    stop = Count(llama, stop=2)
    with pytest.raises(KeyboardInterrupt):
        kvbits.calibrate(llama, ids(4), "nuq3", out=tmp_path)
    stop.done()
    with pytest.raises(
        ValueError, match=r"samples of another run, which differs in text, samples; give another folder"
    ):
        kvbits.calibrate(llama, ids(3), "nuq3", out=tmp_path)


def test_more_is_added_to_what_is_there(llama: PreTrainedModel, tmp_path: Path) -> None:
    kvbits.calibrate(llama, ids(), "nuq3", out=tmp_path, keep_samples=True)
    count = Count(llama)
    both = kvbits.calibrate(llama, ids(), ["nuq3", "nuq2"], out=tmp_path)
    assert count.forwards == 0  # the samples were kept, and are gone now
    assert equal(both, kvbits.calibrate(llama, ids(), ["nuq3", "nuq2"]))
    assert count.forwards == 2
    assert equal(kvbits.calibrate(llama, ids(), "nuq2", out=tmp_path), both)  # nothing to do
    assert count.done() == 2
    with pytest.raises(ValueError, match="holds another calibration, which differs in text"):
        kvbits.calibrate(llama, ids() + 1, "nuq2", out=tmp_path)


def test_two_runs_in_one_folder_do_not_meet(llama: PreTrainedModel, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")

    def meddle(*_: Any) -> None:
        with pytest.raises(ValueError, match="another run is at work"):
            kvbits.calibrate(llama, ids(), "nuq2", out=tmp_path)

    kvbits.calibrate(llama, ids(), "nuq3", out=tmp_path, report=meddle)
    assert kvbits.load_calibration(tmp_path).fits() == ["key nuq3-static (pre)", "value nuq3-token"]
    kvbits.calibrate(llama, ids(), "nuq2", out=tmp_path)  # and it is free again
    with pytest.raises(ValueError, match="is a file"):
        kvbits.calibrate(llama, ids(), "nuq3", out=tmp_path / TENSORS)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_calibration_comes_back_as_it_was(calibrated: Calibration, llama: PreTrainedModel, tmp_path: Path) -> None:
    calibrated.save(tmp_path)
    found = kvbits.load_calibration(str(tmp_path))
    assert equal(found, calibrated)
    found.check(llama, tokenizer())
    assert {x.dtype for name, x in found.tensors.items() if name != "fingerprint.weights"} == {torch.float32}
    modes = [(tmp_path / name).stat().st_mode for name in (TENSORS, ABOUT)]
    assert modes[0] == modes[1]  # as the user's umask has it, for all files


def damage_tensors(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS).write_bytes(data)


def change(folder: Path, **fields: Any) -> None:
    about = json.loads((folder / ABOUT).read_text())
    about.update(fields)
    (folder / ABOUT).write_text(json.dumps({name: value for name, value in about.items() if value is not None}))


DAMAGES = {
    "a bit flipped": (damage_tensors, ValueError, "damaged"),
    "truncated tensors": (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-9]), ValueError, "damaged"),
    "truncated json": (lambda f: (f / ABOUT).write_text((f / ABOUT).read_text()[:-9]), ValueError, "damaged"),
    "a later format": (lambda f: change(f, format=99, kvbits="9.0"), ValueError, "format 99, written by kvbits 9.0"),
    "a field gone": (lambda f: change(f, model=None), ValueError, "lacks model"),
    "another json": (lambda f: (f / ABOUT).write_text("[]"), ValueError, "no calibration"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), FileNotFoundError, "beside it is not"),
    "no json": (lambda f: (f / ABOUT).unlink(), FileNotFoundError, "is not finished"),
    "nothing": (shutil.rmtree, FileNotFoundError, "there is no"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(calibrated: Calibration, tmp_path: Path, damage: str) -> None:
    spoil, error, says = DAMAGES[damage]
    calibrated.save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=says):
        kvbits.load_calibration(tmp_path)


def test_an_interruption_between_the_two_files_is_seen(
    calibrated: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated.save(tmp_path)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbits.files.calibration._sha256", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrated.save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="is not finished"):
        kvbits.load_calibration(tmp_path)


# -- whose it is -------------------------------------------------------------------------------------------------------


def finetuned() -> PreTrainedModel:
    """One matrix of the last layer changed by 2 %, as by a merged adapter."""
    model = zoo.build("llama")
    model.model.layers[1].mlp.down_proj.weight.data *= 1.02
    return model


def reseeded() -> PreTrainedModel:
    model = zoo.build("llama")
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.weight)
    return model


OTHERS = {
    "a finetune": (finetuned, "its weights are others: a finetune"),
    "other weights": (reseeded, "its weights are others"),
    "another size": (lambda: zoo.build("llama", intermediate_size=96), "intermediate_size is 96, not 64"),
    "another rotary base": (lambda: zoo.build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
                            "rope_theta is 500000.0, not 10000.0"),
    "another family": (lambda: zoo.build("qwen2"), "this is a Qwen2ForCausalLM, not a LlamaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused(calibrated: Calibration, other: str) -> None:
    build, says = OTHERS[other]
    with pytest.raises(ValueError, match=f"of LlamaForCausalLM on 2 x 68 tokens, and not for this model: .*{says}"):
        calibrated.check(build())


def test_another_tokenizer_is_refused(calibrated: Calibration, llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="its tokenizer has another vocabulary"):
        calibrated.check(llama, tokenizer("other"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_model_in_another_dtype_is_not(calibrated: Calibration, dtype: torch.dtype) -> None:
    calibrated.check(zoo.build("llama", dtype))


def test_how_a_model_is_run_does_not_matter(calibrated: Calibration, tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    model = kvbits.load_model(str(tmp_path), kv_cache_dtype="int4")
    model.config.pad_token_id, model.config.use_cache, model.config.eos_token_id = 5, False, [2, 3]
    calibrated.check(model.train())


def test_fields_of_another_release_do_not_matter(calibrated: Calibration, llama: PreTrainedModel) -> None:
    there = dict(calibrated.about["model"])
    there["config"] = {**there["config"], "a_new_field": 1}
    replace(calibrated, about={**calibrated.about, "model": there}).check(llama)
    there["config"]["rope_parameters.factor"] = 2.0
    with pytest.raises(ValueError, match=r"rope_parameters.factor is the default, not 2\.0"):
        replace(calibrated, about={**calibrated.about, "model": there}).check(llama)


def test_frequencies_that_grew_with_a_text_do_not_matter() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = zoo.build("llama", rope_parameters=scaling, max_position_embeddings=64)
    before = fingerprint.of_model(model)
    with torch.no_grad():
        model(ids(1, 200))
    assert fingerprint.of_model(model) == before and before["rotary"]


# -- text --------------------------------------------------------------------------------------------------------------


class Prefixed:
    """A tokenizer that begins every text as Llama's does."""

    bos_token_id = 1

    def __init__(self) -> None:
        self.inner = tokenizer()

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        found = self.inner(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [1, *found] if add_special_tokens else found}


def test_samples_are_spread_over_the_text() -> None:
    plain = sample_ids(TEXT, tokenizer(), 4, 100)  # type: ignore[arg-type]
    whole = torch.tensor(tokenizer()(TEXT)["input_ids"])
    assert torch.equal(plain, torch.stack([whole[i : i + 100] for i in (0, 200, 500, 700)]))
    begun = sample_ids([TEXT[:3000], TEXT[3000:]], Prefixed(), 4, 101)  # type: ignore[arg-type]
    assert begun.shape == (4, 101) and bool((begun[:, 0] == 1).all()) and torch.equal(begun[0, 1:], whole[:100])


def test_what_is_no_text_is_refused(llama: PreTrainedModel) -> None:
    words = tokenizer()
    with pytest.raises(ValueError, match=r"has 1000 tokens, enough for 3 samples of 300.*samples 3, or length 62"):
        kvbits.calibrate(llama, TEXT, tokenizer=words, length=300)
    with pytest.raises(TypeError, match="pass tokenizer="):
        kvbits.calibrate(llama, TEXT)
    with pytest.raises(ValueError, match="length 600 is more than the 512"):
        kvbits.calibrate(llama, TEXT, tokenizer=words, samples=1, length=600)
    with pytest.raises(ValueError, match="int64"):
        kvbits.calibrate(llama, torch.randn(2, 64))
    with pytest.raises(ValueError, match="too short"):
        kvbits.calibrate(llama, ids(1, 20))
    with pytest.raises(ValueError, match="another model's"):
        kvbits.calibrate(llama, ids() + 1000)
    with pytest.raises(TypeError, match="needs a Transformers model"):
        kvbits.calibrate("llama", TEXT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="encoder-decoder"):
        kvbits.calibrate(zoo.build_any("t5"), ids())
    with pytest.raises(ValueError, match="checkpointing='yes' is unknown"):
        kvbits.calibrate(llama, ids(), checkpointing="yes")  # type: ignore[arg-type]


# -- memory ------------------------------------------------------------------------------------------------------------


def plan(model: PreTrainedModel, tokens: int, checkpointing: Any) -> plans.Plan:
    return plans.foresee(model, ids(2, tokens), 0, checkpointing, SINKS)


def test_the_plan_follows_length_and_checkpointing() -> None:
    model = zoo.build("llama", num_hidden_layers=8)
    short, long, twice = plan(model, 128, "off"), plan(model, 256, "off"), plan(model, 256, "on")
    assert 1.8 < long.peak_bytes / short.peak_bytes < 2.5 and long.disk_bytes == 2 * short.disk_bytes
    assert twice.checkpointing and twice.peak_bytes < 0.7 * long.peak_bytes
    # 8 layers, K and V, 2 heads of 8 channels, float32 and a bfloat16 gradient, 2 samples.
    assert long.disk_bytes == 8 * 2 * 2 * 8 * 6 * 256 * 2
    eager = zoo.build("llama", num_hidden_layers=8, attn_implementation="eager")
    assert plan(eager, 256, "off").peak_bytes > 2 * long.peak_bytes  # attention weights: the square of the length


def test_what_is_kept_for_the_backward_is_estimated_well() -> None:
    model = zoo.build("llama", num_hidden_layers=8)
    really, _ = collecting.probe(model, 500)
    guess = plan(model, 500, "off")
    assert 0.4 * guess.peak_bytes < really < guess.peak_bytes


def test_layers_are_checkpointed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, said = zoo.build("llama", num_hidden_layers=8), []
    assert not plan(model, 256, "auto").checkpointing
    monkeypatch.setattr(plans, "available_bytes", lambda _: 10**5)
    short = plan(model, 256, "auto")
    assert short.checkpointing and "take a smaller length" in str(short)
    assert not plan(model, 256, "off").checkpointing
    right = kvbits.calibrate(model, ids(), "nuq3", checkpointing="off")
    found = kvbits.calibrate(model, ids(), "nuq3", tell=said.append)
    assert "2 x 68 tokens" in said[0] and "gradient checkpointing" in said[0] and "on disk" in said[0]
    assert all(torch.allclose(x.float(), right.tensors[name].float(), atol=1e-3) for name, x in found.tensors.items())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"on disk, but .* has 0 MB free"):
        kvbits.calibrate(model, ids(), "nuq3", out=tmp_path)


def test_only_one_sample_and_one_layer_are_held(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next one comes, nothing of the one before is left."""
    collect, read = collecting.collect, calibration.Samples.__init__
    collected: list[weakref.ref[Any]] = []
    fitted: list[weakref.ref[Any]] = []

    def collect_alone(*args: Any) -> dict[str, torch.Tensor]:
        assert not any(held() is not None for held in collected)
        found = collect(*args)
        collected.extend(weakref.ref(x) for x in found.values())
        return found

    def read_alone(self: Any, files: Any, layer: int, side: str, *args: Any) -> None:
        assert not any(held() is not None for held in (*collected, *fitted[: 2 * layer]))
        read(self, files, layer, side, *args)
        fitted.append(weakref.ref(self.x))

    monkeypatch.setattr(collecting, "collect", collect_alone)
    monkeypatch.setattr(calibration.Samples, "__init__", read_alone)
    kvbits.calibrate(llama, ids(3))
    assert len(collected) == 3 * 8 and len(fitted) == 4


def test_available_memory_is_known_here() -> None:
    found = plans.available_bytes(torch.device("cpu"))
    assert found is None or 2**20 < found < 2**50
    assert plans.available_bytes(torch.device("meta")) is None


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    zoo.build("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command(folder: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    usual = (folder, "--text", str(text), "--samples", "3", "--length", "100", "--out", str(out))
    code, output = run(*usual, "-s", "nuq3-1%", "-s", "nuq2")
    assert code == 0 and "3 x 100 tokens; about" in output and "2 layers" in output
    assert "key nuq3-static-1% (pre)" in output and "value nuq2-token" in output
    found = kvbits.load_calibration(out)
    model = kvbits.load_model(folder)
    found.check(model, tokenizer())
    assert equal(
        found, kvbits.calibrate(model, TEXT, ["nuq3-1%", "nuq2"], tokenizer=tokenizer(), samples=3, length=100)
    )
    code, output = run(*usual, "-s", "nuq4")
    assert code == 0 and "key nuq4-static (pre)" in output and "key nuq2-static (pre)" in output


WRONG = {
    "unknown scheme": (["-s", "nuq5"], "unknown scheme"),
    "needless scheme": (["-s", "int4"], "int4 needs no calibration"),
    "too long": (["--length", "600"], "is more than the 512 tokens"),
    "too little text": (["--samples", "40"], "enough for 10 samples"),
    "unknown checkpointing": (["--checkpointing", "maybe"], "allowed are 'auto', 'on', 'off'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_in_one_line(folder: str, tmp_path: Path, wrong: str) -> None:
    options, says = WRONG[wrong]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    usual = ["--text", str(text), "--out", str(tmp_path / "out"), "--length", "100", "--samples", "2"]
    code, output = run(folder, *usual, *options)
    assert code == 2 and says in output and "Traceback" not in output


def test_a_missing_text_is_said(folder: str, tmp_path: Path) -> None:
    code, output = run(folder, "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path))
    assert code == 2 and "none.txt: no such file" in output
