"""Runs of a few steps on the quickstart model, for behavior that only a whole run shows."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from rlcore_tests.window import NO_STEPS_AHEAD, without_schedule

from rlcore.cli import main
from rlcore.cli.train import run as train
from rlcore.errors import UserError
from rlcore.models.load import load_model, load_tokenizer
from rlcore.quickstart import locate

SMALL = [
    "preset=quickstart",
    "trainer.prompts_per_step=8",
    "sampling.samples_per_prompt=4",
    "eval.max_prompts=8",
    "runtime=local",
    "trackers=jsonl",
    "run.name=r",
]
TIMES = ("time", "perf/", "time_s/", "controller/", "schedule/engine_idle", "schedule/scored_ahead")


@pytest.fixture(scope="module", autouse=True)
def _quickstart_assets():
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Write 64 quickstart prompts, each with a right and a wrong answer."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [json.loads(line) for line in Path(locate("quickstart:train")).read_text().splitlines()[:64]]
    for row in rows:
        right = "".join(sorted(row["digits"]))
        row |= {"response": right, "chosen": right, "rejected": right[::-1]}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(directory, algorithm, *more, steps=2):
    """Train, and return the metrics of every step without timings."""
    own = {item.partition("=")[0] for item in more}
    base = [*SMALL, f"algorithm={algorithm}", f"trainer.steps={steps}", f"run.directory={directory}"]
    train([*(item for item in base if item.partition("=")[0] not in own), *more], dry_run=False)
    lines = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("rloo", []),
        ("reinforce_plus_plus", ["algorithm.kl.coefficient=0.01", "algorithm.gamma=0.99"]),
        ("remax", ["sampling.samples_per_prompt=1"]),
        ("gspo", ["algorithm.estimator=opo", "algorithm.correction.weight=sequence"]),
        ("clip_cov", ["algorithm.share=0.1", "algorithm.cov_low=0.0"]),
        ("kl_cov", ["algorithm.share=0.1"]),
        ("dual_clip_ppo", ["algorithm.correction.weight=token", "algorithm.correction.beyond=mask"]),
        ("dppo", ["algorithm.divergence=kl", "algorithm.limit=0.05"]),
        ("optimal_token_baseline", []),
        ("gvpo", ["algorithm.minibatches=2"]),
        ("online_dpo", ["algorithm.minibatches=2"]),
        ("best_of_n", ["algorithm.minibatches=2"]),
    ],
)
def test_a_run_trains_the_policy_to_the_last_step(tmp_path, algorithm, more):
    first, *_, last = run(tmp_path, algorithm, *more)

    assert (first["step"], last["step"]) == (0, 2)
    assert last["actor/grad_norm"] > 0
    assert last["actor/skipped"] == 0
    # measured under the weights that sampled, also for best_of_n and online_dpo, which do not compute old log-probs
    assert last["actor/rollout_logprob_gap"] < 1e-5


def test_the_correction_of_an_accurate_engine_has_weights_close_to_1(tmp_path):
    _, _, last = run(
        tmp_path, "rloo", "algorithm.minibatches=2", "algorithm.correction={weight: token, reject: max_k3}"
    )

    assert last["actor/correction/weight"] == pytest.approx(1, abs=1e-4)
    assert last["actor/correction/effective_size"] == pytest.approx(1, abs=1e-4)
    assert last["actor/correction/outside"] == last["actor/correction/rejected"] == 0
    assert last["actor/rollout_logprob_gap"] < 1e-4


def test_without_steps_ahead_the_window_refills_as_sync(tmp_path):
    settings = ("dapo", "algorithm.refill.rounds=8", "sampling.samples_per_prompt=2")
    settings += ("optimizer.schedule=constant", "placement=split")
    sync, window = (
        run(tmp_path / "sync", *settings, steps=3),
        run(tmp_path / "window", *settings, NO_STEPS_AHEAD, steps=3),
    )

    assert without_schedule(window) == sync
    assert window[-1]["schedule/staleness_max"] == 0
    assert sync[-1]["progress/samples"] > 3 * 8 * 2, "no group was refilled"


def test_a_resumed_run_with_refilled_prompts_has_the_metrics_of_an_uninterrupted_one(tmp_path):
    settings = ["dapo", "algorithm.minibatches=2", "algorithm.refill.rounds=60", "sampling.samples_per_prompt=2"]
    settings += ["optimizer.schedule=constant"]
    run(tmp_path / "cut", *settings, steps=2)
    state = json.loads(next((tmp_path / "cut" / "r" / "checkpoints").glob("*/trainer.json")).read_text())

    whole = run(tmp_path / "whole", *settings, steps=4)
    resumed = run(tmp_path / "cut", *settings, steps=4)

    assert state["loader"]["outstanding"] == []
    assert state["loader"]["next_position"] > 2 * 8
    assert [line["experience/groups"] for line in whole[1:]] == [8, 8, 8, 8]
    assert resumed[-2:] == whole[-2:]


@pytest.mark.parametrize(
    ("settings", "refills"),
    [
        (["dapo", "algorithm.minibatches=2", "algorithm.refill.rounds=8", "sampling.samples_per_prompt=2"], True),
        (["remax"], False),
    ],
    ids=["dapo", "remax"],
)
def test_samples_generated_ahead_survive_an_error(tmp_path, settings, refills):
    """The error is raised by the second round of the third step, so that those before it have taken samples.

    Of eight groups of two samples, some have equal rewards and are refilled, in every step.
    """
    pipelined = [*settings, "schedule=pipelined", "placement=split"]
    (tmp_path / "fails.py").write_text("""
