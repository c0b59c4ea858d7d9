"""Rewards that use a server: batches, retries, limits, and invalid responses."""

import asyncio
import datetime
import socket
from decimal import Decimal

import pytest

from rlcore.errors import ConfigError
from rlcore.testing import RewardContract
from rlcore.testing.waiting import HANG_S

REMOTE = "rlcore_rewards.remote:Remote"
JUDGE = "rlcore_rewards.judge:Judge"


def texts(count):
    return [{"completion": "x" * i} for i in range(count)]


class TestRemote(RewardContract):
    target = REMOTE
    examples = (({"completion": "abc"}, 3.0), ({"completion": ""}, 0.0))

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.options = {"url": server.url}


class TestJudge(RewardContract):
    target = JUDGE
    examples = (({"completion": "abc"}, 0.3), ({"completion": ""}, 0.0))

    @pytest.fixture(autouse=True)
    def _server(self, server):
        server.answers.answer = judged
        self.options = {"url": server.url, "model": "m", "template": "<{completion}> {prompt}"}


def judged(body):
    text = body["messages"][0]["content"].partition("<")[2].rpartition(">")[0]
    return {"choices": [{"message": {"content": f"Score: 9\nno: Score: {min(10, len(text))}"}}]}


def test_samples_are_sent_in_batches_with_the_listed_columns(server, score):
    samples = [{**one, "answer": "a", "secret": "s"} for one in texts(10)]

    found = score(REMOTE, samples, url=server.url, batch_size=4, columns=["answer"], gather_s=0.2)

    assert [one.value for one in found] == [float(i) for i in range(10)]
    assert max(len(body["samples"]) for body in server.answers.asked) <= 4
    assert len(server.answers.asked) < 10
    assert {tuple(sorted(one)) for body in server.answers.asked for one in body["samples"]} == {
        ("answer", "completion", "finish_reason", "num_tokens", "prompt")
    }


def test_a_request_to_a_busy_server_is_retried(server, score):
    server.answers.failures = [503, 429]

    (found,) = score(REMOTE, texts(1), url=server.url, backoff_s=0.05)

    assert (found.status, found.value) == ("score", 0.0)
    assert len(server.answers.asked) == 3


def test_a_sample_is_an_error_after_the_last_attempt(server, score):
    server.answers.failures = [503] * 9

    (found,) = score(REMOTE, texts(1), url=server.url, backoff_s=0.01, retries=2)

    assert found.status == "error"
    assert "the reward server at" in found.message
    assert "answered" in found.message and "503: busy" in found.message
    assert len(server.answers.asked) == 3


def test_a_permanent_refusal_is_not_retried(server, score):
    server.answers.failures = [400] * 9

    (found,) = score(REMOTE, texts(1), url=server.url)

    assert "with 400: busy" in found.message
    assert len(server.answers.asked) == 1


def test_an_attempt_ends_at_its_time_out(server, score):
    server.answers.wait_s = 5.0

    (found,) = score(REMOTE, texts(1), url=server.url, retries=0, options={"timeout_s": 0.3})

    assert found.status == "error"
    assert "did not answer" in found.message and "within 0.3 s" in found.message


def test_an_unreachable_server_is_an_error_and_not_a_score_of_zero(score):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    (found,) = score(REMOTE, texts(1), url=f"http://127.0.0.1:{port}", retries=1, backoff_s=0.01)

    assert (found.status, found.value) == ("error", None)
    assert "incomplete response from the reward server" in found.message


def test_concurrent_requests_stay_within_the_limit(server, score):
    server.answers.wait_s = 0.05

    found = score(REMOTE, texts(12), url=server.url, batch_size=1, max_concurrency=3)

    assert [one.status for one in found] == ["score"] * 12
    assert 1 < server.answers.most_at_once <= 3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"scores": [1.0, 2.0]}, "instead of scores for 1 samples"),
        ([1.0], "instead of scores for 1 samples"),
        ({"scores": ["good"]}, "'good' (str), not a number"),
        ({"scores": [{"value": 1}]}, "which has no score"),
    ],
)
def test_a_response_of_another_form_is_an_error(server, score, answer, text):
    server.answers.answer = lambda body: answer

    (found,) = score(REMOTE, texts(1), url=server.url, retries=0)

    assert found.status == "error"
    assert text in found.message


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (
            {"when": datetime.date(2026, 1, 2)},
            "column 'when' holds datetime.date(2026, 1, 2) (date), which JSON cannot",
        ),
        ({"when": Decimal(3)}, "column 'when' holds Decimal('3') (Decimal), which JSON cannot represent"),
        ({"when": 1, "prompt": [{"role": "user", "content": b"x"}]}, "column 'prompt' holds [{"),
    ],
    ids=["date", "decimal", "prompt"],
)
def test_a_value_that_json_cannot_represent_is_an_error_of_its_own_sample_only(server, score, sample, text):
    bad, good = score(
        REMOTE, [{"completion": "ab", **sample}, {"completion": "ab", "when": 1}], url=server.url, columns=["when"]
    )

    assert (bad.status, good.status, good.value) == ("error", "score", 2.0)
    assert text in bad.message


