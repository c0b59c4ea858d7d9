"""Rewards in separate processes: a hang or a crash affects only its own sample."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError, PluginError, UserError
from rlcore.protocols.reward import RewardSpec
from rlcore.rewards.executor import RewardExecutor
from rlcore.testing.waiting import HANG_S, wait_until

SOURCE = """
import asyncio, os, re, signal, subprocess, sys, time
from dataclasses import dataclass
from fractions import Fraction

import rlcore.protocols.reward as protocol


def length(completion): return len(completion)
def scaled(completion, factor=1.0): return len(completion) * factor
def fraction(completion): return Fraction(1, 2)
def boolean(completion): return completion == "b"
def skips_b(completion): return None if completion == "b" else 1.0
def never(completion): return None
def crash(completion, sample_id): return os._exit(7) if completion == "b" else float(sample_id)
def segfault(completion): return os.kill(os.getpid(), signal.SIGSEGV) if completion == "b" else 1.0
def leave(completion): sys.exit(3)
def raises(completion): return 1 / 0 if completion == "b" else 1.0
def nan(completion): return float("nan")
def text(completion): return "good"
def mapping(completion): return {"score": 1.0}
def needs_gold(completion, gold): return 1.0
def result(completion): return protocol.RewardResult(0.5, metrics={"format": True})
def bad_metric(completion): return protocol.RewardResult(0.5, metrics={"format": float("inf")})
def forgetful(completion, tags): tags.append("x"); return len(tags)
def pid(completion): return os.getpid()
def large(completion): return 1e39 if completion == "b" else 3e38
def largest(completion): return 3.4028234663852886e38
def huge_integer(completion): return 10**400
def interrupts(completion): raise KeyboardInterrupt("by the reward")
def ends_the_generator(completion): raise GeneratorExit("by the reward")
def forks(completion): return float(os.fork() == 0) if completion == "b" else 1.0
def forks_and_the_copy_fails(completion): return 1.0 if os.fork() else 1 / 0


def murmurs(completion): print(completion)


def prints(completion):
    print("x" * 1_000_000, flush=True)
    subprocess.run([sys.executable, "-c", "print('y' * 1_000_000)"])
    print("z" * 1_000_000, file=sys.stderr)
    return 1.0


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises_unprintable(completion): raise Unprintable
async def judge_forks(completion): return float(os.fork() == 0) if completion == "b" else 1.0
async def judge_interrupts(completion): raise KeyboardInterrupt("by the reward")
async def judge_cancels(completion): raise asyncio.CancelledError("by the reward")


def numpy_scalar(completion):
    import numpy
    return {"a": numpy.float32(0.5), "b": numpy.bool_(True), "c": numpy.int64(3)}[completion]


def hang(completion, sample_id):
    if completion == "b":
        while True:
            pass
    return float(sample_id)


def hang_holding_the_interpreter(completion):
    return float(re.match("(a+)+$", "a" * 60 + "b") is not None)


def spawn_and_hang(completion, path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


async def judge(completion, sample_id):
    await asyncio.sleep(0.05)
    return float(sample_id)


num_begun = 0


async def counts_begun(completion):
    global num_begun
    num_begun += 1
    await asyncio.sleep(0.05)
    return num_begun


async def judge_hangs(completion, sample_id):
    await asyncio.sleep(600 if completion == "b" else 0)
    return float(sample_id)


async def judge_blocks(completion, sample_id):
    if completion == "b":
        time.sleep(600)
    return float(sample_id)


@protocol.batched
def lists(completion, sample_id): return [float(i) for i in sample_id]


@protocol.batched
def too_short(completion): return [1.0] * (len(completion) - 1)


@protocol.batched
def no_list(completion): return 1.0


@protocol.batched
def one_is_nan(completion): return [float("nan") if c == "b" else 1.0 for c in completion]


@protocol.batched
def lists_crash(completion, sample_id):
    if "b" in completion:
        os._exit(9)
    return [float(i) for i in sample_id]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}


def trl(prompts, completions, answer, **kwargs):
    return [float(c == a) if a else None for c, a in zip(completions, answer)]


