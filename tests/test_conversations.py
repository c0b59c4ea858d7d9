"""Datasets of conversations: which part is the prompt, and which tokens are the response."""

from itertools import groupby, pairwise

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
FORGETS = CHATML.replace("{{ m.content | trim }}", "{{ (m.content if m.role == 'user' or loop.last else '') | trim }}")
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


def prepare(tokenizer, *rows, responses=("response",), every_turn=False, **options):
    builder = PromptBuilder(tokenizer, PromptOptions(**options), responses=responses, every_turn=every_turn)
    return builder.prepare(Rows(*rows))


def samples_batch(tokenizer, prepared, columns, max_tokens=64):
    rows = {name: object_array(prepared.rows[name]) for name in columns}
    numbers = {"group_id": range(len(prepared)), "prompt_id": range(len(prepared))}
    prompts = Batch.of(lengths=prepared.lengths, tokens={"input_ids": prepared.token_ids}, rows=rows | numbers)
    return demonstrate(prompts, columns, tokenizer, max_tokens)


def samples_of(tokenizer, prepared, columns):
    """Return the texts of prompt and response that are trained on."""
    samples = samples_batch(tokenizer, prepared, columns, 256)
    spans = list(pairwise([*samples.offsets().tolist()]))
    ids, mask = samples["input_ids"], samples["loss_mask"]
    split = [(ids[a:b][~mask[a:b]], ids[a:b][mask[a:b]]) for a, b in spans]
    texts = [(tokenizer.decode(prompt), tokenizer.decode(response)) for prompt, response in split]
    return [(prompt, response.replace("<|im_end|> ", "<|im_end|>")) for prompt, response in texts]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        pytest.param({"messages": [ASK, GOOD]}, {}, id="messages"),
        pytest.param({"chat": [ASK, GOOD]}, {"prompt_column": "chat"}, id="column-of-another-name"),
        pytest.param({"a": {"chat": [ASK, GOOD]}}, {"prompt_column": "a.chat"}, id="field-of-a-column"),
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


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
TOOL = {"role": "tool", "content": "5"}


def test_messages_with_tool_calls_need_no_content(tokenizer):
    prepared = prepare(tokenizer, {"messages": [ASK, CALL, TOOL, GOOD]})
    assert samples_of(tokenizer, prepared, ["response"])[0][1] == "Lily.<|im_end|>"

    prepared = prepare(tokenizer, {"prompt": [ASK], "response": [ASK, CALL]})
    assert samples_of(tokenizer, prepared, ["response"])[0][1] == "<|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has several messages or tool calls, which need a chat template"):
        prepare(tokenizer, {"prompt": "Who?", "response": [CALL]})


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


def test_every_answer_of_a_conversation_is_learned_and_nothing_else(tokenizer):
    messages = [SYSTEM, ASK, GOOD, MORE, BAD, BAD, ASK, GOOD]
    prepared = prepare(tokenizer, {"messages": messages}, every_turn=True)

    samples = samples_batch(tokenizer, prepared, ["response"], 256)

    by_hand = [
        (False, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Lily.<|im_end|>"),
        (False, "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Tom.<|im_end|>"),
        (False, "\n<|im_start|>assistant\n"),
        (True, "Tom.<|im_end|>"),
        (False, "\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Lily.<|im_end|>"),
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "".join(text for _, text in by_hand) + "\n"
    prompt, rest = by_hand[0][1], "".join(text for _, text in by_hand[1:])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, rest)]
    assert samples["input_ids"].tolist() == [*ids[0], *ids[1]]
    tokens = zip(samples["loss_mask"].tolist(), samples["input_ids"].tolist(), strict=True)
    spans = [(learned, [token for _, token in span]) for learned, span in groupby(tokens, key=lambda pair: pair[0])]
    assert [(learned, tokenizer.decode(span)) for learned, span in spans] == by_hand
    assert samples["num_loss_tokens"].tolist() == [int(samples["loss_mask"].sum())]
    assert samples["finish_reason"].tolist() == ["stop"]


