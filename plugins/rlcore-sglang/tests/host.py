"""`python host.py MODEL PHASE`: a host with an engine, for tests that kill it. Prints the engine's pid, then when it is busy."""

import asyncio
import subprocess
import sys
import time

import torch
from rlcore_sglang import SGLangConfig, SGLangRollout, weights

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
    engine = SGLangRollout(
        SGLangConfig(max_batch_size=8, bucket_mb=1), model=ModelConfig(path=model), context=RolloutContext()
    )
    print("started", flush=True)
    if phase == "load":
        weights._MB = 20_000
        control = engine._engine.control

        def control_and_say(action, **fields):
            control(action, **fields)
            if action == "update_weights_from_tensor":
                print("took a piece", flush=True)

        engine._engine.control = control_and_say
        engine.load_weights(slow(engine._expected.shapes), 1)
    for _ in range(1000):
        asyncio.run(drain(engine))


def slow(shapes):
    for name, shape in shapes.items():
        time.sleep(0.2)
        yield name, torch.zeros(shape)


async def drain(engine):
    sampling = Sampling(max_response_tokens=200)
    asked = [Request(request_id=i, prompt_ids=[3, 4], sampling=sampling, seed=i) for i in range(8)]
    async for _ in engine.generate(asked):
        pass


if __name__ == "__main__":
    main()