@dataclass(frozen=True)
class Options:
    suffix: str
    weight: float = 1.0


class WithOptions:
    Config = Options

    def __init__(self, config):
        self.config = config

    def __call__(self, completion):
        return self.config.weight * completion.endswith(self.config.suffix)


class Plain:
    def __call__(self, completion):
        return 1.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def spec(place):
    return lambda attribute, **rest: RewardSpec(rest.pop("name", attribute), f"{place}:{attribute}", **rest)


def samples(completions="abc", **columns):
    return [{"completion": c, "sample_id": i, "prompt_id": 0, **columns} for i, c in enumerate(completions)]


def score(specs, rows, **settings):
    with RewardExecutor(specs, **settings) as executor:
        return executor.score(rows)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_processes", [pytest.param(0, id="inline"), pytest.param(1, id="process")])
@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        pytest.param("length", [1.0, 1.0, 1.0], id="int"),
        pytest.param("boolean", [0.0, 1.0, 0.0], id="bool"),
        pytest.param("numpy_scalar", [0.5, 1.0, 3.0], id="numpy_scalar"),
        pytest.param("fraction", [0.5, 0.5, 0.5], id="fraction"),
        pytest.param("lists", [0.0, 1.0, 2.0], id="batched"),
        pytest.param("judge", [0.0, 1.0, 2.0], id="async"),
        pytest.param("Plain", [1.0, 1.0, 1.0], id="class_without_options"),
        pytest.param("skips_b", [1.0, None, 1.0], id="none_is_a_skip"),
    ],
)
def test_scores_come_back_in_order(spec, num_processes, attribute, values):
    outcomes = score([spec(attribute)], samples(), num_processes=num_processes)

    assert [outcome.value for outcome in outcomes] == values
    assert {outcome.status for outcome in outcomes} <= {"score", "skip"}


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        pytest.param("raises", "ZeroDivisionError: division by zero (my_rewards.py:", id="exception"),
        pytest.param("nan", "returned nan, not a finite number", id="nan"),
        pytest.param("huge_integer", "OverflowError: int too large to convert to float (", id="huge_integer"),
        pytest.param("large", "returned 1e+39, which is infinite in float32", id="infinite_in_float32"),
        pytest.param("ends_the_generator", "GeneratorExit: by the reward (my_rewards.py:", id="generator_exit"),
        pytest.param("judge_cancels", "CancelledError: by the reward (my_rewards.py:", id="cancelled"),
        pytest.param("text", "returned 'good' (str), not a number, None or RewardResult", id="string"),
        pytest.param("mapping", "returned {'score': 1.0} (dict), not a number, None or RewardResult", id="dict"),
        pytest.param("bad_metric", "metric 'format' is inf, not a finite number", id="metric"),
        pytest.param("too_short", "returned a list of 2 for 3 completions", id="wrong_length"),
        pytest.param("no_list", "returned float, not a list of 3", id="no_list"),
        pytest.param("one_is_nan", "returned nan, not a finite number", id="nan_in_list"),
        pytest.param("leave", "SystemExit: 3 (my_rewards.py:", id="sys_exit"),
        pytest.param("needs_gold", "asks for column 'gold', which the sample does not have", id="column"),
    ],
)
def test_no_score_is_an_error_never_a_number(spec, attribute, message):
    outcome = score([spec(attribute)], samples(), num_processes=0)[1]

    assert (outcome.status, outcome.value, outcome.reward) == ("error", None, attribute)
    assert outcome.message.startswith(message)


def test_a_bad_value_in_a_list_costs_only_its_sample(spec):
    outcomes = score([spec("one_is_nan")], samples(), num_processes=0)

    assert [outcome.status for outcome in outcomes] == ["score", "error", "score"]


def test_the_largest_float32_is_a_score(spec):
    assert score([spec("largest")], samples("a"), num_processes=0)[0].value == 3.4028234663852886e38


def test_a_weighted_sum_that_is_infinite_in_float32_is_an_error_of_the_largest_reward(spec):
    outcome = score([spec("length"), spec("largest", weight=-10.0)], samples("a"), num_processes=0)[0]

    assert (outcome.status, outcome.value, outcome.reward) == ("error", None, "largest")
    assert outcome.message == "the weighted sum of the rewards is -3.4e+39, which is infinite in float32"


