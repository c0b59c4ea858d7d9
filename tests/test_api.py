"""The Python interface: it trains like the command line, takes objects, and says what to do when it cannot."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from rlcore_tests.runs import metrics

import rlcore
from rlcore.cli import main
from rlcore.cli.train import run as train_command
from rlcore.errors import ConfigError, DataError, ModelError, PluginError, UserError
from rlcore.models.load import load_model, load_tokenizer
from rlcore.quickstart import locate
from rlcore.testing.waiting import HANG_S

ROOT = Path(__file__).parents[1]
ROWS = [{"prompt": f"sort {n}=", "digits": str(n)} for n in range(50000, 50040)]


@pytest.fixture(scope="module", autouse=True)
def _quickstart_assets():
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))


def ends_in_four(completion: str) -> float:
    return float(completion.endswith("4"))


def settings(directory, steps=2, **more):
    """Return the settings of a run `r` in one process that takes a second."""
    small = {"trainer.prompts_per_step": 8, "sampling.samples_per_prompt": 4, "sampling.max_response_tokens": 8}
    place = {"run.directory": str(directory), "run.name": "r", "trackers": ["jsonl"], "trainer.steps": steps}
    return {**small, **place, **{name.replace("__", "."): value for name, value in more.items()}}


def small(directory, steps=2, **more):
    """Return the arguments of a small run."""
    chosen = {name: more.pop(name) for name in [*more] if "__" in name}
    given = {"model": "quickstart:model", "data": ROWS, "reward": ends_in_four, "runtime": "local"}
    return given | {"settings": settings(directory, steps, **chosen)} | more


SCRIPT = """
import rlcore

def ends_in_four(completion: str) -> float:
    return float(completion.endswith("4"))

