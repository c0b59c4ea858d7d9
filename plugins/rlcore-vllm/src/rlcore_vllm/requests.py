"""Between rlcore's requests and samples and vLLM's: what may run, how it is drawn, what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import NumericalError, SampleError
from rlcore.types import FinishReason, Request, Sample

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_COLDEST = 0.01
"""vLLM raises lower temperatures to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine can take."""

    vocab_size: int
    context_length: int
    """Tokens of prompt and response together."""
    end_ids: tuple[int, ...]
    """End-of-sequence tokens of the model."""


def end_ids(path: str) -> tuple[int, ...]:
    """End-of-sequence tokens of the generation config, else of the model's."""
    from transformers import AutoConfig, GenerationConfig

    configs: list[Any] = []
    if (Path(path) / "generation_config.json").is_file():
        configs.append(GenerationConfig.from_pretrained(path, local_files_only=True))
    configs.append(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).get_text_config())
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def model_facts(path: str) -> dict[str, Any]:
    """What tells a model from others, read from its directory; worker.py says the same of the one that it serves."""
    from transformers import AutoConfig

    return facts_of(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))


def facts_of(config: Any) -> dict[str, Any]:
    """Of a config of transformers."""
    text = config.get_text_config()
    return {
        "architecture": (config.architectures or ["?"])[0],
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
    }


def sampling_options(request: Request, limits: Limits) -> dict[str, Any]:
    """vLLM's `SamplingParams` as plain data.

    Raises:
        SampleError: the request cannot run.
    """
    _check(request, limits)
    sampling = request.sampling
    room = limits.context_length - len(request.prompt_ids)
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.seed % 2**63,
        "max_tokens": min(sampling.max_response_tokens, room),
        "stop_token_ids": sorted({*limits.end_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # they are among stop_token_ids
        "logprobs": 0,  # of the drawn token only
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        options |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return options


def _check(request: Request, limits: Limits) -> None:
    name, sampling, num_prompt = f"request {request.request_id}", request.sampling, len(request.prompt_ids)
    if not num_prompt:
        raise SampleError(f"{name} has an empty prompt\nGive it one token at least, such as the tokenizer's bos.")
    wrong = [token for token in request.prompt_ids if not 0 <= token < limits.vocab_size]
    if wrong:
        raise SampleError(
            f"{name}: token id {wrong[0]} is not among the {limits.vocab_size} of the model\n"
            "Use the tokenizer of model.path for the prompts."
        )
    if sampling.max_response_tokens < 1:
        raise SampleError(f"{name}: max_response_tokens={sampling.max_response_tokens}\nAsk for one token at least.")
    if num_prompt >= limits.context_length:
        raise SampleError(
            f"{name}: a prompt of {num_prompt} tokens leaves no room in a context of {limits.context_length}\n"
            f"Type  data.max_prompt_tokens={limits.context_length - 1} data.overlong=drop"
        )
    if 0 < sampling.temperature < _COLDEST:
        raise SampleError(
            f"{name}: temperature={sampling.temperature} is below {_COLDEST}, the coldest that vLLM draws at\n"
            "Type  sampling.temperature=0  for greedy responses."
        )


def sample(
    request: Request,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    finish_reason: str | None,
    spans: Sequence[tuple[str, int, int]],
) -> Sample:
    """The sample of a finished request; `spans` are (version, first token, token after the last).

    Raises:
        NumericalError: the model computed something that is not finite.
        SampleError: vLLM ended the request for a reason that the core does not know.
    """
    for position, log_prob in enumerate(log_probs, start=len(request.prompt_ids)):
        if not math.isfinite(log_prob):
            raise NumericalError(
                f"request {request.request_id}: the model's logits are not finite at position {position}\n"
                "Look for NaN or infinity in the weights of the last update."
            )
    if finish_reason not in _REASONS:
        raise SampleError(f"request {request.request_id}: vLLM ended it with '{finish_reason}'\nSee the engine's log.")
    versions = [int(version) for version, start, end in spans for _ in range(start, end)]
    return Sample(
        request_id=request.request_id,
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=_REASONS[finish_reason],
        policy_version=versions[-1],
        token_versions=versions if len(spans) > 1 else (),
    )
