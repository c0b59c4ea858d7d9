"""Several data sets: for training with weights, and for evaluation with metrics of their own."""

import json

import pytest
from rlcore_tests.runs import metrics

import rlcore
from rlcore.config.build import flatten
from rlcore.config.compose import compose
from rlcore.errors import ConfigError, DataError, UserError
from rlcore.trainer.evaluate import evaluate_groups, groups_of, held_out
from tests.test_api import small

MATH = [
    {"prompt": f"sort {n}=", "digits": str(n), "extra": {"kind": "even" if n % 2 == 0 else "odd"}} for n in range(30)
]
CODE = [{"prompt": f"sort {n}=", "digits": str(n), "level": n % 3} for n in range(60, 66)]


def planned(tmp_path, **more):
    return rlcore.plan(**small(tmp_path, **({"data": {"math": MATH, "code": CODE}, "reward": "sorted_digits"} | more)))


def test_data_sets_are_joined_in_order_and_lack_columns_as_none(tmp_path):
    prompts = planned(tmp_path).plan.prompts

    assert prompts.sets == {"math": 30, "code": 6}
    assert prompts.batch["prompt_id"].tolist() == list(range(36))
    assert prompts.batch["digits"].tolist() == [row["digits"] for row in MATH + CODE]
    assert prompts.batch["level"].tolist() == [None] * 30 + [0, 1, 2] * 2
    assert prompts.batch["extra"].tolist() == [row["extra"] for row in MATH] + [None] * 6
    files = {path.name for path in (tmp_path / "r" / "inputs").iterdir()}
    assert files == {"train-math.jsonl", "train-code.jsonl"}


def test_a_column_that_one_data_set_lacks_is_refused_with_its_name(tmp_path):
    with pytest.raises(UserError, match=r"asks for column 'digits', which \S*train-code.jsonl does not have"):
        planned(tmp_path, data={"math": MATH, "code": [{"prompt": "a"}]})


def test_a_training_set_has_the_share_of_its_weight(tmp_path):
    plan = planned(tmp_path, data__weights={"math": 1, "code": 3}, trainer__prompts_per_step=8)
    text = plan.describe()

    assert " 25.00% math: 30 prompts" in text
    assert " 75.00% code: 6 prompts" in text
    assert " 16.67% code: 6 prompts" in planned(tmp_path / "plain").describe()


def test_a_data_set_smaller_than_its_share_of_a_step_is_reported(tmp_path, caplog):
    planned(tmp_path, data__weights={"math": 1, "code": 7}, trainer__prompts_per_step=8)

    (found,) = [it.getMessage() for it in caplog.records if "each step takes" in it.getMessage()]
    assert found == "each step takes 7 prompts from code, which has 6, so it repeats some; lower  data.weights.code"


def test_a_mixture_trains_and_resumes_bit_for_bit(tmp_path):
    chosen = {"data": {"math": MATH, "code": CODE}, "reward": "sorted_digits", "data__weights": {"math": 1, "code": 1}}
    chosen |= {"trainer__log_samples": 32}
    rlcore.train(**small(tmp_path / "whole", steps=4, **chosen))
    rlcore.train(**small(tmp_path / "cut", steps=2, **chosen))
    rlcore.train(**small(tmp_path / "cut", steps=4, **chosen))

    lines = [json.loads(line) for line in (tmp_path / "whole" / "r" / "samples.jsonl").read_text().splitlines()]
    assert {line["prompt_id"] >= 30 for line in lines} == {True, False}
    assert repr(metrics(tmp_path / "cut")[-2:]) == repr(metrics(tmp_path / "whole")[-2:])
    with pytest.raises(ConfigError, match=r"was made with data.weights=\{'math': 1.0, 'code': 1.0\}, not"):
        rlcore.train(**small(tmp_path / "cut", steps=5, **{**chosen, "data__weights": {"math": 1, "code": 2}}))


NAMES = {"reward", "pass_rate", "pass_at_k", "samples", "response_length"}


