"""Logged samples of a step: from several prompts, and not always the first of each."""

import numpy as np
import pytest

from rlcore.trainer.run import spread


@pytest.mark.parametrize(
    ("group_id", "count", "step", "rows"),
    [
        pytest.param([7, 7, 7, 5, 5, 5, 9, 9, 9], 3, 0, [0, 3, 6], id="one-of-each-prompt"),
        pytest.param([7, 7, 7, 5, 5, 5, 9, 9, 9], 3, 4, [1, 4, 7], id="another-one-in-another-step"),
        pytest.param([0, 0, 1, 1, 2, 2, 3, 3], 2, 1, [1, 5], id="fewer-samples-than-prompts"),
        pytest.param([0, 0, 0, 1, 1, 1], 4, 2, [0, 2, 3, 5], id="more-samples-than-prompts"),
        pytest.param([0, 1, 1, 1], 4, 1, [0, 1, 2, 3], id="groups-of-several-sizes"),
        pytest.param([0, 1], 9, 3, [0, 1], id="more-than-there-are"),
        pytest.param([], 4, 3, [], id="none"),
    ],
)
def test_logged_samples_are_spread_over_prompts(group_id, count, step, rows):
    assert spread(np.array(group_id, dtype=np.int64), count, step) == rows


def test_every_sample_of_a_prompt_is_logged_in_some_step():
    group_id = np.repeat(np.arange(4), 8)

    seen = {row for step in range(8) for row in spread(group_id, 4, step)}

    assert seen == set(range(32))
