"""A bonus for answers that are new: your own dispatch mode, worker and algorithm in one file.

    rlcore train preset=quickstart algorithm=examples/novelty.py:Novel runtime=local trainer.steps=20

Workers of the role `memory` remember all answers to a prompt. A batch is split by prompt instead of by row number, so
that each rank sees every answer to its prompts, in all steps. Checkpoints contain what they remember.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore import Batch, Mesh, Worker, dispatch
from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.protocols import Call, Roles, RoleSpec, WorkerContext
from rlcore.types import Mean


class ByPrompt:
    """Sends the rows of a prompt to the same rank in every step; results are dicts, which are merged."""

    def split(self, call: Call, meshes: Sequence[Mesh]) -> Sequence[Call | None]:
        (batch,) = call.args
        owner = batch.fetch("prompt_id").numpy() % meshes[0].dp_size
        return [Call((batch.take(np.flatnonzero(owner == mesh.dp_rank)),)) for mesh in meshes]

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> dict[int, float]:
        return {key: value for output in outputs for key, value in output.items()}


class Memory(Worker):
    """Remembers the answers to the prompts of this rank."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._answers: dict[int, set[str]] = defaultdict(set)

    @dispatch(f"{__file__}:ByPrompt", reads=["prompt_id", "sample_id", "completion"], on_device=False)
    def novelty(self, samples: Batch) -> dict[int, float]:
        """Return sample_id -> 1.0 for an answer that its prompt did not have before, else 0.0."""
        found = {}
        for prompt, sample, text in zip(*(list(samples[name]) for name in ("prompt_id", "sample_id", "completion"))):
            known = self._answers[int(prompt)]
            found[int(sample)] = float(text not in known)
            known.add(text)
        return found

    def save_to(self, directory: Path, wait: bool) -> bool:
        answers = {prompt: sorted(texts) for prompt, texts in self._answers.items()}
        (directory / f"rank_{self.mesh.rank}.json").write_text(json.dumps(answers))
        return False

    def load_from(self, directory: Path) -> None:
        answers = json.loads((directory / f"rank_{self.mesh.rank}.json").read_text())
        self._answers = defaultdict(set, {int(prompt): set(texts) for prompt, texts in answers.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class NovelConfig(GRPOConfig):
    """Settings of GRPO, and the size of the bonus."""

    bonus: float = 0.1
    """Added to the reward of an answer that its prompt did not have before."""


class Novel(GRPO):
    """GRPO with a bonus for new answers."""

    Config = NovelConfig

    def roles(self) -> Sequence[RoleSpec]:
        return [*super().roles(), RoleSpec(name="memory", worker=f"{__file__}:Memory")]

    def draw(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate and score samples, and add the bonus to their rewards."""
        samples = super().draw(roles, prompts)
        novelty = roles.group("memory", Memory).novelty(samples)
        sample_id, reward = samples.fetch("sample_id", "reward")
        new = torch.tensor([novelty[it] for it in sample_id.tolist()])
        roles.note("memory/new_answers", Mean(float(new.sum()), len(samples)))
        return samples.with_rows(reward=reward + self.config.bonus * new)