def test_an_error_while_sending_is_raised_for_every_sample_of_the_batch(monkeypatch):
    from rlcore_rewards.remote import Remote, RemoteConfig

    remote = Remote(RemoteConfig(url="http://h", gather_s=0.05))

    async def post(path, body):
        raise RuntimeError("no memory")

    monkeypatch.setattr(remote._client, "post", post)

    async def ask():
        asked = [remote(completion="x", prompt="p", num_tokens=1, finish_reason="stop") for _ in range(2)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANG_S)

    assert [str(error) for error in asyncio.run(ask())] == ["no memory"] * 2


def test_a_null_score_is_skipped_and_metrics_are_passed_on(server, score):
    server.answers.answer = lambda body: {
        "scores": [None if not one["completion"] else {"score": 0.5, "metrics": {"m": 2.0}} for one in body["samples"]]
    }

    skipped, scored = score(REMOTE, texts(2), url=server.url)

    assert skipped.status == "skip"
    assert (scored.value, scored.metrics) == (0.5, {"mine/m": 2.0})


def test_the_api_key_is_read_from_an_environment_variable(server, score, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k123")

    score(REMOTE, texts(1), url=server.url, api_key_variable="MY_KEY")

    assert server.answers.headers[0]["Authorization"] == "Bearer k123"


def test_an_unset_key_variable_is_refused_at_the_start(score, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)

    with pytest.raises(ConfigError, match="api_key_variable=MY_KEY: this variable is not set\nType  export MY_KEY=KEY"):
        score(REMOTE, texts(1), url="http://h", api_key_variable="MY_KEY")


def test_the_judge_gets_the_filled_template_and_its_last_score_counts(server, score):
    server.answers.answer = judged
    options = {"url": server.url, "model": "big", "template": "{rubric}: <{completion}> for {prompt}"}
    messages = [{"role": "user", "content": "say x"}]

    (found,) = score(JUDGE, [{"completion": "xxxx", "rubric": "length", "prompt": messages}], **options)

    assert found.value == 0.4
    (body,) = server.answers.asked
    assert body["model"] == "big"
    assert body["messages"] == [{"role": "user", "content": "length: <xxxx> for user: say x"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [("I cannot say", "has no score: …'I cannot say'"), ("", "empty judgment"), (None, "empty judgment")],
)
def test_a_judgment_without_a_score_is_an_error(server, score, content, text):
    server.answers.answer = lambda body: {"choices": [{"message": {"content": content}}]}

    (found,) = score(JUDGE, texts(1), url=server.url, model="m", retries=0)

    assert found.status == "error"
    assert text in found.message


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        (
            REMOTE,
            {"url": "localhost:80"},
            r"url: expected http://… or https://…, got localhost:80\nType  url=http://HOST",
        ),
        (REMOTE, {"url": "http://h", "retries": -1}, "retries: expected 0 or more"),
        (REMOTE, {"url": "http://h", "batch_size": 0}, "batch_size: expected 1 or more"),
        (JUDGE, {"url": "http://h", "model": "m", "pattern": "Score"}, "has no group\nPut parentheses around"),
        (JUDGE, {"url": "http://h", "model": "m", "pattern": "("}, "cannot be used: missing"),
        (JUDGE, {"url": "http://h", "model": "m", "template": "{prompt}"}, "does not contain the completion"),
        (JUDGE, {"url": "http://h", "model": "m", "template": "{"}, "Write literal braces"),
        (JUDGE, {"url": "http://h"}, "model"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(score, target, options, text):
    with pytest.raises(ConfigError, match=text):
        score(target, texts(1), **options)


def test_a_template_with_a_missing_data_column_is_refused_before_the_start():
    from rlcore.protocols.reward import RewardSpec
    from rlcore.rewards.runner import build_reward
    from rlcore.rewards.signature import check_columns

    judge = build_reward(
        RewardSpec("judge", JUDGE, {"url": "http://h", "model": "m", "template": "{rubrik}{completion}"})
    )

    with pytest.raises(ConfigError, match=r"reward 'judge' asks for column 'rubrik', .* Did you mean 'rubric'\?"):
        check_columns("judge", judge, ["prompt", "rubric"])
