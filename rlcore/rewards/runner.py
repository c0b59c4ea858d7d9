"""Load rewards and call them, one result per sample. Runs in the executor's child processes, or inline for a debugger.

It enforces timeouts only on coroutines; the executor ends hangs in plain code.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import inspect
import math
import numbers
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

from rlcore.errors import ConfigError, RlcoreError, SampleError, UserError, did_you_mean
from rlcore.protocols.reward import RewardResult, RewardSpec
from rlcore.registry import resolve
from rlcore.rewards.pipeline import LARGEST, RewardPart, timed_out
from rlcore.rewards.signature import RewardFunction, Row, Signature, arguments, list_arguments, read_signature

if TYPE_CHECKING:
    import asyncio

Job: TypeAlias = tuple[int, list[int]]
"""(reward index, sample indices)."""
Emit: TypeAlias = Callable[[int, int, RewardPart], None]
"""Receives reward index, sample index and the result."""


def build_reward(spec: RewardSpec) -> RewardFunction:
    """Import a reward and apply its options; raise a UserError that names the reward if this fails."""
    try:
        found = _given(spec.function) if spec.function else resolve("reward", spec.target).object
        reward = _make(spec, found) if inspect.isclass(found) else _bind(spec, found)
        read_signature(reward)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward {spec.name!r} ({spec.target}) cannot be created: {_describe(error)}\nCorrect it, or its options."
        ) from error
    return reward


def _given(function: Any) -> Any:
    """Return a reward that was given as an object of the program that started this run."""
    return pickle.loads(function) if isinstance(function, bytes) else function


def _make(spec: RewardSpec, cls: type) -> RewardFunction:
    config = getattr(cls, "Config", None)
    if config is None:
        _check_options(spec, known=[], needed=[])
        made: RewardFunction = cls()
    else:
        fields = [field for field in dataclasses.fields(config) if field.init]
        needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        _check_options(spec, known=[f.name for f in fields], needed=needed)
        made = cls(config(**spec.options))
    if not callable(made):
        raise ConfigError(f"reward {spec.name!r} is a {cls.__name__}, which cannot be called\nGive it a __call__.")
    return made


def _bind(spec: RewardSpec, function: RewardFunction) -> RewardFunction:
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        options = [p.name for p in parameters if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]
        _check_options(spec, known=options, needed=[])
    return functools.partial(function, **spec.options) if spec.options else function


def _check_options(spec: RewardSpec, *, known: list[str], needed: list[str]) -> None:
    takes = f"Its options: {', '.join(known)}" if known else "It takes no options."
    for name in spec.options:
        if name not in known:
            hint = did_you_mean(name, [*known, "weight", "relative"])
            raise ConfigError(f"reward {spec.name!r} has no option {name!r}.{hint}\n{takes}")
    for name in needed:
        if name not in spec.options:
            raise ConfigError(f"reward {spec.name!r} needs the option {name!r}\n{takes}")


class RewardRunner:
    """Loaded rewards. `run` scores the samples of a chunk and emits each result immediately."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float | None) -> None:
        """Load the rewards; `timeout_s` limits each coroutine, None is for a debugger."""
        self._timeout_s = timeout_s
        self._process_id = os.getpid()
        self._rewards = [build_reward(spec) for spec in specs]
        self._signatures = [read_signature(reward) for reward in self._rewards]
        self._asyncio: asyncio.Runner | None = None

    @property
    def concurrent(self) -> list[bool]:
        """True for each reward that processes several samples at once, so that silence does not show which one hangs."""
        return [signature.is_async or signature.batched for signature in self._signatures]

    def run(self, rows: Mapping[int, Row], jobs: Sequence[Job], emit: Emit) -> None:
        """Score `rows` with the rewards in `jobs`."""
        for index, samples in jobs:
            reward, signature = self._rewards[index], self._signatures[index]
            calls = [samples] if signature.batched else [[sample] for sample in samples]
            if signature.is_async:
                self._event_loop().run(self._run_async(index, calls, rows, emit))
                continue
            for call in calls:
                self._emit(emit, index, call, _ask(reward, signature, [rows[sample] for sample in call]))

    def close(self) -> None:
        """Close the event loop of asynchronous rewards."""
        if self._asyncio is not None:
            self._asyncio.close()
            self._asyncio = None

    def _event_loop(self) -> asyncio.Runner:
        """Return the only event loop: rewards keep HTTP sessions, which belong to a loop."""
        if self._asyncio is None:
            import asyncio

            self._asyncio = asyncio.Runner()
        return self._asyncio

    async def _run_async(self, index: int, calls: Sequence[list[int]], rows: Mapping[int, Row], emit: Emit) -> None:
        import asyncio

        async def one(call: list[int]) -> None:
            chosen = [rows[sample] for sample in call]
            parts = await _ask_async(self._rewards[index], self._signatures[index], chosen, self._timeout_s)
            self._emit(emit, index, call, parts)

        await asyncio.gather(*(one(call) for call in calls))

    def _emit(self, emit: Emit, index: int, samples: Sequence[int], parts: Sequence[RewardPart]) -> None:
        """Emit the results. Exit if this process is a fork that a reward created and let return."""
        if os.getpid() != self._process_id:
            os._exit(1)
        for sample, part in zip(samples, parts, strict=True):
            emit(index, sample, part)


