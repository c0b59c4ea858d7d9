"""Split conversations of a dataset into prompts and responses, for algorithms that learn from its responses.

A response is a text, or a list of messages that ends with one of the assistant and may repeat the prompt. Without a
column of prompts, the prompt is what the responses of a row share: all messages before the last one, or before the
first one of the assistant (`every_turn`). The assistant's messages after the prompt are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]


def as_messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def is_message(value: Any) -> bool:
    """Return whether a value is a message: with a role, and with content or tool calls."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return value.get("content") is not None or bool(value.get("tool_calls"))


def is_answered(value: Any) -> bool:
    """Return whether a value is a list of messages that ends with one of the assistant."""
    return (
        isinstance(value, list) and all(map(is_message, value)) and [it["role"] for it in value[-1:]] == ["assistant"]
    )


def split(
    table: dict[str, list[Any]], prompt: str | None, responses: Sequence[str], every_turn: bool
) -> dict[str, list[Any]]:
    """Return the table with prompts and responses in separate columns.

    `prompt` names the column of prompts, or of conversations that end with the response. None: the prompt is the
    messages that the response columns share.
    """
    name = responses[0]
    if prompt is None and any(map(is_answered, table.get(name, ()))):
        rows = zip(*(table[it] for it in responses if it in table), strict=True)
        return table | {"prompt": [_shared(row, every_turn) for row in rows]}
    if prompt in table and name not in table and len(responses) == 1 and any(map(is_answered, table[prompt])):
        given = table[prompt]
        asked = [_shared([value], every_turn) if is_answered(value) else value for value in given]
        return table | {prompt: asked, name: [value if is_answered(value) else None for value in given]}
    return table


def _shared(responses: Sequence[Any], every_turn: bool) -> Sequence[Message] | None:
    """Return the prompt of responses that contain it."""
    answered = [it for it in responses if is_answered(it)]
    if not answered:
        return None
    first: list[Message] = answered[0]
    starts = [place for place, message in enumerate(first) if message["role"] == "assistant"]
    if every_turn:
        return first[: starts[0]]
    for start in reversed(starts):
        ask = _plain(first[:start])
        if all(_plain(it[:start]) == ask and it[start:] and it[start]["role"] == "assistant" for it in answered):
            return first[:start]
    return first[:-1]


def response_text(
    response: Sequence[Message], prompt: Sequence[Message], asked: str, render: Callable[..., str] | None
) -> str | tuple[str, ...]:
    """Return the text of a response as it follows `asked`, the text of its prompt, including the end of the turn.

    Of several messages, return a tuple: the assistant's, what is between, the assistant's, and so on.

    Args:
        render: applies the chat template to messages, with `ask=True` for the start of an answer at the end; None:
            without a template, the text is the content of the message.

    Raises:
        ValueError: the response has another prompt, or a rendered conversation does not start with its beginning.
    """
    repeats = _plain(response[: len(prompt)]) == _plain(prompt)
    turns = response[len(prompt) :] if repeats else response
    if turns[0]["role"] != "assistant":
        raise ValueError(
            "begins with other messages than the prompt\nGive it the same messages, or only those that follow."
        )
    if render is None:
        if len(turns) > 1 or turns[0].get("content") is None:
            raise ValueError(
                "has several messages or tool calls, which need a chat template\nUse a model that has one."
            )
        return str(turns[0]["content"])
    whole, end = render([*prompt, *turns]), 0
    parts: list[str] = []
    for place, message in enumerate(turns):
        if message["role"] != "assistant":
            continue
        start = render([*prompt, *turns[:place]], ask=True) if place else asked
        # An engine stops at the end of the turn; templates add only whitespace after it.
        done = (render([*prompt, *turns[: place + 1]]) if place < len(turns) - 1 else whole).rstrip()
        if not whole.startswith(start):
            raise ValueError(
                "cannot be separated from its prompt: the chat template renders the whole conversation differently from"
                " the prompt alone\nGive the response as a text that follows the prompt."
            )
        if not whole.startswith(done):
            raise ValueError(
                f"has an answer, message {place + 1}, that the chat template renders differently once others follow\n"
                "Learn the last one only (algorithm.turns=last), or give data.chat_template=FILE without this difference."
            )
        parts += [whole[end : len(start)]] if parts else []
        parts.append(done[len(start) :])
        end = len(done)
    return tuple(parts) if len(parts) > 1 else parts[0]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without keys that have no value, which Parquet adds."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]
