"""What a request may ask: a table of fields for each endpoint, and what is right for each.

Transformers' server ignores fields that it does not know what to do with. Here a field is obeyed, or of no consequence
for the answer, or refused by name. ``null`` is the same as leaving a field out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvbits.serve.errors import Refused

Check: TypeAlias = Callable[[Any], str | None]
"""What is wrong with a value, as the rest of a sentence that begins with the field's name; None: nothing."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_STOPS = 4


def check(body: Mapping[str, Any], fields: Mapping[str, Check], required: str) -> dict[str, Any]:
    """The fields of a request that were given, once each is known to be right.

    Raises:
        Refused: naming the first field that is unknown, missing, of the wrong kind, out of range or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refused(f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")
        wrong = fields[name](value)
        if wrong is not None:
            raise Refused(f"{name!r} {wrong}", param=name, code="invalid_value")
    if required not in given:
        raise Refused(f"{required!r} is missing", param=required, code="missing_required_parameter")
    return given


def shown(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- kinds of values ---------------------------------------------------------------------------------------------------


def anything(_: Any) -> None:
    """Of no consequence for the answer."""


def text(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be a string, not {shown(value)}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair in it, which is no text"
    return None


def boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"


def number(low: float, high: float) -> Check:
    def wrong(value: Any) -> str | None:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if fits else f"must be a number from {low} to {high}, not {shown(value)}"

    return wrong


def integer(low: int, high: int | None = None) -> Check:
    def wrong(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and value >= low and (high is None or value <= high):
            return None
        upper = "or more" if high is None else f"to {high}"
        return f"must be a whole number, {low} {upper}, not {shown(value)}"

    return wrong


def only(*allowed: Any) -> Check:
    """For what this server does in one way alone."""

    def wrong(value: Any) -> str | None:
        if any(type(value) is type(one) and value == one for one in allowed):
            return None
        return f"{shown(value)} is not supported here; leave it out or give {' or '.join(map(shown, allowed))}"

    return wrong


def never(value: Any) -> str:
    return "is not supported here; leave it out"


def temperature(value: Any) -> str | None:
    wrong = number(0, 2)(value)
    if wrong is None and 0 < value < 0.01:  # logits divided by less may overflow
        return f"must be 0, or at least 0.01, not {shown(value)}"
    return wrong


def stop(value: Any) -> str | None:
    sequences = [value] if isinstance(value, str) else value
    if not isinstance(sequences, list) or len(sequences) > MOST_STOPS:
        return f"must be a string or a list of at most {MOST_STOPS}, not {shown(value)}"
    wrong = ("must not be empty" if one == "" else text(one) for one in sequences)
    return next((f"is not right: a stop sequence {reason}" for reason in wrong if reason is not None), None)


def logit_bias(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"must be an object of token ids and numbers, not {shown(value)}"
    allowed = number(-100, 100)
    wrong = {token: bias for token, bias in value.items() if not _is_token(token) or allowed(bias)}
    return f"has {shown(wrong)}; token ids and numbers from -100 to 100 are allowed" if wrong else None


def _is_token(text: str) -> bool:
    """Whether a key is a number as JSON writes it, and no longer than any that Python makes of digits."""
    return len(text) < 20 and text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def stream_options(value: Any) -> str | None:
    known = {"include_usage": boolean, "include_obfuscation": only(False)}
    return _object(value, known)


def variables(value: Any) -> str | None:
    return None if isinstance(value, dict) else f"must be an object of variables, not {shown(value)}"


def _object(value: Any, known: Mapping[str, Check]) -> str | None:
    if not isinstance(value, dict):
        return f"must be an object, not {shown(value)}"
    for name, one in value.items():
        if one is None:  # as clients write what they leave out
            continue
        if name not in known:
            return f"has the unknown field {name!r}; known are {', '.join(map(repr, known))}"
        wrong = known[name](one)
        if wrong is not None:
            return f"is not right: {name!r} {wrong}"
    return None


# -- messages ----------------------------------------------------------------------------------------------------------


def messages(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"must be a list of at least one message, not {shown(value)}"
    wrong = ((index, _message(message)) for index, message in enumerate(value))
    return next((f"is not right: message {index} {reason}" for index, reason in wrong if reason is not None), None)


def _message(message: Any) -> str | None:
    known = {"role": only(*ROLES), "content": _content, "tool_calls": _tool_calls, "tool_call_id": text}
    wrong = _object(message, known)
    if wrong is not None:
        return wrong
    if message.get("role") is None:
        return f"has no 'role'; known are {', '.join(ROLES)}"
    if message.get("content") is None and not message.get("tool_calls"):
        return "has no 'content'"
    return None


def _content(value: Any) -> str | None:
    if isinstance(value, str):
        return text(value)
    if not isinstance(value, list):
        return f"must be a string or a list of parts, not {shown(value)}"
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            return f"has the part {shown(part)}; this server takes text alone: {{'type': 'text', 'text': ...}}"
        wrong = text(part.get("text"))
        if wrong is not None:
            return f"has a part whose 'text' {wrong}"
    return None


def _tool_calls(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"must be a list, not {shown(value)}"
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"has the call {shown(call)}, without the name of a function"
        try:
            arguments = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return f"has a call of {function['name']!r} whose arguments are no JSON object in a string"
    return None


def tools(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"must be a list, not {shown(value)}"
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"has {shown(tool)}; each must be {{'type': 'function', 'function': {{'name': ...}}}}"
    return None


# -- the endpoints -----------------------------------------------------------------------------------------------------

_BOTH: dict[str, Check] = {
    "model": text,
    "max_tokens": integer(1),
    "temperature": temperature,
    "top_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stop,
    "logit_bias": logit_bias,
    "stream": boolean,
    "stream_options": stream_options,
    "n": only(1),
    "frequency_penalty": only(0, 0.0),
    "presence_penalty": only(0, 0.0),
    "user": anything,
}

CHAT: dict[str, Check] = {
    **_BOTH,
    "messages": messages,
    "max_completion_tokens": integer(1),
    "tools": tools,
    "chat_template_kwargs": variables,
    "tool_choice": only("auto"),
    "parallel_tool_calls": only(True),
    "logprobs": only(False),
    "top_logprobs": only(0),
    "response_format": only({"type": "text"}),
    "modalities": only(["text"]),
    "store": only(False),
    "audio": never,
    "function_call": never,
    "functions": never,
    "moderation": never,
    "reasoning_effort": never,
    "verbosity": never,
    "web_search_options": never,
    "metadata": anything,
    "prediction": anything,  # makes the same answer faster
    "prompt_cache_key": anything,
    "prompt_cache_options": anything,
    "prompt_cache_retention": anything,
    "safety_identifier": anything,
    "service_tier": anything,
}
"""Of ``/v1/chat/completions``; ``messages`` is required."""

COMPLETION: dict[str, Check] = {
    **_BOTH,
    "prompt": text,
    "best_of": only(1),
    "echo": only(False),
    "logprobs": never,
    "suffix": only(""),
}
"""Of ``/v1/completions``; ``prompt`` is required."""
