"""One rank of an engine as a process: `rank.py RANK WORLD TENSOR_PARALLEL MODEL DIRECTORY`. Writes its samples."""

import asyncio
import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from conftest import interrupted, requests_of, run, tokens
from rlcore_vllm import VLLMConfig, VLLMRollout
from test_equals_hf import PROMPTS, changed_weights

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing.waiting import HANG_S


def main(rank, world_size, tensor_parallel, model, directory):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=HANG_S),
    )
    engine = VLLMRollout(
        VLLMConfig(tensor_parallel=tensor_parallel, max_batch_size=16),
        model=ModelConfig(path=model),
        context=RolloutContext(rank=rank, world_size=world_size),
    )
    sampled = [tokens(run(engine, requests_of(PROMPTS)))]
    sampled.append({k: list(s.log_probs) for k, s in run(engine, requests_of(PROMPTS, temperature=1.0)).items()})
    engine.load_weights(iter(changed_weights(model, 1.3)), 1)
    sampled.append(tokens(run(engine, requests_of(PROMPTS))))
    asked = requests_of(PROMPTS, temperature=1.0, max_response_tokens=60)
    sampled.append(tokens(run(engine, asked)))
    updated = asyncio.run(interrupted(engine, asked, changed_weights(model, 1.3)))
    sampled.append(tokens(updated))
    engine.close()
    assert dist.is_initialized(), "the engine must not destroy the pool's process group"
    versions = [list(updated[i].token_versions) for i in sorted(updated)]
    facts = {"sampled": sampled, "versions": versions, "mesh": asdict(engine.mesh)}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*[int(word) for word in sys.argv[1:4]], *sys.argv[4:])