from rlcore import hookimpl

class Fails:
    def __init__(self):
        self.rounds = 0

    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        self.rounds += step == 3
        if self.rounds == 2 or (self.rounds and "remax" in run.config.algorithm.name):
            raise RuntimeError("the third step has no rewards")
""")
    whole = run(tmp_path / "whole", *pipelined, steps=4)
    with pytest.raises(RuntimeError, match="the third step has no rewards"):
        run(tmp_path / "cut", *pipelined, f"plugins.hooks=['{tmp_path}/fails.py:Fails']", steps=4)

    assert run(tmp_path / "cut", *pipelined, steps=4) == whole
    assert whole[3]["schedule/staleness_max"] == 1
    assert (whole[3]["schedule/staleness_mean"] < 1) == refills, "prompts of a refill are from the next request"


def test_sft_learns_demonstrations_without_rollout_or_reward(tmp_path, pairs):
    more = [f"data.train={pairs}", "data.eval=", "reward.items=[]", "trainer.prompts_per_step=64"]
    _, first, *_, last = run(tmp_path, "sft", *more, steps=8)

    assert last["actor/loss"] < 0.8 * first["actor/loss"]
    assert last["actor/log_prob"] == pytest.approx(-last["actor/loss"], rel=1e-4)
    assert "reward/mean" not in last
    summary = json.loads(next((tmp_path / "r" / "checkpoints").glob("*/trainer.json")).read_text())
    assert summary["counters"]["samples"] == 8 * 64


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Copy the quickstart model, and add a chat template that ends the assistant's messages."""
    directory = shutil.copytree(locate("quickstart:model"), tmp_path_factory.mktemp("model") / "chat")
    end = "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def chats(pairs):
    """Write the same pairs as conversations."""
    file = pairs.with_name("chats.jsonl")
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for row in rows:
        question = {"role": "user", "content": row.pop("prompt")}
        for name in ("messages", "chosen", "rejected"):
            text = row.pop("response") if name == "messages" else row[name]
            row[name] = [question, {"role": "assistant", "content": text}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("algorithm", "unused"), [("sft", ["chosen", "rejected"]), ("dpo", ["messages"]), ("reward_model", ["messages"])]
)
def test_conversations_train_like_their_rendered_texts(tmp_path, pairs, chats, chat_model, algorithm, unused):
    rename = f"data.rename={{{', '.join(f'{name}: unused_{name}' for name in unused)}}}"
    base = ["data.eval=", "reward.items=[]", "data.template="]
    texts = run(tmp_path / "texts", algorithm, f"data.train={pairs}", *base)

    conversations = run(tmp_path / "chats", algorithm, f"data.train={chats}", f"model.path={chat_model}", rename, *base)

    assert conversations == texts


