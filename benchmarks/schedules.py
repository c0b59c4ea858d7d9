"""Compare schedules in virtual time: continuous batching, responses of lognormal lengths, 16 devices; no engine.

    python benchmarks/schedules.py             (about 20 seconds; prints a table and writes docs/schedules.svg)

The groups of each step are chosen by the trainer's own `Window`, so staleness and waits are those of a run. An engine
advances up to SLOTS responses by one token in TOKEN_S + RESPONSE_S · (responses in progress) seconds. Each schedule
with two pools gets the split of devices that is fastest for it. The baseline generates and trains on all devices
alternately, and switching costs nothing.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from rlcore.data.batch import Batch
from rlcore.trainer.window import PendingGroup, Window

DEVICES = 16
PROMPTS, SAMPLES = 64, 16
SLOTS = 256
TOKEN_S, RESPONSE_S = 0.010, 0.00006
TRAINED_TOKENS_PER_S = 3500.0
"""By one device, with everything that a step does beside generation."""
UPDATE_S = 1.0
"""Engines pause for new weights."""
SPLITS = (6, 8, 10, 12)
"""Devices that generate, of all DEVICES; the others train."""
WARM_UP, NUM_STEPS = 8, 30
SHOWN_S = 620.0
"""Time in the picture."""
PICTURE = Path(__file__).parents[1] / "docs" / "schedules.svg"
FINISHED = Batch.of(lengths=[])


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lognormal response lengths in tokens."""

    sigma: float
    median: float = 1000
    longest: float = 16384

    def draw(self, generator: random.Random) -> float:
        return max(8.0, min(self.longest, generator.lognormvariate(math.log(self.median), self.sigma)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of a schedule, and how it uses the devices."""

    name: str
    steps_ahead: int = 0
    max_staleness: int = 0
    in_flight_updates: bool = False
    shared: bool = False
    """Rollout and trainer hold the same devices alternately."""
    num_generating: int = DEVICES


SYNC = Schedule(name="sync, one pool", shared=True)
PIPELINED = Schedule(name="pipelined", steps_ahead=1, max_staleness=1)
ASYNC = Schedule(name="async, A = 1, k = 4", steps_ahead=1, max_staleness=4, in_flight_updates=True)
ASYNC_2 = Schedule(name="async, A = 2, k = 4", steps_ahead=2, max_staleness=4, in_flight_updates=True)
PARTIAL = replace(ASYNC, name="partial rollouts, one pool", shared=True)
SCHEDULES = (SYNC, PIPELINED, ASYNC, ASYNC_2, PARTIAL)
CASES = {
    "sigma 0.3": (PROMPTS, Lengths(sigma=0.3)),
    "sigma 1": (PROMPTS, Lengths(sigma=1.0)),
    "sigma 1.5": (32, Lengths(sigma=1.5, median=800, longest=32768)),
}
"""Prompts of a step, and the lengths of responses in tokens."""


@dataclass(kw_only=True)
class Outcome:
    """Events and measurements of a simulated run, in virtual seconds."""

    begin_s: float = 0.0
    """When the first step after the warm-up begins."""
    step_s: float = 0.0
    trainer_waits: float = 0.0
    """Share of the time."""
    staleness: list[int] = field(default_factory=list)
    """Of each trained group."""
    training: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each step's update."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When engines generate nothing, for new weights or because the trainer has the devices."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """Time, and by how much the number of responses in progress changed."""

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / len(self.staleness)


class Engine:
    """Responses that advance together, one token at a time; a finished one makes room for the next."""

    def __init__(self, changes: list[tuple[float, int]]) -> None:
        self.now = 0.0
        self.running: list[tuple[float, int]] = []
        """Heap of (the token at which a response ends, group)."""
        self.waiting: deque[tuple[float, int]] = deque()
        self.next_end = math.inf
        """When the next response ends."""
        self._token = 0.0
        self._changes = changes

    @property
    def num_open(self) -> int:
        return len(self.running) + len(self.waiting)

    def request(self, lengths: list[float], group: int) -> None:
        self.waiting += [(length, group) for length in lengths]
        self._start()

    def advance(self, time: float) -> list[int]:
        """Move to a time, at most `next_end`, and return the groups of responses that ended."""
        if self.running and time > self.now:
            self._token += (time - self.now) / self._pace()
        self.now = max(self.now, time)
        ended = []
        while self.running and self.running[0][0] - self._token < 1e-6:
            ended.append(heapq.heappop(self.running)[1])
        if ended:
            self._changes.append((self.now, -len(ended)))
        self._start()
        return ended

    def pause(self, time: float) -> None:
        """Move to a time without generating."""
        self.next_end += time - self.now
        self.now = time

    def _pace(self) -> float:
        return TOKEN_S + RESPONSE_S * len(self.running)

    def _start(self) -> None:
        while self.waiting and len(self.running) < SLOTS:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self._token + length, group))
            self._changes.append((self.now, 1))
        self.next_end = self.now + (self.running[0][0] - self._token) * self._pace() if self.running else math.inf


_next_end = attrgetter("next_end")


class Engines:
    """All engines of a pool, and which groups they have finished."""

    def __init__(self, number: int, outcome: Outcome) -> None:
        self.now = 0.0
        self._outcome = outcome
        self._engines = [Engine(outcome.changes) for _ in range(number)]
        self._open: dict[int, tuple[PendingGroup, int]] = {}

    @property
    def idle(self) -> bool:
        return not self._open

    def request(self, group: PendingGroup, lengths: list[float]) -> None:
        """Give all samples of a group to the engine with the fewest open ones."""
        engine = min(self._engines, key=lambda it: it.num_open)
        engine.advance(self.now)
        self._open[group.position] = (group, len(lengths))
        engine.request(lengths, group.position)

    def run(self, until: float = math.inf) -> None:
        """Run until a time, or until another group is finished."""
        while (engine := min(self._engines, key=_next_end)).next_end <= until:
            self.now = max(self.now, engine.next_end)
            finished = [self._end(position) for position in engine.advance(engine.next_end)]
            if any(finished) and until == math.inf:
                return
        assert until < math.inf, "the engines are idle, and the step waits"
        self.now = until
        for engine in self._engines:
            engine.advance(until)

    def pause(self, seconds: float) -> None:
        """Generate nothing for some time: the clock moves, the responses do not."""
        self._outcome.pauses.append((self.now, self.now + seconds))
        self.now += seconds
        for engine in self._engines:
            engine.pause(self.now)

    def _end(self, position: int) -> bool:
        """Count the end of one response, and return whether its group is finished."""
        group, left = self._open.pop(position)
        if left > 1:
            self._open[position] = (group, left - 1)
        else:
            group.samples = FINISHED
        return left == 1


def simulate(
    schedule: Schedule, lengths: Lengths, *, prompts: int = PROMPTS, num_steps: int = NUM_STEPS, seed: int = 0
) -> Outcome:
    """Simulate the first steps of an endless run; means are those of the steps after WARM_UP."""
    outcome = Outcome()
    generator = random.Random(seed)
    engines = Engines(schedule.num_generating, outcome)
    num_training = DEVICES if schedule.shared else DEVICES - schedule.num_generating
    window = Window(per_step=prompts, steps_ahead=schedule.steps_ahead, max_staleness=schedule.max_staleness)
    drawn: dict[int, list[float]] = {}
    version: dict[int, int] = {}
    waited = 0.0
    for step in range(1, num_steps + 1):
        if step == WARM_UP + 1:
            outcome.begin_s, waited = engines.now, 0.0
            outcome.staleness.clear()
        missing = window.num_missing(prompts, schedule.steps_ahead)
        for group in window.add(range(len(drawn), len(drawn) + missing), step):
            drawn[group.position] = [lengths.draw(generator) for _ in range(SAMPLES)]
            version[group.position] = step - 1
            engines.request(group, drawn[group.position])
        asked = engines.now
        while (chosen := window.choose(prompts, step)) is None:
            engines.run()
        waited += engines.now - asked
        outcome.staleness += [step - 1 - version[group.position] for group in chosen]
        seconds = sum(sum(drawn[it.position]) for it in chosen) / (TRAINED_TOKENS_PER_S * num_training)
        outcome.training.append((engines.now, engines.now + seconds))
        if schedule.shared:
            engines.pause(seconds)
        else:
            engines.run(engines.now + seconds)
        asked = engines.now
        while not schedule.in_flight_updates and not engines.idle:
            engines.run()
        waited += engines.now - asked
        engines.pause(UPDATE_S)
    total = engines.now - outcome.begin_s
    outcome.step_s, outcome.trainer_waits = total / (num_steps - WARM_UP), waited / total
    return outcome


def best(schedule: Schedule, lengths: Lengths, prompts: int) -> tuple[Schedule, Outcome]:
    """Return the schedule with its fastest split of the devices, and the outcome."""
    splits = [schedule] if schedule.shared else [replace(schedule, num_generating=it) for it in SPLITS]
    outcomes = [(it, simulate(it, lengths, prompts=prompts)) for it in splits]
    return min(outcomes, key=lambda pair: pair[1].step_s)


def main() -> None:
    rows: dict[str, list[str]] = {schedule.name: [schedule.name] for schedule in SCHEDULES}
    for prompts, lengths in CASES.values():
        outcomes = [best(schedule, lengths, prompts) for schedule in SCHEDULES]
        for schedule, outcome in outcomes:
            speed = f"{outcomes[0][1].step_s / outcome.step_s:.2f} ×"
            split = "" if schedule.shared else f", {schedule.num_generating} generate"
            rows[schedule.name] += [f"{speed}{split}", f"{outcome.mean_staleness:.2f}, {max(outcome.staleness)}"]
        if lengths.sigma == 1.0:
            PICTURE.write_text(picture(outcomes))
    header = ["schedule", *(cell for case in CASES for cell in (case, "staleness"))]
    for cells in (header, ["---"] * len(header), *rows.values()):
        print(f"| {' | '.join(cells)} |")


LEFT, WIDTH, ROW, ENGINES, TRAINER = 192, 620, 74, 34, 15
"""Sizes in the picture: labels, time axis, distance of two schedules, and the two lanes of each."""


def picture(outcomes: list[tuple[Schedule, Outcome]]) -> str:
    """Return an SVG of who works when: responses in progress, and the steps of the trainer."""
    most = max(level for _, outcome in outcomes for level in levels(outcome))
    parts = [
        text(LEFT, 20, "responses being generated", "#4a7fb5"),
        text(LEFT + 190, 20, "training, with the number of the step", "#c98a2b"),
        text(LEFT + WIDTH + 12, 20, "speed", "#444"),
    ]
    for row, (schedule, outcome) in enumerate(outcomes):
        top = 36 + row * ROW
        pools = (
            f"{DEVICES} devices do both"
            if schedule.shared
            else f"{schedule.num_generating} devices generate, {DEVICES - schedule.num_generating} train"
        )
        speed = outcomes[0][1].step_s / outcome.step_s
        parts += [
            text(8, top + 22, schedule.name, "#222", weight="bold"),
            text(8, top + 40, pools, "#444"),
            text(LEFT + WIDTH + 12, top + 22, f"{speed:.2f} ×", "#222", weight="bold"),
            text(LEFT + WIDTH + 12, top + 40, f"staleness {outcome.mean_staleness:.1f}", "#444"),
            f'<path d="{area(outcome, top, most)}" fill="#a9c8e8" stroke="#4a7fb5" stroke-width="0.5"/>',
            *(box(number, start, end, top, outcome) for number, (start, end) in enumerate(outcome.training, 1)),
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{top + ENGINES}" y2="{top + ENGINES}" stroke="#aaa"/>',
        ]
    height = 36 + len(outcomes) * ROW + 14
    axis = [text(LEFT + second, height - 8, f"{second} s", "#444") for second in range(0, int(SHOWN_S), 100)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 106} {height}" font-family="sans-serif"'
    )
    return "\n".join(
        [f'{head} font-size="12"><rect width="100%" height="100%" fill="white"/>', *parts, *axis, "</svg>\n"]
    )


def levels(outcome: Outcome) -> list[int]:
    """Return the number of responses in progress at every pixel, 0 while engines pause."""
    found, running, changes = [], 0, deque(sorted(outcome.changes))
    for pixel in range(0, WIDTH + 1, 2):
        time = outcome.begin_s + pixel * SHOWN_S / WIDTH
        while changes and changes[0][0] <= time:
            running += changes.popleft()[1]
        found.append(0 if any(start <= time < end for start, end in outcome.pauses) else running)
    return found


def area(outcome: Outcome, top: float, most: int) -> str:
    heights = [ENGINES * level / most for level in levels(outcome)]
    steps = "".join(f"V{top + ENGINES - height:.1f}h2" for height in heights[:-1])
    return f"M{LEFT},{top + ENGINES}{steps}V{top + ENGINES}z"


def box(number: int, start: float, end: float, top: float, outcome: Outcome) -> str:
    """Return the update of a step, or nothing if it is not in the picture."""
    scale = WIDTH / SHOWN_S
    left = max(0.0, (start - outcome.begin_s) * scale)
    right = min(WIDTH, (end - outcome.begin_s) * scale)
    if right <= left:
        return ""
    y = top + ENGINES + 3
    label = text(LEFT + (left + right) / 2 - 6, y + 12, f"{number}", "#7a4f0d") if right - left > 16 else ""
    shape = f'<rect x="{LEFT + left:.1f}" y="{y}" width="{right - left:.1f}" height="{TRAINER}"'
    return f'{shape} fill="#fdf3e4" stroke="#c98a2b"/>{label}'


def text(x: float, y: float, words: str, color: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{color}" font-weight="{weight}">{words}</text>'


if __name__ == "__main__":
    main()
