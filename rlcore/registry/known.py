"""Plugins that exist whether or not they are installed: a name that is asked for can be answered with a pip line."""

from __future__ import annotations

KNOWN_PACKAGES: dict[tuple[str, str], str] = {
    ("backend", "fsdp"): "rlcore-fsdp",
    ("backend", "megatron"): "rlcore-megatron",
    ("rollout", "vllm"): "rlcore-vllm",
    ("rollout", "sglang"): "rlcore-sglang",
}
"""(kind, name) -> the package that provides it."""


def known_names(kind: str) -> dict[str, str]:
    """Name -> package of the known plugins of a kind."""
    return {name: package for (of, name), package in KNOWN_PACKAGES.items() if of == kind}
