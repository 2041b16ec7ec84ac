"""Conversations: their cache goes on from turn to turn and from run to run, and no interruption loses it."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvbits
import zoo
from kvbits.cli import app, chat
from kvbits.hf.names import cache_name
from kvbits.sessions.conversation import ContextFull, Conversation

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = "int8,residual=4,block=32"
WORDS = ["user", "assistant", "system", ".", *(f"word{i}" for i in range(zoo.VOCABULARY - 6))]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
FORGETFUL = TEMPLATE.replace("message['content'] }}", "message['content'] if loop.last or message['role'] == 'user' }}")
"""Leaves out what the model has said before, as templates do with its thoughts."""


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<s>", *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>")
    made.chat_template = template
    return made


def conversation(name: str = "llama", template: str = TEMPLATE, scheme: str = SCHEME, **changes: Any) -> Conversation:
    model = zoo.build(name, **changes)
    return Conversation(model, tokenizer(template), kvbits.cache_for(model, scheme))


def said(talk: Conversation, text: str, count: int = 20) -> Any:
    return talk.ask(text, max_new_tokens=count, do_sample=False)


SAYS = " ".join(f"word{7 * i % 100}" for i in range(30))


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SCHEME, "exact", "lm4,centred,residual=4,block=32"])
def test_a_conversation_goes_on_where_its_cache_is(scheme: str) -> None:
    """Each turn reads what is new alone, and is what generate gives for the rendered messages."""
    talk, model = conversation(scheme=scheme), zoo.build("llama")
    cache, words = kvbits.cache_for(model, scheme), tokenizer()
    for turn in range(4):
        shown: list[str] = []
        before = talk.used
        answer = talk.ask(f"word{turn} {SAYS}", shown.append, max_new_tokens=20, do_sample=False)
        assert "".join(shown) == answer.text and answer.tokens == 20 and answer.end == "length" and answer.again == 0
        ids = words(words.apply_chat_template(talk.messages[:-1], tokenize=False, add_generation_prompt=True),
                    return_tensors="pt", add_special_tokens=False).input_ids  # fmt: skip
        assert answer.read == ids.shape[1] - before and talk.used == ids.shape[1] + 19
        out = model.generate(ids, max_new_tokens=20, do_sample=False, **{cache_name(model): cache})
        assert answer.text == words.decode(out[0, ids.shape[1] :])
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 4
    assert answer.rate is not None and answer.rate > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_template_that_renders_history_otherwise(name: str) -> None:
    """The cache keeps what is in common, up to a whole block, and the rest is read again."""
    talk = conversation(name, FORGETFUL)
    for turn in range(3):
        before = talk.used
        answer = said(talk, f"word{turn} {SAYS}")
        rendered = talk._rendered(talk.messages[:-1]).shape[1]
        assert talk.used == rendered + 19
        assert (answer.again > 0) == (turn > 0) and answer.read == rendered - (before - answer.again)
        if name == "gemma3" and turn:  # windows cannot be cropped
            assert answer.again == before
        elif turn:
            assert answer.again < 20 + 32 + 4
    model = talk.model
    right = kvbits.cache_for(model, SCHEME)
    with torch.no_grad():
        model(input_ids=talk.cache.tokens, **{cache_name(model): right})
    assert torch.equal(talk.cache.tokens, right.tokens)


def test_a_reset_keeps_the_system_message() -> None:
    talk = conversation()
    talk.messages.insert(0, {"role": "system", "content": "word1"})
    first = said(talk, SAYS)
    said(talk, SAYS)
    talk.reset()
    assert talk.used == 0 and talk.messages == [{"role": "system", "content": "word1"}]
    assert said(talk, SAYS).text == first.text
    plain = conversation()
    said(plain, SAYS)
    plain.reset()
    assert plain.messages == []


def test_the_end_of_an_answer() -> None:
    talk = conversation()
    first = said(talk, SAYS, 8)
    last = talk.cache.model.generation_config  # type: ignore[union-attr]
    talk.reset()
    ids = tokenizer()(first.text).input_ids
    last.eos_token_id = [ids[5], 0]
    answer = said(talk, SAYS, 8)
    assert answer.end == "end" and answer.tokens == ids.index(ids[5]) + 1


def test_a_full_context_is_said_and_changes_nothing() -> None:
    talk = conversation(max_position_embeddings=100)
    assert said(talk, SAYS, 500).end == "context" and talk.used == 99
    before = list(talk.messages), talk.cache.tokens
    with pytest.raises(ContextFull, match=r"the messages have 1\d\d tokens, and the model was made for 100"):
        said(talk, SAYS)
    assert talk.messages == before[0] and torch.equal(talk.cache.tokens, before[1])
    talk.reset()
    assert said(talk, "word3", 5).end == "length"


def test_no_template_no_chat() -> None:
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(model, tokenizer(None), kvbits.cache_for(model, SCHEME))


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    talk, right = conversation(), conversation()
    whole = said(right, SAYS)
    shown: list[str] = []
    answer = talk.ask(SAYS, shown.append, lambda: len(shown) >= 6, max_new_tokens=20, do_sample=False)
    assert answer.end == "stopped" and 0 < answer.tokens < 20
    assert answer.text and whole.text.startswith(answer.text) and "".join(shown) == answer.text
    assert talk.messages[-1]["content"] == answer.text
    assert said(talk, "word5").again == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_turn_that_breaks_off_in_the_middle_of_a_forward(name: str, error: type[BaseException], at: int) -> None:
    """An interruption keeps what has been said; an error undoes the turn. The next one is as if all were well."""
    talk, right = conversation(name), conversation(name)
    for each in (talk, right):
        said(each, SAYS)
    calls = [0]

    def break_off(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise error

    hook = talk.model.model.layers[-1].mlp.register_forward_pre_hook(break_off)
    before = list(talk.messages)
    if error is KeyboardInterrupt:
        answer = said(talk, "word5")
        assert answer.end == "stopped" and answer.tokens == at - 1
        assert len(talk.messages) == len(before) + (2 if at > 1 else 0)
    else:
        with pytest.raises(error):
            said(talk, "word5")
        assert talk.messages == before
    hook.remove()
    talk.messages = before
    answer = said(talk, "word6")
    assert answer.tokens == 20
    if name == "llama" and at == 1:  # what the forward had stored was taken back, bit for bit
        assert answer.text == said(right, "word6").text and answer.again == 0


def test_an_interruption_of_a_crop_leaves_a_sound_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers: the first is cut already, and the second is not."""
    talk, right = conversation(), conversation()
    said(talk, SAYS)
    talk.messages = []
    last = talk.cache.packed_layers[-1].core

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(last, "crop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            said(talk, f"{SAYS} word9")
    assert said(talk, "word6").text == said(right, "word6").text


def test_ctrl_c_once_and_twice() -> None:
    talk = conversation()
    with chat._Interruption() as interruption:
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            if len(shown) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        answer = talk.ask(SAYS, show, lambda: interruption.asked, max_new_tokens=50, do_sample=False)
        assert interruption.asked and answer.end == "stopped" and 3 <= answer.tokens < 50
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    with pytest.raises(KeyboardInterrupt):  # outside it is as always
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_goes_on_in_another_run(tmp_path: Path) -> None:
    path, talk, right = tmp_path / "session", conversation(), conversation()
    for each in (talk, right):
        said(each, SAYS)
    talk.save(path)
    again = Conversation.resume(path, zoo.build("llama"), tokenizer())
    assert again.messages == right.messages and again.used == right.used
    for turn in range(3):
        one, other = said(again, f"word{turn} {SAYS}"), said(right, f"word{turn} {SAYS}")
        assert (one.text, one.read, one.again) == (other.text, other.read, 0)
    again.save(path)
    assert len(Conversation.resume(path, zoo.build("llama"), tokenizer()).messages) == 8


def test_a_session_that_somebody_else_has_changed_is_not_overwritten(tmp_path: Path) -> None:
    path, talk = tmp_path / "session", conversation()
    said(talk, SAYS)
    talk.save(path)
    other = Conversation.resume(path, zoo.build("llama"), tokenizer())
    said(other, "word8")
    other.save(path)
    said(talk, "word9")
    with pytest.raises(ValueError, match=r"another program has changed .* save to another file"):
        talk.save(path)
    assert len(Conversation.resume(path, zoo.build("llama"), tokenizer()).messages) == 4
    talk.save(tmp_path / "mine")
    talk.save(tmp_path / "mine")
    with pytest.raises(ValueError, match="another program has changed"):
        talk.save(path)  # nor after it has been saved elsewhere
    path.unlink()
    other.save(path)  # that it was removed is no reason


def test_caches_that_are_no_sessions(tmp_path: Path) -> None:
    talk = conversation()
    for note in (None, {"messages": []}, {"kvbits chat": 1, "messages": [{"role": "user"}]}, {"kvbits chat": 1}):
        kvbits.save(talk.cache, tmp_path / "x", note=note)
        with pytest.raises(ValueError, match="is a cache, but not the session of a chat"):
            Conversation.resume(tmp_path / "x", talk.model, talk.tokenizer)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    zoo.build("llama", max_position_embeddings=300).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def run(*arguments: Any, text: str = "") -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    options = ["chat", *map(str, arguments), "--temperature", "0"]
    result = CliRunner().invoke(app, options, input=text, env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_lines_from_a_pipe_are_turns(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    code, out, err = run(folder, "-s", SCHEME, "--session", path, "--max-new-tokens", 5, text=f"{SAYS}\n\n  word1  \n")
    assert code == 0 and len(out.splitlines()) == 2 and all(len(line.split()) == 5 for line in out.splitlines())
    assert "context 37 of 300 tokens, cache " in err and "cut off after 5 tokens" in err
    code, more, err = run(folder, "--session", path, "--max-new-tokens", 5, text="word2\n/exit\nword3")
    assert code == 0 and len(more.splitlines()) == 1
    assert f"{path}: 4 messages, context 47 of 300 tokens" in err and "read 6 in" in err
    both = run(folder, "-s", SCHEME, "--max-new-tokens", 5, text=f"{SAYS}\nword1\nword2")
    assert both[1] == out + more


def test_ctrl_c_ends_a_pipe_and_keeps_what_was_said(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, shown = chat._write, []

    def interrupted(text: str) -> None:
        write(text)
        shown.append(text)
        if len(shown) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat, "_write", interrupted)
    path = tmp_path / "session"
    code, out, err = run(folder, "--session", path, "--max-new-tokens", 50, text="word1\nword2\nword3")
    assert code == 130 and len(out.splitlines()) == 1 and "; stopped]" in err and "Traceback" not in err
    talk = Conversation.resume(path, zoo.build("llama", max_position_embeddings=300), tokenizer())
    assert [message["content"] for message in talk.messages] == ["word1", out.rstrip("\n")]


def test_commands(folder: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    lines = [
        "word1",
        "/save",
        f"/save {other}",
        "/reset",
        "word1",
        "/help",
        "/nope at all",
        "//nope",
        f"/save {tmp_path}/no/x",
    ]
    code, out, err = run(folder, "--max-new-tokens", 5, text="\n".join(lines))
    assert code == 0
    first, second, third = out.splitlines()
    assert first == second != third
    for line in ("error: name a file: /save FILE", f"{other}: {other.stat().st_size:,} bytes", "begun anew", "/exit",
                 "error: there is no /nope; /help lists commands, and //nope says it", "cannot write"):  # fmt: skip
        assert line in err
    talk = Conversation.resume(other, zoo.build("llama", max_position_embeddings=300), tokenizer())
    assert [message["content"] for message in talk.messages][:1] == ["word1"] and len(talk.messages) == 2


def test_a_context_that_is_full_names_the_way_out(folder: str) -> None:
    code, out, err = run(folder, "--max-new-tokens", 400, text=f"{SAYS}\nword1\nword2")
    assert code == 2 and len(out.splitlines()) == 1
    assert "the context is full, /reset begins anew" in err
    assert "error: the messages have 30" in err and "begin anew; /reset does" in err and "Traceback" not in err


def test_a_session_outlives_a_full_disk(folder: str, tmp_path: Path) -> None:
    from limits import file_size_limit

    path = tmp_path / "session"
    assert run(folder, "--session", path, "--max-new-tokens", 5, text="word1")[0] == 0
    content = path.read_bytes()
    with file_size_limit(1000):
        code, out, err = run(folder, "--session", path, "--max-new-tokens", 5, text="word2\nword3")
    assert code == 2 and len(out.splitlines()) == 2 and err.count("error: the session is not saved: ") == 2
    assert path.read_bytes() == content


def test_a_new_session_overwrites_nothing_that_has_come_meanwhile(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mine, notes = tmp_path / "session", tmp_path / "mine", tmp_path / "notes.txt"
    notes.write_text("dear diary")

    def show(text: str) -> None:
        path.write_text("of another chat that began at the same time")

    monkeypatch.setattr(chat, "_write", show)
    lines = f"word1\n/save {notes}\n"
    code, _, err = run(folder, "--session", path, "--max-new-tokens", 5, text=lines)
    assert code == 2 and err.count("is there already, and is not of this conversation; name another file") == 2
    assert path.read_text().startswith("of another") and notes.read_text() == "dear diary"
    path.unlink()
    code, _, err = run(folder, "--session", path, "--max-new-tokens", 5, text=f"word1\n/save {mine}\n/save {mine}")
    assert code == 0 and mine.exists()  # its own it may write again


def test_no_ctrl_c_keeps_a_session_from_being_written(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asks to stop an answer, and a second one that comes when the answer is there already."""
    path, save = tmp_path / "session", Conversation.save
    once: list[str] = []

    def interrupted(text: str) -> None:
        if not once:
            once.append(text)
            os.kill(os.getpid(), signal.SIGINT)

    def saved(talk: Conversation, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        save(talk, path)

    monkeypatch.setattr(chat, "_write", interrupted)
    monkeypatch.setattr(Conversation, "save", saved)
    assert run(folder, "--session", path, "--max-new-tokens", 5, text="word1\nword2")[0] == 130
    talk = Conversation.resume(path, zoo.build("llama", max_position_embeddings=300), tokenizer())
    assert talk.messages[0]["content"] == "word1" and len(talk.messages) == 2


def test_what_a_user_gets_wrong(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    run(folder, "-s", SCHEME, "--session", path, "--system", "word9", "--max-new-tokens", 5, text="word1")
    wrong = {
        ("-s", "int5"): "near: int8, int4",
        ("-s", "nuq3"): "needs a calibration",
        ("--session", tmp_path / "no" / "x"): "there is no folder",
        ("--session", folder): "is a folder",
        ("--session", path, "-s", "int4"): f"is kept under {SCHEME}, not int4; leave out --scheme",
        ("--session", path, "--system", "word8"): "began with another system message",
        ("--session", path, "--calibration", folder): "leave out --calibration",
        ("--session", path, "--dtype", "bfloat16"): "it is bfloat16, not float32",
        ("--top-p", 0.5): "--top-p means nothing beside it",
        ("--max-new-tokens", 0): "--max-new-tokens",
    }
    for arguments, says in wrong.items():
        code, _, err = run(folder, *arguments, text="word1")
        assert code == 2 and says in err and "Traceback" not in err, arguments
    assert run(folder, "--session", path, "--system", "word9", "-s", SCHEME, text="")[0] == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, _, err = run(folder, "--session", path, text="word1")
    assert code == 2 and "is damaged" in err and path.read_bytes() == content


def test_sampling_options() -> None:
    assert chat._sampling(None, None) == {} and chat._sampling(0, None) == {"do_sample": False}
    assert chat._sampling(0.7, 0.9) == {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    assert chat._sampling(None, 0.9) == {"do_sample": True, "top_p": 0.9}


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: Any) -> None:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvbits.cli", "chat", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        self.terminal, self.output = ours, ""

    def wait_for(self, text: str, seconds: float = 600) -> str:
        """Everything since the last time, up to ``text``."""
        end = time.monotonic() + seconds
        while text not in self.output:
            ready, _, _ = select.select([self.terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} does not come: {self.output!r}"
            try:
                self.output += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {text!r}: {self.output!r}") from None
        before, _, self.output = self.output.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def interrupt_until(self, text: str) -> str:
        """Press Ctrl-C until it is heard: between its prompt and its first look at the keys, readline misses one."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, seconds=3)
        raise AssertionError(f"no Ctrl-C brings {text!r}: {self.output!r}")


@pytest.mark.model
def test_a_terminal_with_smollm2(smollm2: Any, smollm2_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C at the prompt and in an answer, kill -9 in the middle of the next one, and the session is there."""
    model, words = smollm2
    path = tmp_path / "session"
    one = Terminal(smollm2_folder, "--session", path, "--temperature", "0", "--max-new-tokens", "300")
    one.wait_for("> ")
    one.interrupt_until("Ctrl-D leaves")
    one.wait_for("> ")
    one.type("Write a long story about a harbour.\n")
    one.wait_for("harbour.")  # the terminal's echo
    one.wait_for(" the ")
    one.type("\x03")
    said = one.wait_for("; stopped]")
    assert "Ctrl-C again stops at once" in said and " of 8,192 tokens, cache " in said and "tokens/s" in said
    one.wait_for("> ")
    content = path.read_bytes()
    one.type("Write a long story about the sea.\n")
    one.wait_for("sea.")
    one.wait_for(" the ")
    one.process.kill()
    one.process.wait()
    assert path.read_bytes() == content
    talk = Conversation.resume(path, model, words)
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert " the " in talk.messages[1]["content"] and len(talk.messages[1]["content"]) < 1000
    answer = talk.ask("Thank you.", max_new_tokens=4, do_sample=False)
    assert answer.tokens > 0 and answer.read < 20
    kvbits.disable(model)
