"""``kvbits plan``: what it prints and writes, models from files, and one clear line for what a user can get wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import zoo
from kvbits.cli import app
from kvbits.cli.common import tokens_of
from kvbits.plan.devices import GPU_MIB, MIB, bytes_of, count_of, gpu_bytes, machine_bytes
from kvbits.plan.gguf import shape_of_gguf
from kvbits.plan.memory import History, cache
from kvbits.plan.models import shape_of_config
from kvbits.plan.names import shape_of
from kvbits.plan.quality import load
from kvbits.schemes.scheme import Scheme

NUMBERS = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--context", "65536"]


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "100"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def planned(*arguments: str) -> dict[str, Any]:
    """What ``--json`` prints, which is all that it prints."""
    code, text, errors = run(*arguments, "--json")
    assert code == 0, errors
    return json.loads(text)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_json() -> None:
    found = planned(*NUMBERS, "--schemes", "int4,nuq4-1%", "--memory", "24GiB")
    assert set(found) == {"setting", "schemes", "recommended", "notes"}
    assert [row["name"] for row in found["schemes"]] == ["int4", "nuq4-1%"]
    int4, nuq4 = found["schemes"]
    assert (round(int4["paper_gib"], 1), round(nuq4["paper_gib"], 1)) == (8.0, 8.6)
    for row in found["schemes"]:
        assert row["real_bytes"] == sum(row["real_parts"].values()) == row["devices"][0]["cache"]
        assert row["real_bits"] == 8 * row["real_bytes"] / (65_536 * 32 * 32 * 256)
        assert row["max_context"] > 65_536 and row["max_batch"] == 2 and row["fits"]
    assert found["setting"]["context"] == 65_536 and found["setting"]["memory_bytes"] == 24 * 2**30
    assert found["setting"]["attention"] == [
        {"layers": 32, "kv_heads": 32, "key_dim": 128, "value_dim": 128, "window": None}
    ]


def test_the_command_prints_json_alone_to_a_pipe(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvbits.cli", "plan", *NUMBERS, "--schemes", "int4,nuq4-1%", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ))
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["schemes"]] == ["int4", "nuq4-1%"] and done.stderr == ""
    assert [found["schemes"][0][name] for name in ("max_context", "max_batch", "fits")] == [None, None, None]


def test_tables_fit_a_terminal() -> None:
    long = "k=int4-channel,v=int4-gs32-1%,residual=300,sinks=9,layers[0,1,2,-1]=fp8/int8"
    code, text, _ = run("llama-3.1-8b", "--gpu", "a100-80gb", "--devices", "5", "--context", "64k",
                        "--schemes", f"exact;default;{long}")  # fmt: skip
    assert code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in text
    boxed = [line for line in text.splitlines() if line[:1] in "│┃"]
    assert boxed and max(map(len, boxed)) <= 100
    for part in ("65,536 tokens, 1 row", "5 devices (pipeline) of 80.00 GiB", "recommended: default", "longest"):
        assert part in text


def test_no_terminal_is_too_narrow_for_a_figure() -> None:
    shown = []
    for columns in ("80", "15"):
        result = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--gpu", "h100"], env={"COLUMNS": columns})
        shown.append(" ".join(line for line in result.stdout.splitlines() if line[:1] in "│┃").split())
    assert shown[0] == shown[1] and "exact" in shown[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize("option", [[], ["--json"], ["--csv", "-"]])
def test_a_full_disk_behind_standard_output(option: list[str]) -> None:
    words = [sys.executable, "-m", "kvbits.cli", "plan", *NUMBERS, "--schemes", "int4", *option]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode and done.stderr == "error: [Errno 28] No space left on device\n"


def test_csv(tmp_path: Path) -> None:
    arguments = ["smollm2-135m", "--schemes", "exact;int4,residual=64", "--memory", "1GiB"]
    file = tmp_path / "plan.csv"
    code, shown, _ = run(*arguments, "--csv", str(file))
    assert code == 0 and "the cache" in shown
    code, text, _ = run(*arguments, "--csv", "-")
    assert code == 0 and text == file.read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    found = planned(*arguments)["schemes"]
    assert [row["name"] for row in rows] == ["exact", "int4,residual=64"]
    for row, one in zip(rows, found, strict=True):
        assert int(row["real_bytes"]) == one["real_bytes"] and int(row["max_context"]) == one["max_context"]
        assert int(row["device_bytes"]) == one["devices"][0]["total"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws it")
    file = tmp_path / f"plan.{ending}"
    code, _, errors = run("smollm2-135m", "--memory", "1GiB", "--picture", str(file))
    assert code == 0, errors
    start = file.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start
    for name in ("plan.none", "plan"):
        code, _, errors = run("smollm2-135m", "--picture", str(tmp_path / name))
        assert code == 2 and f"{name}" in errors and "png" in errors
    assert list(tmp_path.iterdir()) == [file]


def test_a_picture_has_the_lines_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of each scheme where its context ends is the memory there is."""
    pytest.importorskip("matplotlib", reason="draws it")
    from matplotlib.axes import Axes

    drawn: dict[str, tuple[list[int], list[float]]] = {}
    plot = Axes.plot

    def note(self: Any, xs: Any, ys: Any, **more: Any) -> Any:
        drawn[more["label"]] = (list(xs), list(ys))
        return plot(self, xs, ys, **more)

    monkeypatch.setattr(Axes, "plot", note)
    arguments = [*NUMBERS, "--schemes", "exact,default,small", "--memory", "8GiB"]
    assert run(*arguments, "--picture", str(tmp_path / "plan.png"))[0] == 0
    assert list(drawn) == ["exact", "default", "small"]
    for row in planned(*arguments)["schemes"]:
        xs, ys = drawn[row["name"]]
        below = [y for x, y in zip(xs, ys, strict=True) if x <= row["max_context"]]
        above = [y for x, y in zip(xs, ys, strict=True) if x > row["max_context"]]
        assert below and above and max(below) <= 8 < min(above)


