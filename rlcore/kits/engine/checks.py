"""Checks for engines that wrap another library: of requests, of weight updates and of the engine's state.

Such a library has neither the core's errors nor its guarantees.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import InfrastructureError, ModelError, NumericalError, SampleError
from rlcore.models.load import read_config
from rlcore.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine. Example: Limits(vocab_size=512, context_length=256, end_ids=(2,))"""

    vocab_size: int
    context_length: int
    """Maximum number of tokens of prompt and response together."""
    end_ids: tuple[int, ...]
    """End-of-sequence tokens of the model."""

    def room(self, request: Request) -> int:
        """Return the most tokens that the response may have.

        Raises:
            SampleError: the request cannot run.
        """
        name, asked, num_prompt = f"request {request.request_id}", request.sampling, len(request.prompt_ids)
        if not num_prompt:
            raise SampleError(f"{name} has an empty prompt\nGive it at least one token, such as the tokenizer's bos.")
        wrong = [token for token in request.prompt_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise SampleError(
                f"{name}: token id {wrong[0]} is not among the {self.vocab_size} of the model\n"
                "Use the tokenizer of model.path for the prompts."
            )
        if asked.max_response_tokens < 1:
            raise SampleError(f"{name}: max_response_tokens={asked.max_response_tokens}\nIt must be at least 1.")
        if num_prompt >= self.context_length:
            raise SampleError(
                f"{name}: a prompt of {num_prompt} tokens leaves no room in a context of {self.context_length}\n"
                f"Type  data.max_prompt_tokens={self.context_length - 1} data.overlong=drop"
            )
        return min(asked.max_response_tokens, self.context_length - num_prompt)


def read_limits(path: str, context_length: int = 0) -> Limits:
    """Return the limits of a model directory; `context_length` is a lower limit on the context, from the user."""
    text = read_config(Path(path)).get_text_config()
    own = getattr(text, "max_position_embeddings", None) or context_length or 2048
    return Limits(
        vocab_size=int(text.vocab_size), context_length=min(own, context_length or own), end_ids=end_ids(path)
    )


def end_ids(path: str) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation config, or else of the model config."""
    from transformers import GenerationConfig

    configs: list[Any] = [read_config(Path(path)).get_text_config()]
    if (Path(path) / "generation_config.json").is_file():
        configs.insert(0, GenerationConfig.from_pretrained(path, local_files_only=True))
    found = next((ids for config in configs if (ids := getattr(config, "eos_token_id", None)) is not None), ())
    return (found,) if isinstance(found, int) else tuple(found)


def check_finite(request: Request, log_probs: Sequence[float]) -> None:
    """Raise NumericalError, with the position, if a log-probability from an engine is not finite."""
    for position, log_prob in enumerate(log_probs, start=len(request.prompt_ids)):
        if not math.isfinite(log_prob):
            raise NumericalError(
                f"request {request.request_id}: the model's logits are not finite at position {position}\n"
                "Look for NaN or infinity in the weights of the last update."
            )


class Readiness:
    """State of an engine: open or closed, awake or asleep, running or paused, with complete weights or not."""

    def __init__(self) -> None:
        self.broken: str | None = None
        """Reason why the weights are incomplete."""
        self.is_asleep = self.is_closed = False
        self._resumed: asyncio.Event | None = None
        """Set by `resume`; None unless paused."""

    @property
    def is_paused(self) -> bool:
        """Return whether calls of `generate` have to wait."""
        return self._resumed is not None

    def pause(self) -> None:
        """Let calls of `generate` wait in `resumed`."""
        self.check_open()
        self._resumed = self._resumed or asyncio.Event()

    def resume(self) -> None:
        """Continue after `pause`, in the event loop of the calls that wait."""
        if self._resumed is not None:
            self._resumed.set()
        self._resumed = None

    async def resumed(self) -> None:
        """Wait while the engine is paused."""
        while self._resumed is not None:
            await self._resumed.wait()

    def check_open(self) -> None:
        """Raise InfrastructureError after `close`."""
        if self.is_closed:
            raise InfrastructureError("the rollout engine is closed\nCreate a new one.")

    def check(self) -> None:
        """Raise InfrastructureError, with what to do, if the engine cannot generate now."""
        self.check_open()
        if self.broken:
            raise InfrastructureError(f"the rollout engine has incomplete weights: {self.broken}\nLoad them again.")
        if self.is_asleep:
            raise InfrastructureError("the rollout engine is asleep\nCall wake() before generate().")

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Refuse generation until the weight update in the block has succeeded."""
        self.check_open()
        self.broken = f"loading version {version} did not finish"
        try:
            yield
        except Exception as error:
            self.broken = str(error).partition("\n")[0]
            raise
        self.broken = None


class ExpectedWeights:
    """Names and shapes of the parameters of a model directory; tied ones count once, under any of their names.

    Its output has the layout of the directory's files, which engines know: transformers holds the experts of a mixture
    as one parameter, while files and engines hold each expert's matrices separately.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping

        config = read_config(Path(path))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._parameters: dict[str, Tensor] = parameters
        self._model = model if get_model_conversion_mapping(model, add_legacy=False) else None

    def checked(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights one by one in the layout of the files; of tied ones only the first.

        Raises:
            ModelError: a weight is unknown or has another shape, or some are missing at the end.
        """
        for name, tensor in matched(weights, self._parameters, version):
            yield from self._as_stored(name, tensor)

    def _as_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        if self._model is None:
            yield name, tensor
        else:
            yield from revert_weight_conversion(self._model, {name: tensor}).items()


def matched(
    weights: Iterator[tuple[str, Tensor]], parameters: dict[str, Tensor], version: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield one weight for each distinct parameter, under its first name.

    Args:
        parameters: the model's, tied ones under each of their names.

    Raises:
        ModelError: a weight is unknown or has another shape, or some are missing at the end.
    """
    missing = {id(parameter): name for name, parameter in reversed(parameters.items())}
    for name, tensor in weights:
        if name not in parameters or parameters[name].shape != tensor.shape:
            here = tuple(parameters[name].shape) if name in parameters else "unknown"
            raise unfit(version, f"weight '{name}' {tuple(tensor.shape)} is {here} in the rollout's model")
        if first := missing.pop(id(parameters[name]), None):
            yield first, tensor.detach()
    if missing:
        raise unfit(version, f"{len(missing)} weights are missing, the first is '{next(iter(missing.values()))}'")


def unfit(version: int, reason: str, advice: str = "") -> ModelError:
    """Return the error for weights that do not fit the engine's model."""
    advice = advice or "Give trainer and rollout the same model.path, and load all weights, with adapters merged."
    return ModelError(f"version {version} of the weights does not fit the rollout: {reason}\n{advice}")
