"""Episodes: tokens in and tokens out, limits, and failures in the code of environments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from rlcore_environments import stage as stages
from rlcore_environments.chat import Chat
from rlcore_environments.episodes import (
    DONE,
    ERROR,
    OUT_OF_TOKENS,
    OUT_OF_TURNS,
    TIMEOUT,
    Episodes,
    RequestBatcher,
    episodes_batch,
)
from rlcore_environments.stage import Stage

from rlcore import Batch, Completion, Request, Sampling, Step
from rlcore.data.prompts import PromptBuilder, PromptOptions
from rlcore.errors import ConfigError, InfrastructureError, ModelError, NumericalError, SampleError
from rlcore.models.load import load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.environment import EpisodeConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.registry import resolve
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing import FakeConfig, FakeRollout
from rlcore.testing.model import small_model
from rlcore.testing.waiting import HANG_S
from rlcore.workers.episodes import EpisodeOptions

TEMPLATE = (
    "{% if tools %}tools {% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}<bos>{{ m.role }} {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return small_model(tmp_path_factory.getbasetemp())


@pytest.fixture
def tokenizer(model_path):
    tokenizer = load_tokenizer(model_path)
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    yield tokenizer
    tokenizer.chat_template = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    turns: int = 3
    fault: str = ""
    prompt: int = 0
    """Id of the prompt with the fault."""


class Counts:
    """Environment with a fixed number of turns, and a fault in the second turn of one prompt."""

    Config = Settings
    begun: list[int] = []  # noqa: RUF012
    closed: list[int] = []  # noqa: RUF012
    seen: list[Completion] = []  # noqa: RUF012

    def __init__(self, config):
        self.config, self.fault = config, ""

    async def reset(self, row):
        self.prompt_id = row["prompt_id"]
        self.begun.append(self.prompt_id)
        self.fault = self.config.fault if self.prompt_id == self.config.prompt else ""
        if self.fault == "no message":
            return []
        if self.fault == "raises in reset":
            raise KeyError("level")
        return [{"role": "user", "content": f"go {self.prompt_id}"}]

    async def step(self, completion):
        self.seen.append(completion)
        turn = completion.turn
        match self.fault if turn == 1 else "":
            case "raises":
                raise ValueError("no such door")
            case "awaits too long":
                await asyncio.sleep(2 * HANG_S)
            case "swallows the cancellation":
                await stubborn(15.0)
            case "cancels itself":
                raise asyncio.CancelledError
            case "blocks":
                time.sleep(15.0)
            case "exits":
                raise SystemExit(3)
            case "tuple":
                return [], 1.0, True
            case "nan":
                return Step(reward=float("nan"), done=True)
            case "silent":
                return Step()
            case "assistant":
                return Step(messages=[{"role": "assistant", "content": "me"}])
        done = turn + 1 == self.config.turns
        return Step(messages=[] if done else [{"role": "user", "content": f"more {turn}"}], reward=0.5, done=done)

    async def close(self):
        self.closed.append(self.prompt_id)
        if self.fault == "raises in close":
            raise OSError("still open")
        if self.fault == "swallows the cancellation in close":
            await stubborn(15.0)


async def stubborn(seconds, until=lambda: False):
    """Await, and ignore cancellation."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


class Plain(Counts):
    """Environment whose step is not asynchronous."""

    def step(self, completion):
        return Step(done=True)


class NeverScores(Counts):
    async def step(self, completion):
        return Step(messages=[{"role": "user", "content": "again"}])


def weigh(grams: float, unit: str = "g") -> str:
    """Weigh something.

    Args:
        grams: How heavy it is.
        unit: Unit of the weight.
    """
    return f"{grams} {unit}"


def untyped(grams):
    return grams


def prepared(engine, tokenizer, *, environment=Counts, num=4, limits=None, max_response_tokens=6, **settings):
    """Return episodes, and the arguments of their `run`."""
    options = EpisodeOptions(
        environment=resolve("environment", environment).spec,
        settings=b"",
        limits=limits or EpisodeConfig(step_timeout_s=HANG_S),
        context_length=128,
    )
    rows = [{"prompt": "?", "prompt_id": i} for i in range(num)]
    sampling = Sampling(max_response_tokens=max_response_tokens)
    requests = [Request(request_id=i, prompt_ids=[5], sampling=sampling, seed=100 + i) for i in range(num)]
    Counts.begun.clear()
    Counts.closed.clear()
    Counts.seen.clear()
    return Episodes(engine, lambda: environment(Settings(**settings)), options, tokenizer), (rows, requests)


