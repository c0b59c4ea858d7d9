"""`python host.py MODEL PHASE`: a host with an engine, for tests that kill it. Says the engine's pid, then when it is busy."""

import asyncio
import subprocess
import sys
import time

import torch
from rlcore_sglang import SGLangConfig, SGLangRollout

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import Request, Sampling


def main():
    model, phase = sys.argv[1:]
    start = subprocess.Popen

    def start_and_say(command, **options):
        process = start(command, **options)
        if "rlcore_sglang.engine" in command:
            print(process.pid, flush=True)
        return process

    subprocess.Popen = start_and_say
    engine = SGLangRollout(SGLangConfig(max_batch_size=8), model=ModelConfig(path=model), context=RolloutContext())
    print("started", flush=True)
    if phase == "load":
        engine.load_weights(slow(engine._expected._shapes), 1)
    for _ in range(1000):
        asyncio.run(drain(engine))


def slow(shapes):
    for name, shape in shapes.items():
        time.sleep(1.0)
        yield name, torch.zeros(shape)


async def drain(engine):
    sampling = Sampling(max_response_tokens=200)
    asked = [Request(request_id=i, prompt_ids=[3, 4], sampling=sampling, seed=i) for i in range(8)]
    async for _ in engine.generate(asked):
        pass


if __name__ == "__main__":
    main()
