"""Convert the rows of a dataset to token ids: rename and check columns; build, tokenize and measure prompts.

Called once per dataset, at the start of a run and by `rlcore doctor`, so that problems of the data are reported before
anything else starts.

A plain text is tokenized with the tokenizer's defaults, except that the beginning-of-sequence token is never doubled
and an appended end-of-sequence token is removed. A chat is rendered by the tokenizer's chat template, which writes all
special tokens itself, so none are added.

Shapes: P prompts, T tokens (all prompts, concatenated).
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from rlcore.data.columns import RESERVED_COLUMNS, REWARD_PREFIX
from rlcore.data.conversations import Message, as_messages, is_answered, response_text, split
from rlcore.data.fingerprints import fingerprint_of
from rlcore.data.limits import LIMIT_BYTES, limited
from rlcore.data.text import unencodable
from rlcore.errors import ConfigError, DataError, did_you_mean
from rlcore.protocols.optional import NamesRows

if TYPE_CHECKING:
    from rlcore.protocols.dataset import Dataset

Prompt: TypeAlias = str | Sequence[Message]

_CANDIDATES: Final = ("prompt", "messages", "question", "text")
_CHUNK: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Conversion of a row to a prompt. Example: PromptOptions(template="Question: {question}\\nAnswer:", chat="never")"""

    prompt_column: str = ""
    """Column with text or messages; empty: `prompt`, else the only one of `messages`, `question` and `text`."""
    template: str = ""
    """Format string over columns, instead of a prompt column: "Q: {question}\\nA:"."""
    system: str = ""
    """System message before the prompt; requires a chat template."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Wrap a plain text as a user message with the chat template; auto: if the tokenizer has one."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """New names of columns: {old: new}; all other options use the new names."""
    max_prompt_tokens: int = 1024
    """Maximum number of tokens in a prompt."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Handling of a longer prompt; truncate keeps its last tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPrompts:
    """All prompts of a dataset; the index of a prompt is its `prompt_id`."""

    token_ids: np.ndarray
    """[T] int64."""
    offsets: np.ndarray
    """[P+1] int64; prompt i is token_ids[offsets[i]:offsets[i + 1]]."""
    rows: Mapping[str, Sequence[Any]]
    """[P] per column of the dataset, under its new name; `prompt` is the text or the messages, before the chat template."""
    source_index: np.ndarray
    """[P] int64, row number in the dataset."""
    counts: Mapping[str, int]
    """overlong_dropped and overlong_truncated, over the whole dataset."""

    def __len__(self) -> int:
        return len(self.source_index)

    @property
    def lengths(self) -> np.ndarray:
        """[P] int64, tokens of each prompt."""
        return np.diff(self.offsets)

    def fingerprint(self) -> str:
        """Return 16 hex digits that change with any token and with the order of the prompts."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(self.offsets.tobytes())
        digest.update(self.token_ids.tobytes())
        return digest.hexdigest()

    def column_fingerprints(self) -> dict[str, str]:
        """Return 16 hex digits for each column that change with any of its values."""
        return {name: fingerprint_of(values) for name, values in self.rows.items()}


class PromptBuilder:
    """Prepares the prompts of datasets with one tokenizer and one set of options.

    Example: PromptBuilder(tokenizer, PromptOptions()).prepare(FileDataset("train.jsonl"))
    """

    def __init__(
        self,
        tokenizer: Any,
        options: PromptOptions,
        *,
        reserved: frozenset[str] = RESERVED_COLUMNS,
        responses: Sequence[str] = (),
    ) -> None:
        """Check the options against the Hugging Face `tokenizer`.

        Data must not have the `reserved` columns or `reward:<name>`; `responses` are columns to learn from."""
        _check_options(options)
        self._responses = responses
        self._tokenizer, self._options, self._reserved = tokenizer, options, reserved
        eos = tokenizer.eos_token_id
        self._appends_eos = eos is not None and tokenizer("a")["input_ids"][-1:] == [eos]
        self._has_template = bool(tokenizer.chat_template)
        if options.chat == "always" and not self._has_template:
            raise DataError(
                f"data.chat=always, but {self._no_template}\nType data.chat=never, or use a model that has one."
            )
        self._wraps_text = options.chat != "never" and self._has_template
        if options.system and not self._wraps_text:
            reason = "data.chat=never" if options.chat == "never" else self._no_template
            raise ConfigError(
                f"data.system is set, but {reason}\nPut the text into data.template, or use a model with a chat template."
            )

    @property
    def _no_template(self) -> str:
        return f"the tokenizer of '{self._tokenizer.name_or_path}' has no chat template"

    def prepare(self, dataset: Dataset) -> PreparedPrompts:
        """Read all rows; raise a DataError for the first problem, naming its row."""
        table = self._table(dataset)
        if self._responses and not self._options.template:
            named = self._options.prompt_column or next((name for name in _CANDIDATES if name in table), None)
            table = split(table, named, self._responses)
        prompts = self._prompts(dataset, table)
        token_ids: list[np.ndarray] = []
        for start in range(0, len(prompts), _CHUNK):
            texts = []
            with limited() as restart_clock:
                for index, prompt in enumerate(prompts[start : start + _CHUNK], start):
                    restart_clock()
                    texts.append(self._text(prompt, dataset, index))
                    for name in filter(table.__contains__, self._responses):
                        table[name][index] = self._response(table[name][index], prompt, texts[-1], dataset, index, name)
            _check_encodable(texts, dataset, start)
            token_ids += self._encode(texts)
        return self._assemble(dataset, {**table, "prompt": prompts}, token_ids)

    def _table(self, dataset: Dataset) -> dict[str, list[Any]]:
        """Return the columns under their new names."""
        names = _renamed(dataset, self._options.rename)
        clashes = sorted(name for name in names if name in self._reserved or name.startswith(REWARD_PREFIX))
        if clashes:
            free = {name: f"data_{name.removeprefix(REWARD_PREFIX)}" for name in clashes}
            # a key ends at a colon in the grammar of the command line
            rename = ", ".join(names[name].replace(":", r"\:") + f": {new}" for name, new in free.items())
            raise DataError(
                f"{dataset.name} has columns that rlcore writes itself: {', '.join(clashes)}\n"
                f"Rename them, for example with 'data.rename={{{rename}}}'."
            )
        if not len(dataset):
            raise DataError(f"{dataset.name} has no rows\nGive another data.train or data.eval.")
        rows = [dataset[index] for index in range(len(dataset))]
        return {new: [row.get(old) for row in rows] for new, old in names.items()}

    def _prompts(self, dataset: Dataset, table: Mapping[str, Sequence[Any]]) -> Sequence[Prompt]:
        template = self._options.template
        if template:
            used = _template_fields(template, dataset, list(table))
            prompts: Sequence[Prompt] = _fill(template, dataset, {name: table[name] for name in used})
        else:
            used = [_prompt_column(self._options.prompt_column, dataset, list(table))]
            prompts = table[used[0]]
        if "prompt" in table and "prompt" not in used:
            raise DataError(
                f"{dataset.name} has a column 'prompt', but the prompts are made from {', '.join(used)} and take this name\n"
                "Rename it, for example with 'data.rename={prompt: data_prompt}'."
            )
        for index, prompt in enumerate(prompts):
            problem = _problem(prompt)
            if problem:
                raise DataError(f"{_where(dataset, index)}: the prompt (from {', '.join(used)}) {problem}")
        return prompts

    def _text(self, prompt: Prompt, dataset: Dataset, index: int) -> str:
        """Return the text of a prompt, with the chat template applied."""
        if not self._wraps_text:
            if isinstance(prompt, str):
                return prompt
            reason = "data.chat=never" if self._options.chat == "never" else self._no_template
            raise DataError(
                f"{_where(dataset, index)}: the prompt is a list of messages, but {reason}\n"
                "Use a model whose tokenizer has a chat template, or make the prompt of text columns with data.template."
            )
        return self._render(as_messages(prompt), dataset, index)

    def _response(self, value: Any, prompt: Prompt, asked: str, dataset: Dataset, index: int, name: str) -> Any:
        """Return the text of a response that is a list of messages; any other value unchanged."""
        if not is_answered(value):
            return value
        render = partial(self._render, dataset=dataset, index=index, ask=False) if self._wraps_text else None
        try:
            return response_text(value, as_messages(prompt), asked, render)
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{_where(dataset, index)}: column '{name}' {error}") from error

    def _render(self, messages: Sequence[Message], dataset: Dataset, index: int, *, ask: bool = True) -> str:
        if self._options.system:
            if messages[0]["role"] == "system":
                raise DataError(
                    f"{_where(dataset, index)}: the prompt has a system message, and data.system is set too\n"
                    "Leave data.system out to keep the row's."
                )
            messages = [{"role": "system", "content": self._options.system}, *messages]
        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False))
        except (TimeoutError, MemoryError) as error:
            limit = error if str(error) else f"needed more than {LIMIT_BYTES / 2**30:g} GiB of memory"
            raise DataError(
                f"{_where(dataset, index)}: the chat template of '{self._tokenizer.name_or_path}' {limit}\n"
                "Fix its loops in chat_template.jinja or tokenizer_config.json, or disable it:  data.chat=never"
            ) from error
        except Exception as error:  # a chat template is the model author's code and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"{_where(dataset, index)}: the chat template refused messages with the roles {roles}: {error}\n"
                "Fix the messages, or disable the template with data.chat=never and data.template=..."
            ) from error

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        plain = not self._wraps_text
        encoded: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=plain, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        if plain:
            encoded = [self._clean(ids, text) for ids, text in zip(encoded, texts, strict=True)]
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def _clean(self, ids: list[int], text: str) -> list[int]:
        """Remove a doubled beginning-of-sequence token and an appended end-of-sequence token."""
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and text.startswith(self._tokenizer.bos_token):
            ids = ids[1:]
        return ids[:-1] if self._appends_eos else ids

    def _assemble(
        self, dataset: Dataset, table: Mapping[str, Sequence[Any]], token_ids: list[np.ndarray]
    ) -> PreparedPrompts:
        limit, overlong = self._options.max_prompt_tokens, self._options.overlong
        empty = [index for index, ids in enumerate(token_ids) if not len(ids)]
        if empty:
            raise DataError(f"{_where(dataset, empty[0])}: the prompt has no tokens\nFill it, or remove the row.")
        long = [index for index, ids in enumerate(token_ids) if len(ids) > limit]
        if long and (overlong == "error" or (overlong == "drop" and len(long) == len(token_ids))):
            most = max(len(token_ids[index]) for index in long)
            raise DataError(
                f"{len(long)} of {len(token_ids)} prompts have more than data.max_prompt_tokens={limit} tokens; "
                f"the first is {_where(dataset, long[0])}, the longest has {most}\n"
                f"Type data.max_prompt_tokens={most}, or data.overlong=truncate, or data.overlong=drop if some are shorter."
            )
        dropped = set(long) if overlong == "drop" else set()
        keep = [index for index in range(len(token_ids)) if index not in dropped]
        kept = [token_ids[index][-limit:] for index in keep]
        return PreparedPrompts(
            token_ids=np.concatenate(kept),
            offsets=np.cumsum([0, *map(len, kept)], dtype=np.int64),
            rows={name: [values[index] for index in keep] for name, values in table.items()},
            source_index=np.array(keep, dtype=np.int64),
            counts={"overlong_dropped": len(dropped), "overlong_truncated": len(long) - len(dropped)},
        )


def _check_encodable(texts: Sequence[str], dataset: Dataset, start: int) -> None:
    for index, text in enumerate(texts, start):
        if half := unencodable(text):
            raise DataError(
                f"{_where(dataset, index)}: the prompt has the character {half!r}, half of a surrogate pair\n"
                "Write the other half too, as in \\ud83d\\ude00, or remove the row."
            )


def _where(dataset: Dataset, index: int) -> str:
    return dataset.where(index) if isinstance(dataset, NamesRows) else f"{dataset.name}, row {index + 1}"


def _check_options(options: PromptOptions) -> None:
    if options.max_prompt_tokens < 1:
        raise ConfigError(
            f"data.max_prompt_tokens={options.max_prompt_tokens} leaves no room for a prompt\nType 1 or more."
        )
    if options.template and options.prompt_column:
        raise ConfigError(
            "data.template and data.prompt_column are both set\n"
            f"Name the column in the template, data.template='{{{options.prompt_column}}}', and leave data.prompt_column out."
        )


def _renamed(dataset: Dataset, rename: Mapping[str, str]) -> dict[str, str]:
    """Return new name -> old name of every column."""
    for old in rename:
        if old not in dataset.columns:
            raise ConfigError(f"data.rename: {_missing(old, dataset, dataset.columns)}")
    names: dict[str, str] = {}
    for old in dataset.columns:
        new = rename.get(old, old)
        if new in names:
            raise ConfigError(
                f"data.rename: the columns '{names[new]}' and '{old}' of {dataset.name} would both be '{new}'\n"
                "Give each its own name."
            )
        names[new] = old
    return names


def _missing(name: str, dataset: Dataset, columns: Sequence[str]) -> str:
    hint = did_you_mean(name, list(columns))
    return f"{dataset.name} has no column '{name}'.{hint}\nIt has: {', '.join(columns)}."


def _prompt_column(chosen: str, dataset: Dataset, columns: Sequence[str]) -> str:
    """Return the prompt column: the chosen one, `prompt`, or the only other candidate."""
    if chosen:
        if chosen not in columns:
            raise DataError(f"data.prompt_column: {_missing(chosen, dataset, columns)}")
        return chosen
    found = [name for name in _CANDIDATES if name in columns]
    if not found:
        raise DataError(
            f"{dataset.name} has none of the columns {', '.join(_CANDIDATES)}\n"
            f"Type data.prompt_column=<name>; it has: {', '.join(columns)}."
        )
    if found[0] != "prompt" and len(found) > 1:
        raise DataError(
            f"{dataset.name} has several columns that may be the prompt: {', '.join(found)}\n"
            f"Choose one, such as data.prompt_column={found[0]}."
        )
    return found[0]


def _template_fields(template: str, dataset: Dataset, columns: Sequence[str]) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.template is not a valid format string: {error}\nDouble a literal brace: {{{{ or }}}}."
        ) from error
    fields = [re.split(r"[.\[]", name)[0] for name in names]
    for name in fields:
        if name not in columns:
            raise ConfigError(f"data.template: {_missing(name, dataset, columns)}")
    if not fields:
        raise ConfigError(
            "data.template names no column, so all prompts would be the same\nPut a column in braces: {question}."
        )
    return fields


def _fill(template: str, dataset: Dataset, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    texts: list[str] = []
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        try:
            missing = [name for name, value in row.items() if value is None]
            if missing:
                raise ValueError(f"no value in column '{missing[0]}'")
            texts.append(template.format_map(row))
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise DataError(
                f"{_where(dataset, index)}: cannot fill data.template: {error}\nFix the row, remove it, or change the template."
            ) from error
    return texts


def _problem(prompt: Any) -> str | None:
    """Return the problem of a prompt and what to do, or None."""
    if prompt is None or (isinstance(prompt, str | list) and not prompt):
        return "is empty\nFill it, or remove the row."
    if isinstance(prompt, str):
        return None if prompt.strip() else "is only whitespace\nFill it, or remove the row."
    if not isinstance(prompt, list):
        return f"is a {type(prompt).__name__}\nIt must be a text or a list of messages; data.prompt_column=<name> takes another column."
    for message in prompt:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or message.get("content") is None
        ):
            return 'has a message without role or content\nWrite {"role": "user", "content": "..."}.'
    if prompt[-1]["role"] == "assistant":
        return "ends with a message of the assistant, so there is nothing left to answer\nRemove that message, or learn from it:  algorithm=sft"
    return None
