"""`PromptOptions`: settings of the conversion of rows to prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Conversion of a row to a prompt. Example: PromptOptions(template="Question: {question}\\nAnswer:", chat="never")"""

    prompt_column: str = ""
    """Column with text or messages; empty: `prompt`, else the only one of `messages`, `question` and `text`. A field of
    a column with objects is named with a dot, here and in all settings that name a column: `extra_info.question`."""
    template: str = ""
    """Format string over columns, instead of a prompt column: "Q: {question}\\nA:"."""
    system: str = ""
    """System message before the prompt; requires a chat template."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Wrap a plain text as a user message with the chat template; auto: if the tokenizer has one."""
    chat_template: str = ""
    """File with a Jinja template that replaces the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template: {enable_thinking: false}."""
    tools_column: str = ""
    """Column with the tools that the chat template shows: a list of JSON schemas, or its text; empty: none."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """New names of columns or fields: {old: new}; all other options use the new names."""
    max_prompt_tokens: int = 1024
    """Maximum number of tokens in a prompt."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Handling of a longer prompt; truncate keeps its last tokens."""
