"""Transformers' own handlers of chat completions and completions, made to run on the engine.

Theirs is what a request becomes: templates, tools, the parsing of reasoning and of calls, and every object and event of
the answer. Ours is what happens between: the queue of requests, the engine, and what their handlers leave to chance
(seeds, stop sequences, sampling without ``do_sample``, errors inside a stream). Their ``ModelManager``, which loads and
drops models as requests name them, is of no use to a server of one model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.completion_usage import PromptTokensDetails
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    BaseHandler,
    DirectStreamer,
    GenerationState,
    Modality,
    ReasoningText,
    ToolCall,
    build_response_parser,
)

from kvbits.serve.engine import Aborted, Engine, Job
from kvbits.serve.errors import Refused, failed
from kvbits.serve.fields import CHAT, COMPLETION, Check, check
from kvbits.serve.metrics import Metrics
from kvbits.serve.queue import RequestQueue
from kvbits.serve.stops import Stops
from kvbits.serve.template import render

log = logging.getLogger("kvbits.serve")

LEGACY_ANSWER_TOKENS = 16
"""Of ``/v1/completions``, where a request does not say: OpenAI's number."""


@dataclass
class Serving:
    """What all requests share.

    Attributes:
        engine, tokenizer: of the one model.
        name: under which it is served.
        queue: where requests wait.
        metrics: what becomes of them.
        answer_tokens: of a chat answer at most, where a request does not say.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    name: str
    queue: RequestQueue
    metrics: Metrics
    answer_tokens: int = 1024

    def refuse_unless_served(self, model: str) -> None:
        """Raise :class:`Refused` for another model than the one there is."""
        if model != self.name:
            raise Refused(
                f"there is no model {model!r} here; the one that is served is {self.name!r}",
                404,
                param="model",
                code="model_not_found",
            )


class _Pieces(asyncio.Queue[Any]):
    """An answer as it comes; an error that was put in is raised where it would be taken out."""

    def get_nowait(self) -> Any:
        piece = super().get_nowait()
        if isinstance(piece, Exception):
            raise piece
        return piece


class _Writer(DirectStreamer):
    """Makes of tokens pieces of text, up to a stop sequence."""

    def __init__(self, tokenizer: Any, loop: Any, queue: _Pieces, parser: Any, stops: Stops) -> None:
        super().__init__(tokenizer, loop, queue, response_parser=parser)
        self._first = False  # the engine shows new tokens only, no prompt
        self._stops = stops
        self._gone = threading.Event()

    def see(self, token: int) -> bool:
        """One more token; True where the answer ends with it."""
        self.put(torch.tensor([token]))
        return self._stops.found

    def _enqueue(self, item: Any) -> None:
        pieces = [item]
        if item is None:
            pieces = [self._stops.rest(), None]
        elif type(item) is str:  # neither reasoning nor the call of a tool
            pieces = [self._stops.feed(item)]
        for piece in pieces:
            if piece != "":
                super()._enqueue(piece)

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        super()._enqueue(error)

    def cancel(self) -> None:
        """Nobody reads any more. The engine looks at this itself; theirs would raise out of :meth:`see`."""
        self._gone.set()

    @property
    def cancelled(self) -> bool:
        return self._gone.is_set()


class _Request(BaseGenerateManager):
    """One request in the queue, and what Transformers' handlers call to have it answered."""

    def __init__(self, serving: Serving, stops: Stops, seed: int | None) -> None:
        self.serving, self.stops, self.seed = serving, stops, seed
        self.arrived = time.perf_counter()
        self.job: Job | None = None
        self.writer: _Writer | None = None
        self.refused = Refused("the answer was cancelled", 499, code="cancelled")

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[_Pieces, _Writer]:
        """Enter the queue. What is returned gets the pieces of the answer, then None."""
        pieces = _Pieces()
        loop = asyncio.get_running_loop()
        self.writer = writer = _Writer(processor._tokenizer, loop, pieces, response_parser, self.stops)
        self.job = Job(inputs["input_ids"][0], gen_config, writer.see, lambda: writer.cancelled, self.seed)
        self.serving.queue.enter(self)
        return pieces, writer

    async def generate_non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        """Not used: an answer that is not streamed is one whose pieces are put together."""
        raise NotImplementedError

    def run(self) -> None:
        """In the thread of the engine."""
        job, writer, metrics = self.job, self.writer, self.serving.metrics
        assert job is not None and writer is not None
        start = time.perf_counter()
        try:
            self.serving.engine.run(job)
            if job.ended:
                job.config.max_new_tokens = None  # the handlers compare with it to tell "stop" from "length"
            metrics.answered(job, self.arrived, time.perf_counter() - start)
            writer.end()
        except Aborted:
            metrics.cancelled.inc()
            metrics.answered(job, self.arrived, time.perf_counter() - start)
            writer.fail(self.refused)
        except Exception:
            metrics.failed.inc()
            log.exception("an answer failed")
            writer.fail(failed())

    def refuse(self, why: Refused) -> None:
        """End the answer early, and say why."""
        assert self.writer is not None
        self.refused = why
        self.writer.cancel()
        if self.serving.queue.running is not self:
            self.writer.fail(why)

    def cancel(self) -> None:
        """Nobody waits any more; harmless after the end."""
        if self.writer is not None:
            self.writer.cancel()
        self.serving.queue.leave(self)

    def stop(self) -> None:
        self.cancel()


