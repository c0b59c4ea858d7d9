"""Keys for the layout of models on devices: backend, parallel sizes, offload."""

from __future__ import annotations

from typing import Any

from rlcore_workbench.migration.answer import Answer, Rule, to
from rlcore_workbench.migration.launch import Launch
from rlcore_workbench.verl.names import ACTOR, ROLLOUT

REF = "actor_rollout_ref.ref."
_STRATEGIES = {"dp": "fsdp", "fsdp2": "fsdp"}
_OFFLOADED = ("param", "optimizer", "grad")
MEGATRON = ACTOR + "megatron."
_SIZES = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "override_transformer_config.num_layers_in_first_pipeline_stage": "first_stage_layers",
    "override_transformer_config.num_layers_in_last_pipeline_stage": "last_stage_layers",
}
"""Key below actor.megatron -> setting of backend=megatron with the same meaning."""


def backend_of(launch: Launch) -> str:
    """Return the training backend, given by a key, the config file, or keys of Megatron."""
    for key in (ACTOR + "strategy", "model_engine"):
        if launch.has(key):
            name = launch.texts[key]
            usual = _STRATEGIES.get(name, name) == "fsdp"  # also where a branch of the script leaves it out
            return "fsdp" if usual else _STRATEGIES.get(name, str(launch.get(key)))
    groups = [word.partition("=")[2] for word in launch.others if "@actor_rollout_ref.actor=" in word]
    if groups:
        return groups[-1].removesuffix("_actor")
    files = [word for word in launch.others if word.startswith("--config-name=")]
    megatron = any("megatron" in word for word in files) or any(
        ".megatron." in key or "override_transformer_config" in key for key in launch.texts
    )
    return "megatron" if megatron else "fsdp"


def _strategy(launch: Launch, value: Any) -> Answer:
    return to(backend=backend_of(launch))


def _same_strategy(launch: Launch, value: Any) -> Answer:
    if _STRATEGIES.get(value, value) == backend_of(launch):
        return Answer("always", note="one backend for all models")
    return Answer("none", note=f"one backend for all models: {backend_of(launch)}")


def _of(backend: str, rule: Rule) -> Rule:
    """Return a rule for launches with this backend; the key has no effect with others."""

    def chosen(launch: Launch, value: Any) -> Answer:
        if backend_of(launch) != backend:
            return Answer("always", note=f"has no effect with {backend_of(launch)}")
        return rule(launch, value)

    return chosen


def _size(setting: str) -> Rule:
    def rule(launch: Launch, value: Any) -> Answer:
        if value is None:
            return Answer("always", note="null: the default")
        return Answer("set", ((f"backend.{setting}", value),))

    return rule


def _as_actor(key: str, default: Any) -> Rule:
    """Return a rule for a key of another model, which uses the layout of the actor here."""

    def rule(launch: Launch, value: Any) -> Answer:
        if value == launch.get(key, default):
            return Answer("always", note="uses the layout of the actor")
        return Answer("none", note=f"all models use the layout of the actor: {key}={launch.get(key, default)}")

    return rule


def _sequence_parallel(launch: Launch, value: Any) -> Answer:
    if launch.get(MEGATRON + "tensor_model_parallel_size", 1) == 1:
        return Answer("always", note="has no effect with tensor_model_parallel_size=1")
    return to(backend__sequence_parallel=value)


def _replicate(launch: Launch, value: Any) -> Answer:
    devices = launch.get("trainer.nnodes", 1) * launch.get("trainer.n_gpus_per_node", 8)
    if value <= 0 or value >= devices:
        return Answer("always", note="one copy of the model, sharded over all devices")
    if value % launch.get(_ULYSSES, 1) or devices % value:
        return Answer("none", note=f"copies of {value} devices do not fit {devices} devices and {_ULYSSES}")
    return to(f"{devices} devices, {value} per copy of the model", backend__replicate=devices // value)


def _offload(launch: Launch, value: Any) -> Answer:
    if value and not launch.get(ROLLOUT + "free_cache_engine", True):
        return Answer(
            "none", note=f"{ROLLOUT}free_cache_engine=False becomes device_sharing=never: nothing is offloaded"
        )
    return Answer("always", note="device_sharing=auto: on GPUs models are offloaded while the engine generates")


def _offload_reference(launch: Launch, value: Any) -> Answer:
    if not value:
        return _offload(launch, value)
    return Answer(
        "partly", note="device_sharing=auto: offloaded while the engine generates, on the device while others train"
    )


_OF_MEGATRON: dict[str, Rule] = {
    **{name: _size(setting) for name, setting in _SIZES.items()},
    "sequence_parallel": _sequence_parallel,
    "use_distributed_optimizer": _size("distributed_optimizer"),
}
_OF_FSDP: dict[str, Rule] = {
    "ulysses_sequence_parallel_size": _size("context_parallel"),
    "fsdp_config.ulysses_sequence_parallel_size": _size("context_parallel"),
    "fsdp_config.reshard_after_forward": _size("reshard_after_forward"),
    "fsdp_config.fsdp_size": _replicate,
}
_ULYSSES = ACTOR + "ulysses_sequence_parallel_size"
RULES: dict[str, Rule] = {
    "model_engine": _strategy,
    ACTOR + "strategy": _strategy,
    REF + "strategy": _same_strategy,
    "critic.strategy": _same_strategy,
    **{MEGATRON + name: _of("megatron", rule) for name, rule in _OF_MEGATRON.items()},
    **{ACTOR + name: _of("fsdp", rule) for name, rule in _OF_FSDP.items()},
    **{
        f"{role}megatron.{name}": _of("megatron", _as_actor(MEGATRON + name, None if "layers_in" in name else 1))
        for role in (REF, "critic.")
        for name in _SIZES
    },
    REF + "fsdp_config.ulysses_sequence_parallel_size": _of("fsdp", _as_actor(_ULYSSES, 1)),
    REF + "ulysses_sequence_parallel_size": _of("fsdp", _as_actor(_ULYSSES, 1)),
    "critic.ulysses_sequence_parallel_size": _of("fsdp", _as_actor(_ULYSSES, 1)),
    REF + "fsdp_config.fsdp_size": _of("fsdp", _as_actor(ACTOR + "fsdp_config.fsdp_size", -1)),
    "critic.model.fsdp_config.fsdp_size": _of("fsdp", _as_actor(ACTOR + "fsdp_config.fsdp_size", -1)),
    **{f"{role}megatron.{part}_offload": _offload for role in (ACTOR, "critic.") for part in _OFFLOADED},
    **{ACTOR + f"fsdp_config.{part}_offload": _offload for part in _OFFLOADED},
    **{f"critic.model.fsdp_config.{part}_offload": _offload for part in _OFFLOADED},
    **{f"{REF}{name}.param_offload": _offload_reference for name in ("megatron", "fsdp_config")},
}
"""Key -> rule."""
