"""The rule of `rlcore.trainer.window`, with adversarial schedules."""

import random

import pytest

from rlcore.data.batch import Batch
from rlcore.trainer.window import PendingGroup, Window, num_before

FINISHED = Batch.of(lengths=[1], tokens={"input_ids": [0]})


def in_time(groups, per_step, step):
    """Return whether all groups can be trained on before their deadlines, `per_step` in each step from now on."""
    waiting = sorted(group.deadline_step for group in groups)
    while waiting:
        taken, waiting = waiting[:per_step], waiting[per_step:]
        if min(taken) < step:
            return False
        step += 1
    return True


def check_wait(window, count, step):
    """Check that a step waits only if it has to."""
    unfinished = [it for it in window.pending if it.samples is None]
    assert unfinished, "the step waits, and nothing is being generated"
    finished = [it for it in window.pending if it.samples is not None][:count]
    rest = set(window.pending).difference(finished)
    in_order = window.steps_ahead == window.max_staleness
    assert in_order or len(finished) < count or not in_time(rest, window.per_step, step + 1)


def run(window, num_steps, refill, finish, lose=lambda positions: []):
    """Take groups for all steps; return the staleness of each group and the positions in the order of training.

    Args:
        refill: returns how many more groups a step takes, one number for each time.
        finish: finishes one of the given groups or more.
        lose: returns those of the given positions whose engine fails.
    """
    version, staleness, trained, next_position = {}, [], [], 0
    per_step = window.per_step
    for step in range(1, num_steps + 1):
        for count in [per_step, *refill()]:
            missing = window.num_missing(count, num_steps - step)
            new = window.add(range(next_position, next_position + missing), step)
            version |= {group.position: step - 1 for group in new}
            next_position += missing
            assert len(window.pending) <= count + window.steps_ahead * per_step
            if lost := lose([it.position for it in window.pending if it.samples is None]):
                window.request_again(lost, step)
                version |= dict.fromkeys(lost, step - 1)
            while (chosen := window.choose(count, step)) is None:
                check_wait(window, count, step)
                finish([it for it in window.pending if it.samples is None])
            assert len(chosen) == count
            staleness += [step - 1 - version[group.position] for group in chosen]
            trained += [group.position for group in chosen]
    assert window.pending == [], "the last step leaves groups"
    assert sorted(trained) == list(range(next_position)), "each group is trained on once"
    return staleness, trained


def adversary(random):
    """Choose the newest group in most cases."""

    def finish(groups):
        groups[-1 if random.random() < 0.9 else random.randrange(len(groups))].samples = FINISHED

    return finish


def random_window(chance):
    per_step, ahead = chance.randint(1, 6), chance.randint(0, 3)
    return Window(per_step=per_step, steps_ahead=ahead, max_staleness=ahead + chance.randint(0, 4))


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_no_schedule_exceeds_the_staleness_or_gets_stuck(first):
    for seed in range(first, first + 500):
        chance = random.Random(seed)
        window = random_window(chance)

        def refill(chance=chance, per_step=window.per_step):
            return [chance.randint(1, per_step) for _ in range(chance.choice([0, 0, 0, 1, 2]))]

        staleness, _ = run(window, 30, refill, adversary(chance))

        assert set(staleness) <= set(range(window.max_staleness + 1)), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 1000, 500))
def test_engines_that_fail_change_no_bound(first):
    for seed in range(first, first + 500):
        chance = random.Random(seed)
        window = random_window(chance)

        def refill(chance=chance, per_step=window.per_step):
            return [chance.randint(1, per_step) for _ in range(chance.choice([0, 0, 1]))]

        def lose(positions, chance=chance):
            return [it for it in positions if chance.random() < 0.5] if chance.random() < 0.3 else []

        staleness, _ = run(window, 30, refill, adversary(chance), lose)

        assert set(staleness) <= set(range(window.max_staleness + 1)), f"seed {seed}"


def test_a_group_that_is_requested_again_gets_the_deadline_of_new_ones():
    window = Window(per_step=2, steps_ahead=1, max_staleness=3)
    window.add([0, 1, 2], step=1)

    window.request_again([0, 2], step=3)

    assert [(it.position, it.deadline_step) for it in window.pending] == [(1, 4), (0, 6), (2, 6)]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_equal_bounds_take_groups_in_the_order_of_their_requests(ahead):
    chance = random.Random(ahead)
    window = Window(per_step=4, steps_ahead=ahead, max_staleness=ahead)

    staleness, trained = run(window, 30, lambda: [2] * chance.randint(0, 2), adversary(chance))

    assert trained == sorted(trained)
    assert max(staleness) == ahead


def test_a_straggler_is_overtaken_until_its_deadline():
    window = Window(per_step=2, steps_ahead=1, max_staleness=3)
    taken, overtaken = [], []
    for step in range(1, 5):
        missing = window.num_missing(2, 10)
        new = window.add(range(100 * step, 100 * step + missing), step)
        for group in new:
            group.samples = FINISHED if group.position != 100 else None
        chosen = window.choose(2, step)
        taken.append([group.position for group in chosen] if chosen else None)
        overtaken += [num_before(chosen, window.pending)] if chosen else []

    assert taken == [[101, 102], [103, 200], [201, 300], None]
    assert overtaken == [1, 1, 1]


def test_groups_are_overtaken_by_those_with_a_later_deadline_or_position():
    def group(deadline_step, position):
        return PendingGroup(position=position, deadline_step=deadline_step)

    chosen, rest = [group(4, 9), group(5, 3)], [group(4, 8), group(4, 10), group(5, 2), group(5, 4), group(6, 1)]

    assert num_before(chosen, rest) == 3


def test_the_last_steps_request_nothing_for_later_ones():
    window = Window(per_step=4, steps_ahead=2, max_staleness=2)

    window.add(range(12), step=1)

    assert [window.num_missing(4, ahead) for ahead in (3, 2, 1, 0)] == [0, 0, 0, 0]
    assert Window(per_step=4, steps_ahead=2, max_staleness=2).num_missing(4, 0) == 4


def test_restored_groups_come_first():
    window = Window(per_step=2, steps_ahead=1, max_staleness=2)
    window.add([7], step=3)

    window.put_back([PendingGroup(position=9, deadline_step=4), PendingGroup(position=3, deadline_step=4)])

    assert [group.position for group in window.pending] == [3, 9, 7]
