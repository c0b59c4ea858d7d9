"""Sample tokens from logits with pure functions on tensors. The `hf` engine calls them in each decoding step.

A token is the inverse of the cumulative distribution at a uniform number, which is a hash of the request's seed and the
token's absolute position. So a response depends on seed, prompt and weights, but not on the rest of the batch, and an
interrupted response continues unchanged if its tokens become part of the prompt.
Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcore.types import Request

_CHUNK_VALUES = 2**25
"""Probabilities in one chunk of rows: 256 MB in float64."""
_COLUMNS = ("seeds", "temperature", "greedy", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters of n requests, one entry per row."""

    seeds: Tensor
    """[n] int64; integer seeds modulo 2**64."""
    temperature: Tensor
    """[n] float32, 1 for greedy rows."""
    greedy: Tensor
    """[n] bool"""
    top_k: Tensor
    """[n] int64, 0 keeps all."""
    top_p: Tensor
    """[n] float64"""
    min_p: Tensor
    """[n] float32"""

    any_greedy: bool
    any_sorted: bool
    """True if any row uses top-k or top-p."""
    any_min_p: bool

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingArrays:
        """Build the arrays of these requests on `device`."""
        asked = [request.sampling for request in requests]
        return cls(
            seeds=torch.tensor([_signed(request.seed) for request in requests], dtype=torch.int64, device=device),
            temperature=torch.tensor([s.temperature or 1.0 for s in asked], dtype=torch.float32, device=device),
            greedy=torch.tensor([s.temperature == 0 for s in asked], device=device),
            top_k=torch.tensor([s.top_k for s in asked], dtype=torch.int64, device=device),
            top_p=torch.tensor([s.top_p for s in asked], dtype=torch.float64, device=device),
            min_p=torch.tensor([s.min_p for s in asked], dtype=torch.float32, device=device),
            any_greedy=any(s.temperature == 0 for s in asked),
            any_sorted=any(s.top_k > 0 or s.top_p < 1 for s in asked),
            any_min_p=any(s.min_p > 0 for s in asked),
        )

    def rows(self, start: int, stop: int) -> SamplingArrays:
        """Return rows start:stop."""
        columns = {name: getattr(self, name)[start:stop] for name in _COLUMNS}
        return replace(self, **columns)


def draw(
    logits: Tensor, arrays: SamplingArrays, positions: Tensor, altered: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample token ids [n] and return them with log-probs [n] float32.

    `logits` are [n, V], `positions` [n] those of the new tokens. The log-prob is taken under
    softmax(logits / temperature), before penalties, top-k, top-p and min-p.

    Args:
        altered: logits [n, V] after penalties, from which the tokens are sampled; None: the same.
    """
    num_rows, num_tokens = logits.shape
    chunk = max(1, _CHUNK_VALUES // num_tokens)
    if num_rows <= chunk:
        return _draw(logits, arrays, positions, altered)
    parts = [
        _draw(
            logits[rows],
            arrays.rows(rows.start, rows.stop),
            positions[rows],
            None if altered is None else altered[rows],
        )
        for rows in (slice(start, start + chunk) for start in range(0, num_rows, chunk))
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _draw(logits: Tensor, arrays: SamplingArrays, positions: Tensor, altered: Tensor | None) -> tuple[Tensor, Tensor]:
    log_probs = _log_softmax(logits, arrays)
    sampled = log_probs if altered is None else _log_softmax(altered, arrays)
    cumulative = _truncated(sampled, arrays).cumsum(-1, dtype=torch.float64)
    tokens = invert(cumulative, uniforms(arrays.seeds, positions))
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def penalized(logits: Tensor, requests: Sequence[Request], responses: Sequence[Sequence[int]]) -> Tensor | None:
    """Return [n, V] float32 logits after the penalties for repeated tokens, as in vLLM; None if no request has any.

    First the repetition penalty, for tokens of prompt and response, then frequency and presence, for tokens of the
    response.
    """
    asked = [request.sampling for request in requests]
    if all(s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty for s in asked):
        return None
    logits = logits.float().clone()
    for row, request, sampling, response in zip(logits, requests, asked, responses):
        seen = torch.tensor([*request.prompt_ids, *response], device=row.device)
        values, factor = row[seen], sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
        counts = torch.bincount(torch.tensor(response, dtype=torch.int64), minlength=len(row)).to(row)
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return logits


def probabilities(logits: Tensor, arrays: SamplingArrays) -> Tensor:
    """Return [n, V] float32, the distribution from which each row is sampled.

    It applies, in this order: temperature; the k most likely tokens; of these, the smallest set with top_p of their
    probability; of these, the ones with at least min_p of the largest probability. Ties go to the lower id. A greedy
    row gives its most likely token probability 1.
    """
    return _truncated(_log_softmax(logits, arrays), arrays)


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return [n] first indices at which `cumulative` [n, V] exceeds uniform · total, never of probability 0."""
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    return index.clamp_(max=cumulative.shape[-1] - 1)  # only NaN exceeds it, and the engine reports that


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [n] float64 in [0, 1): the upper 53 bits of splitmix64(splitmix64(seed) + position · golden ratio)."""
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _log_softmax(logits: Tensor, arrays: SamplingArrays) -> Tensor:
    return (logits.float() / arrays.temperature[:, None]).log_softmax(-1)


def _truncated(log_probs: Tensor, arrays: SamplingArrays) -> Tensor:
    probs = log_probs.exp()
    if arrays.any_sorted:
        probs = probs * _most_likely(probs, arrays)
    if arrays.any_min_p:
        probs = probs * (probs >= arrays.min_p[:, None] * probs.amax(-1, keepdim=True))
    if arrays.any_sorted or arrays.any_min_p:
        probs = probs / probs.sum(-1, keepdim=True)
    if arrays.any_greedy:
        certain = torch.zeros_like(probs).scatter_(-1, log_probs.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(arrays.greedy[:, None], certain, probs)
    return probs


def _most_likely(probs: Tensor, arrays: SamplingArrays) -> Tensor:
    """Return [n, V] bool: the tokens kept by top-k and top-p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    among_k = (rank < arrays.top_k[:, None]) | (arrays.top_k == 0)[:, None]
    ordered = (ordered * among_k).double()
    upto = ordered.cumsum(-1)
    within_p = upto - ordered < arrays.top_p[:, None] * upto[:, -1:]
    kept = among_k & (within_p | (arrays.top_p >= 1)[:, None])
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _signed(value: int) -> int:
    """Return the int64 with the same lowest 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(state: Tensor) -> Tensor:
    # Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 14; int64 products wrap.
    state = (state ^ _shift_right(state, 30)) * _FACTORS[0]
    state = (state ^ _shift_right(state, 27)) * _FACTORS[1]
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift logically to the right; torch's shift keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
