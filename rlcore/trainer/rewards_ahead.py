"""`RewardsAhead`: requests the rewards of groups that wait for their step, so that slow rewards overlap with training.

One call runs at a time; groups that arrive meanwhile share the next one. Results, costs and errors of a call belong to
the step that trains on the groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rlcore.controller.future import Future
from rlcore.controller.group import Group
from rlcore.controller.record import Record
from rlcore.data.batch import Batch
from rlcore.trainer.step import Step

_METHODS = {"reward_model": "scores", "reward": "score"}
"""Role -> method that adds its columns, in the order of the calls."""


class RewardsAhead:
    """The rewards that were requested and that no step has used."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = {name: groups[name] for name in _METHODS if name in groups}
        self._calls: dict[int, _Call] = {}
        """Position of a group -> the call that scores it."""
        self._last: _Call | None = None

    @classmethod
    def of(cls, groups: Mapping[str, Group]) -> RewardsAhead | None:
        """Return None if there are no rewards, or a reward model whose hosts also work for the step in progress."""
        model = groups.get("reward_model")
        beside = [it for name, it in groups.items() if name not in _METHODS and model and it.pool == model.pool]
        return None if "reward" not in groups or beside else cls(groups)

    def __contains__(self, position: object) -> bool:
        return position in self._calls

    def is_free(self) -> bool:
        """Continue the last call without waiting, and return whether it has ended."""
        return self._last is None or self._last.advance()

    def request(self, positions: Sequence[int], samples: Batch, step: Step) -> None:
        """Start to compute the rewards of the groups at these positions, which have the same number of samples."""
        self._last = call = _Call(positions, samples, self._groups)
        self._calls |= dict.fromkeys(positions, call)
        step.blocked_s += call.record.blocked_s  # in one process, the call has ended
        call.record.blocked_s = 0.0

    def scored(self, positions: Sequence[int], samples: Batch, step: Step) -> Batch:
        """Return the samples of a step with their scores; those that were not requested are requested now.

        Raises:
            Exception: the error of a call.
        """
        late = [place for place, position in enumerate(positions) if position not in self._calls]
        step.note("schedule/scored_ahead", len(positions) - len(late), len(positions))
        group = range(len(samples) // len(positions))
        if late:
            rows = [place * len(group) + i for place in late for i in group]
            self.request([positions[place] for place in late], samples.take(rows), step)
        parts: list[Batch] = []
        first_rows: dict[int, int] = {}
        for call in dict.fromkeys(self._calls[position] for position in positions):
            start = sum(map(len, parts))
            first_rows |= {position: start + row for position, row in call.first_rows.items()}
            parts.append(call.result(step))
        scored = parts[0].cat(parts).take([first_rows[position] + i for position in positions for i in group])
        self.discard(positions)
        return samples | scored.select(*(name for name in scored.columns if name not in samples))

    def discard(self, positions: Iterable[int]) -> int:
        """Forget groups, and return how many of them no step has used."""
        return sum(self._calls.pop(position, None) is not None for position in positions)


class _Call:
    """A call of the reward model, if there is one, and then of the rewards."""

    def __init__(self, positions: Sequence[int], samples: Batch, groups: Mapping[str, Group]) -> None:
        self.record = Record()
        self.first_rows = {position: i * (len(samples) // len(positions)) for i, position in enumerate(positions)}
        """Position of a group -> its first row."""
        self._samples = samples
        self._methods = deque(getattr(it.recording(self.record), _METHODS[name]) for name, it in groups.items())
        self._running: Future[Batch] = self._methods.popleft().submit(samples)
        self._result: Batch | None = None

    def advance(self) -> bool:
        """Start the next role if the one before has finished; return whether nothing is running."""
        try:
            while self._running.done() and self._methods:
                self._next()
        except Exception:  # `result` raises it again
            return True
        return self._running.done()

    def result(self, step: Step) -> Batch:
        """Wait for the scores and return the samples with them; the first step that asks bears the costs."""
        if self._result is None:
            self.record.on_wait = step.on_wait
            while self._methods:
                self._next()
            self._result = self._samples | self._running.result()
            step.include(self.record)
        return self._result

    def _next(self) -> None:
        self._samples |= self._running.result()
        self._running = self._methods[0].submit(self._samples)
        self._methods.popleft()
