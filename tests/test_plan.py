"""Plans, made before any process starts: plugins, roles, pools, columns, memory, resume, and no unused setting."""

import ast
import json
import math
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import rlcore
from rlcore.algorithms.base import Epochs
from rlcore.algorithms.grpo import GRPO
from rlcore.algorithms.ppo import PPO
from rlcore.backends.local import LocalBackend
from rlcore.config.build import build
from rlcore.config.compose import compose
from rlcore.config.schema import Choice, Config, RewardItem
from rlcore.controller.pool import PoolConfig, check_capacity
from rlcore.errors import CapacityError, ConfigError, DataError, HostDied, ModelError, RunError, UserError
from rlcore.models.size import ModelSize, activation_bytes, frozen_bytes, human, rollout_bytes, trained_bytes
from rlcore.protocols.algorithm import RoleSpec, Unit
from rlcore.testing import FakeRollout
from rlcore.trainer.checkpoint import Checkpoints, newest, read_checkpoint
from rlcore.trainer.describe import describe
from rlcore.trainer.evaluate import held_out
from rlcore.trainer.export import find_checkpoint
from rlcore.trainer.launch import sampling
from rlcore.trainer.plan import make_loader, make_plan, place
from rlcore.types import LossTerms


@pytest.fixture
def make(assets, tmp_path):
    """Return a function that builds a config of eight short prompts and a real model, with more settings by name."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Count to {n}.", "answer": str(n)}) + "\n" for n in range(8)))

    def make(**settings):
        plain = {
            "model": {"path": str(assets / "models" / "stories260k")},
            "data": {"train": str(data), "max_prompt_tokens": 32},
            "reward": {"items": ["exact_match"]},
            "sampling": {"samples_per_prompt": 4, "max_response_tokens": 16},
            "trainer": {"prompts_per_step": 3},
            "runtime": {"name": "local"},
            "pools": {"main": {"device": "cpu"}},
        }
        for name, value in settings.items():
            section, _, key = name.partition("__")
            plain[section] = {**plain.get(section, {}), key: value} if key else value
        return build(Config, plain)

    return make


@pytest.fixture
def plan_of(make, tmp_path):
    return lambda **settings: make_plan(make(**settings), tmp_path / "run")


def pools(**sizes):
    return {name: {"devices_per_node": size, "device": "cpu"} for name, size in sizes.items()}


AHEAD = {"steps_ahead": 1, "max_staleness": 1}
SPLIT = {"pools": pools(actor=1, rollout=1), "placement": {"default": "actor", "rollout": "rollout"}}


def specs(*names):
    """Return role -> specification; the actor is trained."""
    return {name: RoleSpec(name=name, worker=name, loss="loss" if name == "actor" else "") for name in names}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param({}, ["a", "a", "a"], id="first-pool-for-all"),
        pytest.param({"default": "b"}, ["b", "b", "b"], id="default"),
        pytest.param({"default": "a", "rollout": "b"}, ["a", "b", "a"], id="split"),
        pytest.param({"actor": "b", "reference": "b"}, ["b", "a", "a"], id="a-role-that-is-not-in-this-run"),
    ],
)
def test_roles_get_their_pools(make, placement, expected):
    config = make(pools=pools(a=1, b=1), placement=placement)

    assert list(place(config, specs("actor", "rollout", "reward")).values()) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"placement": {"rolout": "main"}},
            "placement.rolout: no role 'rolout' in this run. Did you mean 'rollout'?\n"
            "Roles: actor, rollout; 'default' stands for all others.",
            id="no-such-role",
        ),
        pytest.param(
            {"placement": {"rollout": "mian"}},
            "placement.rollout=mian: no pool 'mian'. Did you mean 'main'?\n"
            "Pools: main; define it with pools.mian.devices_per_node=1",
            id="no-such-pool",
        ),
        pytest.param(
            {"pools": {"main": {"nodes": 2, "devices_per_node": 3}}},
            "runtime=local trains in one process, but pool 'main' of role 'actor' has 6 devices\n"
            "Type  runtime=ray  or  pools.main.devices_per_node=1",
            id="local-with-two-ranks",
        ),
    ],
)
def test_an_impossible_placement_is_refused(make, settings, message):
    with pytest.raises(ConfigError) as raised:
        place(make(**settings), specs("actor", "rollout"))

    assert str(raised.value) == message


def test_the_local_runtime_may_have_many_rollout_devices(make):
    config = make(pools=pools(a=1, b=4), placement={"rollout": "b"})

    assert place(config, specs("actor", "rollout")) == {"actor": "a", "rollout": "b"}


NODE = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        ({"a": PoolConfig(devices_per_node=8, device="cpu")}, [NODE]),
        ({"a": PoolConfig(devices_per_node=2, device="cuda", cpus_per_device=4)}, [NODE]),
        ({"a": PoolConfig(nodes=2, devices_per_node=2, device="cuda")}, [NODE, {"CPU": 1.0}, NODE]),
        ({"a": PoolConfig(device="cuda"), "b": PoolConfig(device="cuda")}, [NODE]),
        ({}, [NODE]),
    ],
)
def test_pools_that_fit_are_accepted(asked, nodes):
    check_capacity(asked, nodes)


@pytest.mark.parametrize(
    ("asked", "nodes", "arithmetic"),
    [
        pytest.param(
            {"a": PoolConfig(devices_per_node=3, cpus_per_device=3, device="cpu")}, [NODE],
            "pool 'a' does not fit: 3 devices × 3 cores = 9 CPU on each of 1 nodes; the cluster has 8 CPU.", id="cores",
        ),
        pytest.param(
            {"a": PoolConfig(devices_per_node=3, device="cuda")}, [NODE],
            "pool 'a' does not fit: 3 devices × 1 cores = 3 CPU and 3 GPU on each of 1 nodes; the cluster has 8 CPU and 2 GPU.",
            id="gpus",
        ),
        pytest.param(
            {"a": PoolConfig(nodes=2, device="cuda")}, [NODE, {"CPU": 4.0}],
            "the cluster has 8 CPU and 2 GPU on node 0; 4 CPU and 0 GPU on node 1.", id="nodes",
        ),
        pytest.param(
            {"a": PoolConfig(devices_per_node=2, device="cuda"), "b": PoolConfig(device="cuda")}, [NODE],
            "pool 'b' does not fit: 1 devices × 1 cores = 1 CPU and 1 GPU on each of 1 nodes; the cluster has 8 CPU and 2 GPU"
            " (other pools also need some: a).",
            id="what-another-pool-took",
        ),
    ],
)  # fmt: skip
def test_pools_that_do_not_fit_are_refused_with_the_arithmetic(asked, nodes, arithmetic):
    with pytest.raises(CapacityError) as raised:
        check_capacity(asked, nodes)

    assert arithmetic in str(raised.value)
    assert f"pools.{list(asked)[-1]}.devices_per_node=1" in str(raised.value).splitlines()[1]


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ({"name": "grpo"}, ["actor", "rollout", "reward"]),
        ({"name": "grpo", "kl": {"coefficient": 0.1}}, ["actor", "reference", "rollout", "reward"]),
        ({"name": "ppo"}, ["actor", "critic", "rollout", "reward"]),
        ({"name": "ppo", "kl": {"monitor": True}}, ["actor", "critic", "reference", "rollout", "reward"]),
    ],
)
def test_only_required_roles_are_planned(plan_of, algorithm, roles):
    plan = plan_of(algorithm=algorithm)

    assert list(plan.workers) == list(plan.placement) == roles


def test_a_plan_writes_nothing(plan_of, tmp_path):
    before = sorted(tmp_path.rglob("*"))

    plan = plan_of()

    assert sorted(tmp_path.rglob("*")) == before
    assert len(plan.prompts.batch) == 8
    assert plan.resume is None
    assert plan.versions == {"rlcore": rlcore.__version__}


def test_only_columns_that_a_loss_reads_are_sent_to_its_update(plan_of):
    always = ("input_ids", "loss_mask", "rollout_log_probs", "first_version")

    assert plan_of().reads == {"actor": (*always, "advantage")}
    assert plan_of(algorithm={"name": "ppo"}).reads["critic"] == (*always, "values", "returns")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"reward": {}}, ["no reward is chosen", "reward=exact_match"], id="no-reward"),
        pytest.param(
            {"reward": {"items": [{"name": "exact_match", "column": "anser"}]}},
            ["anser", "'answer'"],
            id="reward-column",
        ),
        pytest.param({"algorithm": {"name": "grppo"}}, ["grppo", "grpo"], id="algorithm"),
        pytest.param({"backend": {"name": "locl"}}, ["locl", "local"], id="backend"),
        pytest.param({"rollout": {"name": "fh"}}, ["fh", "hf"], id="rollout"),
        pytest.param({"transfer": "inproces"}, ["inproces", "inprocess"], id="transfer"),
        pytest.param({"trackers": [{"name": "jsnl"}]}, ["jsnl", "jsonl"], id="tracker"),
        pytest.param({"algorithm": {"name": "grpo", "epoch": 2}}, ["algorithm.epoch", "epochs"], id="plugin-setting"),
        pytest.param({"algorithm": {"name": "grpo", "epochs": 0}}, ["algorithm.epochs: expected 1"], id="plugin-value"),
        pytest.param({"data__train": "/nowhere.jsonl"}, ["/nowhere.jsonl"], id="data"),
        pytest.param({"model__path": "/nowhere"}, ["model.path=/nowhere"], id="model"),
        pytest.param({"algorithm": {"name": "ppo"}, "critic__path": "/nowhere"}, ["critic.path=/nowhere"], id="critic"),
        pytest.param(
            {"schedule": AHEAD},
            ["steps_ahead=1: role 'actor'", "placement=split   or  schedule=sync"],
            id="schedule-pool",
        ),
        pytest.param({"run__resume": "must"}, ["run.resume=must", "run.resume=auto"], id="resume"),
    ],
)
def test_invalid_settings_are_refused_before_the_start(plan_of, settings, words):
    with pytest.raises(UserError) as raised:
        plan_of(**settings)

    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"trainer__prompts_per_step": 0}, "trainer.prompts_per_step"),
        ({"trainer__steps": -1}, "trainer.steps"),
        ({"trainer__epochs": -1}, "trainer.epochs"),
        ({"trainer__max_skipped_steps": 0}, "trainer.max_skipped_steps"),
        ({"trainer__log_samples": -1}, "trainer.log_samples"),
        ({"sampling__samples_per_prompt": 0}, "sampling.samples_per_prompt"),
        ({"sampling__temperature": -1.0}, "sampling.temperature"),
        ({"sampling__top_k": -1}, "sampling.top_k"),
        ({"sampling__top_p": 0.0}, "sampling.top_p"),
        ({"sampling__min_p": 1.5}, "sampling.min_p"),
        ({"sampling__max_response_tokens": 0}, "sampling.max_response_tokens"),
        ({"eval__every_steps": -1}, "eval.every_steps"),
        ({"eval__max_prompts": 0}, "eval.max_prompts"),
        ({"eval__samples_per_prompt": 0}, "eval.samples_per_prompt"),
        ({"eval__temperature": -0.5}, "eval.temperature"),
        ({"eval__top_k": -1}, "eval.top_k"),
        ({"eval__top_p": 0.0}, "eval.top_p"),
        ({"eval__pass_threshold": math.nan}, "eval.pass_threshold"),
        ({"optimizer": {"warmup_ratio": 0.1, "warmup_steps": 5}}, "optimizer.warmup_ratio"),
        ({"sampling__stop": [""]}, "sampling.stop"),
        ({"sampling__repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"sampling__presence_penalty": 3.0}, "sampling.presence_penalty"),
        ({"sampling__frequency_penalty": -3.0}, "sampling.frequency_penalty"),
        ({"sampling__json_schema": "[1"}, "sampling.json_schema"),
        ({"sampling": {"regex": "a", "json_schema": "{}"}}, "sampling.regex"),
        ({"sampling__stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"runtime__call_timeout_s": 0.0}, "runtime.call_timeout_s"),
        ({"run": {"name": "../elsewhere"}}, "run.name"),
        ({"checkpoint__every_steps": -1}, "checkpoint.every_steps"),
        ({"checkpoint__keep_last": 0}, "checkpoint.keep_last"),
        ({"schedule": {"steps_ahead": -1}}, "schedule.steps_ahead"),
        ({"schedule": {"max_staleness": 1}}, "schedule.steps_ahead"),
        ({"schedule": {"steps_ahead": 1}}, "schedule.max_staleness"),
        ({"schedule": {"steps_ahead": 2, "max_staleness": 2}}, "schedule.steps_ahead"),
        ({"schedule": {"max_engine_failures": -1}}, "schedule.max_engine_failures"),
        ({"schedule": {**AHEAD, "max_engine_failures": 1}}, "schedule.max_engine_failures"),
        ({"reward__num_processes": -1}, "reward.num_processes"),
        ({"reward__timeout_s": 0.0}, "reward.timeout_s"),
        ({"pools": {"main": {"nodes": 0}}}, "pools.main.nodes"),
        ({"pools": {"main": {"devices_per_node": 0}}}, "pools.main.devices_per_node"),
        ({"pools": {"main": {"cpus_per_device": 0}}}, "pools.main.cpus_per_device"),
        ({"pools": {"main": {"device": "gpu"}}}, "pools.main.device"),
        ({"runtime": {"name": "lcoal"}}, "runtime.name"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(make, settings, key):
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: expected .*\nType  {re.escape(key)}=\S+$"):
        make(**settings)


@pytest.mark.parametrize(("epochs", "steps"), [(0, 100), (1, 3), (2, 6), (3, 8)])
def test_epochs_are_passes_over_the_prompts_rounded_up_to_whole_steps(plan_of, epochs, steps):
    plan = plan_of(trainer={"prompts_per_step": 3, "epochs": epochs})  # of 8 prompts

    assert plan.config.trainer.steps == steps
    assert plan.workers["actor"].object.options_of(plan, "actor")["options"].total_steps == steps
    assert line(plan, "step").endswith(f"{steps} steps" + (f" ({epochs} epochs)" if epochs else ""))


def test_a_plan_with_steps_ahead_counts_what_waits(plan_of):
    plan = plan_of(**SPLIT, schedule=AHEAD, algorithm={"name": "grpo", "minibatches": 3})

    assert line(plan, "schedule") == (
        "schedule 1 step ahead, staleness at most 1 step of 3 updates; new weights wait for the responses in flight"
    )
    # (1 + 1) steps × 3 prompts × 4 samples × (32 + 16) tokens × 21 bytes
    assert "           at most 6 groups, 24 responses, 23.6 KB, in flight or waiting" in describe(plan)
    assert not [text for text in describe(plan_of(**SPLIT)) if text.startswith("schedule")]


def test_generation_ahead_of_an_algorithm_that_generates_nothing_is_refused(plan_of):
    with pytest.raises(
        ConfigError, match=r"steps_ahead=1: algorithm '.*Silent' generates nothing\nType  schedule=sync"
    ):
        plan_of(schedule=AHEAD, algorithm={"name": "tests.test_plan:Silent"})


def test_device_sharing_with_steps_ahead_is_refused(plan_of):
    sharing = {"device_sharing": "always", "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1}}}
    placement = {**SPLIT["placement"], "reference": "rollout"}

    with pytest.raises(ConfigError, match=r"role 'reference' needs the devices of pool 'rollout'"):
        plan_of(**SPLIT | {"placement": placement}, schedule=AHEAD, **sharing)


def test_other_calls_in_the_pool_of_the_rollout_are_reported(plan_of, caplog):
    plan_of(**SPLIT | {"placement": {**SPLIT["placement"], "reward": "rollout"}}, schedule=AHEAD)

    assert "role 'reward' is in the rollout's pool 'rollout'" in caplog.text
    assert "placement.reward=actor" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "advice"),
    [
        ({"name": "grpo"}, "algorithm.correction.weight=token"),
        ({"name": "grpo", "correction": {"reject": "mean_k3"}}, "algorithm.correction.weight=token"),
        ({"name": "grpo", "correction": {"weight": "token"}}, None),
        ({"name": "tests.test_plan:Likelihood"}, "schedule=sync"),
    ],
)
def test_an_algorithm_that_does_not_correct_for_staleness_is_reported(plan_of, caplog, algorithm, advice):
    plan_of(**SPLIT, schedule=AHEAD, algorithm=algorithm)

    found = [it.getMessage() for it in caplog.records if "older weights" in it.getMessage()]
    text = "schedule.max_staleness=1: algorithm '{}' does not correct for samples of older weights; type  {}"
    assert found == ([text.format(algorithm["name"], advice)] if advice else [])


def test_without_steps_ahead_nothing_needs_a_correction(plan_of, caplog):
    plan_of(**SPLIT)

    assert "older weights" not in caplog.text


class Likelihood(Epochs):
    """An algorithm that does not say how it treats samples of older weights."""

    def roles(self):
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="rollout", worker="rollout")]

    def reads(self):
        return {"actor": []}

    def writes(self):
        return []

    def collect(self, roles, prompts):
        return roles.score(roles.generate(prompts))

    def loss(self, out, batch):
        return LossTerms(terms=-out.log_probs)


@pytest.mark.parametrize(
    ("sampling", "rollout", "algorithm", "words"),
    [
        ({"regex": "a+"}, "hf", Likelihood, "sampling.regex=a+: rollout=hf does not have it\nType  rollout=vllm"),
        ({"presence_penalty": 1.0}, "fake", Likelihood, "sampling.presence_penalty=1.0: rollout=fake does not have it"),
        (
            {"repetition_penalty": 1.1},
            "hf",
            GRPO,
            "needs samples of the model's own distribution: the log-probs in its",
        ),
        ({"frequency_penalty": 1.0}, "hf", PPO, "rlcore eval RUN sampling.frequency_penalty=1.0"),
    ],
)
def test_sampling_that_an_engine_or_a_loss_cannot_have_is_refused(plan_of, sampling, rollout, algorithm, words):
    with pytest.raises(ConfigError) as raised:
        plan_of(sampling=sampling, rollout={"name": rollout}, algorithm={"name": f"{__name__}:{algorithm.__name__}"})

    assert words in str(raised.value)


def test_penalties_are_accepted_where_no_loss_assumes_the_models_distribution(plan_of):
    plan = plan_of(sampling={"repetition_penalty": 1.1}, algorithm={"name": f"{__name__}:Likelihood"})

    assert sampling(plan.config).repetition_penalty == 1.1


class Silent(GRPO):
    """Algorithm that generates nothing."""

    without = ("rollout", "reward")
    demonstrations = ("answer",)

    def roles(self):
        return super().roles()[:1]


class NoActor(GRPO):
    def roles(self):
        return [RoleSpec(name="rollout", worker="rollout")]


class ReadsValues(GRPO):
    def reads(self):
        return {"actor": ["advantage", "values"]}


class ReadsTypo(PPO):
    def reads(self):
        return {**super().reads(), "actor": ["advantages", "retruns"]}


class InPairs(GRPO):
    unit = Unit(column="pair_id", size=2)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (InPairs, "reads column 'pair_id' in the update of 'actor', but no role of this run writes it."),
        (NoActor, "the algorithm has no role 'actor'; its roles() must include one"),
        (
            ReadsValues,
            "reads column 'values' in the update of 'actor', but no role of this run writes it.\n"
            "It is written by: critic. Roles: actor, rollout, reward.",
        ),
        (
            ReadsTypo,
            "reads column 'retruns' in the update of 'actor', but no role of this run writes it.\n"
            "Did you mean 'returns'? Roles: actor, critic, rollout, reward.",
        ),
    ],
)
def test_an_algorithm_that_contradicts_its_run_is_refused(plan_of, algorithm, message):
    with pytest.raises(ConfigError) as raised:
        plan_of(algorithm={"name": f"tests.test_plan:{algorithm.__name__}"})

    assert message in str(raised.value)


def test_two_rewards_of_the_same_name_get_distinct_names(plan_of):
    plan = plan_of(reward={"items": ["exact_match", {"name": "exact_match", "weight": 0.5}]})

    assert [(spec.name, spec.weight) for spec in plan.rewards] == [("exact_match", 1.0), ("exact_match#2", 0.5)]


def line(plan, start):
    """Return the line of the description that starts with these words, with single spaces."""
    lines = [" ".join(text.split()) for text in describe(plan)]
    (found,) = (text for text in lines if text.startswith(f"{start} "))
    return found


@pytest.mark.parametrize(
    ("devices", "share"),
    [(1, "12 per device"), (4, "3 per device"), (5, "2 or 3 per device"), (16, "0 or 1 per device")],
)
def test_rows_that_do_not_divide_evenly_get_uneven_shares(plan_of, devices, share):
    # 3 prompts × 4 samples
    plan = plan_of(runtime={"name": "ray"}, pools=pools(main=devices))

    assert f"3 prompts × 4 samples = 12 rows, {share}" in line(plan, "step")


class Couples(LocalBackend):
    """Backend with two devices per data-parallel share."""

    @staticmethod
    def data_parallel(config, *, model, world_size, device):
        if world_size % 2:
            raise ConfigError(f"{world_size} devices of {Path(model.path).name} on {device}\nGive the pool 2")
        return world_size // 2


def test_rows_are_counted_per_data_parallel_share(plan_of):
    backend = {"name": "tests.test_plan:Couples"}

    plan = plan_of(runtime={"name": "ray"}, pools=pools(main=6), backend=backend)

    assert "3 prompts × 4 samples = 12 rows, 4 per 2 devices, " in line(plan, "step")


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_a_backend_can_refuse_a_pool_before_the_start(plan_of, role):
    plan = plan_of(
        runtime={"name": "ray"},
        backend={"name": "tests.test_plan:Couples"},
        algorithm={"name": "ppo", "kl": {"coefficient": 0.1}},
        pools=pools(even=2, odd=3),
        placement={"default": "even", role: "odd"},
    )

    with pytest.raises(ConfigError, match="3 devices of stories260k on cpu"):
        describe(plan)


def test_description_of_a_plan(plan_of, tmp_path):
    plan = plan_of(algorithm={"name": "ppo", "epochs": 2, "minibatches": 3, "kl": {"coefficient": 0.1}})

    assert line(plan, "run") == f"run {tmp_path}/run"
    assert line(plan, "model").endswith("stories260k: 0.26 M parameters, float32")
    assert line(plan, "data").endswith("8 prompts")
    assert line(plan, "algorithm") == f"algorithm ppo (rlcore {rlcore.__version__})"
    assert line(plan, "reward").startswith("reward 1 × exact_match")
    assert "6 updates; 100 steps" in line(plan, "step")
    roles = [text.split()[1] for text in describe(plan) if text.startswith("role")]
    assert roles == ["actor", "critic", "reference", "rollout", "reward"]


def test_rollout_memory_is_estimated_for_one_share(plan_of):
    def estimate(devices):
        plan = plan_of(runtime={"name": "ray"}, pools=pools(main=devices))
        return line(plan, "role rollout")

    size = ModelSize.read(Path(plan_of().config.model.path))
    whole = rollout_bytes(size, num_sequences=12, max_tokens=48, half=False)
    third = rollout_bytes(size, num_sequences=4, max_tokens=48, half=False)

    assert f"{human(whole)} per device" in estimate(1)
    assert f"{human(third)} per device" in estimate(3)


def test_a_home_directory_may_be_abbreviated(plan_of, assets, monkeypatch):
    monkeypatch.setenv("HOME", str(assets))

    assert "0.26 M parameters" in line(plan_of(model__path="~/models/stories260k"), "model")


def test_model_size_equals_that_of_the_loaded_model(assets):
    from rlcore.models.load import load_model

    path = assets / "models" / "stories260k"
    model = load_model(str(path))
    size, config = ModelSize.read(path), model.config

    assert size.num_parameters == sum(p.numel() for p in model.parameters())
    assert (size.num_layers, size.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    keys, values = model.model.layers[0].self_attn.k_proj.weight, model.model.layers[0].self_attn.v_proj.weight
    assert size.num_kv_values == len(keys) + len(values)


SIZE = ModelSize(num_parameters=1000, num_layers=4, hidden_size=10, num_kv_values=6)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (frozen_bytes(SIZE), 4000),
        # 34 bytes × 10 hidden × 4 layers × 5 tokens, twice that in float32
        (activation_bytes(SIZE, max_tokens=5, half=True, checkpointing=False), 6800),
        (activation_bytes(SIZE, max_tokens=5, half=False, checkpointing=False), 13600),
        # one layer, and the inputs of four: 5 × (340 + 4 · 10 · 2)
        (activation_bytes(SIZE, max_tokens=5, half=True, checkpointing=True), 2100),
        # parameters, gradients, two moments: 4 × 4 bytes
        (trained_bytes(SIZE), 16000),
        # weights, and 3 sequences × 7 tokens × 4 layers × 6 numbers
        (rollout_bytes(SIZE, num_sequences=3, max_tokens=7, half=False), 4000 + 504 * 4),
        (rollout_bytes(SIZE, num_sequences=3, max_tokens=7, half=True), 2000 + 504 * 2),
    ],
)
def test_memory_by_hand(estimate, expected):
    assert estimate == expected


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (2**20, "1.0 MB"), (3 * 2**30, "3.0 GB"), (2**41, "2.0 TB")],
)
def test_human_sizes(size, text):
    assert human(size) == text


def checkpoint(directory, step, keep_last=9, text="weights", **state):
    def save_roles(path):
        (path / "actor").mkdir()
        (path / "actor" / "model.bin").write_text(text)

    return write(Checkpoints(directory, keep_last), step, save_roles, **state)


def write(checkpoints, step, save_roles, **state):
    checkpoints.begin(step, {"step": step, **state}, save_roles)
    return checkpoints.complete(lambda path: None).path


def test_a_run_resumes_from_its_last_complete_checkpoint(plan_of, tmp_path, caplog):
    directory = tmp_path / "run" / "checkpoints"
    checkpoint(directory, 5, loader=make_loader(plan_of().config, plan_of().prompts).state_dict())
    (checkpoint(directory, 10) / "actor" / "model.bin").write_text("cut")

    assert plan_of().resume.step == 5
    assert "model.bin has 3 bytes instead of 7" in caplog.text
    assert plan_of(run__resume="must").resume.step == 5
    assert plan_of(run__resume="never").resume is None
    assert "resumes at step 5" in line(plan_of(), "run")


def test_a_misspelled_run_name_is_answered_with_the_nearest(make, tmp_path):
    checkpoint(tmp_path / "first_run" / "checkpoints", 5)

    with pytest.raises(ConfigError, match=r"Did you mean run\.name=first_run\?"):
        make_plan(make(run__resume="must"), tmp_path / "frist_run")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: (path / "manifest.json").unlink(), "no manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is broken"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is broken"),
        (
            lambda path: (path / "trainer.json").write_bytes(b"?" * len((path / "trainer.json").read_bytes())),
            "trainer.json has changed since it was written",
        ),
        (lambda path: (path / "actor" / "model.bin").unlink(), "actor/model.bin is missing"),
        (lambda path: (path / "trainer.json").write_text("{}"), "trainer.json has 2 bytes instead of"),
    ],
)
def test_a_damaged_checkpoint_is_never_read(tmp_path, harm, words):
    path = checkpoint(tmp_path, 5)
    assert read_checkpoint(path).step == 5

    harm(path)

    assert newest(tmp_path, checksums=True) is None
    with pytest.raises(UserError, match=f"not a complete checkpoint: {words}"):
        read_checkpoint(path)


def steps(directory):
    return sorted(int(path.name.removeprefix("step_")) for path in directory.glob("step_*"))


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step, keep_last=2)

    assert steps(tmp_path) == [3, 4]


def test_a_new_checkpoint_is_kept_despite_a_damaged_later_one(tmp_path):
    checkpoint(tmp_path, 10, keep_last=1)
    (checkpoint(tmp_path, 20) / "manifest.json").unlink()

    checkpoint(tmp_path, 15, keep_last=1)

    assert steps(tmp_path) == [15, 20]
    assert Checkpoints(tmp_path, 1).latest().step == 15


def test_damaged_checkpoints_are_not_counted_as_kept(tmp_path):
    checkpoint(tmp_path, 10, keep_last=2)
    (checkpoint(tmp_path, 20, keep_last=2) / "manifest.json").unlink()

    checkpoint(tmp_path, 30, keep_last=2)

    assert steps(tmp_path) == [10, 20, 30]


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in (999_999, 1_000_000):
        checkpoint(tmp_path, step)

    assert Checkpoints(tmp_path, 2).latest().step == 1_000_000


def test_a_new_run_renames_the_checkpoints_of_an_earlier_one(tmp_path):
    for _ in range(2):
        checkpoint(tmp_path / "checkpoints", 50)
        Checkpoints(tmp_path / "checkpoints", 2).set_aside()
    Checkpoints(tmp_path / "checkpoints", 2).set_aside()

    assert Checkpoints(tmp_path / "checkpoints", 2).latest() is None
    assert [steps(tmp_path / f"checkpoints.{n}") for n in (1, 2)] == [[50], [50]]


def test_a_failed_checkpoint_keeps_the_earlier_one(tmp_path):
    checkpoint(tmp_path, 5)

    def full(path):
        (path / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        RunError, match=r"step 6 could not be written: .*No space left(.|\n)*last complete one is .*step_000005"
    ):
        write(Checkpoints(tmp_path, 2), 6, full)

    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]
    assert read_checkpoint(tmp_path / "step_000005").state == {"step": 5}


@pytest.mark.parametrize("error", [HostDied("the host died"), KeyError("bug"), KeyboardInterrupt()], ids=repr)
def test_other_errors_keep_their_type_and_get_a_note(tmp_path, error):
    checkpoint(tmp_path, 5)

    def fail(path):
        raise error

    with pytest.raises(type(error)) as raised:
        write(Checkpoints(tmp_path, 2), 6, fail)

    assert raised.value is error
    assert error.__notes__ == [
        f"checkpoint of step 6 could not be written. The last complete one is {tmp_path}/step_000005."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_half_written_checkpoint_of_a_killed_process_is_removed(tmp_path):
    checkpoint(tmp_path, 5)
    (tmp_path / ".step_000006.writing" / "actor").mkdir(parents=True)

    Checkpoints(tmp_path, 2).sweep()

    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_half_removed_checkpoint_is_removed_at_the_next_start(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint(tmp_path, step)

    def removes_half(path, **_):
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlcore.trainer.checkpoint.shutil.rmtree", removes_half)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path, 1)._forget_before(2)
    monkeypatch.undo()

    Checkpoints(tmp_path, 1).sweep()

    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_export_and_resume_find_the_same_checkpoint(tmp_path):
    checkpoint(tmp_path / "checkpoints", 999_999)
    checkpoint(tmp_path / "checkpoints", 1_000_000)
    (checkpoint(tmp_path / "checkpoints", 1_000_001) / "manifest.json").unlink()

    assert find_checkpoint(tmp_path).step == Checkpoints(tmp_path / "checkpoints", 2).latest().step == 1_000_000


def test_resuming_with_different_prompts_is_refused(plan_of, tmp_path):
    loader = make_loader(plan_of().config, plan_of().prompts).state_dict()
    checkpoint(tmp_path / "run" / "checkpoints", 5, loader=loader)

    assert plan_of().resume.step == 5
    with pytest.raises(ConfigError, match=r"made with run\.seed=0, not 1"):
        plan_of(run__seed=1)
    with pytest.raises(ConfigError, match="the prompts differ"):
        plan_of(data__template="Q: {prompt}")


def test_resuming_with_different_answers_is_refused(plan_of, make, tmp_path):
    loader = make_loader(plan_of().config, plan_of().prompts).state_dict()
    checkpoint(tmp_path / "run" / "checkpoints", 5, loader=json.loads(json.dumps(loader)))
    data = Path(make().data.train)
    data.write_text(data.read_text().replace('"answer": "3"', '"answer": "4"'))

    with pytest.raises(ConfigError, match="the data differs from that of the checkpoint in the column answer\nGive"):
        plan_of()


def test_resuming_with_another_samples_per_prompt_is_refused(plan_of, tmp_path):
    loader = make_loader(plan_of().config, plan_of().prompts).state_dict()
    checkpoint(tmp_path / "run" / "checkpoints", 5, loader=loader)

    with pytest.raises(ConfigError, match="samples_per_prompt=4, not 2: sample ids would repeat\nType sampling"):
        plan_of(sampling__samples_per_prompt=2)


@pytest.mark.parametrize("name", ["reward:exact_match", "advantage", "advantage_mean"])
def test_a_data_column_that_the_run_writes_is_refused(plan_of, make, name):
    data = Path(make().data.train)
    data.write_text(data.read_text().replace('"answer"', f'"{name}": 1, "answer"'))

    with pytest.raises(DataError, match=f"has columns that rlcore writes itself: {name}\nRename them") as raised:
        plan_of(algorithm={"name": "ppo"})

    (line,) = re.findall(r"'(data\.rename=.*)'", str(raised.value))
    rename = dict(compose(["model.path=m", "data.train=t", line]).config.data.rename)
    assert rename[name] in plan_of(algorithm={"name": "ppo"}, data__rename=rename).prompts.batch


def test_a_tokenizer_that_is_larger_than_its_model_is_refused(plan_of, assets, tmp_path):
    model = shutil.copytree(assets / "models" / "stories260k", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))

    with pytest.raises(ModelError, match="token ids up to 511, but the model has 500 tokens"):
        plan_of(model__path=str(model))


def test_a_plan_warns_when_its_roles_together_are_too_large(plan_of, monkeypatch):
    plan = plan_of(pools=pools(main=1))
    size = ModelSize.read(Path(plan.config.model.path))
    need = estimate_of_actor(plan.config) + rollout_bytes(size, num_sequences=12, max_tokens=48, half=False)

    monkeypatch.setattr("rlcore.trainer.describe.machine_bytes", lambda: need)
    assert not [text for text in describe(plan) if text.startswith("warning")]
    monkeypatch.setattr("rlcore.trainer.describe.machine_bytes", lambda: need - 1)
    assert f"the work of all CPU pools needs {human(need)}" in line(plan, "warning")


PPO_WITH_REFERENCE = {"name": "ppo", "kl": {"coefficient": 0.1}}


@pytest.mark.parametrize(
    ("setting", "device", "placement", "expected"),
    [
        ("auto", "cuda", {}, ("actor", "critic", "reference")),
        ("auto", "cpu", {}, ()),
        ("always", "cpu", {}, ("actor", "critic", "reference")),
        ("never", "cuda", {}, ()),
        ("auto", "cuda", {"rollout": "other"}, ()),
        ("auto", "cuda", {"rollout": "other", "reference": "other"}, ("reference",)),
    ],
)
def test_roles_that_share_devices_with_the_rollout(plan_of, monkeypatch, setting, device, placement, expected):
    monkeypatch.setattr("rlcore.trainer.sharing.resolve_device", lambda asked: device)
    settings = {"algorithm": PPO_WITH_REFERENCE, "pools": pools(main=1, other=1), "placement": placement}

    assert plan_of(device_sharing=setting, **settings).sharing == expected


ELSEWHERE = {"name": "ray", "address": "10.0.0.1:6379"}


def test_plan_for_a_cluster_shows_that_devices_are_undecided(plan_of, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    plan = plan_of(runtime=ELSEWHERE, pools={"main": {}})

    assert line(plan, "devices") == (
        "devices pools.main.device=auto: cuda if the cluster at 10.0.0.1:6379 has GPUs, else cpu; decided when the run joins it"
    )
    assert "pool main (1 × 1 auto)" in line(plan, "role actor")
    assert plan.sharing == ("actor",)
    assert line(plan, "sharing").endswith(" (only if it has GPUs)")


def test_plan_for_a_cluster_with_a_named_device_ignores_this_machine(plan_of, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    plan = plan_of(runtime=ELSEWHERE, pools=pools(main=1))

    assert "pool main (1 × 1 cpu)" in line(plan, "role actor")
    assert plan.sharing == ()


def test_plan_shows_unused_gpus_of_this_machine(plan_of, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for kind in ("device", "machine"):
        monkeypatch.setattr(f"rlcore.trainer.describe.{kind}_bytes", lambda: 2**40)

    expected = "devices 1 of 8 GPUs of this machine are used; to use all: pools.main.devices_per_node=8"
    assert line(plan_of(pools={"main": {}}), "devices") == expected
    every = plan_of(runtime={"name": "ray"}, pools={"main": {"devices_per_node": 8}})
    assert not [text for text in describe(every) if text.startswith("devices")]


class Stays(FakeRollout):
    frees_device = None


def test_impossible_device_sharing_is_refused(plan_of):
    with pytest.raises(ConfigError) as error:
        plan_of(device_sharing="always", pools=pools(main=1, other=1), placement={"rollout": "other"})
    assert str(error.value) == (
        "device_sharing=always, but no model is in the rollout's pool 'other'\n"
        "Type  placement=colocated   or remove device_sharing"
    )
    with pytest.raises(ConfigError, match=r"rollout=.*Stays does not declare .*\nType  device_sharing=never"):
        plan_of(device_sharing="always", rollout={"name": f"{__name__}:Stays"})
    with pytest.raises(ConfigError, match="device_sharing"):
        plan_of(device_sharing="sometimes")


def test_an_engine_that_cannot_free_its_gpu_is_logged(plan_of, monkeypatch, caplog):
    monkeypatch.setattr("rlcore.trainer.sharing.resolve_device", lambda asked: "cuda")

    assert plan_of(rollout={"name": f"{__name__}:Stays"}).sharing == ()

    assert (
        "rollout does not declare that it can free its device (frees_device), so actor and rollout hold" in caplog.text
    )


def test_device_sharing_on_cpus_must_fit_together(plan_of, monkeypatch):
    plan = plan_of(device_sharing="always")
    need = estimate_of_actor(plan.config) + rollout_bytes(
        ModelSize.read(Path(plan.config.model.path)), num_sequences=12, max_tokens=48, half=False
    )

    monkeypatch.setattr("rlcore.trainer.describe.machine_bytes", lambda: need)
    assert line(plan, "sharing") == (
        "sharing pool 'main': actor is offloaded while rollout generates; rollout sleeps while actor trains"
    )
    monkeypatch.setattr("rlcore.trainer.describe.machine_bytes", lambda: need - 1)
    with pytest.raises(
        CapacityError, match=r"frees nothing on CPUs, and keeping all of them needs \(actor .* \+ rollout .*\) = "
    ):
        describe(plan)


def test_device_sharing_on_gpus_must_fit_each_phase_and_the_host(plan_of, monkeypatch):
    for module in ("sharing", "describe"):
        monkeypatch.setattr(f"rlcore.trainer.{module}.resolve_device", lambda asked: "cuda")
    plan = plan_of(algorithm=PPO_WITH_REFERENCE)
    size = ModelSize.read(Path(plan.config.model.path))
    training = 2 * estimate_of_actor(plan.config) + frozen_bytes(size)
    # gradients are dropped; the reference and the engine keep their weights
    parked = 2 * 12 * size.num_parameters + 4 * size.num_parameters + 4 * size.num_parameters
    has = {"device": training, "machine": parked}
    monkeypatch.setattr("rlcore.trainer.describe.device_bytes", lambda: has["device"])
    monkeypatch.setattr("rlcore.trainer.describe.machine_bytes", lambda: has["machine"])

    assert not [text for text in describe(plan) if text.startswith("warning") and "precision" not in text]
    has["device"] -= 1
    with pytest.raises(CapacityError) as error:
        describe(plan)
    actor, frozen = human(estimate_of_actor(plan.config)), human(frozen_bytes(size))
    assert str(error.value).startswith(
        f"the roles of pool 'main' cannot share its devices: training needs (actor {actor} + critic {actor} + reference {frozen})"
        f" = {human(training)}, but only {human(training - 1)} are available\nLower model.max_tokens_per_device"
    )
    has.update(device=training, machine=parked - 1)
    with pytest.raises(CapacityError, match=r"offloading to host memory needs .* but only"):
        describe(plan)


def estimate_of_actor(config):
    size, tokens = ModelSize.read(Path(config.model.path)), config.model.max_tokens_per_device
    return trained_bytes(size) + activation_bytes(size, max_tokens=tokens, half=False, checkpointing=False)


def test_a_plan_counts_a_weight_update_in_addition_to_the_engine(plan_of, monkeypatch):
    for module in ("sharing", "describe"):
        monkeypatch.setattr(f"rlcore.trainer.{module}.resolve_device", lambda asked: "cuda")
    monkeypatch.setattr("rlcore.trainer.describe.device_bytes", lambda: 2**30)
    monkeypatch.setattr(TakesHalf, "engine_bytes", lambda config, weights, cache, *, device: device - 2**10)

    with pytest.raises(CapacityError) as error:
        describe(plan_of(rollout={"name": f"{__name__}:TakesHalf"}))

    update = human(3 * 4 * 512 * 64)  # the embedding, three times in float32
    assert f"generating needs (rollout 1024.0 MB + weight update {update}) = 1.0 GB" in str(error.value)


class RefusesFloat32(FakeRollout):
    @staticmethod
    def check_model(config, *, model, device):
        if (model.precision, device) == ("float32", "cuda"):
            raise ConfigError("no kernels for float32\nType  model.precision=bfloat16")


def test_an_engine_can_refuse_a_precision_in_the_plan(plan_of, monkeypatch):
    rollout = {"name": f"{__name__}:RefusesFloat32"}
    assert describe(plan_of(rollout=rollout))
    monkeypatch.setattr("rlcore.trainer.describe.resolve_device", lambda asked: "cuda")
    monkeypatch.setattr("rlcore.trainer.describe.device_bytes", lambda: 2**40)

    with pytest.raises(ConfigError, match="no kernels for float32"):
        describe(plan_of(rollout=rollout))
    assert describe(plan_of(rollout=rollout, model__precision="bfloat16"))


def test_float32_on_gpus_gives_a_warning(plan_of, monkeypatch):
    def warnings(**settings):
        return [text for text in describe(plan_of(**settings)) if text.startswith("warning")]

    assert not warnings()
    monkeypatch.setattr("rlcore.trainer.describe.resolve_device", lambda asked: "cuda")
    monkeypatch.setattr("rlcore.trainer.describe.device_bytes", lambda: 2**40)

    (text,) = warnings()
    assert "float32 is about 10 times slower than bfloat16 on the GPUs of main:  type  model.precision=bfloat16" in text
    assert not warnings(model__precision="bfloat16")


class Gathers(LocalBackend):
    working_bytes = staticmethod(lambda config, size, *, precision, world_size, trained: 2**30 + size.num_parameters)


def test_a_plan_counts_the_working_memory_of_a_step(plan_of):
    plan = plan_of(backend={"name": f"{__name__}:Gathers"})
    gathered = 2**30 + ModelSize.read(Path(plan.config.model.path)).num_parameters

    assert f"{human(estimate_of_actor(plan.config) + gathered)} per device" in line(plan, "role actor")


@pytest.mark.parametrize(("setting", "sequences"), [({"max_batch_size": 5}, 5), ({"max_batch_tokens": 100}, 2)])
def test_rollout_memory_counts_sequences_that_run_together(plan_of, setting, sequences):
    plan = plan_of(rollout={"name": "hf", **setting})  # 12 sequences of at most 48 tokens
    size = ModelSize.read(Path(plan.config.model.path))

    assert human(rollout_bytes(size, num_sequences=sequences, max_tokens=48, half=False)) in line(plan, "role rollout")


class TakesHalf(FakeRollout):
    engine_bytes = staticmethod(lambda config, weights, cache, *, device: device // 2 or weights + 2 * cache)


def test_an_engine_can_estimate_its_own_memory(plan_of, monkeypatch):
    plan = plan_of(rollout={"name": f"{__name__}:TakesHalf"})
    size = ModelSize.read(Path(plan.config.model.path))
    weights, whole = (rollout_bytes(size, num_sequences=n, max_tokens=48, half=False) for n in (0, 12))

    assert human(2 * whole - weights) in line(plan, "role rollout")
    for module in ("sharing", "describe"):
        monkeypatch.setattr(f"rlcore.trainer.{module}.resolve_device", lambda asked: "cuda")
    monkeypatch.setattr("rlcore.trainer.describe.device_bytes", lambda: 7 * 2**30)
    plan = plan_of(rollout={"name": f"{__name__}:TakesHalf"})
    assert human(3.5 * 2**30) in line(plan, "role rollout")
    monkeypatch.setattr(TakesHalf, "engine_bytes", lambda config, weights, cache, *, device: device + 1)
    with pytest.raises(CapacityError, match=r"(?s)generating needs \(rollout 7.* \(settings under rollout\)"):
        describe(plan)


def test_held_out_prompts_are_spread_over_the_file(plan_of):
    plan = plan_of(eval__max_prompts=3)  # of 8: 0, 8 // 3, 16 // 3

    assert held_out(plan.prompts, plan.config).prompts["prompt_id"].tolist() == [0, 2, 5]


def leaves(cls, key=""):
    """Yield the dotted name and the field name of all settings below a dataclass."""
    for field in fields(cls):
        kind = get_type_hints(cls)[field.name]
        inner = [item for item in (kind, *get_args(kind)) if is_dataclass(item) and item not in (Choice, RewardItem)]
        if inner:
            yield from leaves(inner[0], f"{key}{field.name}.")
        else:
            yield f"{key}{field.name}", field.name


HANDED_ON = {
    "data": ("data/prompts.py", "data/chat.py"),
    "reward": "trainer/roles.py",
    "eval": "trainer/evaluate.py",
    "episode": "rlcore_environments/",
    "optimizer": ("backends/", "kits/backend/"),
    "runtime": "controller/",
    "sampling": ("rollouts/", "rlcore_vllm/"),
    "pools": "controller/",
}
"""Sections that are passed as a whole -> where their fields are read; others are read by name: config.run.seed."""


def reads():
    """Yield (file, section or "", field) of every attribute that code of rlcore and its plugins reads."""
    core = Path(rlcore.__file__).parent
    plugins = [core.parent / "plugins" / f"rlcore-{name}" / "src" for name in ("environments", "vllm")]
    for root, path in [(home, path) for home in (core, *plugins) for path in home.rglob("*.py")]:
        tree = ast.parse(path.read_text())
        checks = {id(node) for f in ast.walk(tree) if getattr(f, "name", "") == "__post_init__" for node in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in checks:
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                yield str(path.relative_to(root)), owner, node.attr


def test_core_has_fewer_than_150_settings():
    names = [name for name, _ in leaves(Config)]

    assert {"model.path", "sampling.top_p", "pools.nodes", "critic.optimizer.lr", "algorithm", "trackers"} <= set(names)
    assert len(names) == len(set(names)) < 150


BY_NAME = {getattr(role, field) for role in PPO(PPO.Config()).roles() for field in ("model", "optimizer")}
"""Settings that the planner looks up by the name in a RoleSpec."""


def test_every_setting_is_read_by_some_code():
    all_reads = set(reads())
    named = {(owner, field) for _, owner, field in all_reads}

    def is_read(name):
        section, _, field = (f"config.{name}" if "." not in name else name).rpartition(".")
        section = section.split(".")[-1]
        home = HANDED_ON.get(section, "/nowhere")
        return (section, field) in named or any(file.startswith(home) and f == field for file, _, f in all_reads)

    assert [name for name, _ in leaves(Config) if not (is_read(name) or name in BY_NAME)] == []


class Misspelled(GRPO):
    witout = ("reward",)


def test_a_misspelled_optional_member_is_reported(plan_of, caplog):
    plan_of(algorithm={"name": f"{__name__}:Misspelled"})

    assert f"algorithm '{__name__}:Misspelled': 'witout' has no effect; did you mean 'without'?" in caplog.text
