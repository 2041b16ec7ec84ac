"""What a server is made of, without HTTP: where texts end, what may be asked, sizes, the pool of caches, the engine."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvbits
import zoo
from kvbits import serve
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.serve.errors import Refused
from kvbits.serve.fields import CHAT, COMPLETION, check
from kvbits.serve.pool import Pool
from kvbits.serve.queue import RequestQueue
from kvbits.serve.sizes import Sizes
from kvbits.serve.stops import Stops

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = "int4,residual=16,block=32,sinks=4"


# -- stop sequences ----------------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """A text up to the stop sequence that is complete first, by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))], True
    return text, False


@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 20), max_size=5),
)
def test_a_text_ends_before_the_stop_that_is_complete_first_however_it_comes(
    text: str, stops: list[str], places: list[int]
) -> None:
    watch, bounds = Stops(stops), sorted({0, len(text), *(place for place in places if place < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    shown = ""
    for piece in pieces:
        shown += watch.feed(piece)
        assert text.startswith(shown)
    found = watch.found
    assert (shown + watch.rest(), found) == cut(text, stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    watch = Stops(["</done>"])
    assert watch.feed("one < two") == "one < two"
    assert watch.feed(" </do") == " "
    assert watch.feed("g>") == "</dog>"
    assert watch.feed("end</done> more") == "end" and watch.found
    assert watch.feed("more") == "" and watch.rest() == ""


# -- fields ------------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "w1"}]
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"temprature": 1}, "did you mean 'temperature'"),
    "a field of Transformers' server": ({"generation_config": "{}"}, "unknown field 'generation_config'"),
    "text for a number": ({"temperature": "hot"}, "must be a number from 0 to 2, not \"hot\""),
    "a boolean for a number": ({"temperature": True}, "must be a number"),
    "not a number": ({"temperature": float("nan")}, "must be a number"),
    "cold beyond measure": ({"temperature": 1e-9}, "must be 0, or at least 0.01"),
    "more than all": ({"top_p": 1.5}, "from 0 to 1"),
    "no tokens": ({"max_tokens": 0}, "1 or more"),
    "half a token": ({"max_tokens": 2.5}, "must be a whole number"),
    "fewer than no tokens": ({"max_completion_tokens": -1}, "1 or more"),
    "a large seed": ({"seed": 2**63}, "must be a whole number"),
    "two answers": ({"n": 2}, "2 is not supported here; leave it out or give 1"),
    "true for one": ({"n": True}, "true is not supported"),
    "probabilities": ({"logprobs": True}, "give false"),
    "probabilities of the first": ({"top_logprobs": 3}, "give 0"),
    "penalties": ({"frequency_penalty": 0.5}, "not supported"),
    "a schema": ({"response_format": {"type": "json_object"}}, "not supported"),
    "effort": ({"reasoning_effort": "high"}, "not supported here; leave it out"),
    "an empty stop": ({"stop": ""}, "a stop sequence must not be empty"),
    "many stops": ({"stop": ["a", "b", "c", "d", "e"]}, "at most 4"),
    "a stop that is a number": ({"stop": [3]}, "must be a string"),
    "a bias for no token": ({"logit_bias": {"word": 1}}, "token ids"),
    "a bias without bounds": ({"logit_bias": {"1": 1e9}}, "from -100 to 100"),
    "a bias beyond all floats": ({"logit_bias": {"1": 10**400}}, "from -100 to 100"),
    "a token of many digits": ({"logit_bias": {"9" * 5000: 1}}, "token ids"),
    "a token that is spelled otherwise": ({"logit_bias": {"3": 1, "03": 5}}, "token ids"),
    "a number beyond all floats": ({"temperature": 10**400}, "must be a number from 0 to 2"),
    "a stream of text": ({"stream": "yes"}, "must be true or false"),
    "unknown options": ({"stream_options": {"usage": True}}, "unknown field 'usage'"),
    "no messages": ({"messages": []}, "at least one message"),
    "messages of text": ({"messages": "hello"}, "must be a list"),
    "a message of text": ({"messages": ["hello"]}, "message 0 must be an object"),
    "no role": ({"messages": [{"content": "w1"}]}, "message 0 has no 'role'"),
    "an unknown role": ({"messages": [{"role": "king", "content": "w1"}]}, "\"king\" is not supported"),
    "no content": ({"messages": [*MESSAGES, {"role": "user"}]}, "message 1 has no 'content'"),
    "content of numbers": ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list of parts"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text alone"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    "a name": ({"messages": [{"role": "user", "content": "w1", "name": "Ada"}]}, "unknown field 'name'"),
    "a call without a name": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without the name"),
    "a call without JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "no JSON object",
    ),
    "tools without a name": ({"tools": [{"type": "function"}]}, "each must be"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "expected"), WRONG.values(), ids=list(WRONG))
