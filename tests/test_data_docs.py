"""docs/data.md: each command runs on the data that the page shows, for one step."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlcore.cli.train import run as train
from rlcore.models.load import load_tokenizer

pytest.importorskip("rlcore_algorithms", reason="needs plugins/rlcore-algorithms: make test-plugins installs it")

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
FILES = dict(re.findall(r"<!-- data: (\S+) -->\n```\w+\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = re.findall(r"^rlcore train .*$", TEXT, re.MULTILINE)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}!{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments }}{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SMALL = [
    "runtime=local",
    "trainer.steps=1",
    "trainer.prompts_per_step=2",
    "sampling.samples_per_prompt=2",
    "sampling.max_response_tokens=48",
    "eval.max_prompts=2",
    "trackers=jsonl",
    "run.name=r",
]


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    """Return a directory with the files of the page and a chat model."""
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    made = tmp_path_factory.mktemp("data")
    for name, text in FILES.items():
        if name.endswith(".parquet"):
            pa.parquet.write_table(pa.Table.from_pylist([json.loads(line) for line in text.splitlines()]), made / name)
        else:
            (made / name).write_text(text)
    model = assets / "models" / "stories260k"
    (made / "DIR").mkdir()
    for file in model.iterdir():
        (made / "DIR" / file.name).symlink_to(file)
    tokenizer = load_tokenizer(str(model))
    (made / "DIR" / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer.eos_token
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_trains(folder, tmp_path, monkeypatch, command):
    monkeypatch.chdir(folder)

    settings = [word for word in shlex.split(command)[2:] if not word.startswith("trainer.")]
    train([*settings, *SMALL, f"run.directory={tmp_path}"], dry_run=False)

    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 1
    assert lines[-1]["actor/loss"] == lines[-1]["actor/loss"], "not NaN"
    assert any(name.startswith("eval/") for name in lines[-1]) == ("data.eval" in command)


def test_the_page_has_a_command_for_every_file_and_algorithm():
    assert len(COMMANDS) > 15
    assert [name for name in FILES if not any(name in command for command in COMMANDS)] == []
    used = {found for command in COMMANDS for found in re.findall(r"algorithm=(\w+)", command)}
    assert used == {"sft", "dpo", "kto", "ppo", "reward_model"}
