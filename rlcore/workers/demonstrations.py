"""Texts of the data as samples, as if the model had written them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rlcore.data.batch import Batch
from rlcore.types import Request, Sample, Sampling
from rlcore.workers.rollout import samples_batch


def demonstrate(prompts: Batch, columns: Sequence[str], tokenizer: Any, max_tokens: int) -> Batch:
    """Make one sample for each of these columns, side by side in prompt order.

    The end-of-sequence token is put after a text, unless it ends with a special token already, as a rendered turn of a
    chat does. A longer one is cut to `max_tokens`; its finish reason is then "length".
    """
    ids, offsets = prompts["input_ids"].tolist(), prompts.offsets().tolist()
    asked = [ids[start:stop] for start, stop in pairwise(offsets) for _ in columns]
    texts = [str(text) for row in zip(*(prompts[name] for name in columns)) for text in row]
    answers = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    requests = [Request(request_id=i, prompt_ids=prompt, sampling=Sampling(), seed=0) for i, prompt in enumerate(asked)]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    samples = []
    for i, answer in enumerate(answers):
        whole = answer if special.intersection(answer[-1:]) else [*answer, tokenizer.eos_token_id]
        kept, reason = whole[:max_tokens], "length" if len(whole) > max_tokens else "stop"
        unknown = [0.0] * len(kept)
        samples.append(
            Sample(request_id=i, token_ids=kept, log_probs=unknown, finish_reason=reason, policy_version=0)  # type: ignore[arg-type]
        )
    batch = samples_batch(prompts.repeat(len(columns)), len(columns), requests, samples)
    return batch.drop("rollout_log_probs", "token_version", "policy_version")
