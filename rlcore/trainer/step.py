"""`Step`: everything that belongs to one step, or to one evaluation; and where its prompts come from."""

from __future__ import annotations

from collections.abc import Sequence
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
    generated: list[Batch] | None = None
    """The samples of each `roles.generate`, if they are recorded."""
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

    @property
    def columns(self) -> list[str]:
        """Columns of the data."""
        return [name for name in self.prompts.columns if name != "input_ids"]

    def take(self, count: int, step: Step) -> Batch:
        """Return the next prompts, and add their positions to the step."""
        prompts = self.issue(count)
        step.positions += prompts["group_id"].tolist()
        return prompts

    def issue(self, count: int) -> Batch:
        """Return the next prompts, with the row columns `group_id` (their position) and `seed`."""
        return self.at([item.position for item in self.loader.issue(count)])

    def at(self, positions: Sequence[int]) -> Batch:
        """Return the prompts at these positions."""
        items = [self.loader.at(position) for position in positions]
        return self.prompts.take([item.prompt_id for item in items]).with_rows(
            group_id=positions, seed=[item.request_seed for item in items]
        )
