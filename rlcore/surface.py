"""Names of rlcore that plugins may import, each with a tier; every other name is private.

- stable: changes are announced one minor release ahead. `tests/golden/surface.txt` freezes the signatures.
- provisional: may change in any minor release, which is why plugins require `rlcore>=X.Y,<X.(Y+1)`.

`rlcore check` reports a plugin that imports anything else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Literal

Tier = Literal["stable", "provisional"]

STABLE: Mapping[str, str] = {
    "rlcore": "Batch Completion LossTerms Mesh Request RewardResult Sample Sampling Step TokenOutputs Worker batched"
    " catalog dispatch hookimpl resolve __version__",
    "rlcore.types": "Average Counts RESHAPING FinishReason LossFunction LossTerms Mean Mesh Metrics Request Sample Sampling"
    " TokenOutputs merge_metrics",
    "rlcore.errors": "CapacityError ColumnError ConfigError DataError DeadlineExceeded InfrastructureError ModelError"
    " RlcoreError RunError SampleError UserError require",
    "rlcore.protocols": "Algorithm Backend BackendContext Call Completion Dataset Dispatch Environment ModelConfig"
    " OptimizerConfig Reward RewardResult RoleSpec Roles Rollout RolloutContext Step Tracker Transfer Unit Worker"
    " WorkerContext batched",
    "rlcore.protocols.algorithm": "Algorithm RoleSpec Unit",
    "rlcore.protocols.backend": "Backend BackendContext ModelConfig OptimizerConfig",
    "rlcore.protocols.dataset": "Dataset",
    "rlcore.protocols.dispatch": "Call Dispatch",
    "rlcore.protocols.environment": "Completion Environment Message Step",
    "rlcore.protocols.optional": "ChecksModel Closes ComparesSamples DoesWithout EstimatesEngine EstimatesModel"
    " EstimatesStep Evaluates HasTools LearnsFromLabels LearnsFromTexts LearnsTurns NamesRows Saving SavesInBackground"
    " ShowsMetrics ShowsDistributions ShowsPhase SplitsRows FreesDevice TrainsUnits",
    "rlcore.protocols.reward": "Reward RewardResult batched",
    "rlcore.protocols.groups": "ActorGroup CriticGroup GroupMethod ModelGroup Pending ReferenceGroup RewardGroup"
    " RolloutGroup TrainedGroup",
    "rlcore.protocols.roles": "Roles",
    "rlcore.protocols.rollout": "Rollout RolloutContext",
    "rlcore.protocols.tracker": "RunInfo SampleRecord Tracker sample_table",
    "rlcore.protocols.worker": "Worker WorkerContext",
    "rlcore.data.batch": "Batch",
    "rlcore.testing": "AlgorithmContract BackendContract DatasetContract DispatchContract EnvironmentContract"
    " FakeRoles FakeRollout ModelRolloutContract RewardContract RolloutContract RowDispatchContract TrackerContract",
}
"""Module -> names."""

PROVISIONAL: Mapping[str, str] = {
    "rlcore": "evaluate launch plan rollout train",
    "rlcore.api.run": "LiveRun PlannedRun Result check_devices is_writable",
    "rlcore.api.evaluate": "Evaluation",
    # algorithms
    "rlcore.protocols.algorithm": "EvalConfig",
    "rlcore.algorithms.advantages": "gae group_mean group_normalized group_size group_variance",
    "rlcore.algorithms.base": "Epochs EpochsConfig PolicyGradient PolicyGradientConfig",
    "rlcore.algorithms.correction": "CorrectionConfig correct spread",
    "rlcore.algorithms.entropy": "AdaptiveEntropyConfig",
    "rlcore.algorithms.grpo": "GRPO GRPOConfig",
    "rlcore.algorithms.kl": "KLConfig kl_estimate",
    "rlcore.algorithms.losses": "clipped_policy_loss clipped_value_loss",
    "rlcore.algorithms.ppo": "PPO PPOConfig last_loss_tokens",
    "rlcore.config.schema": "Choice Config DataConfig",
    "rlcore.data.chat": "template_arguments",
    "rlcore.data.columns": "INTERNAL_COLUMNS",
    "rlcore.data.files": "read_jsonl",
    "rlcore.data.limits": "limited",
    "rlcore.data.loader": "mix",
    "rlcore.data.shares": "UNIT",
    "rlcore.data.units": "whole_units",
    "rlcore.data.recorded": "open_batch save_batch",
    "rlcore.data.transcript": "Transcript transcripts_batch",
    "rlcore.workers.averaging": "count reduce_terms",
    "rlcore.workers.critic": "CriticWorker with_score_token",
    "rlcore.workers.episodes": "EpisodeOptions",
    "rlcore.workers.plan": "ChosenPlugin PoolFacts RoleMemory RunPlan",
    "rlcore.workers.model": "ModelWorker TrainedWorker",
    "rlcore.workers.policy": "PolicyWorker ReferenceWorker",
    "rlcore.workers.rollout": "RolloutWorker requests_of",
    # backends
    "rlcore.backends.local": "LocalBackend LocalConfig",
    "rlcore.kits.backend": "grid",
    "rlcore.kits.backend.base": "PackedBackend Targets UseOutputs most_over_ranks",
    "rlcore.kits.backend.checkpoint": "SHARDS ShardSaving State read_state",
    "rlcore.kits.backend.grid": "check_devices check_divides need_process_group",
    "rlcore.kits.backend.optimizer": "make_optimizer",
    "rlcore.kits.backend.head": "Part token_statistics",
    "rlcore.kits.backend.ulysses": "heads_to_tokens join own_places tokens_to_heads",
    "rlcore.kits.backend.update": "WeightUpdate blend",
    "rlcore.kits.backend.value_head": "HEAD_FILE VALUE_HEAD initial_value_head",
    "rlcore.models.activations": "checkpoint_activations",
    "rlcore.models.attention": "ADVICE Packing check_kind packed_attention refuse_unknown register",
    "rlcore.models.comparison": "check_attention",
    "rlcore.models.head": "LogitRule",
    "rlcore.models.load": "check_directory check_positions check_same_files fingerprint load_model load_tokenizer"
    " read_config",
    "rlcore.models.weights": "check_finite check_names weight_files",
    "rlcore.registry.versions": "check_versions requirements",
    # engines
    "rlcore.rollouts.hf": "HFConfig HFRollout",
    "rlcore.controller.weights": "Broadcast meet meeting_point",
    "rlcore.kits.engine": "install",
    "rlcore.kits.engine.buckets": "buckets naming_directory",
    "rlcore.kits.engine.checks": "ExpectedWeights Limits Readiness check_finite end_ids read_limits unfit",
    "rlcore.kits.engine.config": "EngineConfig",
    "rlcore.kits.engine.install": "EngineMissing check_version installed_version wanted_version",
    "rlcore.kits.engine.memory": "bytes_per_token cache_bytes start_advice taken_bytes",
    "rlcore.kits.engine.ranks": "engine_mesh server_client server_url",
    "rlcore.kits.engine.serve": "ServerOptions flags serve",
    "rlcore.kits.http": "BadAnswer JsonClient bearer",
    "rlcore.models.size": "ModelSize human",
    # environments and rewards
    "rlcore.errors": "LOST_PEER did_you_mean import_optional require_at_least",
    "rlcore.protocols.environment": "DONE ERROR OUT_OF_TOKENS OUT_OF_TURNS TIMEOUT",
    "rlcore.protocols.reward": "RewardSpec SAMPLE_FIELDS",
    "rlcore.registry": "Resolved catalog load resolve",
    "rlcore.rewards.executor": "RewardExecutor",
    "rlcore.rewards.pipeline": "Outcome RewardPart",
    "rlcore.rewards.runner": "build_reward part_of",
    "rlcore.rewards.signature": "arguments check_columns read_signature required_columns",
    # tools around a run
    "rlcore.surface": "private_imports",
    "rlcore.config.build": "build_plugin flatten type_of",
    "rlcore.config.compose": "PLUGIN_SECTIONS REQUIRED compose conf_directories presets",
    "rlcore.cli": "make_parser",
    "rlcore.cli.list_plugins": "Row list_plugins",
    "rlcore.cli.train": "plan_run",
    "rlcore.controller.make": "make_runtime",
    "rlcore.controller.network": "address_of address_toward interface_of",
    "rlcore.controller.pool": "PoolConfig RuntimeConfig available_cores",
    "rlcore.hooks": "Check Hooks RunView hookimpl",
    "rlcore.quickstart": "Assets Recipe cache_directory locate_assets prepare",
    "rlcore.registry.catalog": "normalize",
    "rlcore.registry.known": "known_names",
    "rlcore.testing": "run_ranks",
    "rlcore.testing.algorithm": "Loss loss_of outputs",
    "rlcore.testing.expect": "allowed equal",
    "rlcore.trainer.launch": "launch",
    "rlcore.trainer.loop": "train",
    "rlcore.trainer.plan": "make_plan",
    "rlcore.trainer.reward_plan": "reward_specs",
    "rlcore.trainer.prompts": "load_prompts named",
    "rlcore.trainer.run": "Run",
}
"""Module -> names."""


def tier_of(module: str, name: str) -> Tier | None:
    """Return the tier of a name, or None when it is private."""
    if name in STABLE.get(module, "").split():
        return "stable"
    return "provisional" if name in PROVISIONAL.get(module, "").split() else None


def private_imports(source: str) -> list[str]:
    """Return the private names of rlcore that Python source imports, as "module.name"."""
    return sorted({f"{module}.{name}" for module, name in _imports(source) if tier_of(module, name) is None})


def _imports(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("rlcore."):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (("import", it.name) for it in node.names if it.name.startswith("rlcore."))
