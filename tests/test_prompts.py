"""`PromptBuilder`: choice of columns, text, tokens, and error messages for unusable rows.

The tokenizer has one token per character: <s> is 0, </s> is 1, "a" is 2, "b" is 3 and so on.
"""

import copy
import resource
import signal
import string
import threading
import time
from datetime import date
from itertools import pairwise

import numpy as np
import pytest

from rlcore.data.files import FileDataset
from rlcore.data.prompts import PromptBuilder, PromptOptions
from rlcore.errors import ConfigError, DataError
from rlcore.testing.waiting import HANG_S
from tests.rows import Rows

BOS, EOS = 0, 1
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " \n:?.[]"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(chat_template=None, appends_eos=False):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    single = "<s> $A </s>" if appends_eos else "<s> $A"
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    tokenizer.name_or_path = "tiny"
    return tokenizer


@pytest.fixture(scope="module")
def plain():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat():
    return make_tokenizer(CHAT_TEMPLATE)


def prepare(tokenizer, *rows, reserved=frozenset(), **options):
    return PromptBuilder(tokenizer, PromptOptions(**options), reserved=reserved).prepare(Rows(*rows))


def texts(tokenizer, prepared):
    spans = pairwise(prepared.offsets)
    return [tokenizer.decode(prepared.token_ids[start:end]).replace(" ", "") for start, end in spans]


def message(error, tokenizer, *rows, **options):
    with pytest.raises(error) as caught:
        prepare(tokenizer, *rows, **options)
    return str(caught.value)


def user(content):
    return [{"role": "user", "content": content}]


def test_plain_prompts_are_concatenated_with_their_columns(plain):
    prepared = prepare(plain, {"question": "ab", "answer": "x"}, {"question": "c", "answer": "y"})

    assert prepared.token_ids.tolist() == [BOS, 2, 3, BOS, 4]
    assert prepared.token_ids.dtype == np.int64
    assert prepared.lengths.tolist() == [3, 2]
    assert prepared.rows == {"question": ["ab", "c"], "answer": ["x", "y"], "prompt": ["ab", "c"]}
    assert prepared.source_index.tolist() == [0, 1]
    assert prepared.counts == {"overlong_dropped": 0, "overlong_truncated": 0}


@pytest.mark.parametrize(
    ("rows", "same"),
    [
        ([{"text": "ab"}, {"text": "c"}], True),
        ([{"text": "c"}, {"text": "ab"}], False),
        ([{"text": "ab"}, {"text": "d"}], False),
        ([{"text": "ab<s>c"}], False),
    ],
    ids=["equal", "other order", "other token", "other cut"],
)
def test_fingerprint_depends_on_the_prompts(plain, rows, same):
    reference = prepare(plain, {"text": "ab"}, {"text": "c"}).fingerprint()

    assert (prepare(plain, *rows).fingerprint() == reference) is same


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (("prompt", "text", "question"), "prompt"),
        (("answer", "question"), "question"),
        (("answer", "text"), "text"),
    ],
    ids=["prompt wins", "question", "text"],
)
def test_prompt_column_is_found(plain, columns, chosen):
    prepared = prepare(plain, {name: name for name in columns})

    assert prepared.rows["prompt"] == [chosen]


def test_named_prompt_column_is_used(plain):
    assert prepare(plain, {"text": "ab", "task": "c"}, prompt_column="task").rows["prompt"] == ["c"]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (
            {"question": "a", "text": "b"},
            {},
            "rows has several columns that may be the prompt: question, text\n"
            "Choose one, such as data.prompt_column=question.",
        ),
        (
            {"task": "a", "answer": "b"},
            {},
            "rows has none of the columns prompt, messages, question, text\n"
            "Type data.prompt_column=<name>; it has: task, answer.",
        ),
        (
            {"question": "a", "answer": "b"},
            {"prompt_column": "qestion"},
            "data.prompt_column: rows has no column 'qestion'. Did you mean 'question'?\nIt has: question, answer.",
        ),
        (
            {"prompt": "a", "question": "b"},
            {"prompt_column": "question"},
            "rows has a column 'prompt', but the prompts are made from question and take this name\n"
            "Rename it, for example with 'data.rename={prompt: data_prompt}'.",
        ),
        (
            {"question": "a", "reward": 1, "seed": 2},
            {"reserved": frozenset({"reward", "seed", "values"})},
            "rows has columns that rlcore writes itself: reward, seed\n"
            "Rename them, for example with 'data.rename={reward: data_reward, seed: data_seed}'.",
        ),
        (
            {"question": "a", "reward:math": 1},
            {},
            "rows has columns that rlcore writes itself: reward:math\n"
            "Rename them, for example with 'data.rename={reward\\:math: data_math}'.",
        ),
    ],
    ids=["ambiguous", "none", "misspelled", "prompt taken", "reserved", "score of a reward"],
)
def test_columns_that_cannot_be_used_are_named(plain, row, options, expected):
    assert message(DataError, plain, row, **options) == expected