def test_what_cannot_be_obeyed_is_refused_by_name(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(Refused) as refused:
        check({"messages": MESSAGES, **more}, CHAT, "messages")
    error = refused.value.body["error"]
    assert expected in error["message"] and repr(error["param"]) in error["message"]
    assert refused.value.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == next(iter(more))


def test_what_changes_nothing_is_taken() -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "n": 1, "logprobs": False, "presence_penalty": 0, "stop": None,
        "frequency_penalty": 0.0, "response_format": {"type": "text"}, "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked = check({"messages": MESSAGES, **harmless}, CHAT, "messages")
    assert asked["messages"] == MESSAGES and "stop" not in asked
    calls = [
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
    ]
    check({"messages": [*MESSAGES, *calls]}, CHAT, "messages")
    with pytest.raises(Refused, match="'prompt' is missing"):
        check({"prompt": None}, COMPLETION, "prompt")
    with pytest.raises(Refused, match="'prompt' must be a string"):
        check({"prompt": ["a", "b"]}, COMPLETION, "prompt")


def test_every_field_of_the_schema_is_known() -> None:
    pytest.importorskip("openai", reason="its types name the fields")
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
    from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams

    assert set(CompletionCreateParamsStreaming.__annotations__) <= set(CHAT)
    assert {"messages", "temperature", "logprobs", "stream"} <= set(CHAT)
    assert set(TextParams.__annotations__) <= set(COMPLETION)


# -- the queue ---------------------------------------------------------------------------------------------------------


class Recorded:
    """A request that notes its number, once it may."""

    def __init__(self, number: int, done: list[int], gate: threading.Event) -> None:
        self.number, self.done, self.gate = number, done, gate

    def run(self) -> None:
        self.gate.wait(10)
        self.done.append(self.number)
        if self.number == 1:
            raise RuntimeError("the engine goes on")

    def refuse(self, why: Refused) -> None:
        self.done.append(-self.number)


def test_the_queue_is_first_come_first_served_and_bounded() -> None:
    queue, done, gate = RequestQueue(3), list[int](), threading.Event()
    requests = [Recorded(number, done, gate) for number in range(5)]
    queue.enter(requests[0])
    while not queue.running:
        time.sleep(0.001)
    for request in requests[1:4]:
        queue.enter(request)
    assert len(queue) == 3
    with pytest.raises(Refused, match="3 requests are waiting") as refused:
        queue.enter(requests[4])
    assert refused.value.status == 503 and int(refused.value.headers["Retry-After"]) >= 1
    queue.leave(requests[2])
    queue.leave(requests[4])
    queue.enter(requests[4])
    gate.set()
    while len(done) < 4:
        time.sleep(0.001)
    assert done == [0, 1, 3, 4]
    gate.clear()
    queue.enter(requests[2])
    while queue.running is None:
        time.sleep(0.001)
    queue.enter(requests[3])
    queue.stop()
    gate.set()
    queue.join(10)
    assert done[4:] == [-3, -2, 2]
    with pytest.raises(Refused, match="shutting down"):
        queue.enter(requests[0])


# -- sizes -------------------------------------------------------------------------------------------------------------

SCHEMES = ("default", "exact", "fp8-static", "lm2,centred,residual=16,block=32,sinks=4+8", "int4-1%,layers[0]=kivi2")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
def test_no_cache_outgrows_its_bound_and_the_bound_is_near(family: str) -> None:
    model, text = zoo.build(family), zoo.prompt(1, 400)
    for scheme in SCHEMES:
        empty = kvbits.cache_for(model, scheme)
        sizes = Sizes(model, empty)
        assert empty.get_seq_length() == 0
        for tokens, steps in ((1, 0), (40, 6), (200, 10), (400, 0)):
            cache = kvbits.cache_for(model, scheme)
            zoo.feed(model, cache, text[:, :tokens], torch.ones(1, tokens), (tokens - steps, *(1,) * steps))
            assert int(cache.nbytes) <= sizes.at(tokens) == sizes.at(tokens, cache), (scheme, tokens)
            if tokens == 400:
                assert sizes.at(tokens) < 1.4 * int(cache.nbytes), scheme
        assert sizes.at(sizes.most_tokens(100_000, 512)) <= 100_000
        assert sizes.most_tokens(sizes.at(77), 512) == 77 and sizes.most_tokens(sizes.at(77) - 1, 512) == 76
        assert sizes.most_tokens(10**9, 512) == 512 and sizes.most_tokens(10, 512) == 0


# -- the pool ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", max_position_embeddings=2048)


def read(model: Any, cache: KVCache, ids: torch.Tensor) -> None:
    """Those of ``ids [T]`` that the cache has not read yet."""
    with torch.no_grad():
        new = ids[None, cache.get_seq_length() :]
        model(input_ids=new, use_cache=True, **{cache_name(model): cache})


TOKEN_BYTES = 2 * 2 * 2 * 8 * 4 + 4  # layers, K and V, heads, channels, float32; the id


class Flat:
    """Sizes of exact caches, without room for growth."""

    def at(self, tokens: int, cache: KVCache | None = None) -> int:
        return TOKEN_BYTES * tokens


def filled(model: Any, pool: Any, ids: torch.Tensor, prompt_tokens: int | None = None) -> tuple[int, KVCache]:
    """Take a cache for a prompt, read it, give it back: how much was reused, and the cache."""
    cache, known = pool.take(ids, len(ids))
    assert torch.equal(cache.tokens[0] if known else ids[:0], ids[:known])
    assert pool.nbytes <= pool.budget_bytes
    read(model, cache, ids)
    assert pool.measure(cache) <= pool.budget_bytes
    pool.give(cache, prompt_tokens or len(ids))
    assert pool.nbytes <= pool.budget_bytes
    return known, cache


def test_the_longest_unused_goes_first_and_is_freed_at_once(model: Any) -> None:
    pool = Pool(lambda: kvbits.cache_for(model, "exact"), Flat(), 250 * TOKEN_BYTES)
    a, b, c = (zoo.prompt(1, 100, seed)[0] for seed in (1, 2, 3))
    gc.disable()
    try:
        assert filled(model, pool, a)[0] == 0
        seen = weakref.ref(filled(model, pool, b)[1])
        assert filled(model, pool, a)[0] == 99  # a is the last one used now
        assert filled(model, pool, c)[0] == 0 and pool.evicted == 1
        assert seen() is None
    finally:
        gc.enable()
    assert filled(model, pool, a)[0] == 99
    assert filled(model, pool, b)[0] == 0 and pool.evicted == 2


def test_a_shared_beginning_is_shared_and_a_conversation_goes_on_in_place(model: Any) -> None:
    sizes = Sizes(model, kvbits.cache_for(model, SCHEME))
    pool = Pool(lambda: kvbits.cache_for(model, SCHEME), sizes, 10**6)
    first, other = zoo.prompt(1, 300, 1)[0], zoo.prompt(1, 300, 2)[0]
    _, cache = filled(model, pool, first)
    branch = torch.cat([first[:200], other[:50]])
    known, copied = filled(model, pool, branch)
    assert 200 - 32 < known <= 200 and copied is not cache and len(pool.kept) == 2
    longer = torch.cat([first, other[:40]])
    known, same = filled(model, pool, longer)
    assert known == 300 and same is cache and len(pool.kept) == 2
    # A beginning of what is there: a fork, so that the longer one stays.
    known, short = filled(model, pool, longer[:320])
    assert known > 250 and short is not cache and pool.kept[0].tokens.tolist() == branch.tolist()
    assert [len(one.tokens) for one in pool.kept] == [250, 340, 320]
    # Again the same prompt, to be answered anew, and one that goes on a little before the last answer.
    assert filled(model, pool, longer[:320])[1] is short
    pool.kept[-1].prompt_tokens = 310
    known, again = filled(model, pool, torch.cat([longer[:310], other[50:90]]))
    assert again is short and known == 310 and [len(one.tokens) for one in pool.kept] == [250, 340, 350]
    assert filled(model, pool, torch.cat([first[:20], other]))[0] == 0  # so little is read again


PACKING = "int4,residual=0,block=32,sinks=0"


def branching(model: Any, room: int, shared: int, own: int, branches: int) -> tuple[Any, torch.Tensor]:
    """A pool with room for so many tokens alone, and branches of ``own`` tokens each behind a shared beginning."""
    sizes = Sizes(model, kvbits.cache_for(model, PACKING))
    pool = Pool(lambda: kvbits.cache_for(model, PACKING), sizes, sizes.at(room))
    start = zoo.prompt(1, shared, 1)[0]
    for seed in range(2, 2 + branches):
        filled(model, pool, torch.cat([start, zoo.prompt(1, own, seed)[0]]))
    return pool, start


def test_what_branches_share_counts_once(model: Any) -> None:
    pool, start = branching(model, room=6000, shared=1200, own=100, branches=12)
    assert len(pool.kept) == 12 and not pool.evicted  # alone they would be 15,600 tokens
    assert int(kvbits.nbytes_of([one.cache for one in pool.kept])) == pool.nbytes <= pool.budget_bytes
    assert filled(model, pool, torch.cat([start, start]))[0] == 1200 - 1200 % 32


def test_what_branches_shared_comes_back_when_they_go(model: Any) -> None:
    """Another text wants part of the room: some of the branches go, and not all for want of their memory."""
    pool, _ = branching(model, room=6800, shared=64, own=300, branches=15)
    assert len(pool.kept) == 15
    filled(model, pool, zoo.prompt(1, 2000, 99)[0])
    assert 0 < pool.evicted == 16 - len(pool.kept) < 8


def test_the_growth_of_what_is_shared_is_in_the_budget(model: Any) -> None:
    """A small branch of a large family: when the memory of all grows, it grows by a part of all of it."""
    pool, start = branching(model, room=6000, shared=64, own=1000, branches=5)
    for seed in range(20):
        filled(model, pool, torch.cat([start, zoo.prompt(1, 60 + 11 * seed, 50 + seed)[0]]))


# -- the engine --------------------------------------------------------------------------------------------------------


def make_engine(model: Any, scheme: str = SCHEME, budget: int = 10**7, **options: Any) -> Any:
    from kvbits.serve.engine import Engine

    return Engine(model, scheme, budget, **options)


def job(prompt: torch.Tensor, tokens: int, see: Callable[[int], bool] = lambda token: False, **options: Any) -> Any:
    from transformers import GenerationConfig

    from kvbits.serve.engine import Job

    kinds = {name: options.pop(name) for name in ("aborted", "seed") if name in options}
    config = GenerationConfig(max_new_tokens=tokens, **{"do_sample": False, "pad_token_id": 0, **options})
    return Job(prompt, config, see, **kinds)


def answer(engine: Any, prompt: torch.Tensor, tokens: int, **options: Any) -> tuple[list[int], int]:
    """New tokens, and how many of the prompt were reused."""
    one = job(prompt, tokens, **options)
    engine.run(one)
    assert engine.pool.nbytes <= engine.pool.budget_bytes
    return one.tokens[len(prompt) :], one.reused_tokens


@pytest.mark.parametrize("scheme", [SCHEME, "default,residual=20"])
def test_an_answer_is_that_of_a_conversation_that_stayed_in_one_cache(model: Any, scheme: str) -> None:
    """Turn after turn through the pool, and beside it one cache, cropped and read by hand."""
    engine, cache = make_engine(model, scheme), kvbits.cache_for(model, scheme)
    conversation = torch.empty(0, dtype=torch.int64)
    for turn in range(4):
        said = zoo.prompt(1, 60 + 11 * turn, turn)[0]
        prompt = torch.cat([conversation, said])
        new, reused = answer(engine, prompt, 20)
        cut = cache.whole(min(len(conversation), cache.get_seq_length())) if turn else 0
        assert reused == cut and (turn == 0 or cut > len(conversation) - 40)
        if cut < cache.get_seq_length():
            cache.crop(cut - cache.get_seq_length())
        ids = prompt[None]
        by_hand = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0,
            **{cache_name(model): cache},
        )  # fmt: skip
        assert new == by_hand[0, len(prompt) :].tolist()
        # As where a client cuts what was said: a part of the answer is not part of the next prompt.
        conversation = torch.cat([prompt, torch.tensor(new[: 20 - 5 * turn])])
    assert len(engine.pool.kept) == 1


