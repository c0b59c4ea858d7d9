"""Conversion of messages to token ids, turn by turn, without tokenizing the model's responses again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlcore.data.limits import limited
from rlcore.errors import ConfigError, ModelError, SampleError
from rlcore.protocols.environment import Message
from rlcore.protocols.optional import HasTools

_MARK = "WrittenByTheModel"
"""Placeholder for a response while the template is rendered; the text after it comes from the template."""


def tools_of(environment: object) -> Sequence[Callable[..., Any]]:
    """Return the tools of an environment, if it has any."""
    return environment.tools if isinstance(environment, HasTools) else ()


class Chat:
    """Chat template of a tokenizer, with the tools of an environment."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Callable[..., Any]] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check that the chat template can render the tools.

        Raises:
            ModelError: the tokenizer has no chat template, or one that ignores tools.
            ConfigError: a tool has no types or no description.
        """
        self.tokenizer = tokenizer
        self._tools = [schema(tool) for tool in tools] or None
        self._arguments = arguments
        name = tokenizer.name_or_path
        if not (tokenizer.chat_template or "chat_template" in arguments):
            raise ModelError(
                f"model.path={name}: its tokenizer has no chat template, which environments need\n"
                "Use a chat model, or leave out  environment"
            )
        question = [{"role": "user", "content": "?"}]
        if self._tools and self._render(question, self._tools) == self._render(question, None):
            raise ModelError(
                f"model.path={name}: its chat template ignores tools, but the environment has tools\n"
                "Use a model with tool support, or describe the tools in the environment's first message."
            )

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the first prompt."""
        return self._encode(self._render(messages, self._tools))

    def after(self, history: Sequence[Message], new: Sequence[Message], written: Sequence[int]) -> list[int]:
        """Return the token ids between two responses: the end of the model's turn and the `new` messages.

        `history` has the messages before that turn, `written` its token ids. An end token that the model
        wrote itself is not repeated.
        """
        text = self._render([*history, {"role": "assistant", "content": _MARK}, *new], self._tools)
        _, mark, rest = text.partition(_MARK)
        if not mark or _MARK in rest:
            raise ModelError(
                f"model.path={self.tokenizer.name_or_path}: its chat template does not render an assistant message"
                " verbatim and exactly once\nUse a model whose template does; environments with several turns need it."
            )
        ids = self._encode(rest)
        return ids[1:] if ids and written and ids[0] == written[-1] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a response, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        plain = [dict(message) for message in messages]
        try:
            with limited():
                return str(
                    self.tokenizer.apply_chat_template(
                        plain, tools=tools, add_generation_prompt=True, tokenize=False, **self._arguments
                    )
                )
        except Exception as error:  # a chat template is code of the model's author and may raise anything
            roles = ", ".join(str(message.get("role")) for message in plain)
            reason = str(error) or type(error).__name__
            raise SampleError(f"the chat template refused messages with the roles {roles}: {reason}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool for the chat template, with descriptions from its docstring."""
    from transformers.utils import get_json_schema

    name = getattr(tool, "__name__", repr(tool))
    try:
        return dict(get_json_schema(tool))
    except Exception as error:  # transformers raises DocstringParsingException, TypeHintParsingException, ValueError, …
        raise ConfigError(
            f"tool '{name}' has no schema: {error}\n"
            "Give every parameter a type, and the docstring a summary and a line per parameter under `Args:`."
        ) from error