def test_rename_gives_reserved_and_prompt_columns_other_names(plain):
    row = {"reward": 3, "task": "ab"}

    prepared = prepare(plain, row, rename={"reward": "gold", "task": "prompt"}, reserved=frozenset({"reward"}))

    assert prepared.rows == {"gold": [3], "prompt": ["ab"]}


def test_the_fingerprint_of_a_column_follows_its_values_alone(plain):
    rows = [{"text": "ab", "answer": 1, "meta": {"when": date(2020, 1, 2)}}, {"text": "c", "answer": 2, "meta": None}]
    reference = prepare(plain, *rows).column_fingerprints()

    again = prepare(plain, *copy.deepcopy(rows), max_prompt_tokens=9).column_fingerprints()
    rows[1]["answer"] = 3
    changed = prepare(plain, *rows).column_fingerprints()

    assert again == reference
    assert {name for name in reference if changed[name] != reference[name]} == {"answer"}
    assert set(reference) == {"text", "prompt", "answer", "meta"}


def test_objects_with_the_default_repr_have_the_same_fingerprint_in_every_process(plain):
    first, second = (prepare(plain, {"text": "a", "it": object(), "set": {"x", "y"}}) for _ in range(2))

    assert first.column_fingerprints() == second.column_fingerprints()


@pytest.mark.parametrize(
    ("rename", "first_line"),
    [
        ({"qestion": "q"}, "data.rename: rows has no column 'qestion'. Did you mean 'question'?"),
        (
            {"question": "answer"},
            "data.rename: the columns 'question' and 'answer' of rows would both be 'answer'",
        ),
    ],
    ids=["misspelled", "taken"],
)
def test_rename_that_cannot_work_is_refused(plain, rename, first_line):
    text = message(ConfigError, plain, {"question": "a", "answer": "b"}, rename=rename)

    assert text.splitlines()[0] == first_line


def test_template_fills_columns_and_may_reach_into_them(plain):
    prepared = prepare(plain, {"prompt": "ab", "info": {"hint": "c"}}, template="Q:{prompt} {info[hint]}?")

    assert prepared.rows["prompt"] == ["Q:ab c?"]


@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        ({"template": "{qestion}"}, "data.template: rows has no column 'qestion'. Did you mean 'question'?"),
        ({"template": "{}"}, "data.template: rows has no column ''."),
        ({"template": "{question"}, "data.template is not a valid format string: expected '}' before end of string"),
        ({"template": "Hello"}, "data.template names no column, so all prompts would be the same"),
        ({"template": "{question}", "prompt_column": "question"}, "data.template and data.prompt_column are both set"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens=0 leaves no room for a prompt"),
        ({"system": "be good"}, "data.system is set, but the tokenizer of 'tiny' has no chat template"),
    ],
    ids=["misspelled", "positional", "open brace", "constant", "two sources", "no room", "system without chat"],
)
def test_options_that_cannot_work_are_refused(plain, options, first_line):
    assert message(ConfigError, plain, {"question": "a"}, **options).splitlines()[0] == first_line


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": None}, "no value in column 'question'"),
        ({}, "no value in column 'question'"),
        ({"question": {}}, "'level'"),
    ],
    ids=["null", "missing", "key"],
)
def test_row_that_does_not_fill_the_template_is_named(plain, row, problem):
    rows = [{"question": {"level": "a"}}, row]

    text = message(DataError, plain, *rows, template="{question[level]}")

    assert text.splitlines()[0] == f"rows, row 2: cannot fill data.template: {problem}"


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "is empty"),
        (None, "is empty"),
        ([], "is empty"),
        (" \n", "is only whitespace"),
        (7, "is a int"),
        ([{"role": "user"}], "has a message without role or content"),
        (["hi"], "has a message without role or content"),
        ([*user("a"), {"role": "assistant", "content": "b"}], "ends with a message of the assistant"),
    ],
    ids=["empty", "null", "no messages", "blank", "number", "no content", "no message", "answered"],
)
def test_unusable_prompt_is_named_with_its_row(chat, prompt, problem):
    text = message(DataError, chat, {"prompt": "a"}, {"prompt": prompt})

    first, second = text.split("\n")
    assert first.startswith(f"rows, row 2: the prompt (from prompt) {problem}")
    assert second


