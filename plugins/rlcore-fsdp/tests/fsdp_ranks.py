"""Real processes in real process groups (gloo), for tests: started quickly, watched, and ended at a deadline."""

import contextlib
import json
import multiprocessing
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

_PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"]


def start_ranks(world, function, directory, *args):
    """Processes that run function(rank, world, directory, *args) and write its result to directory/rank.json."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, "rlcore_fsdp", "rlcore.backends.local"])
    directory.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(rank, world, function, directory, args), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(world, function, directory, *args, timeout_s=90.0):
    """Their results in order of rank; the first failure of a rank ends all of them."""
    ranks = start_ranks(world, function, directory, *args)
    deadline = time.monotonic() + timeout_s
    try:
        alive = {process.sentinel: process for process in ranks}
        while alive:
            ready = wait(list(alive), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"{len(alive)} of {world} ranks did not end within {timeout_s} s"
            for sentinel in ready:
                process = alive.pop(sentinel)
                assert process.exitcode == 0, _failure(directory) or f"a rank ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
            process.join(5)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world)]


def _rank(rank, world, function, directory, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=30),
        )
        result = function(rank, world, directory, *args)
        (directory / f"{rank}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (directory / f"{rank}.failed").write_text(f"{time.time()} rank {rank}\n{traceback.format_exc()}")
        raise


def _failure(directory):
    """The traceback of the rank that failed first; it has the time it needs to write it."""
    for _ in range(20):
        texts = sorted(path.read_text() for path in directory.glob("*.failed"))
        if texts:
            return texts[0]
        with contextlib.suppress(InterruptedError):
            time.sleep(0.05)
    return None
