"""Contract of a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcore.protocols.reward import SAMPLE_FIELDS, RewardSpec
from rlcore.rewards.executor import RewardExecutor
from rlcore.rewards.pipeline import RewardPart
from rlcore.rewards.runner import RewardRunner, build_reward
from rlcore.rewards.signature import read_signature
from rlcore.testing.expect import allowed, equal

Row = dict[str, object]
_ODD = ("", " \n\t", "0" * 3000, "\\frac{1}{", "\u202e\x00\U0001f9ee", "<answer></answer>", "inf NaN 1e999", "-")


class RewardContract:
    """Set the reward's target and examples. Include gold answers, which check the grader itself.

    Example:
        class TestMine(RewardContract):
            target = "my_rewards:right"
            examples = [({"completion": "42", "answer": "42"}, 1.0), ({"completion": "7", "answer": "42"}, 0.0)]
    """

    target: str
    """`module:attr` or `/path/to/file.py:attr`."""
    options: Mapping[str, object] = {}
    examples: Sequence[tuple[Mapping[str, object], float | None]]
    """Samples and their scores; None: does not apply. Missing SAMPLE_FIELDS are filled in."""

    def test_the_examples_get_their_scores(self) -> None:
        equal(self.scores(self.rows()), [score for _, score in self.examples], "the scores of the examples")

    def test_any_completion_gets_a_score(self) -> None:
        self.scores([{**self.rows()[0], "completion": text} for text in _ODD])

    def test_scores_are_reproducible(self) -> None:
        rows = self.rows()
        again = self.scores(rows[::-1])[::-1]
        equal(again, self.scores(rows), "scores must be reproducible: a sample is scored again if a process crashes")

    def test_the_score_does_not_depend_on_the_other_samples(self) -> None:
        alone = [self.scores([row])[0] for row in self.rows()]
        equal(self.scores(self.rows()), alone, "a score must not depend on the other samples of the batch")

    def test_all_columns_read_are_declared(self) -> None:
        signature = read_signature(build_reward(self.spec()))
        declared = {*signature.required, *signature.optional, *SAMPLE_FIELDS, "reward_model"}
        rows = [{name: value for name, value in row.items() if name in declared} for row in self.rows()]
        rule = "every column that is read must be a parameter or in `required_columns`"
        with allowed(rule):
            found = self.scores(rows)
        equal(found, self.scores(self.rows()), rule)

    def test_it_works_in_a_separate_process(self) -> None:
        rule = f"a child process imports {self.target!r} by that name and gives the same scores"
        with allowed(rule), RewardExecutor([self.spec()], timeout_s=30.0) as executor:
            found = [outcome.value for outcome in executor.score(self.rows())]
        equal(found, self.scores(self.rows()), rule)

    def spec(self) -> RewardSpec:
        return RewardSpec("mine", self.target, self.options)

    def rows(self) -> list[Row]:
        """Return the examples with all SAMPLE_FIELDS."""
        given: list[Row] = [
            {"prompt": "p", "num_tokens": 3, "finish_reason": "stop", "prompt_id": i, "sample_id": i}
            for i in range(len(self.examples))
        ]
        return [{**fields, **row} for fields, (row, _) in zip(given, self.examples)]

    def scores(self, rows: Sequence[Row]) -> list[float | None]:
        """Score in this process; fail if a sample cannot be scored."""
        parts: dict[int, RewardPart] = {}
        runner = RewardRunner([self.spec()], None)
        runner.run(dict(enumerate(rows)), [(0, list(range(len(rows))))], lambda _, i, part: parts.update({i: part}))
        runner.close()
        for i, row in enumerate(rows):
            assert parts[i].status in ("score", "skip"), (
                f"completion {row['completion']!r:.60} gets no score: {parts[i].message}\n"
                "Models write anything: return a finite number, or None where the reward does not apply."
            )
        return [parts[i].value for i in range(len(rows))]
