"""Episodes: many concurrent conversations between a model and environments, each in its own coroutine.

Called by the rollout worker instead of the engine. An episode becomes one sample: the whole conversation,
with `loss_mask` on the tokens of the model. If an episode ends without a reward, its sample has the reason.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from rlcore.data.batch import Batch
from rlcore.data.loader import mix
from rlcore.data.transcript import Transcript, transcripts_batch
from rlcore.errors import SampleError
from rlcore.protocols.environment import (
    DONE,
    ERROR,
    OUT_OF_TOKENS,
    OUT_OF_TURNS,
    TIMEOUT,
    Completion,
    Message,
    Step,
)
from rlcore.protocols.optional import Closes
from rlcore.protocols.rollout import Rollout
from rlcore.types import Request, Sample
from rlcore.workers.episodes import EpisodeOptions
from rlcore_environments.chat import Chat, tools_of
from rlcore_environments.stage import Stage, TooManyBlocked

_MAX_CALLS: Final = 8
"""Maximum number of concurrent calls of the engine; requests that arrive in the meantime wait for the next call."""


@dataclass(slots=True, kw_only=True)
class Episode(Transcript):
    """Transcript of a conversation in progress."""

    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    rewards: list[float] = field(default_factory=list)
    end: int = DONE
    error: str = ""


class Episodes:
    """Runner of episodes in one event loop. Those that overlap share the environments' thread and calls of the engine."""

    def __init__(
        self,
        engine: Rollout,
        make: Callable[[], Any],
        options: EpisodeOptions,
        tokenizer: Any,
        count: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """Take what all episodes have in common; `make` returns a new environment, `count` gets every response."""
        self._engine, self._make, self._options = engine, make, options
        self._tokenizer, self._count = tokenizer, count
        self._player: _Player | None = None
        self._stage: Stage | None = None
        self._num_running = 0
        self._open: set[asyncio.Task[Episode]] = set()
        """Episodes that have not ended."""

    @property
    def num_open(self) -> int:
        """Return the number of episodes that have begun and not ended."""
        return len(self._open)

    async def run(self, rows: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[Episode]:
        """Run one episode for each row, with the sampling settings and seed of its request.

        Errors of the engine are raised.
        """
        async with self._shared() as player:
            try:
                async with asyncio.TaskGroup() as group:
                    played = [group.create_task(player.play(*asked)) for asked in zip(rows, requests, strict=True)]
                    for episode in played:
                        self._open.add(episode)
                        episode.add_done_callback(self._open.discard)
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first error has cancelled all other episodes
            return [episode.result() for episode in played]

    def forgive(self) -> None:
        """Forget which environments blocked their threads, at the end of a step."""
        if self._stage is not None:
            self._stage.forgive()

    @asynccontextmanager
    async def _shared(self) -> AsyncIterator[_Player]:
        if self._player is None or self._stage is None:
            chat = Chat(self._tokenizer, tools_of(self._make()), self._options.template)
            self._stage = await Stage(self._options.limits.step_timeout_s).__aenter__()
            batcher = RequestBatcher(self._engine, self._count)
            self._player = _Player(self._make, self._options, chat, self._stage, batcher)
        stage = self._stage
        self._num_running += 1
        try:
            yield self._player
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._player = self._stage = None
                await stage.__aexit__(None, None, None)


class RequestBatcher:
    """Adapter that sends single requests to an engine in batches."""

    def __init__(self, engine: Rollout, count: Callable[[Sample], None] = lambda sample: None) -> None:
        self._engine, self._count = engine, count
        self._waiting: list[tuple[Request, asyncio.Future[Sample]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._num_requests = 0

    async def send(self, request: Request) -> Sample:
        """Send a request, under a new id, and return its response."""
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append((replace(request, request_id=self._num_requests), answer))
        self._num_requests += 1
        if len(self._waiting) == 1:  # requests of the same iteration of the loop join this call
            asyncio.get_running_loop().call_soon(self._start)
        return await answer

    def _start(self) -> None:
        if self._waiting and len(self._calls) < _MAX_CALLS:
            sent, self._waiting = self._waiting, []
            call = asyncio.create_task(self._call(sent))
            self._calls.add(call)
            call.add_done_callback(self._end)

    def _end(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._start()

    async def _call(self, sent: Sequence[tuple[Request, asyncio.Future[Sample]]]) -> None:
        answers = {request.request_id: answer for request, answer in sent}
        error: BaseException = RuntimeError("the rollout returned no sample for a request")
        try:
            async for sample in self._engine.generate([request for request, _ in sent]):
                self._count(sample)
                answer = answers.pop(sample.request_id)
                if not answer.done():  # its episode may have been cancelled
                    answer.set_result(sample)
        except SampleError as raised:  # nothing was generated: send each request again on its own
            error = raised
            if len(sent) > 1:
                await asyncio.gather(*(self._call([one]) for one in sent))
        except Exception as raised:
            error = raised
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)


class _Player:
    """Runner of episodes with one environment and one engine."""

    def __init__(
        self, make: Callable[[], Any], options: EpisodeOptions, chat: Chat, stage: Stage, batcher: RequestBatcher
    ) -> None:
        self._make, self._options = make, options
        self._chat, self._stage, self._batcher = chat, stage, batcher

    async def play(self, row: Mapping[str, Any], request: Request) -> Episode:
        """Run one episode from reset to its end."""
        episode, made = Episode(), []

        async def reset() -> Any:
            made.append(self._make())
            return await _awaited(made[0].reset(row), "reset")

        try:
            first = checked_messages(await self._ask(reset), "reset")
            episode.messages += first
            episode.read(self._chat.begin(first))
            if len(episode.token_ids) >= self._options.max_tokens:
                raise SampleError(
                    f"the first messages have {len(episode.token_ids)} tokens, and the limit is {self._token_limit}"
                )
            while await self._turn(made[0], episode, request):
                pass
            if episode.end != DONE and not episode.rewards:
                episode.rewards.append(self._cut_reward(episode.end))
        except (SampleError, TimeoutError) as error:
            episode.end = TIMEOUT if isinstance(error, TimeoutError) else ERROR
            place = f"turn {episode.num_turns}" if episode.num_turns else "reset"
            name = self._options.environment.name
            episode.error = f"environment '{name}' in {place} of prompt {row['prompt_id']}: {error}"
        finally:
            closing = asyncio.ensure_future(self._close(made, episode, row))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:  # another episode has ended the step; closing has its own timeout
                await closing
                raise
        if not episode.token_ids:
            episode.read(request.prompt_ids)
        return episode

    async def _turn(self, environment: Any, episode: Episode, request: Request) -> bool:
        """Generate a response and pass it to the environment; return True if the episode continues."""
        turn, limit, max_turns = episode.num_turns, self._options.max_tokens, self._options.limits.max_turns
        room = min(request.sampling.max_response_tokens, limit - len(episode.token_ids))
        asked = replace(
            request,
            prompt_ids=list(episode.token_ids),
            sampling=replace(request.sampling, max_response_tokens=room),
            seed=mix(request.seed, turn) if turn else request.seed,
        )
        sample = await self._batcher.send(asked)
        episode.write(sample)
        episode.num_turns += 1
        completion = Completion(
            text=self._chat.text(sample.token_ids),
            finish_reason=sample.finish_reason,
            num_tokens=len(sample.token_ids),
            turn=turn,
            last=turn + 1 == max_turns or len(episode.token_ids) >= limit,
        )
        history = list(episode.messages)
        episode.messages.append({"role": "assistant", "content": completion.text})
        step = checked_step(await self._ask(lambda: _awaited(environment.step(completion), "step")))
        if step.reward is not None:
            episode.rewards.append(float(step.reward))
        new = [] if step.done or completion.last else checked_messages(step.messages, "step")
        episode.messages += step.messages
        if step.done:
            return False
        between = self._chat.after(history, new, sample.token_ids) if new else []
        fits = len(episode.token_ids) + len(between) < limit
        if not new or not fits:
            episode.end = OUT_OF_TURNS if fits and turn + 1 == max_turns else OUT_OF_TOKENS
            return False
        episode.read(between)
        return True

    async def _ask(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Call the environment; raise its errors as SampleError with file and line."""
        try:
            return await self._stage.call(make)
        except (SampleError, TimeoutError, TooManyBlocked):
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
            raise SampleError(f"{type(error).__name__}: {error}{where}") from error

    async def _close(self, made: Sequence[Any], episode: Episode, row: Mapping[str, Any]) -> None:
        async def close() -> None:
            if made and isinstance(made[0], Closes):  # a reset that timed out may have created it in the meantime
                await _awaited(made[0].close(), "close")

        try:
            await self._ask(close)
        except (SampleError, TimeoutError) as error:
            if not episode.error:  # keep the first error
                name = self._options.environment.name
                episode.end, episode.error = (
                    ERROR,
                    f"environment '{name}' in close of prompt {row['prompt_id']}: {error}",
                )

    def _cut_reward(self, end: int) -> float:
        """Return the reward of an episode that reached a limit without a reward."""
        limits = self._options.limits
        if limits.cut_reward is None:
            limit = f"episode.max_turns={limits.max_turns}" if end == OUT_OF_TURNS else self._token_limit
            raise SampleError(f"no reward before the limit of {limit}; type  episode.cut_reward=0")
        return limits.cut_reward

    @property
    def _token_limit(self) -> str:
        limit = self._options.max_tokens
        if limit == self._options.limits.max_tokens:
            return f"episode.max_tokens={limit}"
        return f"{limit} tokens in the model's context"


async def _awaited(answer: Any, method: str) -> Any:
    if not inspect.isawaitable(answer):
        raise SampleError(f"{method} returned {type(answer).__name__}; write  async def {method}(…)")
    return await answer


def checked_messages(answer: Any, method: str) -> list[Message]:
    """Check the next messages for the model, and return them as a list."""
    good = isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer) > 0
    if not good or not all(
        isinstance(it, Mapping) and isinstance(it.get("role"), str) and "content" in it for it in answer
    ):
        what = "no messages, but is not done" if isinstance(answer, Sequence) and not len(answer) else f"{answer!r:.80}"
        raise SampleError(f'{method} returned {what}; write [{{"role": "user", "content": "..."}}]')
    if answer[-1]["role"] == "assistant":
        raise SampleError(f"the last message of {method} has the role assistant, so the model has nothing to answer")
    return list(answer)


def checked_step(answer: Any) -> Step:
    if not isinstance(answer, Step):
        raise SampleError(f"step returned {type(answer).__name__}, not rlcore.Step")
    if answer.reward is not None and not math.isfinite(answer.reward):
        raise SampleError(f"step returned the reward {answer.reward}, which is not finite")
    return answer


def episodes_batch(prompts: Batch, samples_per_prompt: int, episodes: Sequence[Episode]) -> Batch:
    """Return one row per episode; `prompts` is already repeated to match."""
    return transcripts_batch(
        prompts,
        samples_per_prompt,
        episodes,
        truncated=torch.tensor([_is_cut(it) for it in episodes], dtype=torch.bool),
        finish_reason=["length" if _is_cut(it) else it.finish_reason for it in episodes],
        num_turns=torch.tensor([it.num_turns for it in episodes], dtype=torch.int64),
        episode_reward=torch.tensor([sum(it.rewards) if it.rewards else math.nan for it in episodes]),
        episode_end=torch.tensor([it.end for it in episodes], dtype=torch.int64),
        episode_error=[it.error for it in episodes],
        episode_messages=[[dict(message) for message in it.messages] for it in episodes],
    )


def _is_cut(episode: Episode) -> bool:
    return episode.end in (OUT_OF_TURNS, OUT_OF_TOKENS) or episode.finish_reason == "length"
