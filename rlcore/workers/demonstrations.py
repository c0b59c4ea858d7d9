"""Conversion of texts in the data to samples, as if the model had generated them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rlcore.data.batch import Batch
from rlcore.types import Request, Sample, Sampling
from rlcore.workers.rollout import samples_batch


def demonstrate(prompts: Batch, columns: Sequence[str], tokenizer: Any, max_tokens: int) -> Batch:
    """Build one sample for each of these columns, adjacent and in prompt order.

    The end-of-sequence token is appended unless a text already ends with a special token, like a rendered chat turn.
    Longer samples are truncated to `max_tokens` and have finish reason "length".
    """
    ids, offsets = prompts["input_ids"].tolist(), prompts.offsets().tolist()
    repeated = [ids[start:stop] for start, stop in pairwise(offsets) for _ in columns]
    texts = [str(text) for row in zip(*(prompts[name] for name in columns)) for text in row]
    responses = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    requests = [
        Request(request_id=i, prompt_ids=prompt, sampling=Sampling(), seed=0) for i, prompt in enumerate(repeated)
    ]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    samples = []
    for i, response in enumerate(responses):
        whole = response if special.intersection(response[-1:]) else [*response, tokenizer.eos_token_id]
        kept, reason = whole[:max_tokens], "length" if len(whole) > max_tokens else "stop"
        unknown = [0.0] * len(kept)
        samples.append(
            Sample(request_id=i, token_ids=kept, log_probs=unknown, finish_reason=reason, policy_version=0)  # type: ignore[arg-type]
        )
    batch = samples_batch(prompts.repeat(len(columns)), len(columns), requests, samples)
    return batch.drop("rollout_log_probs", "token_version", "policy_version", "first_version")
