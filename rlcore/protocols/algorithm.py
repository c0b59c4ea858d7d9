"""`Algorithm`: the data flow of a step on the controller and the loss on the workers.

See `rlcore.algorithms.grpo` for an example. One instance lives on the controller (`collect`, `update`, state) and one
in each policy and critic worker (`loss`). All are created from the same config; only the config travels between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.errors import require, require_at_least
from rlcore.types import LossTerms, Metrics, TokenOutputs

if TYPE_CHECKING:
    from rlcore.data.batch import Batch
    from rlcore.protocols.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role required by an algorithm. Example: RoleSpec(name="reference", worker="reference")

    `loss` and `weights_from` have defaults by kind of worker: a `policy` is trained with `loss`, a `critic` with
    `value_loss`, and a `rollout` receives the weights of the actor.
    """

    name: str
    """Name in `placement`, in metrics and on `roles`."""
    worker: str
    """A name of the registry kind `worker`."""
    model: str = ""
    """Setting with the directory of its model, such as "algorithm.teacher"; if that is empty: the model of the role in
    `weights_from`, or `model.path`."""
    loss: str | None = None
    """Name of the algorithm's method that computes the role's loss; "" for a role that is not trained."""
    optimizer: str = "optimizer"
    """Section of the config with the settings of its optimizer."""
    weights_from: str | None = None
    """Role whose weights it receives: a rollout after every step, a model when the algorithm calls `roles.send`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: before the first step, every n steps and after the last step."""

    every_steps: int = 20
    """Steps between evaluations; 0: only before and after training."""
    before_training: bool = True
    """Evaluate before the first step."""
    max_prompts: int = 256
    """Maximum number of prompts of each data set in an evaluation."""
    by: str = ""
    """Column whose values have metrics of their own, `eval/VALUE/...`, such as data_source; empty: none."""
    samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all, null: sampling.top_k."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probabilities sum to at least this; null: sampling.top_p."""
    pass_threshold: float = 1.0
    """Minimum reward of a sample that passes."""

    def __post_init__(self) -> None:
        require_at_least(self, every_steps=0, max_prompts=1, temperature=0)
        require(self.top_k is None or self.top_k >= 0, "top_k", "0 (all tokens) or more", self.top_k, 0)
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "more than 0 and at most 1", self.top_p, 1.0)
        few, number = 1 <= self.samples_per_prompt <= 1_000_000, self.samples_per_prompt
        require(few, "samples_per_prompt", "a number from 1 to 1,000,000", number, 1)
        require(isfinite(self.pass_threshold), "pass_threshold", "a finite number", self.pass_threshold, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows that a loss compares, such as a pair. Example: Unit(column="group_id", size=2)"""

    column: str
    """Row column of int64 with one value for all rows of a unit; these rows are adjacent."""
    size: int = 0
    """Rows of a unit. Units with fewer rows are incomplete and not trained; 0 allows any number of rows."""


class Algorithm(Protocol):
    """Turns samples into updates. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `DoesWithout`, `LearnsFromTexts`, `LearnsFromLabels`, `LearnsTurns`, `ComparesSamples`,
    `CorrectsStaleness`, `TrainsUnits`, `Evaluates` and `ShowsMetrics` of `rlcore.protocols.optional`.
    """

    Config: type

    def __init__(self, config: Any) -> None: ...

    def roles(self) -> Sequence[RoleSpec]:
        """Return the roles required under this config; only these are built. `actor` is always among them."""

    def reads(self) -> Mapping[str, Sequence[str]]:
        """Return the columns that the loss of each trained role reads: {"actor": ["old_log_probs", "advantage"]}.

        The planner checks before the start that a role or `writes` provides each of them; only these travel."""

    def writes(self) -> Sequence[str]:
        """Return the columns that `collect` itself adds or renames."""

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Turn prompts into experience, in plain Python on the controller; large columns stay where they are."""

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the actor's loss terms: a pure function of a micro-batch; the core averages them.

        A micro-batch contains any rows, in any order, but whole units: compare rows only within a `unit`. A role with
        another loss names the method in its `RoleSpec`; it has the same signature."""

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Train the roles in epochs and mini-batches; `rlcore.algorithms.base` has the default."""

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON data that a resume needs, such as an adaptive KL coefficient."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