def play(engine, tokenizer, **options):
    episodes, asked = prepared(engine, tokenizer, **options)
    return asyncio.run(episodes.run(*asked))


@pytest.fixture
def fake(model_path):
    return FakeRollout(FakeConfig(), model=ModelConfig(path=model_path), context=RolloutContext())


@pytest.fixture
def hf(model_path):
    return HFRollout(HFConfig(), model=ModelConfig(path=model_path), context=RolloutContext())


class Remembers(FakeRollout):
    """Fake engine that records the seed of every request."""

    def generate(self, requests):
        self.seeds = [*getattr(self, "seeds", []), *(request.seed for request in requests)]
        return super().generate(requests)


def test_every_turn_has_its_own_reproducible_seed(model_path, tokenizer):
    found = []
    for num in (4, 2):  # the number of other episodes must not matter
        engine = Remembers(FakeConfig(), model=ModelConfig(path=model_path), context=RolloutContext())
        play(engine, tokenizer, num=num)
        found.append(engine.seeds)

    assert sorted(found[0])[:4] == [100, 101, 102, 103], "the first turn has the seed of the request"
    assert len(set(found[0])) == len(found[0]) == 4 * 3
    assert len(found[1]) == 2 * 3
    assert set(found[1]) < set(found[0])


def test_the_first_prompt_has_the_tokens_of_single_turn_training(tokenizer):
    messages = [{"role": "system", "content": "a b"}, {"role": "user", "content": "sort 312="}]

    class Rows:
        name, columns = "rows", ("prompt",)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return {"prompt": messages}

    prepared = PromptBuilder(tokenizer, PromptOptions()).prepare(Rows())

    assert Chat(tokenizer).begin(messages) == prepared.token_ids.tolist()


def test_the_settings_of_the_chat_template_apply_to_every_turn(tokenizer):
    arguments = {"chat_template": "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}", "mark": "7"}
    chat, history = Chat(tokenizer, (), arguments), [{"role": "user", "content": "1"}]

    assert tokenizer.decode(chat.begin(history)).replace(" ", "") == "17"
    assert tokenizer.decode(chat.after(history, [{"role": "user", "content": "2"}], [])).replace(" ", "") == "727"


def test_the_mask_covers_exactly_the_tokens_that_the_engine_sampled(fake, tokenizer):
    episodes = play(fake, tokenizer)

    assert [it.end for it in episodes] == [DONE] * 4
    assert len(fake.requests) == 12
    num_sampled = 0
    for asked in fake.requests:
        start, sampled = len(asked.prompt_ids), list(fake._respond(asked)[0])
        (episode,) = [it for it in episodes if it.token_ids[:start] == list(asked.prompt_ids)]
        assert episode.token_ids[start : start + len(sampled)] == sampled
        assert all(episode.loss_mask[start : start + len(sampled)])
        num_sampled += len(sampled)
    assert sum(sum(it.loss_mask) for it in episodes) == num_sampled
    assert all(len(it.log_probs) == len(it.versions) == sum(it.loss_mask) for it in episodes)
    assert all(x <= 0 for it in episodes for x in it.log_probs)


def test_tokens_between_two_turns_come_from_the_template(tokenizer):
    chat = Chat(tokenizer)
    history, new = [{"role": "user", "content": "go"}], [{"role": "user", "content": "more"}]
    end = tokenizer.eos_token_id
    truncated, ended = tokenizer("12")["input_ids"], [*tokenizer("12")["input_ids"], end]

    whole = chat.begin([*history, {"role": "assistant", "content": "12"}, *new])

    assert chat.begin(history) + ended + chat.after(history, new, ended) == whole
    assert chat.begin(history) + truncated + chat.after(history, new, truncated) == whole


def test_an_unusual_tokenization_by_the_model_is_kept(tokenizer):
    """Decoding and encoding again would change these tokens: a pad token, and digits in an unusual order."""
    chat = Chat(tokenizer)
    history, new = [{"role": "user", "content": "go"}], [{"role": "user", "content": "more"}]
    odd = [tokenizer.pad_token_id, *tokenizer("21")["input_ids"]]

    assert chat.after(history, new, odd) == chat.after(history, new, tokenizer("3")["input_ids"])


