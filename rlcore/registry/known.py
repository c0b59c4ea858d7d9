"""Known plugins, installed or not, so that an error for a missing one can name its package."""

from __future__ import annotations

_ALGORITHMS = (
    "best_of_n cispo clip_cov dapo distillation dpo dr_grpo dual_clip_ppo gmpo gpg gspo kl_cov online_dpo opo reinforce"
    " reinforce_plus_plus reinforce_plus_plus_baseline remax reward_model rloo sapo sft"
)

KNOWN_PACKAGES: dict[tuple[str, str], str] = {
    ("backend", "fsdp"): "rlcore-fsdp",
    ("backend", "megatron"): "rlcore-megatron",
    ("rollout", "vllm"): "rlcore-vllm",
    ("rollout", "sglang"): "rlcore-sglang",
    ("command", "check"): "rlcore-workbench",
    ("command", "doctor"): "rlcore-workbench",
    ("command", "migrate"): "rlcore-workbench",
    ("command", "new-plugin"): "rlcore-workbench",
    ("command", "show"): "rlcore-report",
    ("command", "try"): "rlcore-workbench",
    ("worker", "episodes"): "rlcore-environments",
    **{("reward", name): "rlcore-rewards" for name in ("combined", "judge", "overlong", "python", "remote")},
    **{("algorithm", name): "rlcore-algorithms" for name in _ALGORITHMS.split()},
}
"""(kind, name) -> the package that provides it."""


def known_names(kind: str) -> dict[str, str]:
    """Return name -> package of the known plugins of a kind."""
    return {name: package for (of, name), package in KNOWN_PACKAGES.items() if of == kind}
