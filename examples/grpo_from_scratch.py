"""GRPO in a single file: PyTorch and a transformers model, no trainer, no plugins.

    python examples/grpo_from_scratch.py --steps 60

A tiny model learns to sort digits, `sort 60352=` -> `02356`, from its reward alone, with the model and data
of `rlcore train preset=quickstart`. A step samples several responses to each prompt, scores them, and
increases the probability of the better ones:

    A_i = (r_i - mean of its group) / (std of its group + 1e-6)
    loss = mean over response tokens of -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A)
    with ratio = p(token) / p_old(token), where p_old is the policy that sampled

`tests/test_examples.py` passes the samples of rlcore's trainer to `update` and compares losses and weights.
Shapes: P prompts, B responses, L tokens of the longest prompt with its response, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


@dataclass(frozen=True, kw_only=True)
class Settings:
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    max_response_tokens: int = 8
    minibatches: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    lr: float = 1e-3
    warmup_steps: int = 5
    """Number of updates over which the learning rate grows linearly."""
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Prompts with their responses, padded on the right, so that no token attends to padding."""

    ids_BL: Tensor
    is_response_BL: Tensor
    reward_B: Tensor
    group_B: Tensor
    """Group id, shared by the responses to a prompt."""

    def take(self, rows: Tensor) -> Samples:
        return Samples(**{name: column[rows] for name, column in vars(self).items()})


def sort_reward(response: str, digits: str, ended: bool) -> float:
    """Score 1 for the sorted digits, and half the share of ordered neighbors for another order of them."""
    right = sorted(digits)
    if not ended or sorted(response) != right:
        return 0.0
    if list(response) == right:
        return 1.0
    neighbors = list(pairwise(response))
    return 0.5 * sum(a <= b for a, b in neighbors) / len(neighbors)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, rows: list[dict[str, str]], settings: Settings) -> Samples:
    """Sample several responses to each prompt, token by token, and score them."""
    rows = [row for row in rows for _ in range(settings.samples_per_prompt)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    start_B = torch.tensor([len(prompt) for prompt in prompts])
    ids_BL = torch.full((len(rows), int(start_B.max()) + settings.max_response_tokens), tokenizer.pad_token_id)
    for row, prompt in enumerate(prompts):
        ids_BL[row, : len(prompt)] = torch.tensor(prompt)
    end_B, running_B, every = start_B.clone(), torch.ones(len(rows), dtype=torch.bool), torch.arange(len(rows))
    for _ in range(settings.max_response_tokens):
        logits_BV = model(ids_BL[:, : int(end_B.max())]).logits[every, end_B - 1]
        token_B = torch.multinomial(logits_BV.softmax(-1), 1).squeeze(1)
        ids_BL[every[running_B], end_B[running_B]] = token_B[running_B]
        end_B += running_B
        running_B &= token_B != tokenizer.eos_token_id
        if not running_B.any():
            break
    ended = (~running_B).tolist()
    texts = [
        tokenizer.decode(ids[start : end - done].tolist())
        for ids, start, end, done in zip(ids_BL, start_B.tolist(), end_B.tolist(), ended)
    ]
    rewards = [sort_reward(text, row["digits"], done) for text, row, done in zip(texts, rows, ended)]
    place_L = torch.arange(ids_BL.shape[1])
    return Samples(
        ids_BL=ids_BL,
        is_response_BL=(place_L >= start_B[:, None]) & (place_L < end_B[:, None]),
        reward_B=torch.tensor(rewards),
        group_B=every // settings.samples_per_prompt,
    )


def log_probs(model: Any, samples: Samples) -> Tensor:
    """Return log p(token i | tokens before i) as entry i, [B, L]; zero outside the response."""
    logits_BLV = model(samples.ids_BL).logits[:, :-1].float()
    of_token_BL = logits_BLV.log_softmax(-1).gather(2, samples.ids_BL[:, 1:, None]).squeeze(2)
    shifted_BL = torch.cat([torch.zeros(len(of_token_BL), 1), of_token_BL], dim=1)
    return torch.where(samples.is_response_BL, shifted_BL, 0.0)


def advantages(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the advantage of each response in its group, and a mask of responses in groups with variance."""
    advantage_B, varied_B = torch.zeros(len(reward_B)), torch.zeros(len(reward_B), dtype=torch.bool)
    for group in group_B.unique():
        members = group_B == group
        reward = reward_B[members].double()
        if len(reward) > 1:
            advantage_B[members] = ((reward - reward.mean()) / (reward.std() + 1e-6)).float()
            varied_B[members] = bool((reward != reward[0]).any())
    return advantage_B, varied_B


def update(model: Any, schedule: LRScheduler, samples: Samples, step: int, settings: Settings) -> list[float]:
    """Update the model in mini-batches, and return the loss of each. `step` counts from 0."""
    optimizer = schedule.optimizer
    advantage_B, varied_B = advantages(samples.reward_B, samples.group_B)
    samples, advantage_B = samples.take(varied_B), advantage_B[varied_B]  # the other responses have no gradient
    if not len(advantage_B):
        return []
    with torch.no_grad():
        old_BL = log_probs(model, samples)
    order = np.random.Generator(np.random.Philox(key=[0, step])).permutation(len(advantage_B))
    losses = []
    for part in np.array_split(order, min(settings.minibatches, len(order))):
        rows = torch.from_numpy(np.sort(part))
        mini, a_B1 = samples.take(rows), advantage_B[rows, None]
        ratio_BL = torch.exp(log_probs(model, mini) - old_BL[rows])
        clipped_BL = ratio_BL.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        terms_BL = -torch.minimum(ratio_BL * a_B1, clipped_BL * a_B1)
        loss = terms_BL[mini.is_response_BL].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def load(directory: Path) -> tuple[Any, Any]:
    """Load a causal language model without dropout, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def make_optimizer(model: Any, settings: Settings) -> LRScheduler:
    """Make an AdamW optimizer and return its learning-rate schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, eps=settings.eps, weight_decay=0.0)
    return LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / max(1, settings.warmup_steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file, on the task of rlcore's quickstart.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from rlcore.quickstart import cache_directory, prepare  # only model and prompts come from rlcore

    assets, settings = prepare(cache_directory(), progress=print), Settings()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    rows = [json.loads(line) for line in assets.train.read_text().splitlines()]
    model, tokenizer = load(assets.model)
    schedule = make_optimizer(model, settings)
    for step in range(options.steps):
        samples = sample(model, tokenizer, random.sample(rows, settings.prompts_per_step), settings)
        losses = update(model, schedule, samples, step, settings)
        mean = sum(losses) / max(1, len(losses))
        print(f"step {step + 1}/{options.steps}  reward {samples.reward_B.mean():.3f}  loss {mean:+.4f}", flush=True)


if __name__ == "__main__":
    main()
