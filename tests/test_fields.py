"""Fields of nested columns: every setting that names a column may name a field with a dot."""

import tracemalloc

import pytest

from rlcore.data.fields import names_of, values_of
from rlcore.data.prompts import PromptBuilder, PromptOptions
from rlcore.errors import ConfigError, DataError, SampleError
from rlcore.rewards.match import ExactMatch, ExactMatchConfig
from rlcore.rewards.signature import arguments, check_columns, read_signature
from tests.rows import Rows
from tests.test_prompts import make_tokenizer

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": "2+2=",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"question": "What is 2+2?", "split": {"name": "train"}},
}


def prepare(*rows, responses=(), **options):
    builder = PromptBuilder(make_tokenizer(), PromptOptions(**options), responses=responses)
    return builder.prepare(Rows(*rows)).rows


def test_a_field_is_a_column_and_absent_values_are_none():
    table = {"a": [{"b": {"c": 1}}, {"b": None}, None], "a.b": ["own", "own", "own"], "t": ["x", "y", "z"]}

    assert values_of("a.b.c", {"a": table["a"]}) == [1, None, None]
    assert values_of("a.b", table) == ["own", "own", "own"]
    assert [values_of(name, {"a": table["a"], "t": table["t"]}) for name in ("a.x", "t.x", "x", "")] == [None] * 4
    assert names_of({"a": table["a"], "t": table["t"]}) == ["a.b.c", "t"]


def test_names_that_are_offered_can_be_typed():
    table = {"a": [{"b": "x"}], "a.b": [{"c": {"d.e": 1}}], "z.y": [{"w": 2}]}

    assert names_of(table) == ["a.b", "a.b.c.d.e", "z.y.w"]
    assert [values_of(name, table) for name in names_of(table)] == [table["a.b"], [1], [2]]
    assert values_of("a.b", {"a": table["a"]}) == ["x"]
    row = {name: values[0] for name, values in table.items()}
    for name, value in (("a.b.c.d.e", "1"), ("z.y.w", "2")):
        reward = ExactMatch(ExactMatchConfig(column=name))
        assert reward(**arguments(read_signature(reward), {**row, "completion": value})) == 1.0


def test_objects_with_free_keys_take_little_memory_and_are_listed_by_their_column():
    rows = [{f"{row}-{key}": 1 for key in range(5)} for row in range(4000)]
    table = {"free": rows, "few": [{"x": 1}] * len(rows)}

    tracemalloc.start()
    assert names_of(table) == ["free", "few.x"]
    assert values_of("free.0-0", table) == [1] + [None] * 3999
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_a_template_indexes_a_field():
    row = {"extra": {"list": [{"x": "two"}], "name.s": "f"}, "z.y": {"w": "o"}, "of": ["k"]}

    assert prepare(row, template="{extra.list[0][x]} {extra.name.s}{z.y.w}{of[0]}")["prompt"] == ["two fok"]
    with pytest.raises(ConfigError, match=r"no column 'extra.lost'\. Did you mean 'extra.list'"):
        prepare(row, template="{extra.lost[0]}")


def test_settings_of_the_data_reach_fields():
    assert prepare(VERL, prompt_column="extra_info.question", rename={"prompt": "old"})["prompt"] == ["What is 2+2?"]
    template = "{extra_info.question} {extra_info.split.name} {reward_model[style]} {{x.y}}"
    assert prepare(VERL, template=template, rename={"prompt": "old"})["prompt"] == ["What is 2+2? train rule {x.y}"]
    assert prepare(VERL, responses=("reward_model.ground_truth",))["reward_model.ground_truth"] == ["4"]


def test_a_renamed_field_is_a_column_beside_its_own():
    rows = prepare(VERL, rename={"reward_model.ground_truth": "answer", "extra_info": "more"})

    assert list(rows) == ["data_source", "prompt", "reward_model", "more", "answer"]
    assert rows["answer"] == ["4"]
    assert rows["reward_model"] == [VERL["reward_model"]]


FIELDS = (
    "It has: data_source, prompt, reward_model.style, reward_model.ground_truth, extra_info.question, "
    "extra_info.split.name."
)


@pytest.mark.parametrize(
    ("error", "options", "text"),
    [
        (
            DataError,
            {"prompt_column": "extra_info.qestion"},
            "data.prompt_column: rows has no column 'extra_info.qestion'",
        ),
        (ConfigError, {"template": "{extra_info.qestion}"}, "data.template: rows has no column 'extra_info.qestion'"),
        (ConfigError, {"rename": {"extra_info.qestion": "q"}}, "data.rename: rows has no column 'extra_info.qestion'"),
    ],
    ids=["prompt_column", "template", "rename"],
)
def test_a_field_that_does_not_exist_is_refused_with_those_that_do(error, options, text):
    with pytest.raises(error) as raised:
        prepare(VERL, **options)

    assert str(raised.value) == f"{text}. Did you mean 'extra_info.question'?\n{FIELDS}"


def test_a_field_that_would_take_the_name_of_a_column_is_refused():
    with pytest.raises(ConfigError, match=r"the columns 'data_source' and 'reward_model.style' of rows would both be"):
        prepare(VERL, rename={"reward_model.style": "data_source"})
    with pytest.raises(
        DataError, match=r"Rename them, for example with 'data.rename=\{reward_model.style: data_reward\}'"
    ):
        prepare(VERL, rename={"reward_model.style": "reward"})


def test_a_reward_reads_a_field():
    reward = ExactMatch(ExactMatchConfig(column="reward_model.ground_truth"))
    signature = read_signature(reward)

    check_columns("exact_match", reward, [*VERL, *names_of({name: [value] for name, value in VERL.items()})])
    assert reward(**arguments(signature, {**VERL, "completion": "4"})) == 1.0
    with pytest.raises(SampleError, match=r"column 'reward_model.ground_truth', which the sample does not have"):
        arguments(signature, {**VERL, "reward_model": None, "completion": "4"})
    with pytest.raises(ConfigError, match=r"'reward_model.ground_truth', which"):
        check_columns("exact_match", reward, ["reward_model"])
