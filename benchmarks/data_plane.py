"""Measure the cost of moving a batch, calling a group and starting workers.

    python benchmarks/data_plane.py            (about a minute; 3 GB of memory)

Everything is measured in one run on one machine and printed as ratios, next to the budgets.
"""

import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # hosts import benchmarks.workers by name

from benchmarks.workers import Echo, PlainActor, saved
from rlcore import Batch
from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.record import Record

ROWS, TOKENS = 512, 8192
INTEGERS = ("input_ids", "position_ids", "segment_ids", "labels")
FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'measurement':<52} {'result':>12}   budget")
    runtime, spawn_s = _start(4)
    _say("4 CPU workers, processes and first call", f"{spawn_s:.1f} s", "6 s")
    for size in (1, 2, 4):
        group = spawn(Echo, runtime, role=f"echo{size}", pool=f"pool{size}")
        latency = _median(group.noop, 200)
        _say(f"no-op call of a group, {size} workers", f"{latency * 1e3:.2f} ms", "1.5 ms" if size == 2 else "")
        plain = [ray.remote(PlainActor).options(num_cpus=0).remote() for _ in range(size)]
        bare = _median(lambda: ray.get([actor.noop.remote() for actor in plain], timeout=120), 200)  # noqa: B023
        _say(f"  the same with bare Ray, {size} actors", f"{bare * 1e3:.2f} ms")
        if size == 1:
            _move(group)
            _controller_bytes(group)
    runtime.shutdown()


def _start(num_workers: int) -> tuple:
    """Start pools of 1, 2 and 4 hosts; return the runtime and the start time of a pool of `num_workers` alone."""
    # More hosts than cores: this measures rlcore and Ray, not the arithmetic of the workers.
    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    start = time.perf_counter()
    alone = make_runtime(RuntimeConfig(name="ray"))
    alone.start({"main": PoolConfig(devices_per_node=num_workers, device="cpu")}, {})
    spawn(Echo, alone, role="echo", pool="main").noop()
    seconds = time.perf_counter() - start
    alone.shutdown()
    runtime = make_runtime(RuntimeConfig(name="ray"))
    runtime.start({f"pool{n}": PoolConfig(devices_per_node=n, device="cpu") for n in (1, 2, 4)}, {})
    return runtime, seconds


def _move(group: Echo) -> None:
    """Move the same bytes through rlcore, bare Ray and torch.save, and copy them once."""
    columns = {name: torch.randint(0, 50_000, (ROWS * TOKENS,)) for name in INTEGERS}
    columns |= {name: torch.randn(ROWS * TOKENS) for name in FLOATS}
    columns["loss_mask"] = torch.rand(ROWS * TOKENS) > 0.5
    batch = Batch.of(lengths=[TOKENS] * ROWS, tokens=columns)
    names = [f"{name}_back" for name in columns]
    padded = {name: column.reshape(ROWS, TOKENS) for name, column in columns.items()}
    size = sum(column.nbytes for column in columns.values())
    actor = ray.remote(PlainActor).options(num_cpus=0).remote()
    _say(f"batch of {ROWS} × {TOKENS} tokens, {len(columns)} columns", f"{size / 1e6:.0f} MB")

    def through_rlcore() -> None:
        found = group.echo(batch).fetch(*names)
        assert found[0][-1] == columns[INTEGERS[0]][-1]

    def through_bare_ray() -> None:
        refs = ray.get(actor.put_back.remote([ray.put(array) for array in flat]), timeout=120)
        found = ray.get(refs, timeout=120)
        assert found[0][-1] == columns[INTEGERS[0]][-1]

    def through_torch_save() -> None:
        reply = ray.get(actor.echo.remote(saved(padded)), timeout=120)
        found = torch.load(io.BytesIO(reply), weights_only=True)
        assert found[INTEGERS[0]][-1, -1] == columns[INTEGERS[0]][-1]

    flat = [column.numpy() for column in columns.values()]
    targets = [np.ones_like(array) for array in flat]

    def copied_into_new_memory() -> None:
        assert all(len(array.copy()) for array in flat)

    def copied_once() -> None:
        for target, array in zip(targets, flat):
            np.copyto(target, array)

    ways = {"torch.save": through_torch_save, "rlcore": through_rlcore, "bare": through_bare_ray, "copy": copied_once}
    ways["new copy"] = copied_into_new_memory
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(7):  # interleaved, so that a slow moment of the machine affects all of them
        for name, way in ways.items():
            seconds[name].append(_timed(way))
    best = {name: min(times) for name, times in seconds.items()}
    for name, label in (
        ("copy", "  one copy of the bytes, into existing memory"),
        ("new copy", "  one copy of the bytes, into new memory"),
        ("rlcore", "  controller → worker → controller, rlcore"),
        ("bare", "  the same columns, bare Ray"),
        ("torch.save", "  the same, padded, torch.save"),
    ):
        _say(label, f"{best[name] * 1e3:.0f} ms")
    _say("  torch.save / rlcore", f"{best['torch.save'] / best['rlcore']:.1f} ×", "≥ 10 ×")
    _say("  rlcore / one copy into existing memory", f"{best['rlcore'] / best['copy']:.2f} ×", "≤ 2 ×")
    _say("  rlcore / bare Ray", f"{best['rlcore'] / best['bare']:.2f} ×")
    _say("  rlcore / one copy into new memory", f"{best['rlcore'] / best['new copy']:.2f} ×")


def _controller_bytes(group: Echo) -> None:
    """Measure the bytes of GRPO's calls that reach the controller, for growing responses."""
    for length in (256, 1024, 8192):
        rows = 64
        prompts = Batch.of(
            lengths=[length] * rows,
            tokens={"input_ids": torch.zeros(rows * length, dtype=torch.int64)},
            rows={"reward": torch.zeros(rows), "group_id": list(range(rows))},
        )
        samples = group.echo(prompts.select("input_ids"))  # as if the worker had generated them
        record = Record()
        measured = group.recording(record)
        samples |= measured.log_probs(samples)
        samples = samples.balance(1)
        measured.log_probs(samples)
        _say(f"controller bytes of two calls, responses of {length}", f"{record.num_bytes:,}", "constant")


def _median(call: Callable[[], object], times: int) -> float:
    for _ in range(20):
        call()
    return statistics.median(_timed(call) for _ in range(times))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _say(what: str, figure: str, budget: str = "") -> None:
    print(f"{what:<52} {figure:>12}   {budget}", flush=True)


if __name__ == "__main__":
    main()
