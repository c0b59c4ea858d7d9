"""Datasets of conversations: which part is the prompt, and which tokens are the response."""

from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from rlcore.data.batch import Batch, object_array
from rlcore.data.prompts import PromptBuilder, PromptOptions
from rlcore.errors import ConfigError, DataError
from rlcore.trainer.prompts import Prompts, check_demonstrations
from rlcore.workers.demonstrations import demonstrate
from tests.rows import Rows

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_END = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
SYSTEM = {"role": "system", "content": "Be kind."}
ASK = {"role": "user", "content": "Who?"}
GOOD = {"role": "assistant", "content": " Lily. "}
BAD = {"role": "assistant", "content": "Tom."}
MORE = {"role": "user", "content": "Why?"}


@pytest.fixture
def tokenizer(assets):
    """Return a real tokenizer with a ChatML template."""
    made = AutoTokenizer.from_pretrained(str(assets / "models" / "stories260k"))
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


def prepare(tokenizer, *rows, responses=("response",), **options):
    return PromptBuilder(tokenizer, PromptOptions(**options), responses=responses).prepare(Rows(*rows))


def samples_of(tokenizer, prepared, columns):
    """Return the texts of prompt and response that are trained on."""
    rows = {name: object_array(prepared.rows[name]) for name in columns}
    numbers = {"group_id": range(len(prepared)), "prompt_id": range(len(prepared))}
    prompts = Batch.of(lengths=prepared.lengths, tokens={"input_ids": prepared.token_ids}, rows=rows | numbers)
    samples = demonstrate(prompts, columns, tokenizer, 64)
    spans = list(pairwise([*samples.offsets().tolist()]))
    ids, mask = samples["input_ids"], samples["loss_mask"]
    split = [(ids[a:b][~mask[a:b]], ids[a:b][mask[a:b]]) for a, b in spans]
    return [(tokenizer.decode(prompt), tokenizer.decode(response)) for prompt, response in split]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        pytest.param({"messages": [ASK, GOOD]}, {}, id="messages"),
        pytest.param({"chat": [ASK, GOOD]}, {"prompt_column": "chat"}, id="column-of-another-name"),
        pytest.param({"prompt": [ASK], "response": [GOOD]}, {}, id="response-as-messages"),
        pytest.param({"prompt": "Who?", "response": [ASK, GOOD]}, {}, id="response-repeats-its-prompt"),
        pytest.param({"response": [ASK, GOOD]}, {}, id="no-column-of-prompts"),
        pytest.param({"q": "Who", "response": [GOOD]}, {"template": "{q}?"}, id="prompt-from-a-template"),
    ],
)
def test_the_last_answer_is_learned_as_the_template_renders_it(tokenizer, row, options):
    prepared = prepare(tokenizer, row, **options)

    (sample,) = samples_of(tokenizer, prepared, ["response"])
    assert sample == ("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n", "Lily.<|im_end|>")


def test_earlier_answers_and_the_system_message_are_the_prompt(tokenizer):
    prepared = prepare(tokenizer, {"messages": [ASK, BAD, MORE, GOOD]}, system="Be kind.")

    ((prompt, response),) = samples_of(tokenizer, prepared, ["response"])
    assert [word in prompt for word in ("Be kind.", "Who?", "Tom.", "Why?", "Lily.")] == [True] * 4 + [False]
    assert response == "Lily.<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "Who?", "chosen": [GOOD], "rejected": [BAD]}, id="last-messages"),
        pytest.param({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, id="prompt-as-messages"),
        pytest.param({"prompt": "Who?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, id="prompt-repeated"),
        pytest.param({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, id="shared-prompt"),
    ],
)
def test_pairs_of_conversations_are_a_prompt_and_two_responses(tokenizer, row):
    prepared = prepare(tokenizer, row, responses=("chosen", "rejected"))

    asked = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert samples_of(tokenizer, prepared, ["chosen", "rejected"]) == [
        (asked, "Lily.<|im_end|>"),
        (asked, "Tom.<|im_end|>"),
    ]


def test_a_template_without_end_of_turn_gets_the_end_of_sequence(tokenizer):
    tokenizer.chat_template = WITHOUT_END

    (sample,) = samples_of(tokenizer, prepare(tokenizer, {"messages": [ASK, BAD]}), ["response"])

    assert sample == ("[user]Who?[assistant]", "Tom." + tokenizer.eos_token)


def test_without_a_template_the_content_is_the_text(tokenizer):
    prepared = prepare(tokenizer, {"prompt": "Who?", "response": [BAD]}, chat="never")

    assert samples_of(tokenizer, prepared, ["response"])[0][1] == "Tom." + tokenizer.eos_token


def test_texts_are_learned_as_they_are(tokenizer):
    prepared = prepare(
        tokenizer, {"prompt": "Who?", "response": "Tom. "}, {"prompt": "Who?", "response": "A<|im_end|>"}
    )

    responses = [response for _, response in samples_of(tokenizer, prepared, ["response"])]
    assert responses == ["Tom. " + tokenizer.eos_token, "A<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "template", "text"),
    [
        pytest.param(
            {"chosen": [ASK, GOOD], "rejected": [MORE, BAD]},
            CHATML,
            "rows, row 1: column 'rejected' begins with other messages than the prompt",
            id="other-prompts",
        ),
        pytest.param(
            {"prompt": "Who?", "chosen": [GOOD], "rejected": [BAD]},
            THINKS,
            "rows, row 1: column 'chosen' cannot be separated from its prompt: the chat template renders",
            id="template-that-changes-the-prompt",
        ),
    ],
)
def test_a_response_that_does_not_follow_its_prompt_is_refused(tokenizer, row, template, text):
    tokenizer.chat_template = template

    with pytest.raises(DataError) as raised:
        prepare(tokenizer, row, responses=("chosen", "rejected"))

    assert str(raised.value).startswith(text)


def test_a_conversation_that_ends_with_a_question_has_nothing_to_learn(tokenizer):
    prepared = prepare(tokenizer, {"messages": [ASK, GOOD]}, {"messages": [ASK]})
    data = Prompts(
        name="rows",
        batch=Batch.of(lengths=prepared.lengths, rows={"response": object_array(prepared.rows["response"])}),
        dropped=0,
        truncated=0,
        fingerprint="",
        columns={},
    )

    with pytest.raises(ConfigError, match="column 'response' of prompt 1 is None"):
        check_demonstrations("sft", ["response"], data)


def test_a_conversation_is_not_split_for_an_algorithm_that_samples_its_responses(tokenizer):
    with pytest.raises(DataError, match="learn from it:  algorithm=sft"):
        prepare(tokenizer, {"messages": [ASK, GOOD]}, responses=())