class _Events(StreamingResponse):
    """A stream of events that ends the work when it is over, however that came."""

    def __init__(self, events: AsyncIterator[str], request: _Request) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.request = request

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.request.cancel()


class _Handler(BaseHandler):
    """One request.

    Args:
        serving: what all share.
        body: the JSON object that came.
        request_id: of the answer.
    """

    fields: ClassVar[Mapping[str, Check]]
    required: ClassVar[str]
    _streaming: Callable[..., StreamingResponse]
    _non_streaming: Callable[..., Awaitable[JSONResponse]]

    def __init__(self, serving: Serving, body: Mapping[str, Any], request_id: str) -> None:
        super().__init__(None, GenerationState())  # type: ignore[arg-type]
        self.serving, self.request_id = serving, request_id
        self.asked = check(body, self.fields, self.required)
        self.streams = self.asked.get("stream", False)
        self.include_usage = self.asked.get("stream_options", {}).get("include_usage", False)
        serving.refuse_unless_served(self.asked.get("model", serving.name))
        stops = self.asked.get("stop", [])
        stops = [stops] if isinstance(stops, str) else stops
        own = serving.engine.model.generation_config.stop_strings or []
        own = [own] if isinstance(own, str) else own
        self.request = _Request(serving, Stops([*stops, *own]), self.asked.get("seed"))

    async def answer(self) -> Response:
        """Wait in the queue, and answer. Raises :class:`Refused`."""
        serving = self.serving
        ids = await asyncio.to_thread(self.tokens)
        if not ids:
            raise Refused(f"{self.required!r} has no tokens in it: it is empty", param=self.required)
        arguments = {
            "request_id": self.request_id,
            "model": serving.engine.model,
            "processor": serving.tokenizer,
            "model_id": serving.name,
            "inputs": {"input_ids": torch.tensor([ids])},
            "gen_config": self.generation_config(len(ids)),
            "gen_manager": self.request,
            **self.more(),
        }
        if self.streams:
            return _Events(self._events(self._streaming(**arguments).body_iterator), self.request)
        try:
            return await self._non_streaming(**arguments)
        finally:
            self.request.cancel()

    def tokens(self) -> list[int]:
        """Token ids of the prompt."""
        raise NotImplementedError

    def more(self) -> dict[str, Any]:
        """Arguments of this endpoint alone."""
        return {}

    def most_tokens(self) -> tuple[int | None, int]:
        """Tokens of the answer: as asked for, and where nothing is."""
        raise NotImplementedError

    def generation_config(self, prompt_tokens: int) -> GenerationConfig:
        """What ``generate`` does for this request: what the model's own config says, where the request does not."""
        engine = self.serving.engine
        vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
        biases = {int(token): float(bias) for token, bias in self.asked.get("logit_bias", {}).items()}
        if biases and max(biases) >= vocabulary:
            raise Refused(f"'logit_bias' names token {max(biases)}; there are {vocabulary}", param="logit_bias")
        temperature, top_p = self.asked.get("temperature"), self.asked.get("top_p")
        config = self._build_generation_config(
            {"temperature": temperature, "top_p": top_p}, engine.model.generation_config
        )
        if biases:
            config.sequence_bias = {(token,): bias for token, bias in biases.items()}
        if temperature or (temperature is None and top_p is not None and top_p < 1):
            config.do_sample = True
            config.top_k = config.top_k or 0  # none, rather than the 50 of Transformers
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        if config.pad_token_id is None:
            eos = config.eos_token_id
            config.pad_token_id = eos[0] if isinstance(eos, list) else eos
        config.cache_implementation = config.max_length = config.stop_strings = None
        config.num_beams = config.num_return_sequences = 1
        config.max_new_tokens = engine.admit(prompt_tokens, *self.most_tokens())
        return config

    def usage(self, answer_tokens: int) -> CompletionUsage:
        """Tokens of prompt and answer, and how many of them a cache had read before."""
        job = self.request.job
        assert job is not None
        prompt = len(job.prompt)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=answer_tokens,
            total_tokens=prompt + answer_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=job.reused_tokens),
        )

    async def _events(self, events: Any) -> AsyncIterator[str]:
        """Theirs, and the two that they lack: an error in a form that clients read, and the end."""
        try:
            async for event in events:
                yield event
        except Refused as error:
            yield f"data: {json.dumps(error.body)}\n\n"
        else:
            yield "data: [DONE]\n\n"

    def _build_chunk_sse(self, *args: Any, usage: CompletionUsage | None = None, **kwargs: Any) -> str:
        """One event; after the last one another with the usage, for those who asked."""
        event: str = super()._build_chunk_sse(*args, **kwargs)  # type: ignore[misc]
        if usage is None or not self.include_usage:
            return event
        last = json.loads(event.removeprefix("data: "))
        counted = self.usage(usage.completion_tokens).model_dump(exclude_none=True)
        return event + f"data: {json.dumps({**last, 'choices': [], 'usage': counted})}\n\n"

    async def _pieces(self, model: Any, processor: Any, inputs: Any, gen_config: Any, parser: Any = None) -> list[Any]:
        """The whole answer, in pieces."""
        coming, _ = self.request.generate_streaming(model, processor, inputs, gen_config, self.request_id, parser)
        pieces = []
        while (piece := await coming.get()) is not None:
            pieces.append(piece)
        return pieces

    def _reason(self) -> str:
        job = self.request.job
        assert job is not None
        return "stop" if job.ended else "length"

    def _answer_tokens(self) -> int:
        assert self.request.writer is not None
        return self.request.writer.total_tokens