@pytest.mark.parametrize("num_processes", [pytest.param(0, id="inline"), pytest.param(1, id="process")])
@pytest.mark.parametrize("attribute", ["forks", "judge_forks", "forks_and_the_copy_fails"])
def test_only_the_original_of_a_process_that_a_reward_forked_answers(spec, num_processes, attribute):
    outcomes = score([spec(attribute)], samples("abab"), num_processes=num_processes)

    values = [1.0, 0.0, 1.0, 0.0] if attribute != "forks_and_the_copy_fails" else [1.0] * 4
    assert [outcome.value for outcome in outcomes] == values


@pytest.mark.parametrize("attribute", ["interrupts", "judge_interrupts"])
def test_keyboard_interrupt_raised_by_a_reward_is_an_error_with_its_place(spec, attribute):
    outcomes = score([spec(attribute)], samples("ab"))

    assert [outcome.status for outcome in outcomes] == ["error", "error"]
    assert all(o.message.startswith("KeyboardInterrupt: by the reward (my_rewards.py:") for o in outcomes)


def test_ctrl_c_ends_an_inline_executor(spec):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt):
            score([spec("interrupts")], samples("a"), num_processes=0)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exit_code_of_a_process_that_ended_by_itself_is_reported(spec):
    outcome = score([spec("raises_unprintable")], samples("a"))[0]

    assert outcome.message == "its process died (exit code 1)"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        pytest.param("crash", "its process died (exit code 7)", id="os_exit"),
        pytest.param("segfault", "its process died (signal SIGSEGV)", id="segfault"),
        pytest.param("lists_crash", "its process died (exit code 9)", id="batched_crash"),
        pytest.param("hang", "no answer within 2 s", id="hang"),
        pytest.param("judge_hangs", "no answer within 2 s", id="async_hang"),
        pytest.param("judge_blocks", "no answer within 2 s", id="async_blocks_its_loop"),
    ],
)
def test_hang_or_crash_costs_one_sample(spec, attribute, message, monkeypatch):
    monkeypatch.setattr("rlcore.rewards.executor._GRACE_S", 0.2)

    outcomes = score([spec(attribute)], samples("abaabaa"), timeout_s=2.0)

    status = "timeout" if "answer" in message else "error"
    assert [outcome.status for outcome in outcomes] == ["score", status, "score", "score", status, "score", "score"]
    assert [outcome.message for outcome in outcomes if outcome.message] == [message, message]
    assert [outcome.value is None for outcome in outcomes] == [False, True, False, False, True, False, False]


def test_other_rewards_still_score_the_sample_of_a_crash(spec):
    outcomes = score([spec("length"), spec("crash"), spec("boolean")], samples("ab"))

    assert [outcome.parts for outcome in outcomes] == [
        {"length": 1.0, "crash": 0.0, "boolean": 0.0},
        {"length": 1.0, "crash": None, "boolean": 1.0},
    ]
    assert (outcomes[1].status, outcomes[1].reward) == ("error", "crash")


def test_many_samples_over_two_processes_keep_their_order(spec):
    rows = [{"completion": "x" * (i % 11), "sample_id": i} for i in range(300)]

    outcomes = score([spec("length")], rows, num_processes=2)

    assert [outcome.value for outcome in outcomes] == [i % 11 for i in range(300)]
    assert [outcome.sample_id for outcome in outcomes] == list(range(300))


def test_weights_and_skips(spec):
    specs = [spec("length", weight=2.0), spec("skips_b", weight=0.5), spec("never")]

    outcomes = score(specs, samples("abc"))

    assert [outcome.value for outcome in outcomes] == [2.5, 2.0, 2.5]


def test_metrics_of_a_result_carry_the_name_of_the_reward(spec):
    outcome = score([spec("result", name="style")], samples("a"), num_processes=0)[0]

    assert (outcome.value, outcome.metrics) == (0.5, {"style/format": 1.0})


