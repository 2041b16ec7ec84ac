"""A real server over TCP on the loopback interface, asked by OpenAI's own client, and by others that misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import served
import zoo
from kvbits.cli import app

served.skip_unless_serving()

import openai  # noqa: E402  skipped where it is missing

from kvbits.serve.engine import Engine  # noqa: E402
from kvbits.serve.fields import CHAT, COMPLETION  # noqa: E402
from kvbits.serve.handlers import Chat  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = "int4,residual=16,block=32"
ASK: list[Any] = [{"role": "user", "content": "w3 w4 w5"}]


@pytest.fixture(scope="module")
def tiny(one_thread: None) -> Iterator[served.Local]:
    """One server for all tests that leave it as it is."""
    model = zoo.build("llama", eos_token_id=1, max_position_embeddings=4096)
    with served.in_thread(Engine(model, SCHEME, 10**7), served.tokenizer()) as server:
        yield server


def chat(client: Any, messages: Any = ASK, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 8, **options})


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{(first + 7 * i) % 100}" for i in range(count))


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_answer_in_pieces(tiny: served.Local) -> None:
    client = tiny.client()
    whole = chat(client, max_tokens=20)
    events = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content and len(text.split()) == 20
    assert [e.choices[0].finish_reason for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[0].choices[0].delta.role == "assistant" and len({event.id for event in events}) == 1
    assert events[-1].choices == [] and all(event.usage is None for event in events[:-1])
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 20, 26)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 20)
    assert all(event.usage is None for event in chat(client, stream=True))


def test_a_stream_ends_as_clients_expect(tiny: served.Local) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    body = json.dumps({"prompt": "w1", "max_tokens": 3, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    lines = response.read().decode().strip().split("\n\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_completions(tiny: served.Local) -> None:
    client = tiny.client()
    whole = client.completions.create(model="tiny", prompt="w1 w2 w3")
    assert whole.usage.completion_tokens == 16 and whole.choices[0].finish_reason == "length"
    parts = client.completions.create(model="tiny", prompt="w1 w2 w3", stream=True, max_tokens=16)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_stops_end_an_answer_and_are_no_part_of_it(tiny: served.Local) -> None:
    client = tiny.client()
    text = client.completions.create(model="tiny", prompt="w9 w8", max_tokens=12).choices[0].text
    word = text.split()[5]
    before = text[: text.index(word)]
    stopped = client.completions.create(model="tiny", prompt="w9 w8", max_tokens=12, stop=["never", word])
    assert stopped.choices[0].text == before and stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == len(before.split()) + 1
    parts = list(client.completions.create(model="tiny", prompt="w9 w8", max_tokens=12, stop=word, stream=True))
    assert "".join(part.choices[0].text for part in parts) == before
    assert parts[-1].choices[0].finish_reason == "stop"
    # The last token that was allowed completes it: still its own end.
    count = len(before.split()) + 1
    last = client.completions.create(model="tiny", prompt="w9 w8", max_tokens=count, stop=word)
    assert last.choices[0].finish_reason == "stop"


def test_sampling_obeys_seed_and_temperature(tiny: served.Local) -> None:
    client = tiny.client()
    greedy = chat(client).choices[0].message.content
    assert chat(client, temperature=0, seed=4).choices[0].message.content == greedy
    hot = {"temperature": 2, "max_tokens": 12}
    one, same, other = (chat(client, seed=seed, **hot).choices[0].message.content for seed in (1, 1, 2))
    assert one == same != other
    assert len({chat(client, **hot).choices[0].message.content for _ in range(3)}) > 1
    assert chat(client, top_p=0.0001, seed=1).choices[0].message.content == greedy  # nothing but the likeliest is left
    biased = " ".join([served.WORDS[20 - len(served.SPECIAL)]] * 3)
    bias = chat(client, logit_bias={"20": 100}, max_completion_tokens=3)
    assert bias.choices[0].message.content == biased
    bias = client.completions.create(model="tiny", prompt="w9 w8", max_tokens=3, logit_bias={"20": 100})
    assert bias.choices[0].text == biased


def test_the_next_turn_reads_only_what_is_new(tiny: served.Local) -> None:
    client, before = tiny.client(), tiny.metrics()
    messages: list[Any] = [{"role": "user", "content": words(150)}]
    first = chat(client, messages)
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "w1 w2"}]
    second = chat(client, messages)
    prompt, reused = second.usage.prompt_tokens, second.usage.prompt_tokens_details.cached_tokens
    assert prompt - 20 < reused < prompt  # the last message, and what the template puts before it
    assert first.usage.prompt_tokens_details.cached_tokens < 10
    after = tiny.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvbits_reused_tokens_total"] == reused + first.usage.prompt_tokens_details.cached_tokens
    assert grown["kvbits_prompt_tokens_total"] == first.usage.prompt_tokens + prompt
    assert grown["kvbits_answer_tokens_total"] == 16
    assert grown["kvbits_first_token_seconds_count"] == grown["kvbits_generation_seconds_count"] == 2


def test_models_and_health(tiny: served.Local) -> None:
    client = tiny.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("org/huge")
    with pytest.raises(openai.NotFoundError, match="there is no model 'huge' here") as error:
        chat(client, model="huge")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    connection.request("HEAD", "/health")  # as many who watch servers ask
    assert connection.getresponse().status == 200


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "at least one message"),
    "an unknown field": ({"extra_body": {"top_k": 3}}, "unknown field 'top_k'"),
    "two answers": ({"n": 2}, "'n' 2 is not supported"),
    "more than there is room for": ({"max_tokens": 5000}, "and 5000 of answer are more than the 4096"),
    "a template that refuses": ({"messages": [{"role": "developer", "content": "w1"}]}, "no developers"),
    "tools without a place": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "no place for tools"),
    "another template": (
        {"extra_body": {"chat_template_kwargs": {"chat_template": "w1"}}}, "no variable 'chat_template'"),
    "a token that is not there": ({"logit_bias": {"500": 1}}, "token 500; there are 128"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_answered_is_refused(tiny: served.Local, options: dict[str, Any], expected: str) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as error:
            chat(tiny.client(), **{**options, **more})
        assert expected in error.value.message and error.value.body["type"] == "invalid_request_error"


def test_variables_of_the_template_are_set(tiny: served.Local) -> None:
    loud = chat(tiny.client(), extra_body={"chat_template_kwargs": {"loud": True}})
    assert loud.usage.prompt_tokens == 7


def test_what_is_said_beside_a_call_is_read(tiny: served.Local) -> None:
    words = served.tokenizer()
    calls = "{% for c in m.tool_calls %}w9 {% endfor %}"
    words.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}} {calls}{{% endfor %}}"
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "w7"}, {"type": "text", "text": "w8"}]
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2 w3", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": parts, "tool_calls": [call, call]},
    ]
    chat = Chat(dataclasses.replace(tiny.serving, tokenizer=words), {"messages": messages}, "x")
    assert words.decode(chat.tokens()) == "w1 w2 w3 w9 w9 w7 w8 w9 w9"


RAW: dict[str, tuple[bytes | Iterator[bytes], dict[str, str], int, str]] = {
    "no JSON": (b'{"prompt": ', {}, 400, "the body is no JSON"),
    "no object": (b'["w1"]', {}, 400, "no JSON object, but list"),
    "not a number": (b'{"prompt": "w1", "temperature": NaN}', {}, 400, "NaN is no number in JSON"),
    "a deep hole": (b"[" * 100_000, {}, 400, "the body is no JSON"),
    "no text": (b'{"prompt": "\xff"}', {}, 400, "the body is no JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', {}, 400, "half of a surrogate pair"),
    "half a character for a field": (b'{"prompt": "w1", "\\ud800": 1}', {}, 400, "unknown field"),
    "an empty prompt": (b'{"prompt": ""}', {}, 400, "'prompt' has no tokens"),
    "another type": (b'{"prompt": "w1"}', {"Content-Type": "text/plain"}, 415, "send application/json"),
    "too much": (b" " * (2**20 + 1), {}, 413, "larger than the 1,048,576 bytes"),
    "too much, bit by bit": (b" " * (2**20 + 1), {"Transfer-Encoding": "chunked"}, 413, "larger than the 1,048,576"),
}


@pytest.mark.parametrize(("body", "headers", "status", "expected"), RAW.values(), ids=list(RAW))
def test_bodies_that_are_no_requests(
    tiny: served.Local, body: bytes, headers: dict[str, str], status: int, expected: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    chunked = "Transfer-Encoding" in headers
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before the end of the body
        connection.request(
            "POST", "/v1/completions", iter([body[:100], body[100:]]) if chunked else body,
            {"Content-Type": "application/json", **headers}, encode_chunked=chunked,
        )  # fmt: skip
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    assert response.status == status and expected in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


LEAVES = st.none() | st.booleans() | st.integers(-3, 2000) | st.floats(allow_nan=False)
JSON = st.recursive(
    LEAVES | st.sampled_from(["", "w1 w2", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "7"]), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(sorted({*CHAT, *COMPLETION} - {"max_tokens"})), JSON, max_size=5),
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
)
def test_no_body_is_an_error_of_the_server(tiny: served.Local, body: dict[str, Any], path: str) -> None:
    """Whatever it holds is answered or refused, and nothing of it reaches the model that the model cannot take."""
    whole = {"messages": ASK} if "chat" in path else {"prompt": "w1 w2"}
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps({**whole, "max_tokens": 3, **body}), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status in (200, 400, 404), (text, body)
    assert "internal_error" not in text, (text, body)


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/chat/completions", 405), ("POST", "/v1/embeddings", 404), ("POST", "/load_model", 404),
    ("POST", "/reset", 404), ("POST", "/v1/responses", 404), ("GET", "/docs", 404), ("GET", "/openapi.json", 404),
])  # fmt: skip
def test_what_is_not_there_says_what_is(tiny: served.Local, method: str, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == status and "/v1/chat/completions" in json.loads(response.read())["error"]["message"]


def test_an_error_of_the_server_is_told_and_the_server_goes_on(
    tiny: served.Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, before = tiny.client(), tiny.metrics()["kvbits_failed_total"]

    def fail(*_: Any) -> None:
        raise RuntimeError('out of "memory"\n')

    with monkeypatch.context() as patched:
        patched.setattr(tiny.engine, "_generate", fail)
        with pytest.raises(openai.InternalServerError, match="its log has the reason"):
            chat(client)
        with pytest.raises(openai.APIError, match="its log has the reason"):
            list(chat(client, stream=True))
    assert tiny.metrics()["kvbits_failed_total"] == before + 2
    with monkeypatch.context() as patched:  # before there is anything to run
        patched.setattr(tiny.serving, "tokenizer", None)
        with pytest.raises(openai.InternalServerError, match="its log has the reason"):
            chat(client)
    assert tiny.metrics()['kvbits_requests_total{path="/v1/chat/completions",status="500"}'] == 2
    assert chat(client).choices[0].message.content


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_everything_but_health(tiny: served.Local) -> None:
    with served.in_thread(tiny.engine, served.tokenizer(), key="sécret") as server:
        for wrong in ("none", "secre", "secretx"):
            for call in (lambda c: c.models.list(), chat, lambda c: c.models.retrieve("tiny")):
                with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"):
                    call(server.client(wrong))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for path, key, status in (
            ("/health", "", 200), ("/metrics", "", 401), ("/metrics", "Bearer", 401), ("/metrics", "Basic sécret", 401),
            ("/metrics", "Bearer sécret", 200), ("/v1/models", "bearer sécret", 200), ("/v1/models", "sécret", 401),
        ):  # fmt: skip
            connection.request("GET", path, headers={"Authorization": key.encode()})
            response = connection.getresponse()
            response.read()
            assert response.status == status, (path, key)


def test_the_right_key_opens(tiny: served.Local) -> None:
    with served.in_thread(tiny.engine, served.tokenizer(), key="secret") as server:
        assert chat(server.client()).choices and server.metrics()["kvbits_requests_total"] > 0


# -- load, and clients that go away ------------------------------------------------------------------------------------


@pytest.fixture
def slow(tiny: served.Local, monkeypatch: pytest.MonkeyPatch) -> Iterator[served.Local]:
    """A server of its own with room for three to wait, whose model takes its time."""
    from kvbits.serve.engine import Job

    run = tiny.engine.run

    def slowly(job: Job) -> None:
        see = job.see
        job.see = lambda token: time.sleep(0.02) or see(token)  # type: ignore[func-returns-value]
        run(job)

    monkeypatch.setattr(tiny.engine, "run", slowly)
    with served.in_thread(tiny.engine, served.tokenizer(), queue=3) as server:
        yield server


def test_a_client_that_goes_away_ends_its_work(slow: served.Local) -> None:
    client = slow.client()
    with chat(client, max_tokens=2000, stream=True) as stream:
        assert len([event for event, _ in zip(stream, range(4), strict=False)]) == 4
    slow.wait_for("kvbits_cancelled_total", 1)
    with pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=2000, timeout=0.5)
    slow.wait_for("kvbits_cancelled_total", 2)
    slow.wait_for("kvbits_running", 0)
    assert slow.metrics()["kvbits_answer_tokens_total"] < 500
    assert chat(client).choices[0].finish_reason == "length"


def test_a_client_that_goes_away_before_its_body_is_no_error(
    tiny: served.Local, caplog: pytest.LogCaptureFixture
) -> None:
    left = 'kvbits_requests_total{path="/v1/completions",status="499"}'
    before = tiny.metrics().get(left, 0)
    for sent in (b"", b'{"prompt": "w1', b'{"prompt": "w1 w2", "max_tokens": 2000}'):
        with socket.create_connection(("127.0.0.1", tiny.port)) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n")
            raw.sendall(b"Content-Length: %d\r\n\r\n" % (39 if len(sent) == 39 else 100) + sent)
    tiny.wait_for(left, before + 3)
    tiny.wait_for("kvbits_running", 0)
    assert "Traceback" not in caplog.text and "ASGI" not in caplog.text
    assert chat(tiny.client()).choices


def test_more_than_may_wait_are_told_to_come_back(slow: served.Local) -> None:
    client, outcomes = slow.client(), list[str]()

    def ask(number: int) -> None:
        try:
            outcomes.append(chat(client, max_tokens=25, stream=number % 2 == 1) and "answered")
        except openai.InternalServerError as refused:
            assert refused.status_code == 503 and refused.code == "overloaded"
            assert int(refused.response.headers["retry-after"]) >= 1
            outcomes.append("refused")

    with ThreadPoolExecutor(12) as many:
        list(many.map(ask, range(12)))
    assert sorted(outcomes) == ["answered"] * outcomes.count("answered") + ["refused"] * outcomes.count("refused")
    assert 4 <= outcomes.count("answered") < 12
    slow.wait_for("kvbits_waiting", 0)
    slow.wait_for("kvbits_running", 0)


def test_those_who_leave_the_queue_make_room(slow: served.Local) -> None:
    client = slow.client()
    with chat(client, max_tokens=2000, stream=True):
        slow.wait_for("kvbits_running", 1)
        waiting = [chat(client, stream=True) for _ in range(3)]
        slow.wait_for("kvbits_waiting", 3)
        with pytest.raises(openai.InternalServerError, match="3 requests are waiting"):
            chat(client)
        for stream in waiting:
            stream.close()
        slow.wait_for("kvbits_waiting", 0)
    assert chat(client).choices


def test_an_end_is_told_to_those_who_wait(tiny: served.Local, slow: served.Local) -> None:
    """One that runs and one that waits, in a server that ends at once: both get an error that says so."""
    told = list[str]()

    def ask(client: Any, stream: bool) -> None:
        with pytest.raises(openai.APIError, match="shutting down") as error:
            answer = chat(client, max_tokens=2000, stream=stream)
            list(answer if stream else ())
        told.append(str(error.value))

    with served.in_thread(tiny.engine, served.tokenizer(), grace=0.1) as ending:
        asking = [threading.Thread(target=ask, args=(ending.client(), stream)) for stream in (True, False, True)]
        for number, thread in enumerate(asking):
            thread.start()
            ending.wait_for("kvbits_waiting", number and float(number))
            ending.wait_for("kvbits_running", 1)
    for thread in asking:
        thread.join(10)
    assert len(told) == 3


def test_many_conversations_at_once_stay_in_the_budget() -> None:
    """24 requests of 12 conversations, 8 at a time, in a budget for a few: all answered as if alone."""
    model = zoo.build("llama", eos_token_id=1, max_position_embeddings=2048)
    engine = Engine(model, "exact", 256 * 1000)
    asked = [[{"role": "user", "content": words(100 + 10 * (n % 12), n % 12)}] for n in range(24)]
    peaks = list[float]()
    with served.in_thread(engine, served.tokenizer()) as server:
        client, over = server.client(), threading.Event()

        def watch() -> None:
            while not over.is_set():
                peaks.append(server.metrics()["kvbits_cache_bytes"])
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(8) as many:
            answers = list(many.map(lambda messages: chat(client, messages).choices[0].message.content, asked))
        over.set()
        watcher.join()
        assert answers[:12] == answers[12:] and len(set(answers)) > 6
        final = server.metrics()
    assert 0 < max(peaks) <= final["kvbits_cache_budget_bytes"] == 256_000
    assert final["kvbits_caches_evicted_total"] > 5 and final["kvbits_answer_tokens_total"] == 24 * 8
    alone = Engine(model, "exact", 10**8)
    with served.in_thread(alone, served.tokenizer()) as server:
        assert [chat(server.client(), one).choices[0].message.content for one in asked[:4]] == answers[:4]


def test_what_the_budget_cannot_hold_is_refused_before_it_is_made() -> None:
    model = zoo.build("llama", eos_token_id=1, max_position_embeddings=2048)
    with served.in_thread(Engine(model, "exact", 256 * 300), served.tokenizer()) as server:
        message = r"budget of all caches is 76,800: room for \d+ tokens"
        with pytest.raises(openai.BadRequestError, match=message) as error:
            chat(server.client(), [{"role": "user", "content": words(500)}])
        assert error.value.code == "memory_budget_exceeded"
        assert server.metrics()["kvbits_cache_bytes"] == 0
        assert chat(server.client(), max_tokens=None).usage.completion_tokens == 32  # the server's default fits


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return served.save(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=100_000)


def test_killed_in_the_middle_and_started_again(folder: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = served.start(folder, "--scheme", SCHEME, "--memory", "64MB", log=log)
    stream = iter(chat(server.client(), max_tokens=50_000, stream=True))
    assert next(stream).choices and server.process.poll() is None
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(Exception, match=r"peer closed connection|Connection error"):  # of the client's transport
        list(stream)
    kept = tmp_path / "kept"
    options = ("--scheme", SCHEME, "--grace", "1", "--prefix-folder", str(kept))
    again = served.start(folder, *options, port=server.port, log=log)
    client = again.client()
    assert chat(client, [{"role": "user", "content": words(60)}]).choices[0].finish_reason == "length"
    # Asked to stop in the middle of an answer, it waits for a second and ends.
    stream = iter(chat(client, max_tokens=50_000, stream=True))
    next(stream)
    start = time.monotonic()
    again.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert again.process.wait(60) in (0, -signal.SIGTERM)
    assert 0.9 < time.monotonic() - start < 20
    assert list(kept.glob("*.safetensors"))  # of that answer, and of what there was of the last one
    text = log.read_text()
    assert f"tiny under {SCHEME} at http://127.0.0.1:{server.port}/v1" in text and "Traceback" not in text


@pytest.mark.parametrize(("options", "expected"), [
    (["--scheme", "int5"], "near: int8, int4"),
    (["--memory", "many"], "--memory 'many' is no size"),
    (["--memory", "0"], "must be more than 0"),
    (["--memory", "1kB"], "no room for a cache of 2 tokens"),
    (["--context", "1000000"], "more than the 100000 that the model was made for"),
    (["--api-key", " "], "the API key is empty"),
    (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    (["--port", "99999"], "--port"),
])  # fmt: skip
def test_what_a_user_gets_wrong_is_one_clear_line(folder: str, options: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["serve", folder, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and expected in result.output and "Traceback" not in result.output


def test_a_port_that_another_server_takes_meanwhile_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once may both have an address as long as neither listens."""
    from kvbits.serve import server

    with server.bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        try:
            late = server.bind("127.0.0.1", port)
        except OSError:
            pytest.skip("this system gives an address to one alone")
        other.listen()
        monkeypatch.setattr(server, "bind", lambda *_: late)
        result = CliRunner().invoke(app, ["serve", folder, "--port", str(port)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"cannot listen on 127.0.0.1 port {port}: " in result.output


def test_a_port_in_use_is_named(folder: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", folder, "--port", port])
    assert result.exit_code == 2 and f"cannot listen on 127.0.0.1 port {port}" in result.output


# -- the small model ---------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_small_model_converses(smollm2: Any) -> None:
    """Two turns, of which the second reuses the first."""
    from kvbits import disable

    model, words_of = smollm2
    engine = Engine(model, "default", 2 * 10**8)
    try:
        with served.in_thread(engine, words_of) as server:
            client = server.client()
            messages: list[Any] = [{"role": "user", "content": "Name three rivers of Europe."}]
            first = chat(client, messages, max_tokens=24)
            said = first.choices[0].message.content
            assert any(river in said for river in ("Danube", "Rhine", "Volga", "Seine", "Thames", "Elbe"))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Which is the longest?"}]
            events = list(chat(client, messages, max_tokens=12, stream=True, stream_options={"include_usage": True}))
            assert events[-1].usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
            assert "".join(event.choices[0].delta.content or "" for event in events[:-1]).strip()
    finally:
        engine.close()
        disable(model)
