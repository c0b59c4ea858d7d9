"""The command line: help with valid examples, exit codes, and each command on a real run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.api.run import _new_name
from rlcore.cli import COMMANDS, main
from rlcore.config.compose import compose
from rlcore.config.schema import Config
from rlcore.errors import UserError
from rlcore.hooks.manager import Hooks
from rlcore.testing.waiting import HANG_S
from rlcore.trainer.launch import launch
from rlcore.trainer.manifest import write_manifest
from tests.distributions import rlcore

TINY = [
    *("preset=quickstart", "trainer.steps=1", "trainer.prompts_per_step=4", "sampling.samples_per_prompt=2"),
    *("eval.max_prompts=4", "runtime=local", "trackers=jsonl", "run.name=r"),
]


@pytest.fixture(scope="session", autouse=True)
def _quickstart_assets():
    """Create the quickstart assets once, in the user's cache."""
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Return a directory with the run `r` of one step; tests must not change it."""
    folder = tmp_path_factory.mktemp("outputs")
    assert main(["train", *TINY, f"run.directory={folder}"]) == 0
    return folder


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def helped(capsys, command: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def examples(text: str) -> list[list[str]]:
    """Return the lines of a help text that start with `rlcore`, without their explanations."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  rlcore ")]
    return [shlex.split(re.split(r" {2,}| \| | > |; then", line)[0])[1:] for line in lines]