def test_the_output_of_rewards_is_cut_and_the_rest_is_counted(spec, capfd, caplog):
    outcomes = score([spec("prints")], samples("a" * 10), num_processes=2, timeout_s=60.0)

    assert [outcome.value for outcome in outcomes] == [1.0] * 10
    out, err = capfd.readouterr()
    assert len(out) + len(err) == 64 * 1024
    assert [record.getMessage() for record in caplog.records] == [
        "rewards printed more than 64 kB; dropping their further output",
        "rewards printed 30.0 MB, of which 29.9 MB were dropped",
    ]


def test_a_little_output_of_rewards_is_passed_on(spec, capfd, caplog):
    score([spec("murmurs")], samples("ab"))

    assert sorted(capfd.readouterr().err.splitlines()) == ["a", "b"]
    assert caplog.records == []


def test_coroutines_of_a_chunk_run_together(spec):
    outcomes = score([spec("counts_begun")], samples("a" * 40))

    assert min(outcome.value for outcome in outcomes) > 1, "others had begun before the first was done"


@pytest.mark.parametrize("num_processes", [pytest.param(0, id="inline"), pytest.param(1, id="process")])
def test_columns_are_not_changed_by_a_reward(spec, num_processes):
    rows = samples("ab", tags=["one"])
    before = copy.deepcopy(rows)

    outcomes = score([spec("forgetful"), spec("forgetful", name="again")], rows, num_processes=num_processes)

    assert rows == before
    assert outcomes[0].parts == {"forgetful": 2.0, "again": 2.0}


@pytest.mark.parametrize("num_processes", [pytest.param(0, id="inline"), pytest.param(1, id="process")])
def test_functions_of_other_trainers(spec, num_processes):
    rows = samples("ab", data_source="d", reward_model={"ground_truth": "b"}, prompt="p", answer="b")

    outcomes = score([spec("verl"), spec("trl")], rows, num_processes=num_processes)

    assert [outcome.parts for outcome in outcomes] == [{"verl": 0.0, "trl": 0.0}, {"verl": 1.0, "trl": 1.0}]
    assert outcomes[0].metrics == {"verl/acc": 1.0}


def test_options_reach_classes_and_functions(spec):
    specs = [spec("WithOptions", options={"suffix": "b"}), spec("scaled", options={"factor": 3})]

    outcomes = score(specs, samples("ab"), num_processes=0)

    assert [outcome.parts for outcome in outcomes] == [
        {"WithOptions": 0.0, "scaled": 3.0},
        {"WithOptions": 1.0, "scaled": 3.0},
    ]


@pytest.mark.parametrize("num_processes", [pytest.param(0, id="inline"), pytest.param(1, id="process")])
@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        pytest.param(
            "WithOptions",
            {"sufix": "b"},
            "reward 'WithOptions' has no option 'sufix'. Did you mean 'suffix'?\nIts options: suffix, weight",
            id="misspelled_option",
        ),
        pytest.param(
            "WithOptions",
            {},
            "reward 'WithOptions' needs the option 'suffix'\nIts options: suffix, weight",
            id="missing_option",
        ),
        pytest.param(
            "Plain", {"x": 1}, "reward 'Plain' has no option 'x'.\nIt takes no options.", id="class_takes_none"
        ),
        pytest.param(
            "scaled",
            {"facto": 1},
            "reward 'scaled' has no option 'facto'. Did you mean 'factor'?",
            id="function_option",
        ),
        pytest.param("lenght", {}, "no 'lenght' in it. Did you mean 'length'?", id="misspelled_function"),
        pytest.param("SOURCE", {}, "no 'SOURCE' in it.", id="no_such_name"),
    ],
)
def test_reward_that_cannot_be_loaded_is_refused_before_any_sample(spec, num_processes, attribute, options, message):
    with pytest.raises(UserError) as caught:
        RewardExecutor([spec(attribute, options=options)], num_processes=num_processes)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param("no_such_module:f", "reward 'no_such_module:f': there is no module 'no_such_module'", id="module"),
        pytest.param("/no/such.py:f", "reward '/no/such.py:f': there is no file /no/such.py", id="file"),
        pytest.param("lenght", "no reward named 'lenght'. Did you mean 'length'?", id="no_colon"),
        pytest.param("math:pi", "reward 'pi' does not meet the Reward protocol: it is a float", id="no_function"),
    ],
)
def test_bad_target_is_refused(target, message):
    with pytest.raises(PluginError) as caught:
        RewardExecutor([RewardSpec("x", target)])

    assert message in str(caught.value)