def evaluated(directory, eval_data, **more):
    chosen = {"eval__samples_per_prompt": 2, "eval__temperature": 1.0, "eval__pass_threshold": 0.5} | more
    result = rlcore.train(**small(directory, steps=0, eval_data=eval_data, reward="sorted_digits", **chosen))
    return {name: value for name, value in result.metrics[0].items() if name.startswith("eval/")}


def test_every_evaluation_set_has_the_metrics_that_it_has_alone(tmp_path):
    both = evaluated(tmp_path / "both", {"math": MATH, "code": CODE}, eval__max_prompts=20)
    alone = {
        name: evaluated(tmp_path / name, rows, eval__max_prompts=20) for name, rows in (("math", MATH), ("code", CODE))
    }

    assert set(alone["math"]) == {f"eval/{name}" for name in NAMES}
    assert set(both) == {f"eval/{group}{name}" for name in NAMES for group in ("", "math/", "code/")}
    for name in NAMES:
        for group in ("math", "code"):
            assert both[f"eval/{group}/{name}"] == alone[group][f"eval/{name}"]
    assert [both[f"eval/{group}samples"] for group in ("", "math/", "code/")] == [52.0, 40.0, 12.0]
    rates = [both[f"eval/{group}pass_rate"] for group in ("", "math/", "code/")]
    assert rates[0] == pytest.approx((40 * rates[1] + 12 * rates[2]) / 52)


def test_the_values_of_a_column_have_metrics_of_their_own(tmp_path):
    one = evaluated(tmp_path / "one", MATH, eval__by="extra.kind")
    both = evaluated(tmp_path / "both", {"math": MATH, "code": CODE}, eval__by="extra.kind")

    assert {name for name in one if name.endswith("/samples")} == {f"eval/{it}samples" for it in ("", "even/", "odd/")}
    assert one["eval/even/samples"] == 30.0
    assert one["eval/reward"] == pytest.approx((one["eval/even/reward"] + one["eval/odd/reward"]) / 2)
    groups = {name.removesuffix("samples") for name in both if name.endswith("/samples")}
    assert groups == {"eval/", "eval/math/", "eval/code/", "eval/math/even/", "eval/math/odd/", "eval/code/None/"}
    assert both["eval/math/even/reward"] == one["eval/even/reward"]


def test_an_empty_value_has_a_name_and_others_stay_apart(tmp_path):
    kinds = ["", "x", "/x", ""]
    rows = [{"prompt": "sort 1=", "digits": "1", "kind": kind} for kind in kinds]

    found = groups_of(planned(tmp_path, data=rows).plan.prompts, range(4), "kind")
    assert found == {"(empty)": [0, 3], "x": [1], "/x": [2]}
    found = groups_of(planned(tmp_path, data={"a": rows}).plan.prompts, range(4), "kind")
    assert found == {"a": [0, 1, 2, 3], "a/(empty)": [0, 3], "a/x": [1], "a//x": [2]}


def test_rlcore_eval_takes_several_data_sets(tmp_path):
    evaluated(tmp_path, {"math": MATH, "code": CODE})

    found = rlcore.evaluate(tmp_path / "r", reward="sorted_digits")

    assert {"eval/reward", "eval/math/reward", "eval/code/reward"} <= set(found.metrics)
    assert len(found.samples) == found.metrics["eval/samples"] == 72
    found = rlcore.evaluate(tmp_path / "r", data={"new": CODE[:2]}, reward="sorted_digits")
    assert {name for name in found.metrics if name.endswith("/reward")} == {"eval/reward", "eval/new/reward"}


def test_an_evaluation_of_the_algorithms_own_is_repeated_for_each_group(tmp_path):
    held = held_out(planned(tmp_path).plan.prompts, planned(tmp_path).plan.config)

    def count(roles, prompts, config):
        return {"eval/pass_rate": float(len(prompts)), "eval/loss": 0.5}, prompts

    found, samples = evaluate_groups(count, None, held, None)

    assert found["eval/pass_rate"] == len(samples) == 36
    assert [found["eval/math/pass_rate"], found["eval/code/pass_rate"], found["eval/code/loss"]] == [30, 6, 0.5]