def test_dpo_shows_its_rows_loss_and_truncated_responses(tmp_path, pairs, capsys, caplog):
    more = [f"data.train={pairs}", "data.eval=", "reward.items=[]", "trackers=[console,jsonl]"]
    lines = run(tmp_path, "dpo", *more, "sampling.max_response_tokens=2")

    out = capsys.readouterr().out
    assert "step       8 prompts × 2 responses (chosen, rejected) = 16 rows" in out
    assert "\nrollout " not in out
    loss, accuracy = lines[-1]["actor/loss"], lines[-1]["actor/accuracy"]
    assert f"  loss {loss:.4g}  accuracy {accuracy:.4g}  " in out
    cut = [record.getMessage() for record in caplog.records if "are truncated" in record.getMessage()]
    assert len(cut) == 1
    assert cut[0].startswith("16 of the 16 responses of this step have more than 2 tokens and are truncated")
    assert "type  sampling.max_response_tokens=4" in cut[0]


def test_rlcore_eval_scores_a_model_that_was_trained_without_rewards(tmp_path, pairs, capsys):
    run(tmp_path, "sft", f"data.train={pairs}", "data.eval=", "reward.items=[]")
    capsys.readouterr()

    more = ["data.eval=quickstart:eval", "reward=sorted_digits", "eval.max_prompts=8"]
    code = main(["eval", str(tmp_path / "r"), "--json", *more])

    assert code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval/samples"] == 8


def test_sft_with_held_out_prompts_is_evaluated_with_the_reward(tmp_path, pairs):
    first, *_ = run(tmp_path, "sft", f"data.train={pairs}")

    assert first["eval/samples"] == 8


def test_offline_dpo_prefers_right_answers_after_a_few_steps(tmp_path, pairs):
    lines = run(tmp_path, "dpo", f"data.train={pairs}", "data.eval=", "algorithm.beta=0.5", steps=6)

    assert lines[1]["actor/loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are equal
    assert lines[-1]["actor/loss"] < 0.6
    assert lines[-1]["actor/accuracy"] > 0.9


def test_orpo_prefers_right_answers_without_a_reference(tmp_path, pairs):
    all_pairs = "trainer.prompts_per_step=64"
    lines = run(tmp_path, "orpo", f"data.train={pairs}", "data.eval=", all_pairs, steps=6)

    assert lines[-1]["actor/loss"] < lines[1]["actor/loss"]
    assert lines[-1]["actor/accuracy"] > 0.9


@pytest.fixture(scope="module")
def labeled(pairs):
    """Write the same prompts, the first of each four with a wrong answer."""
    file = pairs.with_name("labeled.jsonl")
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"label": number % 4 > 0, "response": row["chosen"] if number % 4 else row["rejected"]}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_kto_learns_from_labels_without_pairs(tmp_path, labeled):
    more = ["data.eval=", "trainer.prompts_per_step=64", "algorithm.beta=0.5", "algorithm.undesirable_weight=3"]
    lines = run(tmp_path, "kto", f"data.train={labeled}", *more, steps=8)

    # policy and reference are equal: the weights times sigmoid(0)
    assert lines[1]["actor/loss"] == pytest.approx((0.75 + 0.25 * 3) / 2, abs=1e-4)
    assert lines[1]["kto/reference_point"] == 0
    assert lines[1]["kto/desirable"] == 0.75
    assert lines[-1]["actor/loss"] < 0.9 * lines[1]["actor/loss"]
    assert lines[-1]["actor/accuracy"] > 0.9
    state = json.loads(next((tmp_path / "r" / "checkpoints").glob("*/trainer.json")).read_text())
    assert state["counters"]["samples"] == 8 * 64, "mismatched pairs are not samples"


