"""A frozen reward model as a role: its score is the value at the end of prompt and response."""

import json
import shutil
import string
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from rlcore_tests.runs import metrics
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from rlcore.cli import main
from rlcore.cli.train import plan_run
from rlcore.cli.train import run as train
from rlcore.data.batch import Batch
from rlcore.errors import DataError
from rlcore.hooks import Hooks
from rlcore.protocols.worker import WorkerContext
from rlcore.quickstart import Recipe, prepare
from rlcore.testing.model import plain_model
from rlcore.trainer.launch import launch
from rlcore.trainer.rewards_ahead import RewardsAhead
from rlcore.trainer.step import Step
from rlcore.workers.classifier import ClassifierWorker
from rlcore.workers.critic import with_score_token

GUESS = f"{Path(__file__).parents[1]}/docs/snippets/environment.py:Guess"
_RECIPE = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("assets"), _RECIPE)


@pytest.fixture(scope="module")
def reward_model(assets, tmp_path_factory):
    directory = tmp_path_factory.mktemp("rm") / "actor"
    shutil.copytree(assets.model, directory)
    head = torch.randn(1, _RECIPE.hidden, generator=torch.Generator().manual_seed(1))
    save_file({"value_head.weight": head}, directory / "value_head.safetensors")
    return directory


def settings(assets, tmp_path, *more):
    return [
        f"model.path={assets.model}",
        f"data.train={assets.train}",
        "runtime=local",
        "trackers=jsonl",
        f"run.directory={tmp_path}",
        "run.name=r",
        "trainer.steps=1",
        "trainer.prompts_per_step=4",
        "sampling.samples_per_prompt=2",
        "sampling.max_response_tokens=6",
        "reward.num_processes=0",
        *more,
    ]


def scored_samples(words, num_prompts=4):
    """Return the samples of the first prompts, with their scores; the only reward is that of the reward model."""
    plan, _ = plan_run(words)
    assert [spec.name for spec in plan.rewards] == ["model"]
    run = launch(plan, Hooks([]))
    try:
        return run.roles.compute_rewards(run.roles.generate(run.source.take(num_prompts, Step(number=1)))).local()
    finally:
        run.close({})


def test_the_score_is_the_value_after_the_last_token(assets, reward_model, tmp_path):
    scored = scored_samples(settings(assets, tmp_path, f"reward.model={reward_model}"))

    from safetensors.torch import load_file

    head = load_file(reward_model / "value_head.safetensors")["value_head.weight"]
    model = plain_model(str(assets.model))
    offsets = scored.offsets().tolist()
    for i, (start, stop) in enumerate(pairwise(offsets)):
        with torch.no_grad():
            hidden = model(scored["input_ids"][start:stop][None], output_hidden_states=True).hidden_states[-1][0, -1]
        assert float(scored["model_score"][i]) == pytest.approx(float(head @ hidden), abs=2e-4)
    assert scored["reward"].tolist() == pytest.approx(scored["model_score"].tolist())


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def classifier(directory, architecture, *, chat_template=None, pad_token_id=0, num_labels=1, **more):
    """Save a random sequence classifier with a tokenizer of characters, other than the policy's."""
    torch.manual_seed(3)
    config_class = getattr(transformers, architecture.replace("ForSequenceClassification", "Config"))
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *string.printable])}
    config = config_class(
        vocab_size=len(words) + 4,
        pad_token_id=pad_token_id,
        num_labels=num_labels,
        max_position_embeddings=96,
        **SIZES,
        **more,
    )
    getattr(transformers, architecture)(config).save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForSequenceClassification", {}),
        ("LlamaForSequenceClassification", {"pad_token_id": None}),
        ("Qwen2ForSequenceClassification", {"chat_template": CHAT, "num_key_value_heads": 2}),
        ("BertForSequenceClassification", {"chat_template": CHAT}),
    ],
    ids=["llama", "one-row-at-a-time", "qwen2-with-template", "bert-with-template"],
)
@pytest.mark.parametrize("max_tokens", [16384, 40])
def test_a_sequence_classifier_scores_each_conversation_as_it_does_alone(
    assets, tmp_path, architecture, options, max_tokens
):
    directory = classifier(tmp_path / "rm", architecture, **options)
    more = [f"reward.model={directory}", "reward=model", f"model.max_tokens_per_device={max_tokens}"]
    scored = scored_samples(settings(assets, tmp_path, *more))

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for i, (prompt, completion) in enumerate(zip(scored["prompt"], scored["completion"])):
        text = f"<user>{prompt}<assistant>{completion}" if "chat_template" in options else prompt + completion
        with torch.no_grad():
            wanted = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, 0]
        assert float(scored["model_score"][i]) == pytest.approx(float(wanted), abs=1e-5)
    assert len(set(scored["model_score"].tolist())) > 4
    assert scored["reward"].tolist() == scored["model_score"].tolist()


@pytest.fixture(scope="module")
def chat_model(assets, tmp_path_factory):
    """Copy the policy, and add a chat template."""
    directory = shutil.copytree(assets.model, tmp_path_factory.mktemp("model") / "chat")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