def test_problem_in_a_file_names_file_and_line(plain, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n')

    with pytest.raises(DataError) as caught:
        PromptBuilder(plain, PromptOptions()).prepare(FileDataset(str(path)))

    assert str(caught.value).startswith(f"{path}:3: the prompt (from prompt) is empty\n")


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("ab", {}, "<s>[user]ab[assistant]"),
        ("ab", {"chat": "always"}, "<s>[user]ab[assistant]"),
        ("ab", {"chat": "never"}, "<s>ab"),
        ("ab", {"system": "s"}, "<s>[system]s[user]ab[assistant]"),
        (user("ab"), {}, "<s>[user]ab[assistant]"),
        (
            [*user("a"), {"role": "assistant", "content": "b"}, *user("c")],
            {"system": "s"},
            "<s>[system]s[user]a[assistant]b[user]c[assistant]",
        ),
    ],
    ids=["auto", "always", "never", "system", "messages", "turns"],
)
def test_chat_template_is_applied_with_one_bos(chat, prompt, options, expected):
    prepared = prepare(chat, {"prompt": prompt}, **options)

    assert texts(chat, prepared) == [expected]
    assert prepared.token_ids.tolist().count(BOS) == 1
    assert prepared.rows["prompt"] == [prompt]


def test_texts_and_messages_may_be_mixed(chat):
    prepared = prepare(chat, {"prompt": "a"}, {"prompt": user("b")}, {"prompt": "c"})

    assert texts(chat, prepared) == [f"<s>[user]{letter}[assistant]" for letter in "abc"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("ab", [BOS, 2, 3]), ("<s>ab", [BOS, 2, 3]), ("a</s>", [BOS, 2, EOS])],
    ids=["plain", "text has bos", "text has eos"],
)
@pytest.mark.parametrize("appends_eos", [False, True])
def test_special_tokens_are_neither_doubled_nor_appended(text, ids, appends_eos):
    tokenizer = make_tokenizer(appends_eos=appends_eos)
    assert prepare(tokenizer, {"prompt": text}).token_ids.tolist() == ids


def test_chat_without_template_is_refused_at_once(plain):
    with pytest.raises(DataError, match=r"^data.chat=always, but the tokenizer of 'tiny' has no chat template\n"):
        PromptBuilder(plain, PromptOptions(chat="always"))


@pytest.mark.parametrize(
    ("tokenizer", "options", "reason"),
    [("plain", {}, "the tokenizer of 'tiny' has no chat template"), ("chat", {"chat": "never"}, "data.chat=never")],
    ids=["no template", "never"],
)
def test_messages_without_chat_template_are_refused(request, tokenizer, options, reason):
    text = message(DataError, request.getfixturevalue(tokenizer), {"messages": user("a")}, **options)

    assert text == (
        f"rows, row 1: the prompt is a list of messages, but {reason}\n"
        "Use a model whose tokenizer has a chat template, or make the prompt of text columns with data.template."
    )


def test_two_system_messages_are_refused(chat):
    messages = [{"role": "system", "content": "s"}, *user("a")]

    assert "has a system message, and data.system is set too" in message(
        DataError, chat, {"messages": messages}, system="t"
    )


def test_refusal_of_the_chat_template_names_row_and_roles(chat):
    messages = [*user("a"), {"role": "tool", "content": "b"}]

    text = message(DataError, chat, {"messages": user("a")}, {"messages": messages})

    assert text.splitlines()[0] == (
        "rows, row 2: the chat template refused messages with the roles user, tool: no tools here"
    )


LONG = [{"text": "abcd"}, {"text": "e"}, {"text": "abc"}]


def test_overlong_prompt_is_an_error_with_the_limit_to_type(plain):
    assert message(DataError, plain, *LONG, max_prompt_tokens=3) == (
        "2 of 3 prompts have more than data.max_prompt_tokens=3 tokens; the first is rows, row 1, the longest has 5\n"
        "Type data.max_prompt_tokens=5, or data.overlong=truncate, or data.overlong=drop if some are shorter."
    )


@pytest.mark.parametrize(
    ("overlong", "token_ids", "source_index", "counts"),
    [
        ("drop", [BOS, 6], [1], {"overlong_dropped": 2, "overlong_truncated": 0}),
        ("truncate", [3, 4, 5, BOS, 6, 2, 3, 4], [0, 1, 2], {"overlong_dropped": 0, "overlong_truncated": 2}),
    ],
)
def test_overlong_prompts_are_dropped_or_truncated_and_counted(plain, overlong, token_ids, source_index, counts):
    prepared = prepare(plain, *LONG, max_prompt_tokens=3, overlong=overlong)

    assert prepared.token_ids.tolist() == token_ids
    assert prepared.source_index.tolist() == source_index
    assert prepared.rows["text"] == [LONG[index]["text"] for index in source_index]
    assert prepared.counts == counts


