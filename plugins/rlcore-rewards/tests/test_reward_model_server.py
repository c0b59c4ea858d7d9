"""Reward models behind a server, which answers in the formats that vLLM and SGLang document."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlcore.errors import ConfigError
from rlcore.testing import RewardContract

TARGET = "rlcore_rewards.reward_model_server:RewardModelServer"
MESSAGES = [{"role": "user", "content": "p"}]


def listed(**entry):
    """Return an answer of vLLM with one entry."""
    usage = {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": None}
    return {"id": "x-1", "object": "list", "created": 1, "model": "m", "data": [{"index": 0, **entry}], "usage": usage}


def classified(*probs):
    return listed(label="LABEL_0", probs=list(probs), num_classes=len(probs))


def base(server):
    return server.url.removesuffix("/score")


class TestRewardModelServer(RewardContract):
    target = TARGET
    examples = (({"completion": "abc"}, 3.0), ({"completion": ""}, 0.0))

    @pytest.fixture(autouse=True)
    def _server(self, server):
        server.answers.answer = lambda body: classified(float(len(body["messages"][-1]["content"])))
        self.options = {"url": base(server), "model": "m"}


@pytest.mark.parametrize(
    ("api", "answer", "path", "fields"),
    [
        pytest.param(
            "classify",
            classified(-1.25),
            "/classify",
            {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}], "use_activation": False},
            id="classify",
        ),
        pytest.param(
            "pooling",
            listed(object="pooling", data=[-1.25]),
            "/pooling",
            {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}], "use_activation": False},
            id="pooling-of-the-sequence",
        ),
        pytest.param(
            "pooling",
            listed(object="pooling", data=[[0.5], [0.25], [-1.25]]),
            "/pooling",
            {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}], "use_activation": False},
            id="pooling-of-every-token",
        ),
        pytest.param(
            "score",
            listed(object="score", score=-1.25),
            "/score",
            {"text_1": "p", "text_2": "yes", "use_activation": False},
            id="score",
        ),
        pytest.param(
            "sglang",
            [{"embedding": [-1.25], "meta_info": {"id": "x", "finish_reason": None, "prompt_tokens": 4}}],
            "/classify",
            {"text": ["pyes"]},
            id="sglang",
        ),
    ],
)
def test_the_score_is_the_output_in_the_answer_of_each_interface(server, score, api, answer, path, fields):
    server.answers.answer = lambda body: answer

    (found,) = score(TARGET, [{"completion": "yes"}], url=base(server), model="m", api=api)

    assert (found.status, found.value) == ("score", -1.25)
    assert server.answers.paths == [path]
    assert server.answers.asked == [{"model": "m", **fields}]


def test_one_of_several_outputs_is_chosen_after_an_activation(server, score):
    server.answers.answer = lambda body: classified(0.1, 0.2, 0.7)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]

    (found,) = score(
        TARGET,
        [{"completion": "yes", "prompt": chat}],
        url=base(server),
        model="m",
        output=2,
        activation=True,
        system="Be kind.",
    )

    assert found.value == 0.7
    (body,) = server.answers.asked
    assert body["use_activation"] is True
    ends = [{"role": "system", "content": "Be kind."}], [{"role": "assistant", "content": "yes"}]
    assert body["messages"] == [*ends[0], *chat, *ends[1]]


def test_text_for_sglang_is_rendered_without_the_token_that_the_server_adds(server, score, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=template)
    made.save_pretrained(tmp_path)
    server.answers.answer = lambda body: [{"embedding": [1.0], "meta_info": {}}]

    options = {"url": base(server), "model": "m", "api": "sglang", "tokenizer": str(tmp_path)}
    (found,) = score(TARGET, [{"completion": "yes", "prompt": MESSAGES}], **options)

    assert found.value == 1.0
    assert server.answers.asked[0]["text"] == ["[user]p[assistant]yes"]


@pytest.mark.parametrize(
    ("answer", "settings", "text"),
    [
        ({"error": {"message": "no"}}, {}, "has no output 0 of /classify"),
        (classified(0.5), {"output": 1}, "has no output 1 of /classify"),
        ([{"embedding": [0.5]}], {}, "has no output 0 of /classify"),
        (classified("high"), {}, "'high' (str), not a number"),
        (listed(object="pooling", data="AAAA"), {"api": "pooling"}, "not a number"),
    ],
)
def test_another_answer_is_an_error_of_its_sample(server, score, answer, settings, text):
    server.answers.answer = lambda body: answer

    (found,) = score(TARGET, [{"completion": "yes"}], url=base(server), model="m", **settings)

    assert (found.status, found.value) == ("error", None)
    assert text in found.message


def test_messages_without_a_template_are_an_error_of_their_sample(server, score):
    server.answers.answer = lambda body: [{"embedding": [1.0]}]
    samples = [{"completion": "yes", "prompt": MESSAGES}, {"completion": "yes"}]

    bad, good = score(TARGET, samples, url=base(server), model="m", api="sglang")

    assert (bad.status, good.status) == ("error", "score")
    assert "the prompt is a list of messages" in bad.message and "tokenizer: DIR" in bad.message


def test_a_busy_server_is_asked_again_a_limited_number_of_times(server, score):
    server.answers.answer = lambda body: classified(0.5)
    found = []
    for failures in ([503, 429], [503] * 9):
        server.answers.failures = failures
        found += score(TARGET, [{"completion": "yes"}], url=base(server), model="m", retries=2, backoff_s=0.01)

    first, second = found

    assert (first.status, first.value) == ("score", 0.5)
    assert second.status == "error"
    assert "the reward model server at" in second.message and "503: busy" in second.message
    assert len(server.answers.asked) == 6


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"url": "localhost"}, "url: expected http://"),
        ({"api": "rank"}, "api: expected classify, pooling, score, sglang, got rank"),
        ({"output": -1}, "output: expected 0 or more"),
        ({"tokenizer": "DIR"}, "tokenizer: expected nothing with api=classify"),
        ({"api": "sglang", "tokenizer": "/nowhere"}, "tokenizer=/nowhere of reward 'reward_model_server' cannot be"),
        ({"api": "sglang", "activation": True}, "activation: expected false with api=sglang"),
        ({"api": "score", "system": "Be kind."}, "system: expected nothing with api=score"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(score, settings, text):
    with pytest.raises(ConfigError, match=text):
        score(TARGET, [{"completion": "yes"}], **{"url": "http://h", "model": "m", **settings})