result = rlcore.train(
    model="quickstart:model",
    data=[{"prompt": f"sort {n}=", "digits": str(n)} for n in range(50000, 50040)],
    eval_data="quickstart:eval",
    reward=[ends_in_four, {"name": "sorted_digits", "weight": 0.5}],
    algorithm="grpo", rollout="hf", runtime="RUNTIME",
    settings={"trainer.steps": 3, "trainer.prompts_per_step": 8, "sampling.samples_per_prompt": 4, "eval.max_prompts": 8,
              "run.directory": "DIRECTORY", "run.name": "r", "reward.num_processes": 2},
)
"""


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_script_equals_the_command_line_bit_for_bit(tmp_path, runtime):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text("def ends_in_four(completion): return float(completion.endswith('4'))\n")
    rewards = f"reward=[{tmp_path}/mine.py:ends_in_four,{{name: sorted_digits, weight: 0.5}}]"
    given = ["model.path=quickstart:model", f"data.train={tmp_path}/rows.jsonl", "data.eval=quickstart:eval", rewards]
    given += ["trainer.steps=3", "trainer.prompts_per_step=8", "sampling.samples_per_prompt=4", "eval.max_prompts=8"]
    train_command([*given, "runtime=local", f"run.directory={tmp_path}/typed", "run.name=r"], dry_run=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("RUNTIME", runtime).replace("DIRECTORY", f"{tmp_path}/called"))

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG_S)

    assert done.returncode == 0, done.stderr
    assert repr(metrics(tmp_path / "called")) == repr(metrics(tmp_path / "typed"))
    assert len(metrics(tmp_path / "typed")) == 4


class Seen:
    """A plain object with hooks."""

    def __init__(self):
        self.steps = []

    def rlcore_step_end(self, step, metrics):
        self.steps.append((step, metrics["reward/mean"]))


def test_a_result_has_metrics_a_directory_and_an_export(tmp_path):
    seen = Seen()
    result = rlcore.train(**small(tmp_path, callbacks=[seen]))

    assert result.directory == tmp_path / "r"
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    assert [(line["step"], line["reward/mean"]) for line in result.metrics[1:]] == seen.steps
    assert load_model(str(result.export(tmp_path / "out"))).config.vocab_size > 10
    assert {path.name for path in (tmp_path / "r" / "inputs").iterdir()} == {"train.jsonl"}


def test_a_loop_of_ones_own_trains_like_train(tmp_path):
    rlcore.train(**small(tmp_path / "one", steps=3))
    with rlcore.launch(rlcore.plan(**small(tmp_path / "two", steps=3))) as run:
        steps = [metrics["step"] for metrics in run]

    assert steps == [1, 2, 3]
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_ends_early_leaves_a_checkpoint_from_which_the_run_resumes(tmp_path, how):
    whole = small(tmp_path / "whole", steps=3)
    rlcore.train(**whole)
    cut = small(tmp_path / "cut", steps=3)
    if how == "break":
        with rlcore.launch(rlcore.plan(**cut)) as run:
            for _ in run:
                break
    else:
        with pytest.raises(ZeroDivisionError), rlcore.launch(rlcore.plan(**cut)) as run:
            [1 / 0 for _ in run]
    assert [path.name for path in (tmp_path / "cut" / "r" / "checkpoints").iterdir()] == ["step_000001"]
    rlcore.train(**cut)

    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def closure(letter):
    return lambda completion: float(letter in completion)


class Reward:
    __name__ = "mine"

    def __init__(self, value):
        self.value = value

    def __call__(self, completion):
        return self.value


@pytest.mark.parametrize("processes", [0, 1])
def test_closures_and_objects_are_rewards(tmp_path, processes):
    given = [closure("4"), closure("5"), {"name": Reward(0.25), "weight": 2.0}]
    result = rlcore.train(**small(tmp_path, reward=given, reward__num_processes=processes))

    last = result.metrics[-1]
    assert {"reward/lambda", "reward/lambda#2", "reward/mine"} <= last.keys()
    assert last["reward/mean"] == pytest.approx(last["reward/lambda"] + last["reward/lambda#2"] + 0.5, abs=1e-6)


def test_an_object_that_cannot_be_sent_is_refused_with_what_to_do(tmp_path):
    lock = threading.Lock()

    def locked(completion):
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"reward 'locked' cannot be sent.*\n.*runtime=local reward.num_processes=0"):
        rlcore.plan(**small(tmp_path, reward=locked))
    assert not (tmp_path / "r").exists()

    rlcore.train(**small(tmp_path, reward=locked, reward__num_processes=0))


def test_a_run_with_objects_resumes_only_with_them(tmp_path, capsys):
    whole = rlcore.train(**small(tmp_path / "whole", steps=4, callbacks=[Seen()]))
    rlcore.train(**small(tmp_path, callbacks=[Seen()]))
    rows = tmp_path / "r" / "inputs" / "train.jsonl"
    typed = ["model.path=quickstart:model", f"data.train={rows}", f"run.directory={tmp_path}", "run.name=r"]
    typed += ["trainer.prompts_per_step=8", "sampling.samples_per_prompt=4", "runtime=local", "trainer.steps=4"]

    assert main(["train", *typed, "reward=sorted_digits"]) == 2
    assert capsys.readouterr().err.endswith(
        "the run was started with Python objects, which are not given now: reward=[ends_in_four], callbacks=[Seen]\n"
        "Resume it from Python:  rlcore.train(…, reward=[ends_in_four], callbacks=[Seen],"
        ' settings={"run.name": "r"})   or start a new run:  run.name=NAME\n'
    )
    assert main(["train", *typed, "reward=python:ends_in_four"]) == 2
    assert "reward 'ends_in_four' was an object of a Python program" in capsys.readouterr().err
    resumed = rlcore.train(**small(tmp_path, steps=4, callbacks=[Seen()]))
    assert metrics(tmp_path) == metrics(tmp_path / "whole")
    assert len(resumed.metrics) == len(whole.metrics) == 5


def test_a_resumed_run_refuses_other_rows(tmp_path):
    rlcore.train(**small(tmp_path))

    with pytest.raises(ConfigError, match=r"inputs/train.jsonl of this run differs.*\n.*run.name"):
        rlcore.plan(**small(tmp_path, data=ROWS[:20]))
    assert len((tmp_path / "r" / "inputs" / "train.jsonl").read_text().splitlines()) == 40


def loaded():
    path = locate("quickstart:model")
    return load_model(path), load_tokenizer(path)


def test_a_loaded_model_trains_like_its_directory(tmp_path):
    model, tokenizer = loaded()
    rlcore.train(**small(tmp_path / "object", model=model, tokenizer=tokenizer))
    rlcore.train(**small(tmp_path / "path"))

    assert metrics(tmp_path / "object") == metrics(tmp_path / "path")
    assert (tmp_path / "object" / "r" / "inputs" / "model" / "model.safetensors").is_file()
    rlcore.train(**small(tmp_path / "object", steps=3, model=model, tokenizer=tokenizer))
    model.get_input_embeddings().weight.data.add_(1)
    with pytest.raises(ConfigError, match="inputs/model of this run differs"):
        rlcore.plan(**small(tmp_path / "object", model=model, tokenizer=tokenizer))


class Tokenizer:
    """A stand-in for the tokenizer of another model."""

    def __init__(self, size=10, eos=1):
        self.size, self.eos_token_id = size, eos

    def __len__(self):
        return self.size

    def save_pretrained(self, path): ...


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, r"needs its tokenizer\nPass  tokenizer=AutoTokenizer"),
        (Tokenizer(size=10**6), r"1000000 tokens, but the model has embeddings for \d+"),
        (Tokenizer(eos=7), r"its end token is 7, but the model ends with \[1\]"),
    ],
)
def test_a_model_with_another_tokenizer_is_refused(tmp_path, tokenizer, message):
    with pytest.raises(ModelError, match=message):
        rlcore.plan(**small(tmp_path, model=loaded()[0], tokenizer=tokenizer))


class Dataset:
    """A stand-in for datasets.Dataset: rows by iteration."""

    column_names = ("prompt", "digits")

    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    "make",
    [Dataset, lambda: (row for row in ROWS), lambda: pytest.importorskip("datasets").Dataset.from_list(ROWS)],
    ids=["stand-in", "generator", "datasets"],
)
def test_rows_of_a_data_set_are_written_once(tmp_path, make):
    rlcore.plan(**small(tmp_path, data=make(), eval_data=ROWS[:3]))

    written = [json.loads(line) for line in (tmp_path / "r" / "inputs" / "train.jsonl").read_text().splitlines()]
    assert written == ROWS
    assert len((tmp_path / "r" / "inputs" / "eval.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": ROWS, "test": ROWS}, r"a dict with train, test, not rows\nPass one split:  data=data\['train'\]"),
        (7, r"data: a int, not rows\nPass a path, or a list"),
        (["one", "two"], r'data, row 0: a str, not a dict of columns\n.*to_dict\("records"\)'),
        ([{"prompt": "1+1=", "image": object()}], r"data, row 0: column 'image' cannot be written as JSON: it holds a"),
        ([{"question_text": "1+1="}], r"none of the columns prompt.*\nType data.prompt_column=<name>"),
    ],
    ids=["splits", "no rows", "texts", "image", "no prompt"],
)
def test_data_that_cannot_be_used_is_refused_and_leaves_nothing(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        rlcore.plan(**small(tmp_path, data=data))

    assert list(tmp_path.iterdir()) == []


def test_an_error_says_how_to_pass_a_setting(tmp_path):
    with pytest.raises(UserError, match=r"optimizer.learning_rate") as caught:
        rlcore.plan(**small(tmp_path, optimizer__learning_rate=1e-3))

    assert caught.value.__notes__ == ['In Python, key=value is passed as  settings={"key": value}']


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("trackers", "trackers=[console,jsonl]", ["console", "jsonl"]),
        ("optimizer.lr", "optimizer.lr=1e-6", 1e-6),
        ("sampling.stop", "sampling.stop=['a b','}']", ("a b", "}")),
        ("data.rename", "data.rename={a b: c}", {"a b": "c"}),
        ("pools", "pools={main: {devices_per_node: 2}}", {"main": {"devices_per_node": 2}}),
        ("preset", "preset=gsm8k", "gsm8k"),
        ("schedule", "schedule=async", "async"),
        ("data.template", "data.template='{a}'", "'{a}'"),
    ],
)
def test_a_value_means_what_it_means_on_the_command_line(key, typed, value):
    from rlcore.config.compose import compose

    assert compose([(key, value)], complete=False).plain == compose([typed], complete=False).plain


def test_a_setting_given_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.name is given twice"):
        rlcore.plan(**small(tmp_path, algorithm="grpo", algorithm__name="ppo"))


def test_a_callback_with_an_unknown_hook_is_refused(tmp_path):
    class Mine:
        def rlcore_step_ends(self, step): ...

    with pytest.raises(ConfigError, match=r"'rlcore_step_ends', which is not a hook. Did you mean 'rlcore_step_end'"):
        rlcore.plan(**small(tmp_path, callbacks=[Mine()]))


def test_two_runs_at_once_are_refused(tmp_path):
    planned = rlcore.plan(**small(tmp_path))
    with rlcore.launch(planned) as run:
        with pytest.raises(ConfigError, match="another run is active in this process"):
            rlcore.evaluate("quickstart:model", ROWS, reward=ends_in_four, runtime="local")
        assert len(list(run)) == 2


def test_a_run_is_evaluated_with_rows_and_functions(tmp_path):
    result = rlcore.train(**small(tmp_path))

    found = rlcore.evaluate(result, ROWS[:5], reward=ends_in_four, settings={"eval.samples_per_prompt": 2})
    assert found.metrics["eval/samples"] == len(found.samples) == 10
    rewards = [sample["reward"] for sample in found.samples]
    assert sum(rewards) / 10 == pytest.approx(found.metrics["eval/reward"])
    assert rewards == [ends_in_four(sample["completion"]) for sample in found.samples]
    with pytest.raises(PluginError, match="reward 'ends_in_four' was an object of a Python program"):
        rlcore.evaluate(result.directory, ROWS[:5])


def test_a_loaded_model_is_evaluated_like_its_directory():
    model, tokenizer = loaded()
    given = {"data": ROWS[:5], "reward": ends_in_four, "runtime": "local"}

    of_object = rlcore.evaluate(model, tokenizer=tokenizer, **given)
    assert of_object.metrics == rlcore.evaluate(locate("quickstart:model"), **given).metrics


def test_samples_are_recorded_and_trained_on(tmp_path):
    recorded = rlcore.rollout(
        locate("quickstart:model"),
        tmp_path / "samples",
        ROWS,
        reward=ends_in_four,
        runtime="local",
        settings={"trainer.steps": 2, "trainer.prompts_per_step": 8, "sampling.samples_per_prompt": 4},
    )
    assert len(list((recorded.directory / "steps").glob("0*"))) == 2

    result = rlcore.train(**small(tmp_path, schedule__replay=str(recorded.directory)))
    assert len(result.metrics) == 3


def test_a_run_works_in_a_thread_and_in_an_event_loop(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(rlcore.train(**small(tmp_path / "thread"))))
    thread.start()
    thread.join(HANG_S)

    async def cell():
        results.append(rlcore.train(**small(tmp_path / "loop")))

    asyncio.run(cell())
    assert [len(result.metrics) for result in results] == [3, 3]
    assert metrics(tmp_path / "thread") == metrics(tmp_path / "loop")


INTERRUPTED = """
import os, signal
import rlcore

