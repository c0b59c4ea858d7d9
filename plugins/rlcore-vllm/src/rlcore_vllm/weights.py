"""A whole set of weights, or an error: every parameter of the model, under its name and in its shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ModelError


class ExpectedWeights:
    """Names and shapes of the parameters of a model directory; tied ones count once, whichever name comes."""

    def __init__(self, path: str) -> None:
        parameters = dict(_empty_model(path).named_parameters(remove_duplicate=False))
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._identity = {name: id(parameter) for name, parameter in parameters.items()}

    def checked(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """The same weights, one after the other.

        Raises:
            ModelError: one is unknown or has another shape, or at the end some are missing.
        """
        missing = {identity: name for name, identity in reversed(self._identity.items())}
        for name, tensor in weights:
            if self._shapes.get(name) != tuple(tensor.shape):
                here = self._shapes.get(name, "unknown")
                raise _unfit(version, f"weight '{name}' {tuple(tensor.shape)} is {here} in the rollout's model")
            missing.pop(self._identity[name], None)
            yield name, tensor.detach()
        if missing:
            raise _unfit(version, f"{len(missing)} weights did not come, the first is '{next(iter(missing.values()))}'")


def _empty_model(path: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _unfit(version: int, reason: str) -> ModelError:
    return ModelError(
        f"version {version} of the weights does not fit the rollout: {reason}\n"
        "Give trainer and rollout the same model.path, and load a whole set of weights."
    )
