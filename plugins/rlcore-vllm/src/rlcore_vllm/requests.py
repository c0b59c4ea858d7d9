"""Conversion of rlcore's requests to vLLM's and of vLLM's outputs to rlcore's samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import InfrastructureError, ModelError, SampleError
from rlcore.kits.engine.checks import Limits, check_finite
from rlcore.models.load import read_config
from rlcore.types import FinishReason, Request, Sample, Sampling

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_COLDEST = 0.01
"""Lowest temperature at which vLLM samples; it raises lower ones to this value."""


def model_facts(path: str) -> dict[str, Any]:
    """Read the properties that identify a model from its directory; worker.py reports those of the served model."""
    return facts_of(read_config(Path(path)))


def facts_of(config: Any) -> dict[str, Any]:
    """Return the identifying properties of a transformers config."""
    text = config.get_text_config()
    return {
        "architecture": (config.architectures or ["?"])[0],
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
    }


def sampling_options(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`.

    Raises:
        SampleError: the request cannot run.
    """
    room, sampling = limits.room(request), request.sampling
    if 0 < sampling.temperature < _COLDEST:
        raise SampleError(
            f"request {request.request_id}: temperature={sampling.temperature} is below {_COLDEST}, the lowest that"
            " vLLM samples at\nType  sampling.temperature=0  for greedy responses."
        )
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.seed % 2**63,
        "max_tokens": room,
        "stop_token_ids": sorted({*limits.end_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # they are among stop_token_ids
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    options |= {
        name: value
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        if (value := getattr(sampling, name)) != getattr(Sampling(), name)
    }
    if sampling.regex or sampling.json_schema:
        grammar = {"regex": sampling.regex, "json": sampling.json_schema}
        options["structured_outputs"] = {name: text for name, text in grammar.items() if text}
    if sampling.stop:
        options |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return options


def check_taken(missing: Sequence[Sequence[str]]) -> None:
    """Raise ModelError if vLLM's model loader skipped parameters on any rank."""
    names = sorted({name for rank in missing for name in rank})
    if names:
        raise ModelError(
            f"vLLM's loader did not update {len(names)} parameters; the first is '{names[0]}'\n"
            "Use another engine for this model:  rollout=hf"
        )


def check_dropped(success: bool) -> None:
    """Raise InfrastructureError if vLLM still has KV cache of old weights."""
    if not success:
        raise InfrastructureError("vLLM did not drop the KV cache of the old weights\nStart the run again.")


def sample(
    request: Request,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    finish_reason: str | None,
    spans: Sequence[tuple[str, int, int]],
    version: int,
) -> Sample:
    """Return the sample of a finished request.

    Args:
        spans: (version, first token, token after the last) of consecutive tokens.
        version: the engine's weight version, which is used if no token was sampled.

    Raises:
        NumericalError: a log-probability is not finite.
        SampleError: vLLM finished the request for a reason that the core does not know.
    """
    check_finite(request, log_probs)
    if finish_reason not in _REASONS:
        raise SampleError(f"request {request.request_id}: vLLM ended it with '{finish_reason}'\nSee the engine's log.")
    versions = [int(version) for version, start, end in spans for _ in range(start, end)]
    return Sample(
        request_id=request.request_id,
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=_REASONS[finish_reason],
        policy_version=versions[-1] if versions else version,
        token_versions=versions if len(spans) > 1 else (),
    )