def test_the_classifier_reads_the_system_message(assets, chat_model, tmp_path):
    directory = classifier(tmp_path / "rm", "LlamaForSequenceClassification", chat_template=CHAT)
    more = [f"reward.model={directory}", "reward=model", "data.system=be brief"]
    base = [item for item in settings(assets, tmp_path) if not item.startswith("model.path=")]
    scored = scored_samples([*base, *more, f"model.path={chat_model}"], num_prompts=2)

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = f"<system>be brief<user>{scored['prompt'][0]}<assistant>{scored['completion'][0]}"
    with torch.no_grad():
        wanted = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, 0]
    assert float(scored["model_score"][0]) == pytest.approx(float(wanted), abs=1e-5)


def test_positions_before_the_first_are_not_counted(tmp_path):
    directory = classifier(tmp_path / "rm", "RobertaForSequenceClassification")
    worker = ClassifierWorker(
        WorkerContext(role="reward_model"),
        path=str(directory),
        policy_path=str(directory),
        system="",
        dtype=torch.float32,
        max_tokens=4096,
    )

    def score(prompt):
        response = {"input_ids": [15], "loss_mask": [True]}
        return worker.scores(Batch.of(lengths=[1], tokens=response, rows={"prompt": [prompt]}))

    assert score("a" * 94)["model_score"].isfinite().all()
    with pytest.raises(DataError, match="has 96 tokens, but the reward model reads 95"):
        score("a" * 95)


def test_a_conversation_that_the_classifier_cannot_read_ends_the_run(assets, tmp_path, capsys):
    short = classifier(tmp_path / "short", "LlamaForSequenceClassification")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))

    assert main(["train", *settings(assets, tmp_path, f"reward.model={short}", "reward=model")]) == 2

    assert "tokens, but the reward model reads 8\nType smaller limits:" in capsys.readouterr().err


def test_a_run_learns_from_it_beside_another_reward(assets, reward_model, tmp_path, capsys):
    more = [
        f"reward.model={reward_model}",
        "reward=[{name: model, weight: 0.5}, {name: exact_match, column: prompt}]",
        f"data.eval={assets.eval}",
    ]

    assert main(["train", *settings(assets, tmp_path, *more)]) == 0

    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/mean"] == pytest.approx(0.5 * last["reward/model"] + last["reward/exact_match"], abs=1e-4)
    assert main(["eval", str(tmp_path / "r"), "runtime=local", "--json"]) == 0
    assert "eval/reward" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["reward=model"], "reward 'model' asks for column 'model_score', which "),
        (
            ["reward.model={plain}"],
            "is not a reward model: it has no value_head.safetensors, and the architecture in its config.json is",
        ),
        (
            ["reward.model={one}", f"environment={GUESS}", "model.path={chat}"],
            f"reads a prompt and one response, but environment={GUESS} plays",
        ),
        (["reward.model={labels}"], "has 3 outputs; a reward model has one\nChoose another model"),
        (
            ["reward.model={rm}", "reward=sorted_digits"],
            "reward.model is set, but no reward uses its score\nType  reward=m",
        ),
        (["reward.model=nowhere"], "reward.model=nowhere: there is no such directory"),
    ],
)
def test_what_cannot_score_is_refused_before_the_start(assets, reward_model, chat_model, tmp_path, capsys, more, text):
    labels = classifier(tmp_path / "labels", "LlamaForSequenceClassification", num_labels=3)
    one = classifier(tmp_path / "one", "LlamaForSequenceClassification")
    given = [item.format(plain=assets.model, rm=reward_model, labels=labels, one=one, chat=chat_model) for item in more]

    assert main(["train", *settings(assets, tmp_path, *given)]) == 2

    assert text in capsys.readouterr().err


def test_the_score_token_is_the_last_one_again():
    batch = Batch.of(lengths=[2, 3], tokens={"input_ids": [5, 6, 7, 8, 9], "loss_mask": [False, True] + [True] * 3})

    ended = with_score_token(batch)

    assert ended["input_ids"].tolist() == [5, 6, 6, 7, 8, 9, 9]
    assert ended["loss_mask"].tolist() == [False, False, True, False, False, False, True]


@pytest.mark.parametrize(("pool", "share"), [("judges", 1.0), ("actor", 0.0)])
def test_scores_of_a_model_with_its_own_pool_are_requested_ahead(
    assets, reward_model, tmp_path, monkeypatch, pool, share
):
    placed = ("placement=split", "pools.judges.devices_per_node=1", f"placement.reward_model={pool}")
    more = ("schedule=pipelined", *placed, f"reward.model={reward_model}", "trainer.steps=3", "trackers=jsonl")
    found = {}
    for name in ("ahead", "in_step"):
        train(settings(assets, tmp_path / name, *more), dry_run=False)
        found[name] = metrics(tmp_path / name)
        monkeypatch.setattr(RewardsAhead, "of", lambda groups: None)

    assert found["ahead"] == found["in_step"]
    lines = [json.loads(line) for line in (tmp_path / "ahead" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("schedule/scored_ahead", 0.0) for line in lines if line["step"]] == [0.0, share, share]
