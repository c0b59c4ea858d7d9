"""`ChatTemplate`: renders messages of the data with the tokenizer's chat template, or that of `data.chat_template`.

A template is code of the model's author and may raise anything; callers limit its time and memory (limits.py).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlcore.data.conversations import Message
from rlcore.data.limits import LIMIT_BYTES, limited
from rlcore.data.options import PromptOptions
from rlcore.errors import ConfigError, DataError, did_you_mean, did_you_mean_path

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None


class ChatTemplate:
    """The chat template of a run."""

    def __init__(self, tokenizer: Any, options: PromptOptions) -> None:
        """Check the options.

        Raises:
            UserError: there is no template, or it does not use a variable that is given.
        """
        self._name, self._apply, self._options = tokenizer.name_or_path, tokenizer.apply_chat_template, options
        exists = bool(tokenizer.chat_template or options.chat_template)
        self.wraps_text = options.chat != "never" and exists
        """True: prompts are rendered, also those that are texts."""
        missing = f"the tokenizer of '{self._name}' has no chat template"
        self.missing = "data.chat=never" if options.chat == "never" else missing
        """Reason for which nothing is rendered."""
        if options.chat == "always" and not exists:
            raise DataError(f"data.chat=always, but {missing}\nType data.chat=never, or use a model that has one.")
        asked = {
            "system": options.system,
            "tools_column": options.tools_column,
            "chat_template": options.chat_template,
            "chat_template_kwargs": options.chat_template_kwargs,
        }
        given = [name for name, value in asked.items() if value]
        if given and not self.wraps_text:
            raise ConfigError(
                f"data.{given[0]} is set, but {self.missing}\n"
                "Put the text into data.template, or use a model with a chat template."
            )
        self._arguments = template_arguments(tokenizer, options)

    def render(self, messages: Sequence[Message], where: str, tools: Tools, *, ask: bool = False) -> str:
        """Return the text of messages; `ask` adds the start of an answer.

        Raises:
            DataError: the template refuses them, with their place `where`.
        """
        if self._options.system:
            if messages[0]["role"] == "system":
                raise DataError(
                    f"{where}: the prompt has a system message, and data.system is set too\n"
                    "Leave data.system out to keep the row's."
                )
            messages = [{"role": "system", "content": self._options.system}, *messages]
        try:
            return str(self._apply(messages, tools=tools, add_generation_prompt=ask, tokenize=False, **self._arguments))
        except (TimeoutError, MemoryError) as error:
            limit = error if str(error) else f"needed more than {LIMIT_BYTES / 2**30:g} GiB of memory"
            raise DataError(
                f"{where}: the chat template of '{self._name}' {limit}\n"
                "Fix its loops in chat_template.jinja or tokenizer_config.json, or disable it:  data.chat=never"
            ) from error
        except Exception as error:  # a chat template is the model author's code and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"{where}: the chat template refused messages with the roles {roles}: {error}\n"
                "Fix the messages, or disable the template with data.chat=never and data.template=..."
            ) from error

    def check_tools(self, tools: Tools, where: str) -> None:
        """Raise ConfigError if the template ignores tools."""
        question = [{"role": "user", "content": "?"}]
        with limited():
            if tools and self.render(question, where, tools) == self.render(question, where, None):
                raise ConfigError(
                    f"data.tools_column={self._options.tools_column}: the chat template of '{self._name}' ignores tools\n"
                    "Use a model with tool support, or give data.chat_template=FILE."
                )


def template_arguments(tokenizer: Any, options: PromptOptions) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` for `data.chat_template` and `data.chat_template_kwargs`.

    Raises:
        ConfigError: there is no such file, or the template does not use a variable.
    """
    variables = options.chat_template_kwargs
    given = {"chat_template": _read(options.chat_template)} if options.chat_template else {}
    template = given.get("chat_template") or tokenizer.chat_template or ""
    text = template if isinstance(template, str) else " ".join(template.values())
    words = sorted(set(re.findall(r"\b[a-zA-Z_]\w*", text)))
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in variables:
        if name in own:
            raise ConfigError(f"data.chat_template_kwargs.{name}: rlcore sets this itself\nRemove it.")
        if name not in words:
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template has no variable '{name}'."
                f"{did_you_mean(name, words)}\nRemove it, or give another template:  data.chat_template=FILE"
            )
    return {**variables, **given}


def _read(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        others = list(file.parent.iterdir()) if file.parent.is_dir() else []
        raise ConfigError(
            f"data.chat_template={path}: there is no such file.{did_you_mean_path(file, others)}\n"
            "Give a file with a Jinja template, such as chat_template.jinja of a model."
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template={path} cannot be read: {error}\nSave the file as UTF-8.") from error


def tools_of(value: Any, where: str) -> Tools:
    """Return the tools of a row, which are a list of JSON schemas or its JSON text; None if there are none.

    Raises:
        DataError: the value is something else, with its place `where`.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        tools = value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(
            f"{where} is {value!r:.60}, not a list of tools\n"
            'Write JSON schemas, or their JSON text: [{"type": "function", "function": {...}}]'
        )
    return tools or None