def test_under_the_exact_scheme_reuse_changes_nothing(model: Any) -> None:
    """Random conversations that branch, in a budget for a few of them: every answer is that of an empty server."""
    chance = random.Random(0)
    engine = make_engine(model, "exact", budget=900 * TOKEN_BYTES)
    texts, reused = [zoo.prompt(1, 30)[0]], 0
    for number in range(30):
        base = chance.choice(texts)
        prompt = torch.cat([base[: chance.randint(1, len(base))], zoo.prompt(1, chance.randint(1, 60), number)[0]])
        new, known = answer(engine, prompt, 6)
        assert new == answer(make_engine(model, "exact"), prompt, 6)[0]
        texts.append(torch.cat([prompt, torch.tensor(new)])[:250])
        reused += known
    assert reused > 500 and engine.pool.evicted > 5


def test_an_aborted_prompt_leaves_the_pool_sound(model: Any) -> None:
    from kvbits.serve.engine import Aborted

    engine, said = make_engine(model), zoo.prompt(1, 200, 5)[0]
    first = zoo.prompt(1, 120)[0]
    start, _ = answer(engine, first, 10)
    prompt = torch.cat([first, torch.tensor(start), said])
    calls = iter([False, True])  # in the second layer of the prompt
    with pytest.raises(Aborted):
        engine.run(job(prompt, 10, aborted=lambda: next(calls)))
    assert [len(one.tokens) for one in engine.pool.kept] == [129]
    seen: list[int] = []
    with pytest.raises(Aborted):
        engine.run(job(prompt, 50, lambda token: bool(seen.append(token)), aborted=lambda: len(seen) >= 5))
    assert len(seen) == 5 and [len(one.tokens) for one in engine.pool.kept] == [len(prompt) + 4]
    other = make_engine(model)
    answer(other, first, 10)
    expected, _ = answer(other, prompt, 30)
    again = torch.cat([prompt, torch.tensor(seen)])
    new, reused = answer(engine, again, 25)
    assert seen + new == expected and reused == len(again) - 1