def test_a_step_of_kto_has_the_reference_point_and_the_loss_of_plain_pytorch(tmp_path, labeled):
    rows = [json.loads(line) for line in labeled.read_text().splitlines()[:16]]
    for number, row in enumerate(rows):  # learned whatever the prompt is, so that the reference point is more than 0
        row["response"] = "12345"[: 2 + number % 3] if row["label"] else "98"
    labeled = tmp_path / "same.jsonl"
    labeled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["data.eval=", "data.shuffle=false", "data.template=", "trainer.prompts_per_step=16"]
    more += ["checkpoint.every_steps=1", "checkpoint.keep_last=2", "optimizer.schedule=constant"]
    lines = run(tmp_path, "kto", f"data.train={labeled}", *more, steps=2)
    trained = str(tmp_path / "r" / "checkpoints" / "step_000001" / "actor")
    policy, reference = load_model(trained), load_model(locate("quickstart:model"))
    tokenizer = load_tokenizer(locate("quickstart:model"))

    def log_ratio(prompt, response):
        asked = tokenizer(prompt)["input_ids"]
        answer = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([*asked, *answer])
        with torch.no_grad():
            both = [model(ids[None]).logits[0].log_softmax(-1) for model in (policy, reference)]
        start = len(asked) - 1
        found = [table[start:-1].gather(1, torch.tensor(answer)[:, None]).sum() for table in both]
        return float(found[0] - found[1])

    others = [*rows[1:], rows[0]]
    mismatched = [log_ratio(row["prompt"], other["response"]) for row, other in zip(rows, others, strict=True)]
    point = max(0.0, sum(mismatched) / len(mismatched))
    signed = [(1 if row["label"] else -1) * (log_ratio(row["prompt"], row["response"]) - point) for row in rows]
    loss = sum(1 / (1 + math.exp(0.1 * it)) for it in signed) / len(signed)

    assert point > 0
    assert lines[-1]["kto/reference_point"] == pytest.approx(point, rel=1e-5)
    assert lines[-1]["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert lines[-1]["actor/margin"] == pytest.approx(0.1 * sum(signed) / len(signed), rel=1e-4)


def test_a_reward_model_is_trained_and_evaluated_on_held_out_pairs(tmp_path, pairs):
    more = [f"data.train={pairs}", f"data.eval={pairs}", "eval.max_prompts=64", "trainer.prompts_per_step=32"]
    first, *_, last = run(tmp_path, "reward_model", *more, steps=8)

    assert first["eval/samples"] == 128
    assert last["eval/loss"] < first["eval/loss"]
    assert last["eval/pass_rate"] > 0.9


def test_distillation_moves_the_student_toward_the_teacher(tmp_path, pairs):
    run(tmp_path / "teacher", "sft", f"data.train={pairs}", "data.eval=", "trainer.prompts_per_step=64", steps=8)
    teacher = next((tmp_path / "teacher" / "r" / "checkpoints").glob("*/actor"))
    more = [f"algorithm.teacher={teacher}", "trainer.prompts_per_step=32", "data.eval="]

    lines = run(tmp_path / "student", "distillation", *more, "reward.items=[]", steps=10)

    assert lines[-1]["distillation/kl"] < 0.7 * lines[1]["distillation/kl"]
    assert "reward/mean" not in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["kl_cov", "algorithm.share=0.1", "algorithm.estimator=reinforce_plus_plus"], id="tokens"),
        pytest.param(["online_dpo", "algorithm.minibatches=2", "algorithm.beta=0.5"], id="pairs"),
        pytest.param(["optimal_token_baseline", "algorithm.minibatches=2"], id="groups"),
    ],
)
def test_two_ranks_choose_the_same_tokens_and_take_the_same_steps_as_one_rank(tmp_path, settings):
    one = run(tmp_path / "one", *settings)
    two = run(tmp_path / "two", *settings, "runtime=ray", "pools.main.devices_per_node=2")

    for line, other in zip(one, two, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_kto_on_two_ranks_has_the_reference_point_and_the_steps_of_one_rank(tmp_path, labeled):
    settings = ["kto", f"data.train={labeled}", "data.eval=", "trainer.prompts_per_step=15", "algorithm.minibatches=2"]
    one = run(tmp_path / "one", *settings, steps=3)
    two = run(tmp_path / "two", *settings, "runtime=ray", "pools.main.devices_per_node=2", steps=3)

    for line, other in zip(one, two, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(["sft"], ["column 'response'", "does not have", "data.rename"], id="no-demonstrations"),
        pytest.param(["sft", "algorithm.response=digts"], ["column 'digts'", "'digits'"], id="misspelled"),
        pytest.param(["dpo"], ["column 'chosen'"], id="no-pairs"),
        pytest.param(["kto", "algorithm.response=digits"], ["column 'label'", "data.rename"], id="no-labels"),
        pytest.param(
            ["kto", "algorithm.response=digits", "algorithm.label=prompt"],
            ["'prompt'", "needs true or false"],
            id="texts",
        ),
        pytest.param(["distillation"], ["algorithm.teacher", "DIR"], id="no-teacher"),
        pytest.param(["distillation", "algorithm.teacher=/nowhere"], ["algorithm.teacher=/nowhere"], id="lost-teacher"),
        pytest.param(["gspo", "algorithm.estimator=reinforce_plus_plus"], ["algorithm.estimator"], id="pair"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path, settings, words):
    with pytest.raises(UserError) as raised:
        run(tmp_path, *settings)

    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
