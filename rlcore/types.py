"""The basic types shared by all of rlcore. Read this file first.

Shapes: B rows (samples), U units (rows that belong together), T tokens (all samples of a batch, concatenated).
Alignment: entry i of a token column belongs to token i. `log_probs[i]` is
log p(token i | the preceding tokens of its sample); tokens of the prompt have `loss_mask` false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.data.batch import Batch

FinishReason = Literal["stop", "length", "abort"]
RESHAPING: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty", "regex", "json_schema")
"""Settings of `Sampling` that change the model's distribution, not only its temperature and tail. Engines declare them."""
Average = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "row-mean", "unit-mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of an engine. Example: Sampling(temperature=1.0, max_response_tokens=64)"""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    max_response_tokens: int = 256
    """Maximum number of tokens in a response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the response includes them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's end-of-sequence tokens; the response includes them."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens in the prompt or the response by this if they are positive, else multiply them; 1: off."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that the response has."""
    frequency_penalty: float = 0.0
    """Subtract this from the logit of a token for each time that the response has it."""
    regex: str = ""
    """Regular expression that the whole response matches; empty: any response."""
    json_schema: str = ""
    """JSON schema, as JSON text, that the response follows; empty: any response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one response. Example: Request(request_id=3, prompt_ids=[5, 9], sampling=Sampling(), seed=7)"""

    request_id: int
    """Unique among the requests of one call; the Sample carries the same id."""
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    """The same seed and weights give the same response, whatever other requests are running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response. Example: Sample(request_id=3, token_ids=[12, 2], log_probs=[-0.2, -1.1], finish_reason="stop", policy_version=7)"""

    request_id: int
    token_ids: Sequence[int]
    """[n] generated ids, including the end token if there is one, without the prompt."""
    log_probs: Sequence[float]
    """[n] log-probability of each token under softmax(logits / temperature), before penalties, top-k, top-p and min-p, as
    the trainer computes it. Greedy samples use temperature 1."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled the last token."""
    token_versions: Sequence[int] = ()
    """[n] version that sampled each token, if the weights changed during generation; empty: all `policy_version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Coordinates of one rank in its role's device mesh. Example: Mesh(rank=3, world_size=4, dp_rank=1, dp_size=2)"""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    """Index of this rank's share of the rows; ranks with the same dp_rank get the same share."""
    dp_size: int = 1
    returns: bool = True
    """True if this rank's result is collected: exactly one rank of each dp_rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Outputs of a model for the tokens of a batch; zero where `loss_mask` is false."""

    log_probs: Tensor | None = None
    """[T] float32, log p(token i | preceding tokens), at the sampling temperature."""
    entropy: Tensor | None = None
    """[T] float32, entropy in nats of the distribution from which token i was sampled."""
    values: Tensor | None = None
    """[T] float32, the critic's value of the state in which token i was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Result of a loss: terms, not a mean. The core averages with counts over the whole mini-batch."""

    terms: Tensor
    """[T] per token; [B] per row with average="row-mean"; [U] per unit with average="unit-mean".

    Tokens outside `loss_mask`, and rows and units without loss tokens, are ignored."""
    average: Average = "token-mean"
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] (averaged over loss tokens), [B] (over rows) or [U] (over units) tensors, for logging; no gradient."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of the loss of one mini-batch, summed over all ranks. Example: Counts(rows=8, tokens=73, units=4)"""

    rows: int
    """Rows with at least one loss token."""
    tokens: int
    """Loss tokens."""
    units: int = 0
    """Units with at least one loss token; every row is one if the algorithm has no units."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can still be merged: total and weight. Example: Mean(3.0, 2.0) + Mean(1.0, 2.0) == Mean(4.0, 4.0)"""

    total: float
    weight: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True, slots=True)
class CallTime:
    """Time of a call on one rank. Example: CallTime("actor.update", "main", 0, 1763800000.0, 1.5)"""

    name: str
    """"role.method", or "weight sync"."""
    pool: str
    """Pool of the rank; empty: the time that the controller waited for the call."""
    rank: int
    begin: float
    """Seconds since 1970."""
    seconds: float


Metrics: TypeAlias = dict[str, Mean]
"""Metrics by name; they can be merged with those of another rank or mini-batch."""

LossFunction: TypeAlias = "Callable[[TokenOutputs, Batch], tuple[Tensor, Metrics]]"
"""Loss as passed to a backend: maps outputs and the micro-batch to metrics and a scalar whose sum over all
micro-batches and ranks is the loss of the mini-batch."""


def merge_metrics(parts: Sequence[Mapping[str, Mean]]) -> Metrics:
    """Merge metrics of ranks or mini-batches, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, mean in part.items():
            merged[name] = merged[name] + mean if name in merged else mean
    return merged