class Stop:
    def rlcore_step_end(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGNAL)

try:
    rlcore.train(runtime="local", callbacks=[Stop()],
                 settings={"preset": "quickstart", "trainer.prompts_per_step": 8, "sampling.samples_per_prompt": 4,
                           "eval.max_prompts": 8, "plugins.hooks": [], "run.directory": DIRECTORY, "run.name": "r"})
except KeyboardInterrupt:
    handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("interrupted", handler, os.listdir(DIRECTORY + "/r/checkpoints"))
print("the script goes on")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, name):
    script = INTERRUPTED.replace("SIGNAL", name).replace("DIRECTORY", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step_000002"]
    said = done.stdout.splitlines()
    if name == "SIGINT":
        assert said[-2:] == ["interrupted True ['step_000002']", "the script goes on"]
    else:
        assert "the script goes on" not in said


class ZMQInteractiveShell:
    """A stand-in for the shell of a notebook, by which rich recognizes one."""

    config: ClassVar = {}


def test_the_example_script_runs(tmp_path):
    script = ROOT / "examples" / "python_api.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "step 3: reward" in done.stdout


def test_the_example_notebook_runs_cell_by_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    names = {"__name__": "__main__"}

    async def run_cells():  # as a kernel does
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)

    asyncio.run(run_cells())

    assert len(names["rewards"]) == len(names["result"].metrics) - 1 == 3
    assert "step 3/3" in capsys.readouterr().out
    assert len(list((tmp_path / "outputs").iterdir())) == 2
