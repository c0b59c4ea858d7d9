"""The standard columns of a batch: their names, levels, types and writers. Datasets must not use these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["row", "token", "object"]


@dataclass(frozen=True, slots=True)
class Column:
    """A standard column: one row of the table below."""

    name: str
    level: Level
    dtype: str
    meaning: str
    written_by: str
    internal: bool = False
    """True: bookkeeping that rewards, environments and logged samples do not get."""


STANDARD_COLUMNS: tuple[Column, ...] = (
    Column("input_ids", "token", "int64", "token ids of prompt and response", "loader, rollout"),
    Column("loss_mask", "token", "bool", "true where the model wrote the token", "rollout"),
    Column("position_ids", "token", "int64", "position of the token in its sample", "backend, if it needs them"),
    Column("rollout_log_probs", "token", "float32", "log-probs of the sampling engine", "rollout"),
    Column("token_version", "token", "int64", "version of the weights that sampled the token; -1: none", "rollout"),
    Column("old_log_probs", "token", "float32", "log-probs of the actor before the update", "algorithm"),
    Column("ref_log_probs", "token", "float32", "log-probs of the frozen reference", "reference"),
    Column("entropy", "token", "float32", "entropy of the actor before the update, nats", "actor"),
    Column("values", "token", "float32", "the critic's values", "critic"),
    Column("rewards", "token", "float32", "reward per token, KL penalty included", "algorithm"),
    Column("advantages", "token", "float32", "advantage per token", "algorithm"),
    Column("returns", "token", "float32", "target of the critic", "algorithm"),
    Column("sample_id", "row", "int64", "unique in the run", "rollout"),
    Column("prompt_id", "row", "int64", "index of the prompt in its dataset", "loader"),
    Column("group_id", "row", "int64", "shared by the samples of one prompt in one step", "loader", internal=True),
    Column("unit_id", "row", "int64", "shared by the adjacent rows of a unit, kept together", "core", internal=True),
    Column("seed", "row", "int64", "seed of the request", "loader, rollout", internal=True),
    Column("policy_version", "row", "int64", "version that sampled the last token", "rollout", internal=True),
    Column("first_version", "row", "int64", "lowest version that sampled a token", "rollout", internal=True),
    Column("num_loss_tokens", "row", "int64", "number of tokens in the loss", "rollout", internal=True),
    Column("truncated", "row", "bool", "the response or the episode reached a limit", "rollout", internal=True),
    Column("finish_reason", "object", "str", "stop, length or abort", "rollout"),
    Column("num_turns", "row", "int64", "responses of the model in the episode", "environment"),
    Column("episode_reward", "row", "float32", "sum of the rewards of an episode; NaN: none", "environment"),
    Column("episode_end", "row", "int64", "0 done, 1 out of turns, 2 of tokens, 3 timeout, 4 error", "environment"),
    Column("episode_error", "object", "str", "reason why an episode has no reward; empty if it has one", "environment"),
    Column("episode_messages", "object", "list", "the whole conversation", "environment"),
    Column("model_score", "row", "float32", "score of the reward model", "reward_model"),
    Column("reward", "row", "float32", "score of the sample", "reward"),
    Column("reward_status", "row", "int64", "0 score, 1 skip, 2 timeout, 3 error", "reward", internal=True),
    Column("reward_has_note", "row", "bool", "reward_note is not None", "reward", internal=True),
    Column("reward_note", "object", "list", "[failed reward, message, further metrics], or None", "reward"),
    Column("completion", "object", "str", "the response as text", "reward"),
    Column("advantage", "row", "float32", "advantage of the whole response", "algorithm"),
)

INTERNAL_COLUMNS: frozenset[str] = frozenset(column.name for column in STANDARD_COLUMNS if column.internal)

RESERVED_COLUMNS: frozenset[str] = frozenset(column.name for column in STANDARD_COLUMNS) | {"num_tokens"}

REWARD_PREFIX = "reward:"
"""Row columns `reward:<name>` hold the score of each reward (NaN: none); data must not have such columns."""
