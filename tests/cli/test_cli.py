"""The command line: its commands on a tiny model in a folder, and one clear line for what a user can get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvbits
import zoo
from command_line import TEXT, run
from kvbits.cli import generate
from kvbits.cli.common import out, tokens_of
from kvbits.hf.run import Run
from kvbits.schemes.catalogue import CATALOGUE


def test_generate_compares_schemes(folder: str, tmp_path: Path) -> None:
    file, measured = tmp_path / "book.txt", tmp_path / "out.json"
    file.write_text(TEXT)
    code, output = run(
        "generate", folder, "-s", "exact", "-s", "int8,residual=16,block=32", "-s", "kivi2,residual=0,block=32",
        "--prompt-file", str(file), "--max-new-tokens", "8", "--json", str(measured),
    )  # fmt: skip
    assert code == 0 and "tokens equal" in output and "word" in output and "\n  kivi2,residual" in output
    exact, int8, kivi2 = json.loads(measured.read_text())
    assert exact["scheme"] == "exact" and exact["leading_tokens_equal"] == 8 and exact["bytes_ratio"] == 1
    assert exact["prompt_tokens"] == 300 and exact["new_tokens"] == 8
    # DynamicCache in float32: 2 layers, K and V, 2 heads, 8 channels, and no slot for the last token.
    assert exact["kv_bytes"] == 2 * 2 * 2 * 8 * 4 * 307
    assert kivi2["kv_bytes"] < int8["kv_bytes"] < exact["kv_bytes"]
    assert exact["decode_tokens_per_second"] > 0 and exact["prefill_tokens_per_second"] > 0


def test_the_table_has_names_as_they_were_given_and_fits_80_columns(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbits.cli.common.out._width", 80)
    names = ["default", "default,layers[0]=int8-channel,residual=64,sinks=4+8"]
    given = ("--prompt", TEXT, "--max-new-tokens", "3")
    code, output = run("generate", folder, "-s", names[0], "-s", names[1], *given)
    assert code == 0 and "default, prompt of 300 tokens" in output and "lm4" not in output
    out.print(generate.table(names, [Run(name, (1, 2, 3), 128_000, 17_179_869_184, 9.0, 2.0) for name in names]))
    for printed in (output, capsys.readouterr().out):
        lines = printed[printed.index("prefill") :].splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in printed
        assert names[1] in "".join(line.split()[0] for line in lines if line.strip()), printed
    for cell in ("17,179,869,184", "1.00x", "14222.2", "1.0", "3 of 3", "prefill", "tokens equal"):
        assert f" {cell}" in printed


def test_prompts_from_the_line_and_from_standard_input_agree(folder: str) -> None:
    line = run("generate", folder, "--prompt", TEXT, "--prompt-tokens", "20", "--max-new-tokens", "4")
    piped = run("generate", folder, "--prompt-file", "-", "--prompt-tokens", "20", "--max-new-tokens", "4", text=TEXT)
    assert line[0] == piped[0] == 0
    assert line[1].splitlines()[:2] == piped[1].splitlines()[:2]
    assert "prompt of 20 tokens" in line[1]


def test_schemes_lists_the_whole_catalogue() -> None:
    code, output = run("schemes")
    assert code == 0
    assert all(f" {entry.name} " in output for entry in CATALOGUE)


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_lose_no_word_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbits.cli.common.out._width", columns)
    for arguments in (["schemes"], ["schemes", "kivi2"], ["schemes", "nuq3-1%"]):
        code, output = run(*arguments)
        assert code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in output
        boxed = [line for line in output.splitlines() if line[:1] in "│┃"]  # pages have no frames, and no long lines
        assert max(map(len, boxed or output.splitlines())) <= columns


def test_the_page_of_a_scheme_says_what_its_options_keep_exact() -> None:
    code, output = run("schemes", "kivi2,residual=64,sinks=2+8,layers[0]=int8")
    assert code == 0
    assert "the first 2 tokens" in output and "up to 8 later ones" in output and "64 most recent" in output
    assert "layers[0]=int8" in output


def test_the_version_is_an_option_and_a_command() -> None:
    assert run("--version") == run("version") == (0, f"{kvbits.__version__}\n")


def test_explain(folder: str) -> None:
    code, output = run("explain", folder, "--scheme", "kivi2")
    assert code == 0 and f"layers 0-1: kivi2; steps: {zoo.RUNS}" in output


WRONG = {
    "unknown scheme": (["-s", "int5"], "near: int8, int4"),
    "impossible scheme": (["-s", "int4-gs48"], "allowed are (16, 32, 64, 128)"),
    "a layer that is not there": (["-s", "int4,layers[7]=fp8", "--prompt", "word1"], "layers 0 to 1"),
    "a prompt that is too long": ([], "are more than the 512"),
    "no folder for the results": (["--prompt", "word1", "--json", "no-such-folder/out.json"], "no-such-folder"),
    "missing file": (["--prompt-file", "no-such-file.txt"], "no-such-file.txt: no such file or directory"),
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "two prompts": (["--prompt", "word1", "--prompt-file", "-"], "not both"),
    "no new tokens": (["--max-new-tokens", "0"], "--max-new-tokens"),
    "unknown dtype": (["--dtype", "int4"], "allowed are auto, float32, bfloat16, float16"),
    "no chat template": (["--prompt", "word1", "--chat"], "has no chat template"),
    "unknown device": (["--prompt", "word1", "--device", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
def test_what_a_user_gets_wrong_is_one_clear_line(folder: str, arguments: list[str], expected: str) -> None:
    code, output = run("generate", folder, *arguments)
    assert code == 2
    assert expected in output and "Traceback" not in output


def test_no_such_model() -> None:
    code, output = run("generate", "no/such-model", "--prompt", "word1")
    assert code == 2 and "no/such-model" in output and "Traceback" not in output


def test_a_file_that_is_no_text(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00\x80" * 10)
    code, output = run("generate", folder, "--prompt-file", str(file))
    assert code == 2 and str(file.name) in output and "UTF-8" in output


def test_numbers_of_tokens() -> None:
    texts = {"1": 1, "512": 512, " 2k": 2048, " 32K ": 32768, "1m": 1 << 20, "007": 7}
    assert {text: tokens_of(text) for text in texts} == texts
    for wrong in ("", "0", "0k", "-5", "1.5k", "k", "2kk", "2kb", "1 k", "1e3", "٣"):
        with pytest.raises(ValueError, match="is not a number of tokens; give one such as 512"):
            tokens_of(wrong)


@pytest.mark.parametrize(
    "module", ["typer", "rich.table", "torch", "kvbits.schemes.scheme", "transformers", "kvbits.hf.run"]
)
def test_an_interruption_of_an_import_ends_quietly(module: str, folder: str) -> None:
    program = f"""
import sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["kvbits", "generate", {folder!r}, "--prompt", "text"]
from kvbits.cli import main  # what the installed command does
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr and "Interrupt" not in done.stderr  # a progress bar may be there
