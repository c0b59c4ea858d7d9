"""Pairs of samples, and the gradients of their loss in plain PyTorch, for backends and algorithms that train pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.models.load import load_model
from rlcore.testing.training import make_batch


def make_pairs() -> Batch:
    """Return the batch of `make_batch` as four pairs, with made-up log-probs of a reference."""
    batch = make_batch()
    ref = -torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    return batch.with_tokens(ref_log_probs=ref).with_rows(unit_id=torch.arange(len(batch)) // 2)


def plain_pair_gradients(
    path: str, pairs: Batch, *, beta: float = 1.0, head: Tensor | None = None
) -> tuple[dict[str, Tensor], float]:
    """Return gradients by name, and value, of the mean logistic loss of pairs by plain PyTorch, sample by sample.

    Args:
        beta: factor of the log-ratios to `ref_log_probs`, as in DPO.
        head: [1, D] value head of a reward model, whose scores are the values at the loss tokens; None: DPO.
    """
    model, weight = load_model(path), None if head is None else head.detach().clone().requires_grad_()
    names = ("input_ids", "loss_mask", "ref_log_probs")
    scores = []
    for ids, mask, ref in zip(*(pairs[name].split(pairs.lengths.tolist()) for name in names)):
        out = model(ids[None], output_hidden_states=True)
        if weight is None:
            log_probs = out.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            scores.append(beta * ((log_probs - ref[1:]) * mask[1:]).sum())
        else:
            scores.append((out.hidden_states[-1][0, :-1] @ weight[0] * mask[1:]).sum())
    margins = torch.stack(scores[0::2]) - torch.stack(scores[1::2])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | ({} if weight is None else {"value_head.weight": weight.grad}), float(loss.detach())
