"""Conversion of texts in the data to samples, as if the model had generated them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from rlcore.data.batch import Batch
from rlcore.data.transcript import Transcript, transcripts_batch
from rlcore.types import FinishReason, Sample


def demonstrate(prompts: Batch, columns: Sequence[str], tokenizer: Any, max_tokens: int) -> Batch:
    """Build one sample for each of these columns, adjacent and in prompt order.

    A response is a text, or a tuple of texts: those at even places are learned, those between them are only read. The
    end-of-sequence token is appended unless a text already ends with a special token, like a rendered chat turn.
    Responses with more than `max_tokens` are truncated and have finish reason "length".
    """
    ids, offsets = prompts["input_ids"].tolist(), prompts.offsets().tolist()
    asked = [ids[start:stop] for start, stop in pairwise(offsets) for _ in columns]
    parts = [
        [it] if isinstance(it, str) else list(it) for row in zip(*(prompts[name] for name in columns)) for it in row
    ]
    encoded = _encode(tokenizer, parts) if parts else []
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    transcripts = []
    for prompt, (tokens, learned) in zip(asked, encoded, strict=True):
        if not special.intersection(tokens[-1:]):
            tokens, learned = [*tokens, tokenizer.eos_token_id], [*learned, True]
        transcripts.append(_transcript(prompt, tokens, learned, max_tokens))
    batch = transcripts_batch(prompts.repeat(len(columns)), len(columns), transcripts)
    return batch.drop("rollout_log_probs", "token_version", "policy_version", "first_version")


def _encode(tokenizer: Any, responses: Sequence[Sequence[str]]) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each response, and for each token whether it begins in a part that is learned."""
    texts = ["".join(parts) for parts in responses]
    several = any(len(parts) > 1 for parts in responses)
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=several, verbose=False)
    if not several:
        return [(tokens, [True] * len(tokens)) for tokens in encoded["input_ids"]]
    found = []
    for tokens, spans, parts in zip(encoded["input_ids"], encoded["offset_mapping"], responses, strict=True):
        ends = list(accumulate(map(len, parts)))
        found.append((tokens, [bisect_right(ends[:-1], start) % 2 == 0 for start, _ in spans]))
    return found


def _transcript(prompt: list[int], tokens: list[int], learned: list[bool], max_tokens: int) -> Transcript:
    """Return the prompt and the first tokens of a response."""
    reason: FinishReason = "length" if len(tokens) > max_tokens else "stop"
    transcript = Transcript()
    transcript.read(prompt)
    for is_learned, pairs in groupby(zip(tokens[:max_tokens], learned), key=itemgetter(1)):
        part = [token for token, _ in pairs]
        if is_learned:
            unknown = [0.0] * len(part)
            transcript.write(
                Sample(request_id=0, token_ids=part, log_probs=unknown, finish_reason=reason, policy_version=0)
            )
        else:
            transcript.read(part)
    return transcript