def _ask(reward: RewardFunction, signature: Signature, rows: Sequence[Row]) -> list[RewardPart]:
    try:
        return _parts_of(signature, reward(**_keywords(signature, rows)), len(rows))
    except BaseException as error:
        return [_failure(error)] * len(rows)


async def _ask_async(
    reward: RewardFunction, signature: Signature, rows: Sequence[Row], timeout_s: float | None
) -> list[RewardPart]:
    import asyncio

    try:
        async with asyncio.timeout(timeout_s) as limit:
            return _parts_of(signature, await reward(**_keywords(signature, rows)), len(rows))
    except BaseException as error:
        late = timeout_s is not None and limit.expired()
        return [timed_out(timeout_s or 0.0) if late else _failure(error)] * len(rows)


def _failure(error: BaseException) -> RewardPart:
    """Convert an exception of a reward to an error of its sample, except Ctrl-C, which a child process ignores."""
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raise error
    return RewardPart("error", message=_describe(error))


def _keywords(signature: Signature, rows: Sequence[Row]) -> dict[str, Any]:
    return list_arguments(signature, rows) if signature.batched else arguments(signature, rows[0])


def _parts_of(signature: Signature, answer: Any, num_samples: int) -> list[RewardPart]:
    if not signature.batched:
        return [part_of(answer, signature)]
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise SampleError(f"returned {type(answer).__name__}, not a list of {num_samples}")
    if len(answer) != num_samples:
        raise SampleError(f"returned a list of {len(answer)} for {num_samples} completions")
    return [_part_or_error(value, signature) for value in answer]


def _part_or_error(value: Any, signature: Signature) -> RewardPart:
    try:
        return part_of(value, signature)
    except SampleError as error:
        return RewardPart("error", message=_describe(error))


def part_of(answer: Any, signature: Signature) -> RewardPart:
    """Convert the answer of a reward to a score or a skip; raise SampleError for anything else."""
    metrics: Mapping[str, Any] = {}
    if isinstance(answer, RewardResult):
        answer, metrics = answer.value, answer.metrics
    elif isinstance(answer, dict) and signature.convention == "verl" and "score" in answer:
        # in verl, the other entries may be anything; only numbers are metrics, not an extracted answer, for example
        metrics = {name: value for name, value in answer.items() if name != "score" and isinstance(value, numbers.Real)}
        answer = answer["score"]
    measured = {name: _finite(value, f"metric {name!r} is") for name, value in metrics.items()}
    if answer is None:
        return RewardPart("skip", metrics=measured)
    score = _finite(answer, "returned")
    if abs(score) > LARGEST:
        raise SampleError(f"returned {score:.3g}, which is infinite in float32")
    return RewardPart("score", score, metrics=measured)


def _finite(value: Any, what: str) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise SampleError(f"{what} {value!r:.60} ({type(value).__name__}), not a number, None or RewardResult")
    if not math.isfinite(value):
        raise SampleError(f"{what} {float(value)}, not a finite number")
    return float(value)


def _describe(error: BaseException) -> str:
    """Return one line with the exception and its location in the reward's code."""
    if isinstance(error, RlcoreError):
        return str(error).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def serve(fd: int, lifeline: int) -> None:
    """Run a child process: load the rewards sent over `fd`, then score chunks until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for inherited in (fd, lifeline):
        os.set_inheritable(inherited, False)
    _end_with(lifeline)
    connection = Connection(fd)
    specs, timeout_s = connection.recv()
    try:
        runner = RewardRunner(specs, timeout_s)
    except UserError as error:
        connection.send(error)
        return
    connection.send(runner.concurrent)
    try:
        while True:
            rows, jobs = connection.recv()
            runner.run(rows, jobs, lambda reward, sample, part: connection.send((reward, sample, part)))
    except EOFError:
        runner.close()


def _end_with(lifeline: int) -> None:
    """Make the kernel end this process group when the parent's end of the pipe closes, whatever Python is doing.

    A thread would not suffice: a backtracking regular expression never releases the interpreter lock."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the parent process ended before its reward process started")
