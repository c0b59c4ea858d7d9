"""Processes in a process group (gloo, and NCCL for CUDA tensors), with a deadline."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlcore.testing.waiting import HANG_S

_PRELOADED = ("torch.distributed.checkpoint", "transformers.models.llama.modeling_llama", "rlcore.backends.local")


def start_ranks(
    world: int,
    function: Callable[..., Any],
    directory: Path,
    *args: Any,
    preload: Sequence[str] = (),
    timeout_s: float = HANG_S,
) -> list[BaseProcess]:
    """Start processes that run function(rank, world, directory, *args) and write its result to directory/rank.json.

    Args:
        preload: modules that the fork server imports once; only those of the first call count.
        timeout_s: limit of one collective; at least 30.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preload])
    directory.mkdir(parents=True, exist_ok=True)
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, world, function, directory, args, timeout_s), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(
    world: int,
    function: Callable[..., Any],
    directory: Path,
    *args: Any,
    preload: Sequence[str] = (),
    timeout_s: float = HANG_S,
) -> list[Any]:
    """Run the ranks and return their JSON results in order of rank; the first failure ends all of them."""
    ranks = start_ranks(world, function, directory, *args, preload=preload, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        alive: dict[Any, BaseProcess] = {process.sentinel: process for process in ranks}
        while alive:
            ready = wait(list(alive), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"{len(alive)} of {world} ranks did not end within {timeout_s} s"
            for sentinel in ready:
                process = alive.pop(sentinel)
                assert process.exitcode == 0, _failure(directory) or f"a rank ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
            process.join(HANG_S)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world)]


def _rank(
    rank: int, world: int, function: Callable[..., Any], directory: Path, args: tuple[Any, ...], timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=max(30.0, timeout_s)),
        )
        result = function(rank, world, directory, *args)
        (directory / f"{rank}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (directory / f"{rank}.failed").write_text(f"{time.time()} rank {rank}\n{traceback.format_exc()}")
        raise


def _failure(directory: Path) -> str | None:
    """Return the traceback of the rank that failed first, waiting briefly for it."""
    for _ in range(20):
        texts = sorted(path.read_text() for path in directory.glob("*.failed"))
        if texts:
            return texts[0]
        with contextlib.suppress(InterruptedError):
            time.sleep(0.05)
    return None