def test_a_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    code, _, errors = run("smollm2-135m", "--page", str(file), "--schemes", "int4,fp8")
    assert code == 0, errors
    assert file.read_text().startswith("<!DOCTYPE html>") and "SmolLM2 135M" in file.read_text()


@pytest.mark.parametrize("option", ["--page", "--csv"])
@pytest.mark.parametrize("name", ["folder", "a" * 300])
def test_a_file_that_cannot_be_written_is_named(option: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code, _, errors = run(*NUMBERS, option, str(tmp_path / name))
    assert code == 2 and errors.startswith(f"error: {tmp_path / name}: ") and errors.count("\n") == 1


def test_measured_quality_is_shown_and_chosen_by(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    rows = [
        {"scheme": "hf:quanto4", "kl_mean": 0.5},
        {"scheme": "int4", "kl_mean": 0.02, "top1": 0.97, "ppl": 23.5},
        {"scheme": "fp8", "kl_mean": 0.001, "ppl": float("nan")},
        {"scheme": "kivi4", "error": "out of memory"},
    ]
    file.write_text(json.dumps({"setting": {"model": "tiny", "text": "a book"}, "rows": rows}))
    arguments = [*NUMBERS, "--schemes", "exact,int4,fp8,kivi4", "--results", str(file)]
    found = planned(*arguments, "--memory", "12GiB")
    assert [row["quality"] for row in found["schemes"]] == [
        None, {"kl_mean": 0.02, "top1": 0.97, "ppl": 23.5}, {"kl_mean": 0.001}, None,
    ]  # fmt: skip
    assert found["recommended"] == {
        "scheme": "int4",
        "why": "the least divergence of what fits, KL 0.0200 (tiny, a book, quality.json)",
    }
    assert planned(*arguments, "--memory", "40GiB")["recommended"]["scheme"] == "fp8"
    assert "0.0200" in run(*arguments)[1]


def test_the_results_in_this_repository_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "bench" / "results"
    quality = load(folder / "quality.json")
    assert quality.of(Scheme.parse("int4")) is not None and quality.of(Scheme.parse("int4,residual=1")) is None


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its weights, as a folder."""
    path = tmp_path_factory.mktemp("model")
    zoo.build("gemma3", torch.bfloat16).save_pretrained(path)
    return path


def test_a_folder_and_its_config_are_the_model(folder: Path) -> None:
    model = zoo.build("gemma3", torch.bfloat16)
    shape = shape_of(str(folder))
    assert shape.layers == shape_of(str(folder / "config.json")).layers
    assert shape.layers == shape_of_config(model.config, dtype=torch.bfloat16).layers
    assert shape.dtype == torch.bfloat16
    own = planned(str(folder), "--weights", "file")["setting"]["weights_bytes"]
    assert own == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0 < own - planned(str(folder))["setting"]["weights_bytes"] < 10_000  # the header of the file
    wide = planned(str(folder), "--dtype", "float32")["schemes"][0]
    assert wide["real_bytes"] > 1.9 * planned(str(folder))["schemes"][0]["real_bytes"]


def test_a_model_that_kvbits_does_not_serve_is_planned_exact(tmp_path: Path) -> None:
    zoo.build_any("t5").config.save_pretrained(tmp_path)
    found = planned(str(tmp_path), "--dtype", "float32", "--context", "100", "--source", "300", "--memory", "1GiB")
    assert [row["name"] for row in found["schemes"]] == ["exact"]
    assert found["schemes"][0]["real_bytes"] == 2 * 2 * 6 * 8 * 4 * (100 + 300)  # layers, K and V, heads, channels
    code, _, errors = run(str(tmp_path), "--schemes", "int4")
    assert code == 2 and "int4: T5ForConditionalGeneration is an encoder-decoder" in errors


def gguf_file(path: Path, architecture: str, tensors: dict[str, tuple[int, ...]] | None = None, **fields: Any) -> Path:
    """A GGUF file with these metadata; ``__`` is a dot."""
    gguf = pytest.importorskip("gguf", reason="writes the file")
    import numpy as np

    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in fields.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    for name, shape in (tensors or {"token_embd.weight": (32, 8)}).items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


COMMON = dict(block_count=6, context_length=4096, embedding_length=64, feed_forward_length=128,
              attention__head_count=4)  # fmt: skip


def kinds(path: Path) -> list[Any]:
    """Of each layer the KV heads, key and value channels and window, or the bytes of its states."""
    found = [(layer.attention, layer.row_bytes) for layer in shape_of_gguf(path).layers]
    return [(x and (x.heads, x.key_channels, x.value_channels, x.window)) or row_bytes for x, row_bytes in found]


def test_shapes_from_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    plain = (4, 16, 16, None)
    assert kinds(gguf_file(file, "llama", **COMMON)) == [plain] * 6
    assert kinds(gguf_file(file, "llama", **COMMON, attention__head_count_kv=1)) == [(1, 16, 16, None)] * 6
    sides = {"attention__key_length": 32, "attention__value_length": 24}
    assert kinds(gguf_file(file, "qwen3", **COMMON, **sides, attention__head_count_kv=2)) == [(2, 32, 24, None)] * 6
    window = {"attention__sliding_window": 100}
    slid = (4, 16, 16, 100)
    assert kinds(gguf_file(file, "gemma2", **COMMON, **window)) == [slid, plain] * 3
    assert kinds(gguf_file(file, "gemma3", **COMMON, **window)) == [slid] * 5 + [plain]
    pattern = {"attention__sliding_window_pattern": [True, False, True, False, False, True]}
    assert kinds(gguf_file(file, "other", **COMMON, **window, **pattern)) == [slid, plain, slid, plain, plain, slid]
    every = {"attention__sliding_window_pattern": 3}
    assert kinds(gguf_file(file, "other", **COMMON, **window, **every)) == [slid, slid, plain] * 2
    latent = {"attention__kv_lora_rank": 48, "rope__dimension_count": 8, "attention__head_count_kv": 1}
    assert kinds(gguf_file(file, "deepseek2", **COMMON, **latent)) == [(1, 48, 8, None)] * 6
    states = {"ssm__conv_kernel": 4, "ssm__inner_size": 32, "ssm__state_size": 8, "ssm__group_count": 1}
    row = 4 * (3 * (32 + 2 * 8) + 8 * 32)
    mixed = {"attention__head_count_kv": [0, 0, 4, 0, 0, 4]}
    assert kinds(gguf_file(file, "jamba", **COMMON, **states, **mixed)) == [row, row, plain] * 2
    assert kinds(gguf_file(file, "qwen3next", **COMMON, **states, full_attention_interval=3)) == [row, row, plain] * 2
    assert kinds(gguf_file(file, "gemma3n", **COMMON, attention__shared_kv_layers=2)) == [plain] * 4 + [0, 0]
    assert kinds(gguf_file(file, "gemma4", **COMMON, **window, **pattern, attention__key_length_swa=8))[:2] == [
        (4, 8, 16, 100), plain,
    ]  # fmt: skip


def test_a_window_that_no_layer_is_said_to_have(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "model.gguf", "llama", **COMMON, attention__sliding_window=100)
    assert kinds(file) == [(4, 16, 16, None)] * 6
    assert "does not say for which layers" in planned(str(file))["notes"][0]


def test_an_encoder_decoder_in_a_gguf_file(tmp_path: Path) -> None:
    """Its layers hold the encoder's text, too, and those of the encoder hold nothing; kvbits does not serve it."""
    tensors = {"token_embd.weight": (32, 8), "enc.blk.0.attn_q.weight": (4, 4), "dec.blk.1.attn_q.weight": (3, 5)}
    file = gguf_file(tmp_path / "model.gguf", "t5", tensors, **COMMON, decoder_block_count=2)
    shape = shape_of_gguf(file)
    assert shape.encodes and shape.weights is not None and shape.weights.layers == (0, 15)
    found = planned(str(file), "--context", "100", "--source", "300")
    assert found["schemes"][0]["real_bytes"] == 2 * 4 * (16 + 16) * 4 * (100 + 300)
    code, _, errors = run(str(file), "--schemes", "int4")
    assert code == 2 and "int4: T5 is an encoder-decoder" in errors


@pytest.mark.parametrize(("architecture", "fields"), [("bert", {"attention__causal": 0}), ("t5encoder", {})])
def test_a_gguf_file_of_an_encoder(architecture: str, fields: dict[str, int], tmp_path: Path) -> None:
    code, _, errors = run(str(gguf_file(tmp_path / "model.gguf", architecture, **COMMON, **fields)))
    assert code == 2 and "generates no text, so it has no KV cache to plan" in errors


def test_states_in_gguf_files(tmp_path: Path) -> None:
    """llama.cpp, ``n_embd_r`` and ``n_embd_s``: of RWKV, of Kimi's delta attention, and of Falcon-H1 beside K and V."""
    none, file = {**COMMON, "attention__head_count": 0, "attention__head_count_kv": 0}, tmp_path / "model.gguf"
    assert kinds(gguf_file(file, "rwkv7", **none, wkv__head_size=16)) == [4 * 64 * (2 + 16)] * 6
    mixed = {"attention__head_count_kv": [0, 0, 4] * 2, "kda__head_dim": 8, "ssm__conv_kernel": 4}
    assert kinds(gguf_file(file, "kimi-linear", **COMMON, **mixed))[:2] == [4 * 4 * (3 * 3 * 8 + 8 * 8)] * 2
    states = {"ssm__conv_kernel": 4, "ssm__inner_size": 32, "ssm__state_size": 8, "ssm__group_count": 1}
    both = planned(str(gguf_file(file, "falcon-h1", **COMMON, **states)), "--context", "10")
    assert [row["name"] for row in both["schemes"]] == ["exact"]
    assert both["schemes"][0]["real_bytes"] == 6 * (4 * (3 * (32 + 2 * 8) + 8 * 32) + 10 * 4 * (16 + 16) * 4)


def test_weights_of_a_gguf_file_are_counted_where_they_lie(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (32, 8), "blk.0.attn_q.weight": (4, 4), "blk.5.ffn_up.weight": (3, 5),
               "output_norm.weight": (7,), "output.weight": (32, 9)}  # fmt: skip
    shape = shape_of_gguf(gguf_file(tmp_path / "model.gguf", "llama", tensors, **COMMON))
    weights = shape.weights
    assert weights is not None and weights.layers == (16, 0, 0, 0, 0, 15)
    assert (weights.embedding, weights.table, weights.head) == (256, 256, 7 + 288)
    assert weights.file_bytes == 2 * weights.total
    assert planned(str(tmp_path / "model.gguf"), "--weights", "file")["setting"]["weights_bytes"] == 2 * weights.total


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    first = gguf_file(tmp_path / "big-00001-of-00002.gguf", "llama", {"token_embd.weight": (32, 8)}, **COMMON)
    with pytest.raises(ValueError, match="is one of 2 parts, and big-00002-of-00002"):
        shape_of_gguf(first)
    gguf_file(tmp_path / "big-00002-of-00002.gguf", "llama", {"blk.0.attn_q.weight": (4, 4)})
    weights = shape_of_gguf(first).weights
    assert weights is not None and weights.total == 32 * 8 + 16


def test_a_gguf_file_and_the_config_that_transformers_reads_agree(tmp_path: Path) -> None:
    """The same tiny Llama, as a GGUF header and as a config."""
    sizes = dict(block_count=2, embedding_length=48, feed_forward_length=64, attention__head_count=6,
                 attention__head_count_kv=2, context_length=512, vocab_size=zoo.VOCABULARY)  # fmt: skip
    shape = shape_of_gguf(gguf_file(tmp_path / "model.gguf", "llama", **sizes))
    config = shape_of_config(zoo.build("llama").config, dtype=torch.float32)
    assert shape.layers == config.layers and shape.widths == config.widths
    for scheme in ("exact", "default"):
        calls = History.of(300, 3)
        assert cache(shape, Scheme.parse(scheme), calls) == cache(config, Scheme.parse(scheme), calls)


# -- sizes and devices -------------------------------------------------------------------------------------------------


def test_sizes_of_memories() -> None:
    assert bytes_of("24GiB") == bytes_of(" 24 gib") == 24 * 2**30
    assert bytes_of("80GB") == 80 * 10**9 and bytes_of("1.5TiB") == 3 * 2**39 and bytes_of("12345678") == 12_345_678
    assert bytes_of("0", least=0) == 0
    for text in ("24G", "x", "", "-1GiB", "0GiB", "1e30", "9" * 30, "9" * 400, "9" * 5000, "10000TiB", "GiB"):
        with pytest.raises(ValueError, match="memory"):
            bytes_of(text)
    with pytest.raises(ValueError, match="24 without a unit is 24 bytes, no size of a memory; write 24GiB or 24GB"):
        bytes_of("24")


def test_numbers_of_parameters() -> None:
    assert count_of("6.7b") == 6_700_000_000 and count_of("350M") == 350_000_000 and count_of("12,345") == 12_345
    for text in ("", "x", "-7b", "0", "1e30", "9" * 20, "9" * 400, "9" * 5000, "7bb"):
        with pytest.raises(ValueError, match="number of parameters"):
            count_of(text)


def test_numbers_of_tokens() -> None:
    for text, number in {"512": 512, "64k": 65_536, "64K": 65_536, "1m": 2**20, " 10000000 ": 10**7}.items():
        assert tokens_of(text) == number
    for text in ("0", "-1", "1e30", "k", "", "1.5k", "10g", "9" * 5000):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            tokens_of(text)


def test_gpus_by_name() -> None:
    assert gpu_bytes("A100-80GB") == gpu_bytes("nvidia a100 80gb") == 80 * 2**30
    assert gpu_bytes("4090") == gpu_bytes("RTX_4090") == gpu_bytes("GeForce RTX 4090") == GPU_MIB["rtx-4090"] * MIB
    assert gpu_bytes("M4 Max 64GB") == 48 * 2**30 and gpu_bytes("m1-16gb") == 16 * 2**30 * 2 // 3
    assert gpu_bytes("cpu") == machine_bytes() > 2**28
    for name, near in {
        "m4": "such as m4-32gb", "m2 Max": "m2-max-32gb", "m4-0gb": "unknown GPU", "a100": "a100-40gb or a100-80gb",
        "h1000": "near: h100", "abacus": "known: t4",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=near):
            gpu_bytes(name)


# -- what a user gets wrong --------------------------------------------------------------------------------------------

WRONG = {
    "nothing": ([], "name a model, such as llama-3.1-8b, or give all of --layers"),
    "not all numbers": (["--layers", "32"], "give all of --layers 32"),
    "a model and numbers": (["llama-7b", "--layers", "32"], "not both"),
    "no context": ([*NUMBERS[:-1], "0"], "'0' is not a number of tokens"),
    "absurd context": ([*NUMBERS[:-1], "1e30"], "'1e30' is not a number of tokens"),
    "huge context": ([*NUMBERS[:-1], "9" * 40], "--context"),
    "negative layers": (["--layers", "-3", *NUMBERS[2:]], "--layers -3 is no size of a model; give 1 to 10,000"),
    "no batch": ([*NUMBERS, "--batch", "0"], "--batch 0"),
    "unknown scheme": ([*NUMBERS, "--schemes", "int5"], "near: int8, int4"),
    "option first": ([*NUMBERS, "--schemes", "residual=3"], "no scheme stands before it"),
    "layer that is not there": ([*NUMBERS, "--schemes", "int4,layers[40]=fp8"], "layers 0 to 31"),
    "head_dim that does not fit": (
        ["--layers", "2", "--kv-heads", "1", "--head-dim", "512", "--schemes", "nuq3-1%,block=256"], "give block=128",
    ),
    "unknown GPU": ([*NUMBERS, "--gpu", "h1000"], "near: h100"),
    "GPU and memory": ([*NUMBERS, "--gpu", "h100", "--memory", "1GiB"], "not both"),
    "unknown memory": ([*NUMBERS, "--memory", "24G"], "write it as 24GiB"),
    "no memory": ([*NUMBERS, "--memory", "0GiB"], "is no device's"),
    "no memory to keep free of": ([*NUMBERS, "--reserve", "1GiB"], "give --gpu or --memory, too"),
    "text of no encoder": ([*NUMBERS, "--source", "5"], "--source 5 is an encoder's text"),
    "two outputs in one": ([*NUMBERS, "--csv", "-", "--json"], "--csv - is not possible beside --json; give a file"),
    "a page to a pipe": ([*NUMBERS, "--page", "-"], "--page - is not possible; give a file"),
    "a page of devices": ([*NUMBERS, "--devices", "2", "--chunk", "9", "--page", "x.html"], "or --devices, --chunk"),
    "unknown split": ([*NUMBERS, "--devices", "2", "--split", "rows"], "allowed are pipeline, tensor, context"),
    "too many devices": ([*NUMBERS, "--devices", "40"], "32 layers cannot be split over 40 devices"),
    "unknown weights": ([*NUMBERS, "--weights", "int5"], "allowed are auto"),
    "unknown dtype": ([*NUMBERS, "--dtype", "int4"], "allowed are auto, float32"),
    "unknown model": (["llama-3.1-9b"], "near: llama-3.1-8b"),
    "unknown model, nothing near": (["zzzz/qqqq"], "known without the hub: llama-7b"),
    "no name": ([""], "'' names no model; give one such as llama-3.1-8b"),
    "unknown model in brackets": (["[/x]"], "there is no file, folder or preset '[/x]'"),
    "missing file": (["no-such.gguf"], "there is no file no-such.gguf"),
    "missing folder for a page": ([*NUMBERS, "--page", "no-such/x.html"], "there is no folder no-such"),
    "missing results": ([*NUMBERS, "--results", "no-such.json"], "cannot read no-such.json"),
    "too many new tokens": ([*NUMBERS, "--new-tokens", "65536"], "cannot be new ones"),
    "too many parameters": ([*NUMBERS, "--parameters", "1e30"], "write it as 6.7b"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
def test_what_a_user_gets_wrong_is_one_clear_line(arguments: list[str], expected: str) -> None:
    code, text, errors = run(*arguments)
    assert code == 2 and text == ""
    assert expected in errors and "Traceback" not in errors and errors.startswith("error: ")


DAMAGED = [
    ("config.json", "{", "is no config.json"),
    ("config.json", "[1]", "is no config.json: it holds no fields"),
    ("config.json", '{"model_type": "lama"}', "knows no model_type 'lama'; near: llama"),
    ("config.json", '{"hidden_size": 8}', "knows no model_type 'None'"),
    ("config.json", '{"model_type": "vit"}', "generates no text"),
    ("config.json", '{"model_type": "llama", "num_hidden_layers": 1000000000}', "layers are no model's"),
    ("config.json", '{"model_type": "llama", "hidden_size": -8}', "-8"),
    ("config.json", "[" * 100_000, "is no config.json: maximum recursion depth"),
    ("config.json", '{"model_type": "llama", "dtype": "float8_e4m3fn"}', "float8_e4m3fn are not planned; give --dtype"),
    ("config.json", '{"model_type": "llama", "quantization_config": {"bits": "four"}}', "of 'four' bits is no model's"),
    ("config.json", '{"model_type": "llama", "quantization_config": {"bits": -4}}', "of -4 bits is no model's"),
    ("config.json", '{"model_type": "llama", "num_hidden_layers": -1}', "-1"),
    ("model.gguf", "GGUF", "is no GGUF file, or damaged"),
    ("model.gguf", "text", "is no GGUF file, or damaged"),
    ("model.bin", "text", "model.bin is no config.json"),
]


@pytest.mark.parametrize(("name", "content", "expected"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_model_is_one_clear_line(name: str, content: str, expected: str, tmp_path: Path) -> None:
    if name.endswith("gguf"):
        pytest.importorskip("gguf", reason="reads the file")
    (tmp_path / name).write_text(content)
    code, text, errors = run(str(tmp_path / name))
    assert code == 2 and text == "" and expected in errors and "Traceback" not in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": 3}', '{"rows": [{"scheme": "int4"}]}', '{"rows": [null, 7]}',
                                     '{"rows": [{"scheme": "int5", "kl_mean": 1}]}',
                                     '{"rows": [{"scheme": "int4", "kl_mean": 1' + "0" * 400 + "}]}",
                                     '{"rows": [{"scheme": "int4", "kl_mean": true}]}'])  # fmt: skip
def test_results_without_figures(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    code, _, errors = run(*NUMBERS, "--results", str(tmp_path / "results.json"))
    assert code == 2 and f"{tmp_path / 'results.json'} " in errors and "Traceback" not in errors


def test_a_gguf_file_that_says_too_little(tmp_path: Path) -> None:
    for fields in ({}, {"block_count": 0}, {"block_count": 3}, {**COMMON, "attention__head_count_kv": [1, 2]}):
        file = gguf_file(tmp_path / "model.gguf", "llama", **fields)
        code, _, errors = run(str(file))
        assert code == 2 and "model.gguf" in errors and "Traceback" not in errors


@pytest.mark.parametrize("package", ["matplotlib", "gguf"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, arguments = "report", [*NUMBERS, "--picture", str(tmp_path / "x.png")]
    if package == "gguf":
        extra, arguments = "gguf", [str(gguf_file(tmp_path / "model.gguf", "llama", **COMMON))]
    monkeypatch.setitem(sys.modules, package, None)
    code, _, errors = run(*arguments)
    assert code == 2 and f"pip install 'kvbits[{extra}]'" in errors and errors.count("\n") == 1