def test_example_lines_are_read_without_their_explanations():
    text = "x:\n  rlcore train a=b    and more\n  rlcore config c=d > run.yaml     keep it; then: rlcore train\n  python x\n"

    assert examples(text) == [["train", "a=b"], ["config", "c=d"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_examples_are_accepted_by_the_parser(capsys, monkeypatch, command):
    found = examples(helped(capsys, command))
    assert found, "no example"
    seen = []
    monkeypatch.setattr("argparse.ArgumentParser.error", lambda self, message: pytest.fail(message))
    module = importlib.import_module(f"rlcore.cli.{command.replace('-', '_')}")

    class Taken(Exception):
        pass

    def stop(self, *arguments, **options):
        seen.append(parse(self, *arguments, **options))
        raise Taken

    import argparse

    parse = argparse.ArgumentParser.parse_known_args
    for name, *arguments in found:
        assert name == command
        words = [word for word in arguments if word != "..."]
        monkeypatch.setattr("argparse.ArgumentParser.parse_args", stop)
        monkeypatch.setattr("argparse.ArgumentParser.parse_intermixed_args", stop)
        with pytest.raises(Taken):
            module.main(words)
    assert [rest for _, rest in seen if rest] == []


def settings_of_examples() -> list[list[str]]:
    """Return the settings in all help texts, with placeholders replaced by existing files."""
    found = []
    for command in ("train", "eval", "config"):
        module = importlib.import_module(f"rlcore.cli.{command}")
        for _, *words in examples(module._EXAMPLES):
            settings = [word for word in words if re.match(r"[\w.]+=", word)]
            if settings:
                found.append(settings)
    return found


@pytest.mark.parametrize("settings", settings_of_examples(), ids=" ".join)
def test_the_settings_of_every_example_compose(settings):
    compose(settings, complete=False)


def test_there_are_examples_to_compose():
    assert len(settings_of_examples()) >= 8


@pytest.mark.parametrize("command", [[], ["-h"], ["--help"], ["help"]], ids=str)
def test_help_lists_every_command_with_an_example(capsys, command):
    assert main(command) == 0

    out = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)
    assert "example: rlcore train preset=quickstart" in out


def test_python_m_rlcore_is_the_command(tmp_path):
    from rlcore import __version__

    done = rlcore("--version", cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"rlcore {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["list-plugins", "--kind", "tracker"], 0),
        (["train", "trainer.step=1"], 2),
        (["train", "--unknown"], 2),
        (["trian"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes_as_a_shell_sees_them(tmp_path, arguments, code):
    done = rlcore(*arguments, cwd=tmp_path)

    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failing_run_has_exit_code_1_and_names_the_place(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("def score(completion):\n    raise OSError('no license')\n")

    code = main(["train", *TINY, f"run.directory={tmp_path}", f"reward={tmp_path}/bad.py:score"])

    assert code == 1
    assert "OSError: no license (bad.py:2)" in capsys.readouterr().err


def test_an_interrupt_has_exit_code_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlcore.cli._command", interrupted)

    assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_dry_run_prints_the_plan_and_starts_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    monkeypatch.chdir(tmp_path)
    loaded_before = "ray" in sys.modules

    code = main(["train", "preset=quickstart", "algorithm.kl.coefficient=0.1", "--dry-run"])

    out = capsys.readouterr().out
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert ("ray" in sys.modules) == loaded_before
    lines = [line for line in out.splitlines() if not line.startswith("quickstart:")]
    first_words = [line.split()[0] for line in lines]
    wanted = [
        "run",
        "model",
        "data",
        "eval",
        "algorithm",
        "backend",
        "rollout",
        "reward",
        "trackers",
        "runtime",
        "step",
    ]
    assert first_words == [*wanted, *["role"] * 4, "dry"]
    roles = {line.split()[1]: line for line in lines if line.startswith("role")}
    assert list(roles) == ["actor", "reference", "rollout", "reward"]
    for role in ("actor", "reference", "rollout"):
        assert re.search(r"pool main \(1 × 1 cpu\) +[\d.]+ [KM]B per device$", roles[role])
    assert "64 prompts × 8 samples = 512 rows" in out


@pytest.mark.parametrize("arguments", [[], ["preset=quickstart", "algorithm=ppo", "placement=split"]], ids=["", "ppo"])
def test_a_printed_config_works_as_a_preset_with_the_same_result(tmp_path, capsys, arguments):
    given = [*arguments, *([] if arguments else ["model.path=DIR", "data.train=FILE"])]
    assert main(["config", *given]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)

    assert main(["config", f"preset={tmp_path}/run.yaml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert main(["config", *given, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)

    assert again["config"] == first["config"]
    assert list(first["config"]) == list(Config.__dataclass_fields__)
    assert again["overrides"] == [f"preset={tmp_path}/run.yaml"]


def test_the_config_shows_the_source_of_values_and_missing_ones(capsys):
    assert main(["config", "algorithm=grpo_clip_higher", "trainer.steps=7"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "  path: ???" in lines
    (algorithm,) = [line for line in lines if line.startswith("algorithm:")]
    (trainer,) = [line for line in lines if line.startswith("trainer:")]
    assert "algorithm=grpo_clip_higher (rlcore); plugin of rlcore " in algorithm
    assert trainer.endswith("# command line")


def test_a_checkpoint_is_scored_with_the_settings_of_its_run(outputs, tmp_path, capsys):
    before = files(outputs)
    capsys.readouterr()

    assert main(["eval", str(outputs / "r"), "--json", "--samples", str(tmp_path / "new" / "samples.jsonl")]) == 0

    numbers = json.loads(capsys.readouterr().out)
    last = json.loads((outputs / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert numbers["eval/samples"] == 4
    assert {name: numbers[name] for name in numbers if name != "seconds"} == {
        name: value for name, value in last.items() if name.startswith("eval/")
    }, "greedy, same weights, same prompts: what the run itself measured at its end"
    samples = [json.loads(line) for line in (tmp_path / "new" / "samples.jsonl").read_text().splitlines()]
    assert sum(sample["reward"] for sample in samples) / 4 == pytest.approx(numbers["eval/reward"])
    assert files(outputs) == before, "eval leaves the run alone"


def test_a_model_directory_is_scored_like_its_checkpoint(outputs, tmp_path, capsys):
    assert main(["export", str(outputs / "r"), str(tmp_path / "model")]) == 0
    capsys.readouterr()

    assert (
        main(["eval", str(tmp_path / "model"), "preset=quickstart", "runtime=local", "eval.max_prompts=4", "--json"])
        == 0
    )
    of_model = json.loads(capsys.readouterr().out)
    assert main(["eval", str(outputs / "r" / "checkpoints" / "step_000001"), "--json"]) == 0
    of_checkpoint = json.loads(capsys.readouterr().out)

    assert of_model | {"seconds": 0} == of_checkpoint | {"seconds": 0}


def test_settings_of_an_evaluation_can_be_changed(outputs, capsys):
    capsys.readouterr()
    code = main(["eval", str(outputs / "r"), "eval.samples_per_prompt=3", "eval.temperature=1", "eval.max_prompts=2"])

    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert code == 0
    assert shown["samples"] == "6"
    assert {"reward", "pass_rate", "pass_at_k", "response_length", "seconds"} <= set(shown)


def test_the_most_likely_token_alone_is_greedy(outputs, capsys):
    found = {}
    for settings in (
        (),
        ("eval.temperature=1",),
        ("eval.temperature=1", "eval.top_k=1"),
        ("eval.temperature=1", "eval.top_p=1e-9"),
    ):
        capsys.readouterr()
        assert main(["eval", str(outputs / "r"), "--json", "eval.max_prompts=64", *settings]) == 0
        found[settings] = json.loads(capsys.readouterr().out) | {"seconds": 0}

    greedy, sampled, *narrowed = found.values()
    assert narrowed == [greedy, greedy]
    assert sampled != greedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_weights_of_the_given_type(outputs, tmp_path, dtype):
    import torch
    from transformers import AutoModelForCausalLM

    assert main(["export", str(outputs / "r"), str(tmp_path / "m"), "--dtype", dtype]) == 0
    assert main(["export", str(outputs / "r"), str(tmp_path / "whole")]) == 0

    model, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / it, dtype="auto") for it in ("m", "whole"))
    assert {it.dtype for it in model.parameters()} == {getattr(torch, dtype)}
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.to(getattr(torch, dtype)))


def test_weights_that_overflow_the_type_are_refused(outputs, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    run = shutil.copytree(outputs / "r", tmp_path / "r")
    (file,) = run.glob("checkpoints/*/actor/model.safetensors")
    save_file({name: tensor * 1e6 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    checkpoint = file.parents[1]
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, int(checkpoint.name.removeprefix("step_")))

    assert main(["export", str(run), str(tmp_path / "m"), "--dtype", "float16"]) == 2
    assert "is too large for float16\nType  --dtype bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_penalty_changes_an_evaluation_although_the_algorithm_of_the_run_refuses_it(outputs, capsys):
    lengths = []
    for settings in ((), ("sampling.repetition_penalty=20",)):
        capsys.readouterr()
        assert main(["eval", str(outputs / "r"), "--json", "eval.max_prompts=16", *settings]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["eval/response_length"])

    assert lengths[0] != lengths[1]


def test_an_exported_checkpoint_loads_in_transformers_with_the_logits_of_the_trained_model(outputs, tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlcore.quickstart import locate
    from rlcore.trainer.export import find_checkpoint

    target = tmp_path / "models" / "sorter"
    capsys.readouterr()
    assert main(["export", str(outputs / "r"), str(target)]) == 0

    assert capsys.readouterr().out == f"actor of step 1: {target}\n"
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = torch.tensor([tokenizer("sort 42913=")["input_ids"]])

    def logits(directory: Path) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits

    exported = logits(target)
    assert torch.equal(exported, logits(find_checkpoint(outputs / "r").path / "actor"))
    assert not torch.equal(exported, logits(Path(locate("quickstart:model")))), "the step changed the model"
    assert [path.name for path in target.parent.iterdir()] == ["sorter"], "nothing half written is left"


class Silent:
    """A tracker that records its calls."""

    Config = None
    calls: list[str] = []  # noqa: RUF012

    def __init__(self, config, run) -> None: ...

    def start(self, config, *, resume_step) -> None:
        self.calls.append("start")

    def log(self, step, metrics) -> None: ...

    def log_samples(self, step, samples) -> None: ...

    def finish(self, summary) -> None:
        self.calls.append(f"finish: {summary['error']}")


class Refuses(Silent):
    def start(self, config, *, resume_step) -> None:
        super().start(config, resume_step=resume_step)
        raise UserError("no account\nType  login")


class Unreached(Silent):
    def start(self, config, *, resume_step) -> None:
        raise AssertionError("a tracker after the one that failed was started")


def test_a_failed_start_finishes_the_started_trackers(tmp_path):
    from rlcore.cli.train import plan_run

    trackers = f"trackers=[{','.join(f'{Path(__file__)}:{name}' for name in ('Silent', 'Refuses', 'Unreached'))}]"
    given = [item for item in TINY if not item.startswith("trackers")]
    plan, _ = plan_run([*given, trackers, f"run.directory={tmp_path}"])

    with pytest.raises(UserError, match="no account"):
        launch(plan, Hooks())

    calls = plan.trackers[0].resolved.object.calls
    assert calls == ["start", "start", "finish: UserError: no account", "finish: UserError: no account"]


@pytest.mark.parametrize("command", ["list-plugins", "config"])
def test_a_closed_pipe_ends_a_command_silently(command):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "rlcore", command],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=HANG_S,
            check=False,
        )

    assert (done.returncode, done.stderr) == (141, b"")


def test_dry_run_can_be_anywhere_and_a_preset_file_names_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [item for item in TINY if not item.startswith(("preset", "run.name"))]

    assert main(["train", "--dry-run", "preset=quickstart", *given]) == 0
    assert main(["train", "preset=quickstart", "--dry-run", *given]) == 0
    assert _new_name(compose([*given, "preset=quickstart"]).config, ["+preset=conf/mine.yaml"]).startswith("mine-")
