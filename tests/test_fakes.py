"""The fakes follow their configuration, and the suites need only pytest and rlcore."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
import torch

import rlcore.testing
from rlcore.config.build import build
from rlcore.data.batch import Batch
from rlcore.errors import InfrastructureError, ModelError, SampleError
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.registry import resolve
from rlcore.testing import FakeConfig, FakeRoles, FakeRollout
from rlcore.testing.model import small_model
from rlcore.testing.waiting import HANG_S
from rlcore.types import Counts, Request, Sampling
from tests.workers import Echo

END = 1  # the end token of the small model


@pytest.fixture
def model_path(tmp_path_factory):
    return small_model(tmp_path_factory.getbasetemp())


def engine(model_path, **config):
    return FakeRollout(FakeConfig(**config), model=ModelConfig(path=model_path), context=RolloutContext())


def ask(*prompts, limit=8, seed=0):
    sampling = Sampling(max_response_tokens=limit)
    return [
        Request(request_id=i, prompt_ids=list(prompt), sampling=sampling, seed=seed) for i, prompt in enumerate(prompts)
    ]


def run(engine, requests, timeout_s=HANG_S):
    async def drain():
        return [sample async for sample in engine.generate(requests)]

    return asyncio.run(asyncio.wait_for(drain(), timeout_s))


@pytest.mark.parametrize(
    ("seed", "limit", "tokens", "reason"),
    [(0, 8, [7, 8, 9, END], "stop"), (1, 8, [4, END], "stop"), (2, 2, [7, 8], "length"), (3, 8, [4, END], "stop")],
    ids=["first answer", "second answer", "cut off", "answers come round"],
)
def test_a_scripted_prompt_gets_its_answer_and_an_end_token(model_path, seed, limit, tokens, reason):
    fake = engine(model_path, answers={"5 6": [[7, 8, 9], [4]]})

    (sample,) = run(fake, ask((5, 6), limit=limit, seed=seed))

    assert (sample.token_ids, sample.finish_reason, sample.policy_version) == (tokens, reason, 0)
    assert len(sample.log_probs) == len(tokens)


@pytest.mark.parametrize(
    ("order", "ids"), [("asked", [0, 1, 2]), ("reversed", [2, 1, 0]), ("shortest", [2, 0, 1])], ids=lambda value: str(value)
)  # fmt: skip
def test_samples_finish_in_the_order_that_was_asked_for(model_path, order, ids):
    fake = engine(model_path, order=order, answers={"5": [[7, 8]], "6": [[7, 8, 9]], "7": [[]]})

    assert [sample.request_id for sample in run(fake, ask((5,), (6,), (7,)))] == ids


def test_everything_that_was_asked_is_kept(model_path):
    fake = engine(model_path)
    first, second = ask((5,)), ask((6,), (7,))

    run(fake, first)
    run(fake, second)

    assert fake.requests == first + second


def test_a_fault_comes_after_so_many_samples_over_all_calls(model_path):
    fake = engine(model_path, fault="raise", fault_after=3)
    assert len(run(fake, ask((5,), (6,)))) == 2
    seen = []

    async def drain():
        async for sample in fake.generate(ask((5,), (6,))):
            seen.append(sample.request_id)

    with pytest.raises(InfrastructureError, match="fails because fault=raise"):
        asyncio.run(drain())
    assert seen == [0]


def test_a_hanging_engine_can_be_given_up(model_path):
    with pytest.raises(TimeoutError):
        run(engine(model_path, fault="hang"), ask((5,)), timeout_s=0.1)


def test_a_late_engine_still_answers(model_path):
    start = time.monotonic()

    samples = run(engine(model_path, fault="late", late_s=0.2), ask((5,), (6,)))

    assert len(samples) == 2
    assert time.monotonic() - start >= 0.2


def test_a_dying_engine_ends_its_process_and_needs_no_pytest(model_path):
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import rlcore.testing; assert 'torch' not in sys.modules\n"
        "import asyncio; from rlcore.testing import FakeConfig, FakeRollout; from rlcore.types import *\n"
        "from rlcore.protocols import ModelConfig, RolloutContext\n"
        f"fake = FakeRollout(FakeConfig(fault='die'), model=ModelConfig(path={model_path!r}), context=RolloutContext())\n"
        "asyncio.run(anext(fake.generate([Request(request_id=0, prompt_ids=[5], sampling=Sampling(), seed=0)])))\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)

    assert (done.returncode, done.stderr) == (1, "")


def test_weights_that_are_not_the_models_are_refused(model_path):
    fake = engine(model_path)

    with pytest.raises(ModelError, match="weights are missing"):
        fake.load_weights(iter([]), 1)
    with pytest.raises(ModelError, match=r"'no\.such' \(2,\) is unknown"):
        fake.load_weights(iter([("no.such", torch.ones(2))]), 1)
    with pytest.raises(InfrastructureError, match="incomplete weights"):
        run(fake, ask((5,)))


def test_an_empty_prompt_is_refused(model_path):
    with pytest.raises(SampleError, match="request 0 has an empty prompt"):
        run(engine(model_path), ask(()))


def test_rollout_fake_is_found_by_its_name_and_configured_as_any_other():
    resolved = resolve("rollout", "fake")

    config = build(resolved.object.Config, {"answers": {"5 9": [[7, 2]]}, "fault": "late", "late_s": 1}, "rollout")

    assert resolved.object is FakeRollout
    assert config == FakeConfig(answers={"5 9": [[7, 2]]}, fault="late", late_s=1.0)


ROWS = {"prompt_id": [8, 5, 2], "group_id": [3, 4, 5], "seed": [1, 2, 3]}


def test_fake_roles_give_rows_with_the_columns_of_the_real_ones():
    rows = {name: numbers[:2] for name, numbers in ROWS.items()}
    prompts = Batch.of(lengths=[2, 1], tokens={"input_ids": [5, 6, 7]}, rows=rows)
    roles = FakeRoles(["actor", "critic", "reference"])

    samples = roles.score(roles.generate(prompts))
    samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs")
    samples |= roles.reference.log_probs(samples)
    samples |= roles.critic.values(samples)

    # sample_id is group_id * 4 + number; the first of each four scores 1
    assert samples.fetch("sample_id").tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    assert samples.fetch("reward").tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert roles.store.num_far_reads == 0
    local = samples.local()
    outside = ~local["loss_mask"]
    assert local.per_row(local["loss_mask"].long()).tolist() == local["num_loss_tokens"].tolist()
    for name in ("old_log_probs", "ref_log_probs", "values", "entropy", "rollout_log_probs"):
        assert not local[name][outside].any()
        assert local[name][~outside].any()


def test_fake_roles_offer_only_requested_roles_and_record_training_calls():
    roles = FakeRoles(["actor"])
    batch = Batch.of(lengths=[1], tokens={"input_ids": [3]})

    metrics = roles.actor.update.submit(batch, Counts(rows=1, tokens=1)).result()

    assert roles.actor.updates == [(batch, Counts(rows=1, tokens=1))]
    assert metrics["skipped"].value == 0.0
    assert (roles.has("actor"), roles.has("critic")) == (True, False)
    with pytest.raises(AttributeError, match="no role 'critic'"):
        _ = roles.critic


def test_fake_roles_run_real_workers_that_need_no_model():
    own = RoleSpec(name="echo", worker="tests.workers:Echo")
    roles = FakeRoles([RoleSpec(name="actor", worker="policy"), own])
    samples = roles.score(roles.generate(Batch.of(lengths=[1] * 3, tokens={"input_ids": [5, 6, 7]}, rows=ROWS)))

    seen_by = roles.group("echo", Echo).seen(samples).fetch("seen_by")

    assert seen_by.tolist() == [0] * 6 + [1] * 6  # two workers, each with half of the rows
    assert roles.actor.log_probs(samples).fetch("log_probs").sum() < 0  # a fake: a policy needs a model


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(rlcore.testing, name).__name__ == name for name in rlcore.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rlcore.testing.Nothing


def test_a_plugin_test_of_a_few_lines_reports_the_broken_rule(tmp_path, capsys):
    (tmp_path / "test_mine.py").write_text(
        "from rlcore.protocols.dispatch import Call\n"
        "from rlcore.testing import RowDispatchContract\n"
        "class Everyone:\n"
        "    def split(self, call, meshes): return [call] * len(meshes)\n"
        "    def collect(self, outputs, meshes): return outputs[0]\n"
        "class TestEveryone(RowDispatchContract):\n"
        "    def make(self): return Everyone()\n"
    )

    code = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=line", "--rootdir", str(tmp_path), str(tmp_path)])

    output = capsys.readouterr().out
    assert code == 1, output
    assert "the shares in order of dp_rank must be the rows in order" in output
    assert "3 failed, 4 passed" in output
