"""Rewards relative to the other samples of a prompt: hand-worked tables, and their use in a step."""

import math

import numpy as np
import pytest

from rlcore.config.build import build
from rlcore.config.schema import RewardConfig
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.protocols.reward import RewardSpec
from rlcore.rewards.relative import relative
from rlcore.trainer.roles import Roles
from rlcore.types import Sampling

NAN = math.nan
SCORES = np.array([1.0, 10.0, 3.0, 30.0, NAN, 10.0, 7.0])
GROUPS = np.array([0, 1, 0, 1, 0, 1, 2])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [-1, -20 / 3, 1, 40 / 3, NAN, -20 / 3, 0]),
        ("std", [-1 / math.sqrt(2), -1 / math.sqrt(3), 1 / math.sqrt(2), 2 / math.sqrt(3), NAN, -1 / math.sqrt(3), 0]),
        ("rank", [0, 0.25, 1, 1, NAN, 0.25, 0.5]),
    ],
)
def test_scores_against_their_group(how, expected):
    np.testing.assert_allclose(relative(SCORES, GROUPS, how), expected, rtol=1e-5)
    assert SCORES[0] == 1.0, "the scores themselves are left as they were"


@pytest.mark.parametrize("how", ["mean", "std"])
def test_equal_scores_have_no_advantage(how):
    assert relative(np.full(4, 0.1), np.zeros(4), how).tolist() == [0.0] * 4


def score(role, on_error, rewards, *, group_id, seen=None):
    """Return the sample ids and rewards of a step's experience; `seen` receives the scored batch and the metrics."""
    seen = [] if seen is None else seen
    roles = Roles(
        {"reward": role},
        sampling=Sampling(),
        samples_per_prompt=2,
        reward=RewardConfig(on_error=on_error),
        rewards=[
            RewardSpec(name=name, target=f"m:{name}", weight=weight, relative=how)
            for name, (weight, how) in rewards.items()
        ],
        on_scored=lambda step, batch: seen.append(batch),
    )
    rows = {"sample_id": [0, 1, 2, 3], "group_id": group_id, "prompt_id": group_id, "truncated": [False] * 4}
    scored = roles.score(Batch.of(lengths=[1] * 4, tokens={"input_ids": [5] * 4}, rows=rows))
    seen.append(roles.step.metrics)
    return scored["sample_id"].tolist(), scored["reward"].tolist()


def test_large_scores_beside_small_ones_lose_nothing():
    class Nanoseconds:
        def recording(self, *_):
            return self

        def score(self, samples):
            parts = {"reward:right": [0.0, 1.0, 0.0, 1.0], "reward:fast": [1e9, 3e9, 2e9, 4e9]}
            none = {"reward_status": [0] * 4, "reward_has_note": [False] * 4, "reward_note": [None] * 4}
            return Batch.of(lengths=samples.lengths, rows={"reward": [1e9, 3e9, 2e9, 4e9], **none, **parts})

    assert score(Nanoseconds(), "raise", {"right": (1.0, "no"), "fast": (1.0, "rank")}, group_id=[0] * 4) == (
        [0, 1, 2, 3],
        pytest.approx([0, 1 + 2 / 3, 1 / 3, 2]),
    )


class TwoRewards:
    """Reward role with two scores for each of four samples of two prompts; the third sample failed."""

    def recording(self, *_):
        return self

    def score(self, samples):
        return Batch.of(
            lengths=samples.lengths,
            rows={
                "reward": [4.0, 8.0, NAN, 5.0],
                "reward_status": [0, 0, 3, 0],
                "reward_has_note": [False, False, True, False],
                "reward_note": [None, None, ("short", "broken", {}), None],
                "reward:right": [0.0, 0.0, 1.0, 1.0],
                "reward:short": [2.0, 4.0, 9.0, 2.0],
            },
        )


@pytest.mark.parametrize(
    ("on_error", "kept", "rewards"), [("zero", [0, 1, 2, 3], [-2, 2, -2, 3]), ("drop", [0, 1, 3], [-2, 2, 1])]
)
def test_a_step_is_trained_on_relative_scores_and_tells_the_plain_ones(on_error, kept, rewards):
    """right + 2 × short: 4, 8 and 5 become 0 + 2 × (-1), 0 + 2 × 1 and, alone with a score, 1 + 2 × 0. Where the sample that
    failed counts as 0 from every reward, it is the worse of its two."""
    seen = []
    found = score(
        TwoRewards(), on_error, {"right": (1.0, "no"), "short": (2.0, "mean")}, group_id=[0, 0, 1, 1], seen=seen
    )

    assert found == (kept, rewards)
    assert seen[0]["reward"].tolist()[:2] == [4.0, 8.0]
    assert seen[1]["reward/mean"].value == pytest.approx(17 / len(kept))


def test_relative_is_a_setting_of_each_reward():
    items = build(RewardConfig, {"items": [{"name": "length", "relative": "rank", "max": 9}]}, "reward").items

    assert (items[0].relative, items[0].options) == ("rank", {"max": 9})


def test_an_unknown_way_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"reward\.items\[0\]\.relative: expected one of no, mean, std, rank; got 'best'"
    ):
        build(RewardConfig, {"items": [{"name": "length", "relative": "best"}]}, "reward")