def test_only_the_last_answer_is_learned_by_default(tokenizer):
    (sample,) = samples_of(tokenizer, prepare(tokenizer, {"messages": [ASK, GOOD, MORE, BAD]}), ["response"])

    assert sample[1] == "Tom.<|im_end|>"


@pytest.mark.parametrize("max_tokens", [1, 4, 8, 12, 40])
def test_a_long_conversation_is_cut_at_the_limit(tokenizer, max_tokens):
    prepared = prepare(tokenizer, {"messages": [ASK, GOOD, MORE, BAD]}, every_turn=True)
    whole = samples_batch(tokenizer, prepared, ["response"])

    cut = samples_batch(tokenizer, prepared, ["response"], max_tokens)

    kept = int(prepared.lengths[0]) + max_tokens
    assert cut["input_ids"].tolist() == whole["input_ids"].tolist()[:kept]
    assert cut["loss_mask"].tolist() == whole["loss_mask"].tolist()[:kept]
    assert cut["truncated"].tolist() == [kept < len(whole["input_ids"])]


def test_a_completion_of_several_messages_is_learned_without_the_questions_in_it(tokenizer):
    prepared = prepare(tokenizer, {"prompt": [ASK], "response": [GOOD, MORE, BAD]})

    (sample,) = samples_of(tokenizer, prepared, ["response"])
    assert sample[1] == "Lily.<|im_end|>Tom.<|im_end|>"


@pytest.mark.parametrize(
    ("chosen", "rejected", "responses"),
    [
        ([ASK, GOOD, MORE, GOOD], [ASK, GOOD, MORE, BAD], ["Lily.<|im_end|>", "Tom.<|im_end|>"]),
        ([ASK, GOOD, MORE, GOOD], [ASK, BAD], ["Lily.<|im_end|>Lily.<|im_end|>", "Tom.<|im_end|>"]),
        ([ASK, GOOD], [ASK, GOOD, MORE, BAD], ["Lily.<|im_end|>", "Lily.<|im_end|>Tom.<|im_end|>"]),
        ([SYSTEM, ASK, BAD], [SYSTEM, ASK, BAD], ["Tom.<|im_end|>", "Tom.<|im_end|>"]),
        ([ASK, {**GOOD, "name": None}], [{**ASK, "name": None}, BAD], ["Lily.<|im_end|>", "Tom.<|im_end|>"]),
    ],
    ids=["last-differs", "first-differs", "one-is-longer", "equal", "keys-without-value"],
)
def test_the_prompt_of_a_pair_is_what_its_conversations_share(tokenizer, chosen, rejected, responses):
    prepared = prepare(tokenizer, {"chosen": chosen, "rejected": rejected}, responses=("chosen", "rejected"))

    samples = samples_of(tokenizer, prepared, ["chosen", "rejected"])

    assert [response for _, response in samples] == responses


def test_a_template_without_end_of_turn_gets_the_end_of_sequence(tokenizer):
    tokenizer.chat_template = WITHOUT_END

    (sample,) = samples_of(tokenizer, prepare(tokenizer, {"messages": [ASK, BAD]}), ["response"])

    assert sample == ("[user]Who?[assistant]", "Tom." + tokenizer.eos_token)


def test_without_a_template_the_content_is_the_text(tokenizer):
    prepared = prepare(tokenizer, {"prompt": "Who?", "response": [BAD]}, chat="never")

    assert samples_of(tokenizer, prepared, ["response"])[0][1] == "Tom." + tokenizer.eos_token


def test_several_messages_need_a_template(tokenizer):
    with pytest.raises(
        DataError, match="column 'response' has several messages or tool calls, which need a chat template"
    ):
        prepare(tokenizer, {"prompt": "Who?", "response": [BAD, MORE, GOOD]}, chat="never")


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
        pytest.param(
            {"prompt": "Who?", "chosen": [GOOD, MORE, BAD], "rejected": [BAD]},
            FORGETS,
            "rows, row 1: column 'chosen' has an answer, message 1, that the chat template renders differently once",
            id="template-that-changes-earlier-answers",
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
