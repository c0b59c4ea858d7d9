"""Conversion of rlcore's requests to SGLang's and of SGLang's outputs to rlcore's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import ConfigError, SampleError
from rlcore.kits.engine.checks import Limits, check_finite
from rlcore.types import FinishReason, Request, Sample
from rlcore_sglang.config import SGLangConfig


@dataclass(frozen=True, slots=True)
class Answer:
    """The engine's output for one request. Plain data, because it comes from another process or machine."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """[n] log softmax(logits / temperature) over all tokens, before truncation; temperature 1 for greedy requests. SGLang
    reports them in this form unless SGLANG_RETURN_ORIGINAL_LOGPROB is set."""
    finish_reason: Mapping[str, Any]
    """{"type": "stop" | "length" | "abort", …}"""
    versions: Sequence[int]
    """[n] version of the weights that sampled each token."""

    @classmethod
    def read(cls, output: Mapping[str, Any]) -> Answer:
        """Convert an output of SGLang's `generate`."""
        meta, token_ids = output["meta_info"], list(output["output_ids"])
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        whole = {"version": meta["weight_version"], "start": 0, "end": len(token_ids)}
        spans = meta.get("weight_versions") or [whole]
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        return cls(token_ids, log_probs, dict(meta["finish_reason"]), versions)


@dataclass(slots=True)
class Response:
    """Growing response to one request. After an abort, the tokens so far become part of the next prompt."""

    request: Request
    room: int
    """Maximum number of tokens."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def prompt_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.token_ids]

    def add(self, answer: Answer) -> None:
        """Append the tokens of an answer.

        Raises:
            SampleError: the engine refused the request, or its counts of tokens, log-probs and versions differ.
            NumericalError: a log-probability is not finite.
        """
        name = f"request {self.request.request_id}"
        refused = answer.finish_reason["type"] == "abort" and answer.finish_reason.get("status_code")
        if refused:
            raise SampleError(f"{name}: refused by SGLang: {answer.finish_reason['message']}\nSee the engine's log.")
        counts = len(answer.token_ids), len(answer.log_probs), len(answer.versions)
        if len(set(counts)) > 1:
            raise SampleError(
                f"{name}: SGLang returned {counts[0]} tokens, {counts[1]} log-probs and {counts[2]} versions\n"
                "See the engine's log."
            )
        check_finite(self.request, answer.log_probs)
        self.token_ids += answer.token_ids
        self.log_probs += answer.log_probs
        self.versions += answer.versions

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self.room

    def sample(self, answer: Answer, version: int) -> Sample:
        """Return the finished sample.

        Args:
            answer: the last answer of the engine.
            version: the engine's weight version, which is used if no token was sampled.
        """
        return Sample(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason="length" if self.is_full and answer.finish_reason["type"] == "abort" else _reason(answer),
            policy_version=self.versions[-1] if self.versions else version,
            token_versions=self.versions if len(set(self.versions)) > 1 else (),
        )


def _reason(answer: Answer) -> FinishReason:
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    kind = answer.finish_reason["type"]
    if kind not in reasons:
        raise SampleError(f"SGLang ended a request with '{kind}'\nSee the engine's log.")
    return reasons[kind]


def sampling_params(response: Response, limits: Limits, config: SGLangConfig) -> dict[str, Any]:
    """Return SGLang's `sampling_params` for the rest of a response."""
    sampling = response.request.sampling
    if sampling.min_p and config.deterministic:
        raise ConfigError(
            f"sampling.min_p={sampling.min_p}: SGLang does not support min_p together with a seed\n"
            "Type  rollout.deterministic=false   or  sampling.min_p=0"
        )
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_new_tokens": response.room - len(response.token_ids),
        "stop_token_ids": sorted({*limits.end_ids, *sampling.stop_token_ids}),
        "skip_special_tokens": False,
    }
    if config.deterministic:
        params["sampling_seed"] = response.request.seed % 2**63
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "no_stop_trim": True}
    return params
