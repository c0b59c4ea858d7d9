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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rlcore.data.chat import ChatTemplate, Tools, tools_of
from rlcore.data.columns import RESERVED_COLUMNS, REWARD_PREFIX
from rlcore.data.conversations import Message, as_messages, is_answered, is_message, response_text, split
from rlcore.data.fields import FieldFormatter, Table, names_of, no_column, renamed, values_of
from rlcore.data.fingerprints import fingerprint_of
from rlcore.data.limits import limited
from rlcore.data.options import PromptOptions
from rlcore.data.text import unencodable
from rlcore.errors import ConfigError, DataError
from rlcore.protocols.optional import NamesRows

if TYPE_CHECKING:
    from rlcore.protocols.dataset import Dataset

Prompt: TypeAlias = str | Sequence[Message]

_CANDIDATES: Final = ("prompt", "messages", "question", "text")
_CHUNK: Final = 1024


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
        every_turn: bool = False,
    ) -> None:
        """Check the options against the Hugging Face `tokenizer`.

        Data must not have the `reserved` columns or `reward:<name>`; `responses` are columns to learn from, `every_turn`
        of a conversation or the last."""
        _check_options(options)
        self._responses, self._every_turn = responses, every_turn
        self._tokenizer, self._options, self._reserved = tokenizer, options, reserved
        self._chat = ChatTemplate(tokenizer, options)
        eos = tokenizer.eos_token_id
        self._appends_eos = eos is not None and tokenizer("a")["input_ids"][-1:] == [eos]

    def prepare(self, dataset: Dataset) -> PreparedPrompts:
        """Read all rows; raise a DataError for the first problem, naming its row."""
        table = self._table(dataset)
        if self._responses and not self._options.template:
            named = self._options.prompt_column or next((name for name in _CANDIDATES if name in table), None)
            table = split(table, named, self._responses, self._every_turn)
        prompts, tools = self._prompts(dataset, table), self._tools(dataset, table)
        token_ids: list[np.ndarray] = []
        for start in range(0, len(prompts), _CHUNK):
            texts = []
            with limited() as restart_clock:
                for index, prompt in enumerate(prompts[start : start + _CHUNK], start):
                    restart_clock()
                    where = _where(dataset, index)
                    texts.append(self._text(prompt, where, tools[index]))
                    for name in filter(table.__contains__, self._responses):
                        table[name][index] = self._response(
                            table[name][index], prompt, texts[-1], where, name, tools[index]
                        )
            _check_encodable(texts, dataset, start)
            token_ids += self._encode(texts)
        return self._assemble(dataset, {**table, "prompt": prompts}, token_ids)

    def _table(self, dataset: Dataset) -> dict[str, list[Any]]:
        """Return the columns under their new names, and fields that have a new name or hold responses."""
        if not len(dataset):
            raise DataError(f"{dataset.name} has no rows\nGive another data.train or data.eval.")
        rows = [dataset[index] for index in range(len(dataset))]
        table = renamed(
            {name: [row.get(name) for row in rows] for name in dataset.columns}, self._options.rename, dataset.name
        )
        clashes = sorted(name for name in table if name in self._reserved or name.startswith(REWARD_PREFIX))
        if clashes:
            free = {name: f"data_{name.removeprefix(REWARD_PREFIX)}" for name in clashes}
            before = {new: old for old, new in self._options.rename.items()}
            # a key ends at a colon in the grammar of the command line
            rename = ", ".join(before.get(name, name).replace(":", r"\:") + f": {new}" for name, new in free.items())
            raise DataError(
                f"{dataset.name} has columns that rlcore writes itself: {', '.join(clashes)}\n"
                f"Rename them, for example with 'data.rename={{{rename}}}'."
            )
        named = [*self._responses, self._options.prompt_column] if self._responses else []
        fields = {name: values for name in named if (values := values_of(name, table)) is not None}
        return table | fields

    def _prompts(self, dataset: Dataset, table: Table) -> Sequence[Prompt]:
        template = self._options.template
        if template:
            columns = _template_fields(template, dataset, table)
            prompts: Sequence[Prompt] = _fill(template, dataset, columns)
        else:
            columns = _prompt_column(self._options.prompt_column, dataset, table)
            (prompts,) = columns.values()
        used = list(columns)
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

    def _tools(self, dataset: Dataset, table: Table) -> Sequence[Tools]:
        """Return the tools of each row."""
        name = self._options.tools_column
        if not name:
            return [None] * len(dataset)
        values = values_of(name, table)
        if values is None:
            raise ConfigError(f"data.tools_column: {no_column(name, dataset.name, table)}")
        found = [tools_of(value, f"{_where(dataset, index)}: column '{name}'") for index, value in enumerate(values)]
        first = next((index for index, tools in enumerate(found) if tools), 0)
        self._chat.check_tools(found[first], _where(dataset, first))
        return found

    def _text(self, prompt: Prompt, where: str, tools: Tools) -> str:
        """Return the text of a prompt, with the chat template applied."""
        if self._chat.wraps_text:
            return self._chat.render(as_messages(prompt), where, tools, ask=True)
        if isinstance(prompt, str):
            return prompt
        raise DataError(
            f"{where}: the prompt is a list of messages, but {self._chat.missing}\n"
            "Use a model whose tokenizer has a chat template, or make the prompt of text columns with data.template."
        )

    def _response(self, value: Any, prompt: Prompt, asked: str, where: str, column: str, tools: Tools) -> Any:
        """Return the text of a response that is a list of messages, or texts of several; any other value unchanged."""
        if not is_answered(value):
            return value
        render = partial(self._chat.render, where=where, tools=tools) if self._chat.wraps_text else None
        try:
            return response_text(value, as_messages(prompt), asked, render)
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{where}: column '{column}' {error}") from error

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        plain = not self._chat.wraps_text
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