def test_windows_go_on_but_never_back() -> None:
    """Layers of the model's own type that dropped something are reused as a whole, or not at all."""
    from kvbits.serve.engine import Aborted

    windowed, said = zoo.build("gemma3"), zoo.prompt(1, 90)[0]
    engine = make_engine(windowed)
    new, _ = answer(engine, said[:60], 10)
    longer = torch.cat([said[:60], torch.tensor(new), said[60:80]])
    assert answer(engine, longer, 5)[1] == 69  # all but the last token of the answer, which was never read
    assert answer(engine, said[:60], 10) == (new, 0)
    # Aborted in the second layer, when the first has dropped what its window no longer sees: the cache goes.
    engine, calls = make_engine(windowed), iter([False, True])
    answer(engine, said[:60], 10)
    with pytest.raises(Aborted):
        engine.run(job(longer, 10, aborted=lambda: next(calls)))
    assert not engine.pool.kept and engine.pool.nbytes == 0
    assert answer(engine, longer, 5) == (answer(make_engine(windowed), longer, 5)[0], 0)


def test_caches_outlive_the_process_in_a_folder(model: Any, tmp_path: Path) -> None:
    """What had to make room, and what was there at the end, is found by the next engine, and answers the same."""
    prompts = [zoo.prompt(1, 150, seed)[0] for seed in range(4)]
    nexts = [torch.cat([prompt, zoo.prompt(1, 20, 50 + n)[0]]) for n, prompt in enumerate(prompts)]

    def engine(budget: int = 10**7) -> Any:
        return make_engine(model, budget=budget, folder=kvbits.PrefixStore(tmp_path, 10**8, model, SCHEME))

    first = engine(make_engine(model).sizes.at(400))
    for prompt in prompts:
        answer(first, prompt, 5)
    assert first.pool.evicted > 0
    first.pool.save()
    first.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    second, alone = engine(), make_engine(model)
    for prompt, longer in zip(prompts, nexts, strict=True):
        answer(alone, prompt, 5)
        expected, known = answer(alone, longer, 8)
        assert answer(second, longer, 8) == (expected, known) and known == 150
        assert answer(second, longer, 8) == (answer(alone, longer, 8)[0], 169)  # from memory now