def test_an_episode_becomes_one_sample_with_summed_rewards(fake, tokenizer):
    episodes = play(fake, tokenizer, num=2, turns=2)
    prompts = Batch.of(lengths=[1, 1], tokens={"input_ids": [5, 5]}, rows={"group_id": [7, 8], "prompt_id": [0, 1]})

    batch = episodes_batch(prompts, 1, episodes)

    assert batch["episode_reward"].tolist() == [1.0, 1.0]
    assert batch["num_turns"].tolist() == [2, 2]
    assert batch["sample_id"].tolist() == [7, 8]
    assert batch["num_loss_tokens"].tolist() == batch.per_row(batch["loss_mask"].float()).long().tolist()
    assert [m["role"] for m in batch["episode_messages"][0]] == ["user", "assistant", "user", "assistant"]
    assert batch["rollout_log_probs"].dtype == torch.float32


def test_log_probs_of_every_turn_match_the_trainer(hf, tokenizer, model_path):
    from rlcore.testing.model import plain_model

    for episode in play(hf, tokenizer, turns=3):
        with torch.no_grad():
            logits = plain_model(model_path)(torch.tensor([episode.token_ids])).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(episode.token_ids)[1:, None]).squeeze(1)
        mask = torch.tensor(episode.loss_mask)[1:]
        torch.testing.assert_close(torch.tensor(episode.log_probs), wanted[mask], atol=2e-5, rtol=0)


def test_an_episode_does_not_depend_on_its_neighbors(hf, tokenizer):
    together = play(hf, tokenizer, num=6)

    assert play(hf, tokenizer, num=2)[1].token_ids == together[1].token_ids


FAULTS = [
    ("raises", ERROR, r"in turn 2 of prompt 2: ValueError: no such door \(test_episodes.py:\d+\)"),
    ("raises in reset", ERROR, r"in reset of prompt 2: KeyError: 'level' \(test_episodes.py:\d+\)"),
    ("no message", ERROR, r"in reset of prompt 2: reset returned no messages, but is not done; write \[\{"),
    ("exits", ERROR, r"in turn 2 of prompt 2: RuntimeError: SystemExit: 3"),
    ("tuple", ERROR, r"in turn 2 of prompt 2: step returned tuple, not rlcore.Step"),
    ("nan", ERROR, r"in turn 2 of prompt 2: step returned the reward nan, which is not finite"),
    ("silent", ERROR, r"in turn 2 of prompt 2: step returned no messages, but is not done"),
    ("assistant", ERROR, r"in turn 2 of prompt 2: the last message of step has the role assistant"),
    ("raises in close", ERROR, r"in close of prompt 2: OSError: still open"),
    ("awaits too long", TIMEOUT, r"in turn 2 of prompt 2: no answer within 3 s"),
    ("cancels itself", ERROR, r"in turn 2 of prompt 2: RuntimeError: CancelledError"),
    ("swallows the cancellation", TIMEOUT, r"in turn 2 of prompt 2: it ignored its cancellation; let asyncio.Canc"),
    ("swallows the cancellation in close", ERROR, r"in close of prompt 2: it ignored its cancellation; let asyncio"),
    ("blocks", TIMEOUT, r"in turn 2 of prompt 2: it blocks at test_episodes.py:\d+ instead of awaiting"),
]