@pytest.mark.parametrize(
    ("by", "text"),
    [
        ("extra.kid", "eval.by: .* has no column 'extra.kid'. Did you mean 'extra.kind'"),
        (
            "extra",
            r"eval.by=extra: a column with at most 100 texts or numbers is needed, and its values are such as \{'kind'",
        ),
        ("digits", "and its values are 150 different ones\nName another column"),
    ],
)
def test_a_column_that_cannot_name_groups_is_refused(tmp_path, by, text):
    rows = [{"prompt": "a", "digits": str(n), "extra": {"kind": "x"}} for n in range(150)]

    with pytest.raises(ConfigError, match=text):
        planned(tmp_path, eval_data=rows, eval__by=by)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data.train": {}}, "data.train: expected a file, or {name: file}, got {}\nType  data.train=train.jsonl"),
        ({"data.eval": {" ": "f"}}, "data.eval: expected printable names, got ' '"),
        ({"data.train": {"a": 3}}, "data.train: expected text or a mapping {name: text}, got {'a': 3}"),
        (
            {"data.weights": {"a": 1}},
            "data.weights: expected one for each data set of data.train (it has no names), got a",
        ),
        (
            {"data.train": {"a": "f", "b": "g"}, "data.weights": {"a": 1}},
            "data.weights: expected one for each data set of data.train (a, b), got a\nType  data.weights={a: 1, b: 1}",
        ),
        (
            {"data.train": {"a": "f"}, "data.weights": {"a": 0}},
            "data.weights: expected numbers above 0, got {'a': 0.0}",
        ),
    ],
)
def test_data_sets_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ConfigError) as raised:
        compose(
            [("data.train", "t"), *settings.items()] if "data.train" not in settings else [*settings.items()],
            complete=False,
        )

    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("setting", ["data.train", "data.eval", "data.weights"])
def test_data_sets_given_whole_replace_those_before_and_one_by_name_is_added(tmp_path, setting):
    section, key = setting.split(".")
    old, new = ({"a": 1.0, "b": 1.0}, {"c": 1.0}) if key == "weights" else ({"a": "f", "b": "g"}, {"c": "h"})
    value = new["c"]
    base = {section: {"train": {"a": "f", "b": "g"}, "max_prompt_tokens": 7, key: old}}
    (tmp_path / "p.yaml").write_text("# @package _global_\n" + json.dumps(base))
    also = ["data.train={c: h}"] if key == "weights" else []
    whole = [(f"{setting}={{c: {value}}}", also), (f"data={{{key}: {{c: {value}}}}}", also), ((setting, new), also)]

    for typed, others in whole:
        for options, before in (({"base": base}, []), ({}, [f"preset={tmp_path / 'p.yaml'}"])):
            data = compose([*before, *others, typed], complete=False, **options).config.data
            assert getattr(data, key) == new
            assert data.max_prompt_tokens == 7
    more = ["data.train.c=h"] if key == "weights" else []
    added = compose([*more, f"{setting}.c={value}"], complete=False, base=base).config.data
    assert getattr(added, key) == old | new


@pytest.mark.parametrize(
    ("typed", "train"),
    [
        (["data.train=a,b c.jsonl"], "a,b c.jsonl"),
        (["data.train='a=b.jsonl'"], "a=b.jsonl"),
        (["data.train={math: a.jsonl, code: b.jsonl}"], {"math": "a.jsonl", "code": "b.jsonl"}),
        (["data.train.math=a.jsonl", "data.train.code=x,b=c.jsonl"], {"math": "a.jsonl", "code": "x,b=c.jsonl"}),
    ],
)
def test_data_sets_are_typed_as_a_path_or_by_name(typed, train):
    config = compose(typed, complete=False).config

    assert config.data.train == train
    assert all(name.startswith("data.train") for name in flatten(config) if ".train" in name)


def test_splits_of_a_dataset_dict_are_still_refused(tmp_path):
    class DatasetDict(dict):
        pass

    with pytest.raises(DataError, match="a DatasetDict with train, test, not rows"):
        planned(tmp_path, data=DatasetDict(train=MATH, test=CODE))
    with pytest.raises(DataError, match=r"data\['math'\], row 0: a str, not a dict"):
        planned(tmp_path, data={"math": ["a"]})
