"""Split conversations of a dataset into prompts and responses, for algorithms that learn from its responses.

A response is a text or a list of messages that ends with one of the assistant. The messages before the last one repeat
the prompt, or are the prompt if the data has no column for it. Only the last message is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]


def as_messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def is_answered(value: Any) -> bool:
    """Return whether a value is a list of messages that ends with one of the assistant."""
    return (
        isinstance(value, list)
        and all(isinstance(it, Mapping) and {"role", "content"} <= it.keys() for it in value)
        and [it["role"] for it in value[-1:]] == ["assistant"]
    )


def split(table: dict[str, list[Any]], prompt: str | None, responses: Sequence[str]) -> dict[str, list[Any]]:
    """Return the table with prompts and responses in separate columns.

    `prompt` names the column of prompts, or of conversations that end with the response. None: the prompt is the
    messages before the last one in the first response column.
    """
    name = responses[0]
    if prompt is None and any(map(is_answered, table.get(name, ()))):
        return table | {"prompt": [value[:-1] if is_answered(value) else None for value in table[name]]}
    if prompt in table and name not in table and len(responses) == 1 and any(map(is_answered, table[prompt])):
        given = table[prompt]
        asked = [value[:-1] if is_answered(value) else value for value in given]
        return table | {prompt: asked, name: [value[-1:] if is_answered(value) else None for value in given]}
    return table


def response_text(
    response: Sequence[Message],
    prompt: Sequence[Message],
    asked: str,
    render: Callable[[Sequence[Message]], str] | None,
) -> str:
    """Return the text of a response as it follows `asked`, the text of its prompt, including the end of the turn.

    `render` applies the chat template; None: without a template, the text is the content of the message.

    Raises:
        ValueError: the response has another prompt, or the rendered conversation does not start with `asked`.
    """
    *before, last = response
    if before and _turns(before) != _turns(prompt):
        raise ValueError(
            "begins with other messages than the prompt\nGive it the same messages, or only its last message."
        )
    if render is None:
        return str(last["content"])
    whole = render([*prompt, last])
    if not whole.startswith(asked):
        raise ValueError(
            "cannot be separated from its prompt: the chat template renders the whole conversation differently from"
            " the prompt alone\nGive the response as a text that follows the prompt."
        )
    # An engine stops at the end of the turn; templates add only whitespace after it.
    return whole[len(asked) :].rstrip()


def _turns(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in messages]