class Chat(_Handler, ChatCompletionHandler):
    """``POST /v1/chat/completions``."""

    fields, required = CHAT, "messages"

    def tokens(self) -> list[int]:
        asked = self.asked["messages"]
        messages = self.get_processor_inputs_from_messages(asked, Modality.LLM)
        for message, said in zip(messages, asked, strict=True):  # theirs leaves out what is said beside a call
            if said.get("tool_calls"):
                alone = {"role": said["role"], "content": said.get("content")}
                (plain,) = self.get_processor_inputs_from_messages([alone], Modality.LLM)
                message["content"] = plain["content"]
        variables = self.asked.get("chat_template_kwargs", {})
        return render(self.serving.tokenizer, messages, self.asked.get("tools"), variables)

    def more(self) -> dict[str, Any]:
        return {"tools": self.asked.get("tools")}

    def most_tokens(self) -> tuple[int | None, int]:
        asked = self.asked.get("max_completion_tokens", self.asked.get("max_tokens"))
        return asked, self.serving.answer_tokens

    async def _non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, tools: Any = None, **_: Any
    ) -> JSONResponse:
        parser = build_response_parser(processor, model, inputs["input_ids"], tools=tools)
        pieces = await self._pieces(model, processor, inputs, gen_config, parser)
        calls = [
            ChatCompletionMessageToolCall(
                id=f"{self.request_id}_tool_call_{index}",
                type="function",
                function={"name": call.name, "arguments": call.arguments},  # type: ignore[arg-type]
            )
            for index, call in enumerate(piece for piece in pieces if isinstance(piece, ToolCall))
        ]
        return JSONResponse(
            self._build_completion(
                self.request_id,
                "".join(piece for piece in pieces if type(piece) is str),
                self.serving.name,
                finish_reason="tool_calls" if calls else self._reason(),
                usage=self.usage(self._answer_tokens()),
                tool_calls=calls or None,  # type: ignore[arg-type]
                reasoning_content="".join(x for x in pieces if isinstance(x, ReasoningText)) or None,
            )
        )


class Text(_Handler, CompletionHandler):
    """``POST /v1/completions``."""

    fields, required = COMPLETION, "prompt"

    def tokens(self) -> list[int]:
        ids: list[int] = self.serving.tokenizer(self.asked["prompt"]).input_ids
        return ids

    def most_tokens(self) -> tuple[int | None, int]:
        return self.asked.get("max_tokens"), LEGACY_ANSWER_TOKENS

    async def _non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **_: Any
    ) -> JSONResponse:
        text = "".join(await self._pieces(model, processor, inputs, gen_config))
        choice = CompletionChoice(text=text, index=0, finish_reason=self._reason())  # type: ignore[arg-type]
        answer = Completion(
            id=self.request_id,
            created=int(time.time()),
            model=self.serving.name,
            choices=[choice],
            object="text_completion",
            usage=self.usage(self._answer_tokens()),
        )
        return JSONResponse(answer.model_dump(exclude_none=True))
