"""`Step`: everything that belongs to one step, or to one evaluation; and where its prompts come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.controller.record import Record
from rlcore.data.batch import Batch
from rlcore.data.loader import PromptLoader


@dataclass(slots=True, kw_only=True)
class Step(Record):
    """The prompts and samples of a step, its metrics, and what its calls took."""

    number: int
    positions: list[int] = field(default_factory=list)
    """Positions of its prompts in the order of the loader."""
    num_samples: int = 0
    num_tokens: int = 0
    scored: Batch | None = None
    """The samples that were scored last, including those that were dropped later."""
    collecting: bool = True
    """False once a model may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The training prompts in the order of a loader, which records what was used."""

    loader: PromptLoader
    prompts: Batch
    """All training prompts, tokenized; row i is prompt i."""

    def take(self, count: int, step: Step) -> Batch:
        """Return the next prompts, and add their positions to the step."""
        issued = self.loader.issue(count)
        step.positions += [item.position for item in issued]
        return self.prompts.take([item.prompt_id for item in issued]).with_rows(
            group_id=[item.position for item in issued], seed=[item.request_seed for item in issued]
        )