@pytest.mark.parametrize(("fault", "end", "text"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_a_fault_ends_only_its_own_episode_and_names_its_prompt(fake, tokenizer, fault, end, text):
    import re

    episodes = play(fake, tokenizer, fault=fault, prompt=2, limits=EpisodeConfig(step_timeout_s=3.0))

    assert [it.end for it in episodes] == [DONE, DONE, end, DONE]
    assert [bool(it.error) for it in episodes] == [False, False, True, False]
    assert re.match(rf"environment 'Counts' {text}", episodes[2].error), episodes[2].error
    assert sorted(Counts.closed) == [0, 1, 2, 3]
    assert episodes[2].token_ids, "a row needs at least one token"


def test_a_method_that_is_not_async_is_an_error(fake, tokenizer):
    (episode,) = play(fake, tokenizer, environment=Plain, num=1)

    assert episode.error.endswith("step returned Step; write  async def step(…)")


def test_an_episode_truncated_at_max_turns_keeps_its_reward(fake, tokenizer):
    (episode,) = play(fake, tokenizer, num=1, turns=100, limits=EpisodeConfig(max_turns=3))

    assert (episode.end, episode.num_turns, sum(episode.rewards)) == (OUT_OF_TURNS, 3, 1.5)
    assert [it.last for it in Counts.seen] == [False, False, True]
    assert episode.loss_mask[-1], "messages without a response are not part of the sample"


def test_an_episode_truncated_without_a_reward_is_an_error(fake, tokenizer):
    (episode,) = play(fake, tokenizer, environment=NeverScores, num=1, limits=EpisodeConfig(max_turns=3))

    assert episode.error == (
        "environment 'NeverScores' in turn 3 of prompt 0: no reward before the limit of episode.max_turns=3; type "
        " episode.cut_reward=0"
    )


@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_tokens": 60}], ids=["turns", "tokens"])
def test_an_episode_truncated_without_a_reward_gets_the_cut_reward(fake, tokenizer, limits):
    cut = EpisodeConfig(cut_reward=-0.5, **limits)
    (episode,) = play(fake, tokenizer, environment=NeverScores, num=1, limits=cut)

    assert (episode.error, episode.rewards) == ("", [-0.5])


def test_an_episode_ends_where_the_next_prompt_would_not_fit(fake, tokenizer):
    limit = 60
    (episode,) = play(fake, tokenizer, num=1, turns=100, limits=EpisodeConfig(max_turns=50, max_tokens=limit))

    assert episode.end == OUT_OF_TOKENS
    assert limit - 30 < len(episode.token_ids) <= limit


def test_first_messages_above_the_token_limit_are_an_error(fake, tokenizer):
    (episode,) = play(fake, tokenizer, num=1, limits=EpisodeConfig(max_tokens=8))

    assert "the first messages have" in episode.error
    assert "the limit is episode.max_tokens=8" in episode.error


def test_an_engine_failure_ends_the_step(model_path, tokenizer):
    engine = FakeRollout(
        FakeConfig(fault="raise", fault_after=5), model=ModelConfig(path=model_path), context=RolloutContext()
    )

    episodes, asked = prepared(engine, tokenizer)
    with pytest.raises(InfrastructureError, match="the fake engine fails"):
        asyncio.run(episodes.run(*asked))
    assert Counts.begun
    assert sorted(Counts.closed) == sorted(Counts.begun)
    assert episodes.num_open == 0


def test_episodes_are_open_until_they_end(fake, tokenizer):
    counted = []

    class Uneven(Counts):
        async def step(self, completion):
            while episodes.num_open > 4 - completion.turn:  # those of fewer turns end, sooner or later
                await asyncio.sleep(0.001)
            counted.append(episodes.num_open)
            self.config = replace(self.config, turns=1 + self.prompt_id)
            return await super().step(completion)

    episodes, asked = prepared(fake, tokenizer, environment=Uneven)
    asyncio.run(episodes.run(*asked))

    assert (counted[0], counted[-1], episodes.num_open) == (4, 1, 0)


def test_environments_that_block_too_many_threads_end_the_step(fake, tokenizer, monkeypatch):
    monkeypatch.setattr(stages, "_MAX_BLOCKED", 1)

    with pytest.raises(InfrastructureError, match=r"blocked 1 threads in one step, the last at test_episodes.py:\d+\n"):
        play(
            fake, tokenizer, fault="blocks", prompt=2, turns=20, limits=EpisodeConfig(step_timeout_s=0.3, max_turns=50)
        )


def test_a_slow_environment_does_not_delay_the_others(fake, tokenizer):
    class Slow(Counts):
        async def step(self, completion):
            while self.prompt_id == 0 and len(self.closed) < 3:
                await asyncio.sleep(0.01)
            return await super().step(completion)

    episodes = play(fake, tokenizer, environment=Slow)

    assert [it.end for it in episodes] == [DONE] * 4
    assert Counts.closed[-1] == 0


def test_calls_waiting_in_a_blocked_thread_run_in_the_next_one():
    async def several():
        async def block():
            time.sleep(5.0)

        async def answer():
            return 7

        async with Stage(0.3) as stage:
            blocked = asyncio.create_task(stage.call(block))
            await asyncio.sleep(0.05)
            others = [asyncio.create_task(stage.call(answer)) for _ in range(3)]
            return await asyncio.gather(blocked, *others, return_exceptions=True)

    first, *others = asyncio.run(several())

    assert isinstance(first, TimeoutError)
    assert others == [7, 7, 7]


def test_a_call_that_never_ends_delays_neither_its_caller_nor_the_end_of_the_step():
    release, ended = threading.Event(), []

    async def never_ends():
        await stubborn(2 * HANG_S, release.is_set)
        ended.append("it")

    async def several():
        async with Stage(0.3) as stage:
            calls = [asyncio.create_task(stage.call(never_ends)) for _ in range(2)]
            await asyncio.wait(calls, timeout=HANG_S)
            return [task.done() and str(task.exception()) for task in calls]

    errors = asyncio.run(several())
    waited = bool(ended)
    release.set()

    assert errors == ["it ignored its cancellation; let asyncio.CancelledError propagate"] * 2
    assert not waited


def test_one_request_that_cannot_run_does_not_fail_the_others(fake):
    async def ask():
        batcher = RequestBatcher(fake)
        requests = [
            Request(request_id=0, prompt_ids=[5] * length, sampling=Sampling(max_response_tokens=3), seed=1)
            for length in (3, 500, 4)
        ]
        return await asyncio.gather(*(batcher.send(it) for it in requests), return_exceptions=True)

    first, second, third = asyncio.run(ask())

    assert isinstance(second, SampleError)
    assert first.token_ids and third.token_ids


def test_overlapping_calls_decode_together(hf):
    """Requests that arrive during decoding join the batch, and get the same responses as alone."""

    def request(i):
        return Request(request_id=i, prompt_ids=[4 + i, 6], sampling=Sampling(max_response_tokens=8), seed=i)

    async def alone(i):
        (sample,) = [sample async for sample in hf.generate([request(i)])]
        return sample

    async def overlap():
        return await asyncio.gather(*(alone(i) for i in range(5)))

    one_by_one = [asyncio.run(alone(i)) for i in range(5)]
    passes = []
    decode = HFRollout.generate.__globals__["_Decoding"].advance

    def counted(self):
        passes.append(len(self._rows))
        return decode(self)

    HFRollout.generate.__globals__["_Decoding"].advance = counted
    try:
        together = asyncio.run(overlap())
    finally:
        HFRollout.generate.__globals__["_Decoding"].advance = decode

    assert [list(it.token_ids) for it in together] == [list(it.token_ids) for it in one_by_one]
    assert len(passes) < sum(len(it.token_ids) for it in one_by_one)
    assert hf._decoding is None


def test_closing_a_call_drops_only_its_own_requests(hf):
    def request(i):
        return Request(request_id=i, prompt_ids=[4 + i, 6], sampling=Sampling(max_response_tokens=9), seed=i)

    async def both():
        closed = hf.generate([request(0), request(1)])
        kept = asyncio.create_task(_all(hf.generate([request(2)])))
        await asyncio.wait_for(anext(closed), HANG_S)
        await closed.aclose()
        return await kept

    async def _all(stream):
        return [sample async for sample in stream]

    (sample,) = asyncio.run(both())
    (alone,) = asyncio.run(_all(hf.generate([request(2)])))
    assert list(sample.token_ids) == list(alone.token_ids)


def test_logits_that_are_not_finite_end_the_run(hf, tokenizer):
    with torch.no_grad():
        next(hf._model.parameters()).fill_(float("nan"))

    with pytest.raises(NumericalError, match="not finite"):
        play(hf, tokenizer)


def test_tools_are_part_of_the_prompt(tokenizer):
    shown = Chat(tokenizer, [weigh]).begin([{"role": "user", "content": "?"}])

    assert "tools weigh" in tokenizer.decode(shown)


def test_a_tool_without_types_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"tool 'untyped' has no schema: (.|\n)*\nGive every parameter a type"):
        Chat(tokenizer, [untyped])


def test_a_template_that_ignores_tools_is_refused(tokenizer):
    tokenizer.chat_template = TEMPLATE.partition("{% endif %}")[2]

    Chat(tokenizer)
    with pytest.raises(ModelError, match="its chat template ignores tools, but the environment has tools\nUse a model"):
        Chat(tokenizer, [weigh])


def test_a_tokenizer_without_template_is_refused(tokenizer):
    tokenizer.chat_template = None

    with pytest.raises(ModelError, match="has no chat template, which environments need\nUse a chat model"):
        Chat(tokenizer)


def test_a_template_that_loops_forever_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("rlcore.data.limits.LIMIT_S", 0.5)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    with pytest.raises(SampleError, match=r"the chat template refused .* took longer than 0\.5 s"):
        Chat(tokenizer, [weigh])


def test_a_template_that_hides_assistant_messages_is_refused(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"

    with pytest.raises(ModelError, match="does not render an assistant message verbatim"):
        Chat(tokenizer).after([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}], [5])


@pytest.mark.parametrize(("name", "value"), [("max_turns", 0), ("max_tokens", -1), ("step_timeout_s", 0.0)])
def test_limits_without_an_effect_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*\nType  {name}="):
        replace(EpisodeConfig(), **{name: value})


def test_messages_of_an_episode_are_json_serializable(fake, tokenizer):
    (episode,) = play(fake, tokenizer, num=1)

    json.dumps([dict(m) for m in episode.messages])