def test_prompts_as_long_as_the_limit_stay(plain):
    assert prepare(plain, {"text": "ab"}, max_prompt_tokens=3, overlong="drop").lengths.tolist() == [3]


def test_dropping_every_prompt_is_an_error(plain):
    assert message(DataError, plain, *LONG, max_prompt_tokens=1, overlong="drop").startswith("3 of 3 prompts")


def test_data_set_without_rows_is_an_error(plain):
    assert message(DataError, plain) == "rows has no rows\nGive another data.train or data.eval."


def test_every_word_problem_becomes_a_prompt(each_assets):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(each_assets / "models/stories260k")
    dataset = FileDataset(str(each_assets / "data/gsm8k/train.jsonl"))

    prepared = PromptBuilder(tokenizer, PromptOptions(template="Question: {question}\nAnswer:")).prepare(dataset)

    assert len(prepared) == len(dataset) >= 200
    assert (prepared.token_ids[prepared.offsets[:-1]] == tokenizer.bos_token_id).all()
    first, text = prepared.token_ids[: prepared.offsets[1]], prepared.rows["prompt"][0]
    assert tokenizer.decode(first, skip_special_tokens=True).strip() == text
    assert first.tolist() == tokenizer(text)["input_ids"]


SURROGATES = {
    "text": ([{"prompt": "ab"}, {"prompt": "a\ud83db"}], PromptOptions(), None),
    "message": (
        [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "a\ud83db"}]}],
        PromptOptions(),
        CHAT_TEMPLATE,
    ),
    "content in parts": (
        [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a\ud83db"}]}]}],
        PromptOptions(),
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}ab{% endfor %}",
    ),
    "column of a template": ([{"x": "ab"}, {"x": "a\ud83db"}], PromptOptions(template="a{x}"), None),
}


@pytest.mark.parametrize(("rows", "options", "chat_template"), SURROGATES.values(), ids=list(SURROGATES))
def test_a_prompt_with_half_of_a_surrogate_pair_is_refused_with_its_row(rows, options, chat_template):
    with pytest.raises(DataError) as caught:
        PromptBuilder(make_tokenizer(chat_template), options).prepare(Rows(*rows))

    assert str(caught.value) == (
        "rows, row 2: the prompt has the character '\\ud83d', half of a surrogate pair\n"
        "Write the other half too, as in \\ud83d\\ude00, or remove the row."
    )


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
UNBOUNDED = {
    "loops": (ENDLESS, "took longer than 0.5 s"),
    "allocates at once": ("{{ 'a' * 100000000000 }}", "needed more than 4 GiB of memory"),
    "loops for one row": ("{% if messages[0].content == 'b' %}" + ENDLESS + "{% endif %}a", "took longer than 0.5 s"),
}


@pytest.mark.parametrize(("chat_template", "limit"), UNBOUNDED.values(), ids=list(UNBOUNDED))
def test_a_chat_template_without_bound_is_refused_with_its_row(monkeypatch, chat_template, limit):
    monkeypatch.setattr("rlcore.data.limits.LIMIT_S", 0.5)
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    row = 2 if "==" in chat_template else 1

    with pytest.raises(DataError) as caught:
        PromptBuilder(make_tokenizer(chat_template), PromptOptions()).prepare(Rows({"prompt": "a"}, {"prompt": "b"}))

    assert str(caught.value) == (
        f"rows, row {row}: the chat template of 'tiny' {limit}\n"
        "Fix its loops in chat_template.jinja or tokenizer_config.json, or disable it:  data.chat=never"
    )
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == limits
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_time_limit_is_for_each_prompt(monkeypatch):
    monkeypatch.setattr("rlcore.data.limits.LIMIT_S", 0.5)
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **more: time.sleep(0.2) or render(*given, **more)

    prompts = PromptBuilder(tokenizer, PromptOptions()).prepare(Rows(*[{"prompt": "a"}] * 5))

    assert len(prompts) == 5


def test_prompts_are_rendered_in_another_thread_too():
    built = []
    builder = PromptBuilder(make_tokenizer(CHAT_TEMPLATE), PromptOptions())
    thread = threading.Thread(target=lambda: built.append(builder.prepare(Rows({"prompt": "a"}))))

    thread.start()
    thread.join(timeout=HANG_S)

    assert len(built[0]) == 1
