"""From messages to tokens, through the model's chat template, without losing any of what a request says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvbits.serve.errors import Refused


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to speak.

    Args:
        messages: as Transformers' templates take them.
        tools: that the model may call.
        variables: of the template.

    Raises:
        Refused: if the model has no template, or its template refuses the messages or has no place for part of them.
    """
    if not tokenizer.chat_template:
        raise Refused("this model has no chat template: use /v1/completions", code="no_chat_template")
    template = tokenizer.get_chat_template(tools=tools)
    called = any(message.get("tool_calls") for message in messages)
    for param, what, given in (("tools", "tools", tools), ("messages", "tool_calls", called)):
        if given and what not in template:
            raise Refused(f"the chat template of this model has no place for {what}", param=param)
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in own or name not in template:
            raise Refused(
                f"the chat template of this model has no variable {name!r} to set", param="chat_template_kwargs"
            )
    try:
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **variables
        )
    except Exception as error:  # templates raise what they like, jinja2's own errors and those of Python
        raise Refused(f"the chat template of this model refuses these messages: {error}", param="messages") from error
    return list(ids)
