"""The rollout worker of runs with an environment, which runs episodes instead of single responses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.data.chat import template_arguments
from rlcore.data.columns import INTERNAL_COLUMNS
from rlcore.errors import ConfigError
from rlcore.models.load import check_directory, load_tokenizer
from rlcore.models.size import ModelSize
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import load
from rlcore.types import Sampling
from rlcore.workers.episodes import EpisodeOptions
from rlcore.workers.plan import ChosenPlugin, RunPlan
from rlcore.workers.rollout import RolloutWorker, requests_of
from rlcore_environments.chat import Chat, tools_of
from rlcore_environments.episodes import Episodes, episodes_batch


class EpisodeWorker(RolloutWorker):
    """Rollout worker with one engine rank and the environment of the run."""

    def __init__(self, context: WorkerContext, *, episodes: EpisodeOptions, **engine: Any) -> None:
        super().__init__(context, **engine)
        environment_class: Any = load(episodes.environment, rank=context.rank, host=context.host)
        make = functools.partial(environment_class, episodes.settings)
        tokenizer = load_tokenizer(engine["model"].path)
        self._episodes = Episodes(self.engine, make, episodes, tokenizer, self.count)
        if self.mesh.world_size > self.mesh.dp_size:
            raise ConfigError(
                "environments do not support engines with several ranks, which would have to send the same requests in"
                " lockstep\nGive each engine one device, or use an engine behind a server:  rollout.url=…"
            )

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        return {**super().options_of(plan, role), "episodes": _episodes(plan, role)}

    @classmethod
    def max_tokens(cls, plan: RunPlan, role: str) -> int:
        return _episodes(plan, role).max_tokens

    @classmethod
    def check(cls, plan: RunPlan, role: str) -> None:
        """Check the environment, its tools and the chat template.

        Raises:
            UserError: the environment cannot be created, a tool has no schema, or the chat template is missing or
                ignores tools.
        """
        super().check(plan, role)
        chosen = _environment_of(plan)
        try:
            environment = chosen.resolved.object(chosen.config)
        except Exception as error:
            raise ConfigError(
                f"environment '{plan.config.environment.name}' cannot be created: {type(error).__name__}: {error}\n"
                "It gets only its settings:  def __init__(self, config)"
            ) from error
        for name, reason in (("tools_column", "shows its own tools"), ("system", "writes its own messages")):
            if getattr(plan.config.data, name):
                raise ConfigError(f"data.{name}: an environment {reason}\nRemove  data.{name}   or  environment")
        Chat(load_tokenizer(plan.models[role]), tools_of(environment), _episodes(plan, role).template)

    async def draw(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> Batch:
        """Run n episodes for each prompt, and return each as one sample, in prompt order."""
        requests = requests_of(prompts, sampling, samples_per_prompt)
        prompts = prompts.repeat(samples_per_prompt)
        episodes = await self._episodes.run(_rows(prompts), requests)
        return episodes_batch(prompts, samples_per_prompt, episodes)

    @property
    def num_open(self) -> int:
        """Return the number of episodes that have begun and not ended."""
        return self._episodes.num_open

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self._episodes.forgive()


def _environment_of(plan: RunPlan) -> ChosenPlugin:
    assert plan.environment is not None, "episodes without an environment"
    return plan.environment


def _episodes(plan: RunPlan, role: str) -> EpisodeOptions:
    chosen = _environment_of(plan)
    return EpisodeOptions(
        environment=chosen.resolved.spec,
        settings=chosen.config,
        limits=plan.config.episode,
        template=template_arguments(load_tokenizer(plan.models[role]), plan.config.data),
        context_length=ModelSize.read(check_directory(plan.models[role])).context_length,
    )


def _rows(prompts: Batch) -> list[dict[str, Any]]:
    """Return the data columns of each row, for environments."""
    names = [it for it in prompts.columns if prompts.level(it) != "token" and it not in INTERNAL_COLUMNS]
    columns = {name: prompts[name].tolist() for name in names}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
