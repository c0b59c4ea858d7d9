"""Conversion of transcripts to rows: single responses, and episodes with several."""

import torch

from rlcore.data.batch import Batch
from rlcore.data.transcript import Transcript, transcripts_batch
from rlcore.types import Sample


def response(token_ids, log_probs, version, **options):
    return Sample(
        request_id=0,
        token_ids=token_ids,
        log_probs=log_probs,
        policy_version=version,
        **{"finish_reason": "stop"} | options,
    )


def test_two_turns_and_an_aborted_sample_become_rows():
    episode, aborted = Transcript(), Transcript()
    episode.read([5, 9])
    episode.write(response([7], [-0.5], 3))
    episode.read([1])
    episode.write(response([8, 2], [-0.25, -1.0], 5, token_versions=[4, 5], finish_reason="length"))
    aborted.read([6])
    prompts = Batch.of(lengths=[2, 1], tokens={"input_ids": [5, 9, 6]}, rows={"group_id": [4, 4], "answer": ["a", "b"]})

    batch = transcripts_batch(prompts, 2, [episode, aborted], num_turns=[2, 0])

    assert batch.lengths.tolist() == [6, 1]
    assert batch["input_ids"].tolist() == [5, 9, 7, 1, 8, 2, 6]
    assert batch["loss_mask"].tolist() == [False, False, True, False, True, True, False]
    assert batch["rollout_log_probs"].tolist() == [0.0, 0.0, -0.5, 0.0, -0.25, -1.0, 0.0]
    assert batch["token_version"].tolist() == [-1, -1, 3, -1, 4, 5, -1]
    assert batch["sample_id"].tolist() == [8, 9]
    assert batch["num_loss_tokens"].tolist() == [3, 0]
    assert batch["policy_version"].tolist() == [5, 0]
    assert batch["first_version"].tolist() == [3, 0]
    assert batch["truncated"].tolist() == [True, False]
    assert batch["finish_reason"].tolist() == ["length", "abort"]
    assert batch["num_turns"].tolist() == [2, 0]
    assert batch["answer"].tolist() == ["a", "b"]


def test_no_transcripts_give_columns_of_the_same_types():
    prompts = Batch.of(lengths=[], tokens={"input_ids": []}, rows={"group_id": torch.zeros(0, dtype=torch.int64)})

    batch = transcripts_batch(prompts, 4, [])

    assert len(batch) == 0
    assert {
        name: batch[name].dtype
        for name in ("input_ids", "loss_mask", "rollout_log_probs", "token_version", "first_version")
    } == {
        "input_ids": torch.int64,
        "loss_mask": torch.bool,
        "rollout_log_probs": torch.float32,
        "token_version": torch.int64,
        "first_version": torch.int64,
    }
