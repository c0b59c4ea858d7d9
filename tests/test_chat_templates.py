"""Chat templates: another one, its variables, and the tools of a row."""

import json

import pytest

from rlcore.data.prompts import PromptBuilder, PromptOptions
from rlcore.errors import ConfigError, DataError
from tests.rows import Rows
from tests.test_prompts import make_tokenizer

TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "[call]{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if not enable_thinking %}none {% endif %}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def texts(*rows, template=TEMPLATE, responses=(), **options):
    tokenizer = make_tokenizer(template)
    prepared = PromptBuilder(tokenizer, PromptOptions(**options), responses=responses).prepare(Rows(*rows))
    pairs = zip(prepared.offsets, prepared.offsets[1:], strict=False)
    decoded = ["".join(tokenizer.convert_ids_to_tokens(prepared.token_ids[a:b])) for a, b in pairs]
    return (decoded, prepared) if responses else decoded


def problem(*rows, error=ConfigError, **options):
    with pytest.raises(error) as raised:
        texts(*rows, **options)
    return str(raised.value)


def test_variables_reach_the_template():
    row = {"prompt": "hi"}

    assert texts(row) == ["[user]hi[assistant]none "]
    assert texts(row, chat_template_kwargs={"enable_thinking": True}) == ["[user]hi[assistant]"]


def test_another_template_replaces_that_of_the_tokenizer(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}")
    options = {"chat_template": str(file), "chat_template_kwargs": {"mark": "?"}}

    assert texts({"prompt": "hi"}, **options) == ["hi?"]
    assert texts({"prompt": "hi"}, template=None, **options) == ["hi?"]


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_a_row_are_shown(as_text):
    tools = json.dumps([ADD]) if as_text else [ADD]
    rows = [{"prompt": "a", "meta": {"tools": tools}}, {"prompt": "b", "meta": {"tools": None}}, {"prompt": "c"}]

    assert texts(*rows, tools_column="meta.tools") == [
        "[tools]add [user]a[assistant]none ",
        "[user]b[assistant]none ",
        "[user]c[assistant]none ",
    ]


def test_an_answer_may_be_a_call_of_a_tool():
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    ask, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "b"}
    row = {"messages": [ask, call, result, {"role": "assistant", "content": "c"}], "tools": [ADD]}

    decoded, prepared = texts(row, responses=("response",), tools_column="tools", chat_template_kwargs=THINK)

    assert decoded == ["[tools]add [user]a[assistant][call]add[tool]b[assistant]"]
    assert prepared.rows["response"] == ["c"]


THINK = {"enable_thinking": True}


def test_options_that_cannot_work_are_refused(tmp_path):
    (tmp_path / "mine.jinja").write_text("x")
    row = {"prompt": "a", "tools": [ADD]}

    assert problem(row, chat_template_kwargs={"enable_thinkng": True}) == (
        "data.chat_template_kwargs.enable_thinkng: the chat template has no variable 'enable_thinkng'."
        " Did you mean 'enable_thinking'?\nRemove it, or give another template:  data.chat_template=FILE"
    )
    assert "rlcore sets this itself" in problem(row, chat_template_kwargs={"tools": []})
    assert "rlcore sets this itself" in problem(row, chat_template_kwargs={"tokenize": True})
    text = problem(row, chat_template=str(tmp_path / "mine.jinj"))
    assert text.startswith(
        f"data.chat_template={tmp_path}/mine.jinj: there is no such file. Did you mean '{tmp_path}/mine"
    )
    for name, value in {"tools_column": "tools", "chat_template_kwargs": THINK, "system": "s"}.items():
        assert problem(row, template=None, **{name: value}).startswith(
            f"data.{name} is set, but the tokenizer of 'tiny'"
        )
        assert problem(row, chat="never", **{name: value}).startswith(f"data.{name} is set, but data.chat=never")
    assert problem(row, tools_column="tool").startswith(
        "data.tools_column: rows has no column 'tool'. Did you mean 'tools'?"
    )


@pytest.mark.parametrize("tools", ["add", ["add"], {"name": "add"}, 3, '{"a": 1}', '["add"]'])
def test_tools_that_are_no_schemas_are_refused_with_their_row(tools):
    rows = [{"prompt": "a", "tools": []}, {"prompt": "b", "tools": tools}]

    assert problem(*rows, error=DataError, tools_column="tools").startswith("rows, row 2: column 'tools' is ")


def test_a_template_that_ignores_tools_is_refused():
    row = {"prompt": "a", "tools": [ADD]}

    text = problem(row, template=TEMPLATE.replace("{% if tools %}", "{% if false %}"), tools_column="tools")

    assert text.startswith("data.tools_column=tools: the chat template of 'tiny' ignores tools\nUse a model")
