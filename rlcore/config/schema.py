"""All settings of the core. A plugin's own settings are its `Config` dataclass, merged under its section.

Sections that choose a plugin (`backend`, `rollout`, `algorithm`) hold `name` and that plugin's settings.
Units are part of the names, such as `timeout_s`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, TypeAlias

from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.data.options import PromptOptions
from rlcore.errors import require, require_at_least
from rlcore.protocols.algorithm import EvalConfig
from rlcore.protocols.backend import ModelConfig, OptimizerConfig
from rlcore.protocols.environment import EpisodeConfig
from rlcore.protocols.reward import Relative
from rlcore.types import Sampling

Source: TypeAlias = str | Mapping[str, str]
"""A file, or {name: file}."""


def _require_count(value: int, setting: str, example: int) -> None:
    """Refuse a number of prompts or samples that would exhaust the controller's memory."""
    require(1 <= value <= 1_000_000, setting, "a number from 1 to 1,000,000", value, example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plugin by name, with its own settings. Example: Choice(name="grpo", options={"epochs": 2})"""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Name and location of a run."""

    name: str = ""
    """Name of the run; empty: built from preset, algorithm and time."""
    directory: str = "outputs"
    """Parent directory of runs; a run is in directory/name."""
    seed: int = 0
    """Seed of the data order, sampling and initialization."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the last checkpoint of directory/name if there is one; must: fail if there is none."""

    def __post_init__(self) -> None:
        plain = "/" not in self.name and self.name not in (".", "..")
        # A file name may have 255 bytes.
        plain = plain and self.name.isprintable() and len(self.name.encode()) <= 200
        expected = "a printable name of 1 to 200 bytes without '/', which run.directory is for"
        require(plain, "name", expected, repr(self.name), "mine")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(PromptOptions):
    """Datasets and the conversion of rows to prompts."""

    train: Source
    """JSONL, CSV, Parquet or Arrow: a file, a comma-separated list, a glob or a directory; or OWNER/NAME:SPLIT on the
    Hugging Face hub. Several data sets are {name: file}."""
    eval: Source = ""
    """Held-out prompts, in the form of train; empty: no evaluation. Several data sets have metrics of their own,
    `eval/NAME/...`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Share of each training set in every step, relative to the sum: {name: weight}; each set begins again when it is
    used up. Empty: all prompts are one data set."""
    dataset: str = "files"
    """Plugin of kind `dataset` that opens `train` and `eval`."""
    shuffle: bool = True
    """Shuffle the prompts, differently in every epoch."""

    def __post_init__(self) -> None:
        for setting, source in {"train": self.train, "eval": self.eval}.items():
            names = [] if isinstance(source, str) else list(source)
            require(bool(names or isinstance(source, str)), setting, "a file, or {name: file}", "{}", "train.jsonl")
            bad = next((name for name in names if not name.isprintable() or not name.strip()), None)
            require(bad is None, setting, "printable names", repr(bad), "{math: math.jsonl, code: code.jsonl}")
        if self.weights:
            names = [] if isinstance(self.train, str) else list(self.train)
            example = f"{{{', '.join(f'{name}: 1' for name in names)}}}" if names else "{}"
            expected = f"one for each data set of data.train ({', '.join(names) or 'it has no names'})"
            require(set(self.weights) == set(names), "weights", expected, ", ".join(self.weights), example)
            positive = all(0 < weight < float("inf") for weight in self.weights.values())
            require(positive, "weights", "numbers above 0", dict(self.weights), example)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Sampling):
    """Sampling of responses during training."""

    samples_per_prompt: int = 8
    """Responses sampled for each prompt (the group size)."""

    def __post_init__(self) -> None:
        _require_count(self.samples_per_prompt, "samples_per_prompt", 8)
        require(self.max_response_tokens >= 1, "max_response_tokens", "1 or more", self.max_response_tokens, 256)
        require(self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature, 1.0)
        require(self.top_k >= 0, "top_k", "0 (all tokens) or more", self.top_k, 0)
        require(0 < self.top_p <= 1, "top_p", "more than 0 and at most 1", self.top_p, 1.0)
        require(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1", self.min_p, 0.0)
        positive = 0 < self.repetition_penalty < inf
        require(positive, "repetition_penalty", "a number above 0; 1: off", self.repetition_penalty, 1.1)
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, name, "a number from -2 to 2; 0: off", getattr(self, name), 0.5)
        if self.json_schema:
            require(_is_json(self.json_schema), "json_schema", "a JSON object as text", self.json_schema[:80], "'{}'")
        require(not (self.regex and self.json_schema), "regex", "'' when json_schema is set", self.regex, "''")
        require(all(self.stop), "stop", "non-empty texts", list(self.stop), "['END']")
        require(
            min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", "token ids", list(self.stop_token_ids), "[2]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The training loop."""

    steps: int = 100
    """Steps of the whole run."""
    epochs: int = 0
    """Passes over the prompts, in place of `steps`: epochs · prompts / prompts_per_step steps, rounded up; 0: `steps`."""
    prompts_per_step: int = 32
    """Prompts in each step."""
    max_skipped_steps: int = 3
    """Stop after this many consecutive steps with a non-finite gradient or without any reward."""
    warn_logprob_gap: float = 0.05
    """Warn if the log-probs of engine and trainer differ by more than this on average, in nats."""
    max_logprob_gap: float = 0.0
    """Stop if the log-probs of engine and trainer differ by more than this on average, in nats; 0: never."""
    patience: int = 0
    """Stop after this many values of checkpoint.keep_best in a row without a better one; 0: never."""
    log_samples: int = 4
    """Samples logged per step, spread over as many prompts as possible."""

    def __post_init__(self) -> None:
        require_at_least(self, steps=0, epochs=0, max_skipped_steps=1, patience=0, log_samples=0)
        _require_count(self.prompts_per_step, "prompts_per_step", 32)
        require(self.warn_logprob_gap > 0, "warn_logprob_gap", "more than 0", self.warn_logprob_gap, 0.05)
        require(self.max_logprob_gap >= 0, "max_logprob_gap", "0 (only measured) or more", self.max_logprob_gap, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Generation ahead of training; schedule=sync, pipelined and async are presets of these settings."""

    steps_ahead: int = 0
    """Steps for which responses are requested ahead, while earlier steps train; 0: generate, then train."""
    max_staleness: int = 0
    """Maximum number of steps between the weights that a step updates and those that generated any of its tokens."""
    in_flight_updates: bool = False
    """Send new weights while responses are generated; false: after the responses in flight are finished."""
    max_engine_failures: int = 0
    """Engines that may fail before the run ends, with in_flight_updates: the others generate their responses. The last
    one may not."""
    record: bool = False
    """Write the samples of every step to steps/ in the run's directory."""
    replay: str = ""
    """Directory of a run with recorded steps: train on their samples, without an engine."""

    def __post_init__(self) -> None:
        require(self.steps_ahead >= 0, "steps_ahead", "0 or more", self.steps_ahead, 1)
        ahead, unused = self.steps_ahead, self.max_staleness or self.in_flight_updates
        expected = "0 or 1 with in_flight_updates=false"
        require(ahead <= 1 or self.in_flight_updates, "steps_ahead", expected, ahead, 1)
        expected = "1 or more with max_staleness or in_flight_updates; schedule=sync resets them"
        require(ahead > 0 or not unused, "steps_ahead", expected, ahead, 1)
        fewest = f"schedule.steps_ahead={ahead} or more"
        require(self.max_staleness >= ahead, "max_staleness", fewest, self.max_staleness, ahead)
        failures, expected = self.max_engine_failures, "0 or more, and 0 without in_flight_updates"
        allowed = failures == 0 or (failures > 0 and self.in_flight_updates)
        require(allowed, "max_engine_failures", expected, failures, 0)
        require(not (self.record and self.replay), "record", "false with schedule.replay", "true", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: every n steps and at the end."""

    every_steps: int = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: str = ""
    """Metric whose best checkpoint is written and kept as well, as checkpoints/best: eval/reward; -NAME if lower is
    better. Empty: none."""
    background: bool = True
    """Continue training while the backend (fsdp, megatron) writes from a copy in host memory; complete when the next
    step ends."""

    def __post_init__(self) -> None:
        require_at_least(self, every_steps=0, keep_last=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Restarts of a run by `rlcore train … --supervise`."""

    max_restarts: int = 3
    """Restarts within window_s after which the run ends with exit code 75."""
    window_s: float = 3600.0
    """Time in which restarts are counted, in seconds."""
    delay_s: float = 5.0
    """Wait before the first restart, in seconds; each further one waits twice as long."""

    def __post_init__(self) -> None:
        require_at_least(self, max_restarts=0, delay_s=0)
        require(self.window_s > 0, "window_s", "more than 0", self.window_s, 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of algorithms that have one."""

    path: str = ""
    """Model directory from which the critic starts; empty: model.path."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """A reward in the list."""

    name: str
    """A registered name, module:function or file.py:function."""
    weight: float = 1.0
    relative: Relative = "no"
    """Comparison with the other samples of the prompt, before weighting: mean, std or rank."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(isfinite(self.weight), f"weight of reward '{self.name}'", "a finite number", self.weight, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Rewards; the reward of a sample is their weighted sum."""

    items: tuple[RewardItem, ...] = ()
    """Rewards, each with name, weight, relative and its own options."""
    num_processes: int = 1
    """Number of scoring processes; 0 scores inside the worker, without a timeout."""
    timeout_s: float = 10.0
    """Time limit per sample, in seconds."""
    on_error: Literal["raise", "zero", "drop"] = "raise"
    """Handling of a sample that cannot be scored: stop the run, score 0, or drop the sample."""
    model: str = ""
    """Directory of a reward model, whose score is the reward `model`: trained with algorithm=reward_model, or any sequence
    classifier of transformers with one output."""

    def __post_init__(self) -> None:
        few = 0 <= self.num_processes <= 4096
        require(few, "num_processes", "a number from 0 to 4,096", self.num_processes, 1)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    """Active hooks."""

    hooks: tuple[str, ...] = ()
    """Names of the active hooks: plugins of kind `hooks`; `name?` is left out if it is not installed."""
    on_hook_error: Literal["raise", "warn"] = "raise"
    """Handling of an exception in a hook: stop the run or log a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The config of a run."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    run: RunConfig = RunConfig()
    sampling: SamplingConfig = SamplingConfig()
    trainer: TrainerConfig = TrainerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = CriticConfig()
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    pools: Mapping[str, PoolConfig] = field(default_factory=lambda: {"main": PoolConfig()})
    placement: Mapping[str, str] = field(default_factory=dict)
    """Role -> pool; "default" stands for all other roles."""
    backend: Choice = Choice(name="local")
    """Training backend, with its own settings."""
    rollout: Choice = Choice(name="hf")
    """Inference engine, with its own settings."""
    algorithm: Choice = Choice(name="grpo")
    """Algorithm, with its own settings."""
    environment: Choice = Choice(name="")
    """Multi-turn environment, with its own settings; empty: one response to each prompt."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    transfer: str = "auto"
    """Weight transfer to the engine; auto: inprocess if actor and rollout share a pool, else object_store; collective
    broadcasts between pools."""
    device_sharing: Literal["auto", "always", "never"] = "auto"
    """Device sharing: models in the rollout's pool are offloaded while it generates, and it sleeps while they train.
    auto: on GPUs, if backend and rollout support it."""
    trackers: tuple[Choice, ...] = (Choice(name="console"), Choice(name="jsonl"))
    """Destinations of metrics and samples."""
    plugins: PluginsConfig = PluginsConfig()
