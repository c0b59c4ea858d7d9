"""The rollout worker of runs with an environment: it plays episodes where the core's asks once for each sample."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from rlcore import dispatch
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.models.load import load_tokenizer
from rlcore.protocols.environment import EpisodeOptions
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import load
from rlcore.types import Sampling
from rlcore.workers.rollout import RolloutWorker, requests_of
from rlcore_environments.chat import Chat, tools_of
from rlcore_environments.episodes import episodes_batch, run_episodes


class EpisodeWorker(RolloutWorker):
    """Holds one engine rank, and the environment of the run."""

    def __init__(self, context: WorkerContext, *, episodes: EpisodeOptions, **engine: Any) -> None:
        super().__init__(context, **engine)
        self._episodes = episodes
        self._tokenizer = load_tokenizer(engine["model"].path)
        environment_class: Any = load(episodes.environment, rank=context.rank, host=context.host)
        self._make = functools.partial(environment_class, episodes.settings)
        if self.mesh.world_size > self.mesh.dp_size:
            raise ConfigError(
                "environments need engines of one rank: the ranks of a larger one would have to ask the same things in"
                " step\nGive each engine one device, or use one that runs behind a server:  rollout.url=…"
            )

    @staticmethod
    def check_environment(environment: Any, model_path: str) -> None:
        """Called by the planner, before the start.

        Raises:
            UserError: a tool without schema, or a chat template that is missing or shows no tools.
        """
        Chat(load_tokenizer(model_path), tools_of(environment))

    @dispatch("dp")
    def generate(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> Batch:
        """n episodes for each prompt, side by side in prompt order, each as one sample."""
        requests = requests_of(prompts, sampling, samples_per_prompt)
        prompts = prompts.repeat(samples_per_prompt)
        play = run_episodes(self.engine, self._make, self._episodes, self._tokenizer, _rows(prompts), requests)
        return episodes_batch(prompts, samples_per_prompt, asyncio.run(play))


def _rows(prompts: Batch) -> list[dict[str, Any]]:
    """The columns of the data set, for environments."""
    names = [it for it in prompts.columns if prompts.level(it) != "token" and it not in ("seed", "group_id")]
    columns = {name: prompts[name].tolist() for name in names}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