def _prompt_column(chosen: str, dataset: Dataset, table: Table) -> Table:
    """Return the prompt column: the chosen one, `prompt`, or the only other candidate."""
    if chosen:
        values = values_of(chosen, table)
        if values is None:
            raise DataError(f"data.prompt_column: {no_column(chosen, dataset.name, table)}")
        return {chosen: values}
    found = [name for name in _CANDIDATES if name in table]
    if not found:
        raise DataError(
            f"{dataset.name} has none of the columns {', '.join(_CANDIDATES)}\n"
            f"Type data.prompt_column=<name>; it has: {', '.join(names_of(table))}."
        )
    if found[0] != "prompt" and len(found) > 1:
        raise DataError(
            f"{dataset.name} has several columns that may be the prompt: {', '.join(found)}\n"
            f"Choose one, such as data.prompt_column={found[0]}."
        )
    return {found[0]: table[found[0]]}


def _template_fields(template: str, dataset: Dataset, table: Table) -> Table:
    """Return the columns and fields that a template names."""
    try:
        names = [name for _, name, _, _ in FieldFormatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.template is not a valid format string: {error}\nDouble a literal brace: {{{{ or }}}}."
        ) from error
    columns: dict[str, list[Any]] = {}
    for name in names:
        root, path = re.split(r"[.\[]", name)[0], name.partition("[")[0]
        reaches_in = path != root and any(isinstance(value, Mapping) for value in table.get(root, ()))
        choices = [name, path] if reaches_in else [name, path, root]
        used = next((it for it in choices if values_of(it, table) is not None), choices[-1])
        values = values_of(used, table)
        if values is None:
            raise ConfigError(f"data.template: {no_column(used, dataset.name, table)}")
        columns[used] = values
    if not columns:
        raise ConfigError(
            "data.template names no column, so all prompts would be the same\nPut a column in braces: {question}."
        )
    return columns


def _fill(template: str, dataset: Dataset, columns: Table) -> list[str]:
    texts: list[str] = []
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        try:
            missing = [name for name, value in row.items() if value is None]
            if missing:
                raise ValueError(f"no value in column '{missing[0]}'")
            texts.append(FieldFormatter().vformat(template, (), row))
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
    if not all(map(is_message, prompt)):
        return 'has a message without role or content\nWrite {"role": "user", "content": "..."}.'
    if prompt[-1]["role"] == "assistant":
        return "ends with a message of the assistant, so there is nothing left to answer\nRemove that message, or learn from it:  algorithm=sft"
    return None