def test_a_folder_that_takes_nothing_or_cannot_be_read_stops_no_answer(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kvbits.PrefixStore(tmp_path / "small", 1000, model, SCHEME)  # too little for any
    engine = make_engine(model, budget=make_engine(model).sizes.at(250), folder=folder)
    for seed in range(3):
        answer(engine, zoo.prompt(1, 200, seed)[0], 5)
    assert engine.pool.evicted == 2 and caplog.text.count("is not kept: this cache takes") == 2
    engine.pool.save()
    engine = make_engine(model, folder=kvbits.PrefixStore(tmp_path / "x", 10**8, model, SCHEME))
    (tmp_path / "x").rmdir()
    (tmp_path / "x").write_text("a file")
    assert len(answer(engine, zoo.prompt(1, 200)[0], 5)[0]) == 5
    assert "the folder of prefixes cannot be read" in caplog.text


def test_a_job_that_fails_takes_its_cache_with_it(model: Any) -> None:
    engine, prompt = make_engine(model), zoo.prompt(1, 100)[0]
    expected, _ = answer(engine, prompt, 10)

    def fail(token: int) -> bool:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        engine.run(job(prompt, 10, fail))
    assert engine.pool.nbytes == 0
    assert answer(engine, prompt, 10) == (expected, 0)


def test_seeds_decide_and_leave_no_trace(model: Any) -> None:
    engine, prompt = make_engine(model, "exact"), zoo.prompt(1, 50)[0]
    sampled = {"do_sample": True, "top_k": 0, "temperature": 1.5}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = answer(engine, prompt, 12, seed=1, **sampled)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert answer(engine, prompt, 12, seed=1, **sampled)[0] == one != answer(engine, prompt, 12, seed=2, **sampled)[0]
    assert answer(engine, prompt, 12, **sampled)[0] != answer(engine, prompt, 12, **sampled)[0]


def test_answers_end_by_themselves_or_at_the_limit(model: Any) -> None:
    engine, prompt = make_engine(model), zoo.prompt(1, 50)[0]
    whole, _ = answer(engine, prompt, 12)
    at_limit = job(prompt, 12)
    engine.run(at_limit)
    assert not at_limit.ended
    for end in (job(prompt, 12, eos_token_id=[whole[4], 1]), job(prompt, 12, lambda token: token == whole[4])):
        engine.run(end)
        assert end.ended and end.tokens[50:] == whole[: whole.index(whole[4]) + 1]


def test_what_has_no_room_is_refused_with_numbers(model: Any) -> None:
    engine = make_engine(model, "exact", budget=500 * TOKEN_BYTES)
    assert engine.admit(100, None, 1000) == engine.room_tokens - 100 and engine.admit(100, 20, 1000) == 20
    with pytest.raises(Refused, match=r"100 tokens of prompt and 500 of answer may take a cache of [\d,]+ bytes") as no:
        engine.admit(100, 500, 10)
    assert no.value.code == "memory_budget_exceeded" and f"at most {engine.room_tokens - 100}" in str(no.value)
    with pytest.raises(Refused, match="shorten the prompt"):
        engine.admit(1000, None, 10)
    with pytest.raises(Refused, match="more than the 2048 that there is room for") as long:
        engine.admit(2048, None, 10)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(ValueError, match="no room for a cache of 2 tokens"):
        make_engine(model, budget=1000)
    with pytest.raises(ValueError, match="3000 tokens is more than the 2048"):
        make_engine(model, context=3000)
    assert make_engine(model, context=64).room_tokens == 64


# -- packages ----------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PACKAGES", ("json", "no_such_server", "no_such_metrics"))
    with pytest.raises(ImportError, match=r"no_such_server, no_such_metrics: pip install 'kvbits\[serve\]'"):
        serve.require()
    monkeypatch.setattr(serve, "PACKAGES", ())
    monkeypatch.setattr(serve.transformers, "__version__", "5.23.1")
    with pytest.raises(ImportError, match=r"Transformers 5\.24 or later.*installed is 5\.23\.1"):
        serve.require()
