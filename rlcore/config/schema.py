"""Every setting of the core. A plugin's own settings are its `Config` dataclass, merged under its section.

Sections that choose a plugin (`backend`, `rollout`, `algorithm`) hold `name` and that plugin's settings.
Units are in the names; derived values are computed where they are used, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from rlcore.controller.pool import PoolConfig
from rlcore.controller.runtime import RuntimeConfig
from rlcore.data.prompts import PromptOptions
from rlcore.errors import require
from rlcore.protocols.backend import ModelConfig, OptimizerConfig
from rlcore.protocols.environment import EpisodeConfig
from rlcore.protocols.reward import Relative
from rlcore.types import Sampling


def _require_count(value: int, setting: str, example: int) -> None:
    """Refuse a number of prompts or samples whose lists alone would fill the controller's memory."""
    require(1 <= value <= 1_000_000, setting, "a number from 1 to 1,000,000", value, example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plugin by name, with its own settings. Example: Choice(name="grpo", options={"epochs": 2})"""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is called and where it lies."""

    name: str = ""
    """Empty: made from preset, algorithm and time."""
    directory: str = "outputs"
    """Runs lie in directory/name."""
    seed: int = 0
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: from the last checkpoint of directory/name if there is one; must: fail when there is none."""

    def __post_init__(self) -> None:
        plain = "/" not in self.name and self.name not in (".", "..")
        plain = (
            plain and self.name.isprintable() and len(self.name.encode()) <= 200
        )  # of the 255 that a file name may have
        expected = "a printable name of 1 to 200 bytes without '/', which run.directory is for"
        require(plain, "name", expected, repr(self.name), "mine")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(PromptOptions):
    """Files, and how a row becomes a prompt."""

    train: str
    """JSONL, Parquet or Arrow: a file, a comma-separated list, a glob or a directory."""
    eval: str = ""
    """Held-out prompts; empty: no evaluation."""
    dataset: str = "files"
    """A name of the registry kind `dataset`, which opens `train` and `eval`."""
    shuffle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Sampling):
    """How responses are drawn during training."""

    samples_per_prompt: int = 8

    def __post_init__(self) -> None:
        _require_count(self.samples_per_prompt, "samples_per_prompt", 8)
        require(self.max_response_tokens >= 1, "max_response_tokens", "1 or more", self.max_response_tokens, 256)
        require(self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature, 1.0)
        require(self.top_k >= 0, "top_k", "0 (all tokens) or more", self.top_k, 0)
        require(0 < self.top_p <= 1, "top_p", "more than 0 and at most 1", self.top_p, 1.0)
        require(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1", self.min_p, 0.0)
        require(all(self.stop), "stop", "texts of one character at least", list(self.stop), "['END']")
        require(
            min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", "token ids", list(self.stop_token_ids), "[2]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    steps: int = 100
    prompts_per_step: int = 32
    max_skipped_steps: int = 3
    """Steps in a row with a gradient that is not finite, or without any reward, after which the run stops."""
    warn_logprob_gap: float = 0.05
    """Mean distance, in nats, of the engine's log-probs from the trainer's above which a run warns."""
    max_logprob_gap: float = 0.0
    """Stop when the log-probs of engine and trainer differ by more than this, on average; 0 only measures."""
    log_samples: int = 4
    """Samples written to samples.jsonl per step, from as many prompts as there are."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps", "0 or more", self.steps, 100)
        _require_count(self.prompts_per_step, "prompts_per_step", 32)
        require(self.max_skipped_steps >= 1, "max_skipped_steps", "1 or more", self.max_skipped_steps, 3)
        require(self.warn_logprob_gap > 0, "warn_logprob_gap", "more than 0", self.warn_logprob_gap, 0.05)
        require(self.max_logprob_gap >= 0, "max_logprob_gap", "0 (only measured) or more", self.max_logprob_gap, 0.1)
        require(self.log_samples >= 0, "log_samples", "0 or more", self.log_samples, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: before the first step, every n steps, and after the last."""

    every_steps: int = 20
    """0: only before and after."""
    max_prompts: int = 256
    samples_per_prompt: int = 1
    temperature: float = 0.0
    pass_threshold: float = 1.0
    """A sample passes when its reward is at least this."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "every_steps", "0 or more", self.every_steps, 20)
        require(self.max_prompts >= 1, "max_prompts", "1 or more", self.max_prompts, 256)
        _require_count(self.samples_per_prompt, "samples_per_prompt", 1)
        require(self.temperature >= 0, "temperature", "0 or more", self.temperature, 0.0)
        require(isfinite(self.pass_threshold), "pass_threshold", "a finite number", self.pass_threshold, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: every n steps and at the end."""

    every_steps: int = 50
    """0: only at the end."""
    keep_last: int = 2
    background: bool = True
    """Train on while a backend that can (fsdp, megatron) writes, from a copy in host memory; complete when the next step ends."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "every_steps", "0 or more", self.every_steps, 50)
        require(self.keep_last >= 1, "keep_last", "1 or more", self.keep_last, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of algorithms that have one."""

    path: str = ""
    """Empty: starts from model.path."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One reward of the list."""

    name: str
    """A registered name, module:function or file.py:function."""
    weight: float = 1.0
    relative: Relative = "no"
    """Against the other samples of the prompt, before the weight: mean, std or rank."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(isfinite(self.weight), f"weight of reward '{self.name}'", "a finite number", self.weight, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Rewards, summed by weight."""

    items: tuple[RewardItem, ...] = ()
    num_processes: int = 1
    """Processes that score; 0 scores in the worker itself, where a time-out cannot act."""
    timeout_s: float = 10.0
    """Per sample."""
    on_error: Literal["raise", "zero", "drop"] = "raise"
    model: str = ""
    """Directory of a reward model, trained with algorithm=reward_model; its score is the reward `model`."""

    def __post_init__(self) -> None:
        few = 0 <= self.num_processes <= 4096
        require(few, "num_processes", "a number from 0 to 4,096", self.num_processes, 1)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    """Which installed hooks are active."""

    hooks: tuple[str, ...] = ()
    on_hook_error: Literal["raise", "warn"] = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    run: RunConfig = RunConfig()
    sampling: SamplingConfig = SamplingConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = CriticConfig()
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    pools: Mapping[str, PoolConfig] = field(default_factory=lambda: {"main": PoolConfig()})
    placement: Mapping[str, str] = field(default_factory=dict)
    """Role -> pool; the role "default" stands for all that are not named."""
    backend: Choice = Choice(name="local")
    rollout: Choice = Choice(name="hf")
    algorithm: Choice = Choice(name="grpo")
    environment: Choice = Choice(name="")
    """Empty: one response to each prompt."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    transfer: str = "auto"
    """auto: inprocess where actor and rollout share a pool, else object_store; collective broadcasts between pools."""
    take_turns: Literal["auto", "always", "never"] = "auto"
    """Models in the rollout's pool leave its devices while it generates, and it leaves while they train. auto: on GPUs,
    where backend and rollout can."""
    trackers: tuple[Choice, ...] = (Choice(name="console"), Choice(name="jsonl"))
    plugins: PluginsConfig = PluginsConfig()
