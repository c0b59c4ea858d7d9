"""Contract of an environment."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.protocols.environment import Completion, Message, Step
from rlcore.protocols.optional import HasTools
from rlcore.testing.expect import allowed, equal, no_misspelled_member

_ODD = (
    "",
    "<tool_call>",
    '<tool_call>{"name": 7}</tool_call>',
    "[]",
    "\u202e\x00🧮",
    "0" * 3000,
    "</tool_call>{",
    "no",
)


@dataclass(slots=True, kw_only=True)
class Played:
    """Messages and rewards of an environment in one episode."""

    first: Sequence[Message]
    steps: list[Sequence[Message]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    done: bool = False

    @property
    def reward(self) -> float | None:
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) if given else None


class EnvironmentContract:
    """Override `make`, and give examples: a row, the model's response in each turn, and the reward of the episode.

    Example:
        class TestMine(EnvironmentContract):
            examples = [({"prompt": "6 · 7", "answer": "42"}, ["42"], 1.0), ({"prompt": "6 · 7", "answer": "42"}, ["7"], 0.0)]

            def make(self):
                return Mine(MyConfig())
    """

    examples: Sequence[tuple[Mapping[str, Any], Sequence[str], float | None]]
    step_timeout_s: float = 10.0

    def make(self) -> Any:
        """Return a new environment, for one episode."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self)")

    def test_no_optional_member_is_misspelled(self) -> None:
        no_misspelled_member("environment", self.make())

    def test_the_examples_get_their_rewards(self) -> None:
        found = [self.play(row, texts).reward for row, texts, _ in self.episodes()]
        equal(found, [reward for _, _, reward in self.examples], "the rewards of the examples")

    def test_the_row_is_not_modified(self) -> None:
        for row, texts, _ in self.episodes():
            before = copy.deepcopy(row)
            with allowed("the row must not be modified: other episodes of the prompt get the same object"):
                self.play(row, texts)
            equal(row, before, "the row must not be modified: other episodes of the prompt get the same object")

    def test_any_response_is_answered(self) -> None:
        row = self.episodes()[0][0]
        for text in _ODD:
            with allowed(f"a model may write anything, such as {text!r:.40}; return messages, or done=True"):
                self.play(row, [text])

    def test_the_last_turn_has_a_reward(self) -> None:
        row = self.episodes()[0][0]
        for text in _ODD:
            given = self.play(row, [text] * 3, last=True).reward
            assert given is not None, (
                f"an episode of three turns, {text!r:.40} in each, has no reward; the third has completion.last: score it"
            )

    def test_episodes_are_reproducible(self) -> None:
        for row, texts, _ in self.episodes():
            equal(self.play(row, texts), self.play(row, texts), "the same responses must give the same episode")

    def test_episodes_are_independent(self) -> None:
        alone = [self.play(row, texts) for row, texts, _ in self.episodes()]

        async def together() -> list[Played]:
            return list(await asyncio.gather(*(self._play(row, texts, False) for row, texts, _ in self.episodes())))

        rule = "episodes run concurrently in one thread, which must not change their results"
        with allowed(rule):
            found = self.run(together())
        equal(found, alone, rule)

    def test_tools_have_a_schema(self) -> None:
        from transformers.utils import get_json_schema

        environment = self.make()
        for tool in environment.tools if isinstance(environment, HasTools) else ():
            with allowed("tools need type annotations and a docstring, which the chat template shows to the model"):
                get_json_schema(tool)

    def episodes(self) -> list[tuple[Mapping[str, Any], Sequence[str], float | None]]:
        """Return the examples with the columns that every row has."""
        return [({"prompt": "?", "prompt_id": 0, **row}, texts, reward) for row, texts, reward in self.examples]

    def play(self, row: Mapping[str, Any], texts: Sequence[str], *, last: bool = False) -> Played:
        """Play an episode with these responses; `last` sets `completion.last` for the final one."""

        found: Played = self.run(self._play(row, texts, last))
        return found

    @property
    def _late(self) -> str:
        return (
            f"no answer within {self.step_timeout_s:g} s a step: await slow operations, so that other episodes continue"
        )

    def run(self, play: Coroutine[Any, Any, Any]) -> Any:
        """Run in a separate thread, because a blocking step cannot be cancelled."""
        told: list[Any] = []

        def target() -> None:
            try:
                told.append(asyncio.run(play))
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(timeout=self.step_timeout_s * (1 + max(len(texts) for _, texts, _ in self.examples)))
        assert told, self._late
        if isinstance(told[0], BaseException):
            raise told[0]
        return told[0]

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        start = time.monotonic()
        async with asyncio.timeout(self.step_timeout_s):
            found = await answer
        assert time.monotonic() - start <= self.step_timeout_s, self._late
        return found

    async def _play(self, row: Mapping[str, Any], texts: Sequence[str], last: bool) -> Played:
        environment = self.make()
        try:
            played = Played(first=await self._in_time(environment.reset(row)))
            _check_messages(played.first)
            for turn, text in enumerate(texts):
                completion = Completion(
                    text=text, finish_reason="stop", num_tokens=1, turn=turn, last=last and turn + 1 == len(texts)
                )
                step = await self._in_time(environment.step(completion))
                _check_step(step, completion.last)
                played.steps.append(step.messages)
                played.rewards.append(step.reward)
                played.done = step.done
                if step.done:
                    break
        finally:
            if hasattr(environment, "close"):
                await environment.close()
        return played


def _check_messages(messages: Any) -> None:
    assert isinstance(messages, Sequence) and not isinstance(messages, str) and messages, (
        f"no messages: {messages!r:.80}"
    )
    good = all(isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one for one in messages)
    assert good, f'a message is {{"role": "user", "content": "..."}}, got {messages!r:.80}'
    assert messages[-1]["role"] != "assistant", (
        "the last message is the assistant's, so there is nothing left to answer"
    )


def _check_step(step: Any, last: bool) -> None:
    assert isinstance(step, Step), f"step returns rlcore.Step, got {type(step).__name__}"
    assert step.reward is None or math.isfinite(step.reward), f"a reward is a finite number or None, got {step.reward}"
    if not step.done and not last:
        _check_messages(step.messages)
