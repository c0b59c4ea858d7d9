"""Measure the seconds for 100 MB of weights to an engine by each transfer, relative to one copy of the bytes.

    python benchmarks/weight_sync.py vllm      (about three minutes; needs rlcore-vllm)
    python benchmarks/weight_sync.py sglang    (about five minutes; needs rlcore-sglang)

The model is a Llama of 100 MB in float32 on a CPU. `inprocess`, `object_store` and `collective` are complete weight syncs
of a run: the first within one process, the others between two Ray pools. `disk` is SGLang's `rollout.weights=disk`, and
`server` sends files to a server that is already running. Each result is the best of several repeats.
"""

import socket
import subprocess
import sys
import tempfile
import time

import torch
from rollout import ALONE, kind_of, save_model

from rlcore.cli.train import plan_run
from rlcore.errors import InfrastructureError
from rlcore.kits.http import JsonClient
from rlcore.models.load import copy_tokenizer, load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.quickstart import cache_directory, prepare
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import step

REPEATS, HIDDEN, LAYERS = 5, 512, 6
_START_S = 120


def main() -> None:
    if sys.argv[1:] not in [[engine] for engine in ALONE]:
        raise SystemExit(__doc__)
    engine = sys.argv[1]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        path = f"{directory}/model"
        save_model(path, HIDDEN, LAYERS)
        copy_tokenizer(prepare(cache_directory(), progress=print).model, type(cache_directory())(path))
        weights = dict(load_model(path).named_parameters())
        size = sum(tensor.nbytes for tensor in weights.values()) / 1e8
        print(f"{size:.2f} × 100 MB in {len(weights)} tensors; seconds for 100 MB")
        kept = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        copied = best(lambda: [kept[name].copy_(tensor.detach()) for name, tensor in weights.items()])
        report("one copy", copied / size, copied / size)
        split = ["placement=split"]
        ways = {
            "inprocess": ["runtime=local"],
            "object_store": [*split, "transfer=object_store"],
            "collective": [*split, "transfer=collective"],
        }
        if engine == "sglang":
            ways["disk"] = ["runtime=local", "rollout.weights=disk"]
        for name, own in ways.items():
            seconds, share = of_a_run(engine, [f"model.path={path}", f"run.directory={directory}", *own])
            report(name, seconds / size, copied / size, f"{share:.1%} of a step")
        report("server", to_a_server(engine, path, weights) / size, copied / size)


def of_a_run(engine, overrides):
    """Return the seconds of a weight sync and its share of a step."""
    fixed = ["preset=quickstart", f"rollout={engine}", "trackers=[]", "trainer.steps=1000", "eval.every_steps=0"]
    run = launch(*plan_run([*fixed, "trainer.prompts_per_step=4", f"run.name=b{time.time_ns()}", *overrides]))
    try:
        found = [step(run, run.next_step()) for _ in range(3)][1:]
        shares = [metrics["time_s/weight sync"] / metrics["perf/step_s"] for metrics in found]
        return best(lambda: run.roles.sync(version=9)), min(shares)
    finally:
        run.runtime.shutdown()


def to_a_server(engine, path, weights):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    server = subprocess.Popen(
        [sys.executable, "-m", f"rlcore_{engine}.serve", path, "--port", str(port), "--kv-cache-gb", "0.25"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            try:
                JsonClient(url, engine, 2.0).call("GET", "/v1/models")
                break
            except InfrastructureError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        kind = kind_of(engine)
        client = kind(kind.Config(url=url), model=ModelConfig(path=path), context=RolloutContext())
        return best(lambda: client.load_weights(iter(weights.items()), 1))
    finally:
        server.terminate()
        server.wait(timeout=30)


def best(action):
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def report(name, seconds, copied, note=""):
    print(f"  {name:<14}{seconds:>8.3f} s   {seconds / copied:>5.1f} × one copy   {note}", flush=True)


if __name__ == "__main__":
    main()