def test_a_list_of_rewards_must_have_names_that_differ(spec):
    with pytest.raises(ConfigError, match="two rewards have the name 'length'"):
        RewardExecutor([spec("length"), spec("length")])
    with pytest.raises(ConfigError, match="the list of rewards is empty"):
        RewardExecutor([])


def test_module_that_never_loads_meets_a_deadline(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(600)")

    with pytest.raises(DeadlineExceeded, match=r"rewards x: not loaded within 0\.5 s"):
        RewardExecutor([RewardSpec("x", f"{path}:f")], start_timeout_s=0.5)


def test_module_that_kills_its_process_is_named(tmp_path):
    path = tmp_path / "fatal.py"
    path.write_text("import posix; posix._exit(4)")

    with pytest.raises(InfrastructureError, match=r"rewards x: the process died while loading them \(exit code 4\)"):
        RewardExecutor([RewardSpec("x", f"{path}:f")])


def test_child_that_died_between_two_calls_is_replaced_without_blame(spec):
    with RewardExecutor([spec("pid")]) as executor:
        first = int(executor.score(samples("a"))[0].value)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not alive(first))
        again = executor.score(samples("a"))[0]

    assert again.status == "score"
    assert again.value != first


def test_close_leaves_no_process_and_may_be_called_twice(spec):
    executor = RewardExecutor([spec("pid")], num_processes=2)
    pids = {int(outcome.value) for outcome in executor.score(samples("a" * 64))}

    executor.close()
    executor.close()

    assert pids
    assert not [pid for pid in pids if alive(pid)]
    with pytest.raises(InfrastructureError, match="executor is closed"):
        executor.score(samples())


def test_forgotten_executor_ends_its_children(spec):
    executor = RewardExecutor([spec("pid")])
    pid = int(executor.score(samples("a"))[0].value)

    del executor

    assert not alive(pid)


def test_timeout_also_ends_processes_started_by_the_reward(spec, tmp_path):
    note = tmp_path / "pid"

    outcomes = score([spec("spawn_and_hang")], samples("a", path=str(note)), timeout_s=5.0)

    assert outcomes[0].status == "timeout"
    wait_until(lambda: not alive(int(note.read_text())))


def test_ctrl_c_in_the_parent_is_ignored_by_the_child(spec):
    with RewardExecutor([spec("pid")]) as executor:
        pid = int(executor.score(samples("a"))[0].value)
        os.kill(pid, signal.SIGINT)

        assert executor.score(samples("a"))[0].value == pid


PARENT = """
import json, signal, sys
from rlcore.protocols.reward import RewardSpec
from rlcore.rewards.executor import RewardExecutor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
place, attribute, path = sys.argv[1:]
executor = RewardExecutor([RewardSpec(attribute, place + ":" + attribute)])
print(json.dumps([child._process.pid for child in executor._children]), flush=True)
executor.score([{"completion": "b", "sample_id": 0, "path": path}])
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGINT, id="ctrl_c")])
@pytest.mark.parametrize("attribute", ["hang", "hang_holding_the_interpreter", "spawn_and_hang"])
def test_no_child_outlives_its_parent(place, tmp_path, attribute, how):
    note = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, place, attribute, str(note)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["rlcore.rewards"].__path__[0])))
    parent = subprocess.Popen(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = json.loads(parent.stdout.readline())
    if attribute == "spawn_and_hang":
        wait_until(lambda: note.exists() and note.read_text())
        pids.append(int(note.read_text()))
    time.sleep(0.2)
    assert all(alive(pid) for pid in pids)

    os.kill(parent.pid, how)
    _, errors = parent.communicate(timeout=HANG_S)

    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert errors.count("Traceback") == (1 if how == signal.SIGINT else 0), "only the parent speaks"
