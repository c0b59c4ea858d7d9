"""`Algorithm`: the data flow of a step on the controller, and the loss on the workers.

`rlcore.algorithms.grpo` is the first example. An instance lives on the controller (`collect`, `update`, state) and one in
each policy and critic worker (`loss`); both are made from the same config, and only config travels between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.types import LossTerms, Metrics, TokenOutputs

if TYPE_CHECKING:
    from rlcore.data.batch import Batch
    from rlcore.protocols.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role that an algorithm needs. Example: RoleSpec(name="reference", worker="reference")"""

    name: str
    """The name in `placement`, in metrics and on `roles`."""
    worker: str
    """A name of the registry kind `worker`."""
    model: str = ""
    """Directory of a model of its own, given as the setting `algorithm.<name>`; empty: that of the actor."""


class Algorithm(Protocol):
    """How samples become updates. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `DoesWithout`, `LearnsFromTexts`, `ComparesSamples`, `Evaluates`, `HasValueLoss` and `ShowsMetrics`
    of `rlcore.protocols.optional`.
    """

    Config: type

    def __init__(self, config: Any) -> None: ...

    def roles(self) -> Sequence[RoleSpec]:
        """The roles needed under this config; only these are built. `actor` is always among them."""

    def reads(self) -> Mapping[str, Sequence[str]]:
        """Columns that the loss of each trained role reads: {"actor": ["old_log_probs", "advantage"]}.

        The planner checks before anything starts that a role or `writes` provides each, and only these travel."""

    def writes(self) -> Sequence[str]:
        """Columns that `collect` adds or renames by itself."""

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """From prompts to experience, in plain Python on the controller; large columns stay where they are."""

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """The actor's loss terms: a pure function on a micro-batch; core averages. A critic's is `value_loss`."""

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Epochs and mini-batches over the trained roles; `rlcore.algorithms.base` has the default."""

    def state_dict(self) -> dict[str, Any]:
        """JSON data that a resume needs, such as an adaptive KL coefficient."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
