"""Tokens drawn per second: SGLang alone and the same engine under rlcore; and how fast new weights get into it.

    .venv-sglang/bin/python plugins/rlcore-sglang/benchmarks/rollout.py     (two to three minutes; two cores)

32 requests, prompts and responses of 64 tokens, float32 on a CPU; the best of some turns, taken one after the other in one
process. SGLang alone is its own `Engine.generate`, one call for all, with log-probs and seeds. CPU attention is
`torch_native`, a loop over sequences: the figures compare two ways to the same engine, and say nothing of SGLang's speed.
"""

# ruff: noqa: ANN001, ANN201, ANN202
import asyncio
import random
import tempfile
import time

import torch
from rlcore_sglang import SGLangConfig, SGLangRollout
from rlcore_sglang.own import engine_environment, engine_options

from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.checks import read_limits
from rlcore.types import Request, Sampling

REQUESTS, PROMPT, RESPONSE, TURNS = 32, 64, 64, 5
SAMPLING = Sampling(max_response_tokens=RESPONSE)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        save_model(directory, hidden=128, layers=2, vocab=256)
        speed(directory)
        save_model(directory, hidden=512, layers=4, vocab=32000)
        updates(directory)


def speed(path):
    config, model, context = SGLangConfig(max_batch_size=REQUESTS), ModelConfig(path=path), RolloutContext()
    under = SGLangRollout(config, model=model, context=context)
    alone = raw_engine(config, model, context)
    ways = {"SGLang alone": alone, "rollout=sglang": lambda: drain(under)}
    rates = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, draw in ways.items():
            start = time.perf_counter()
            rates[way].append(draw() / (time.perf_counter() - start))
    under.close()
    print("tokens drawn per second, 0.4 M parameters, batch 32")
    for way, found in rates.items():
        print(f"  {way:<16}{max(found):>9,.0f}   {max(found) / max(rates['SGLang alone']):.2f} × SGLang alone")
    print("  budget: rollout=sglang ≥ 0.95 × SGLang alone", flush=True)


def updates(path):
    engine = SGLangRollout(SGLangConfig(max_batch_size=4), model=ModelConfig(path=path), context=RolloutContext())
    weights = list(load_model(path).requires_grad_(False).named_parameters())
    megabytes = sum(tensor.nbytes for _, tensor in weights) / 1e6
    copies = [torch.empty_like(tensor) for _, tensor in weights]
    copied = min(timed(lambda: [copy.copy_(tensor) for copy, (_, tensor) in zip(copies, weights)]) for _ in range(3))
    loaded = min(timed(lambda: engine.load_weights(iter(weights), 1)) for _ in range(3))
    engine.close()
    print(f"\nnew weights, {megabytes:.0f} MB, per 100 MB")
    print(f"  a copy of the bytes  {copied / megabytes * 1e5:8.1f} ms")
    print(f"  load_weights         {loaded / megabytes * 1e5:8.1f} ms   {loaded / copied:.1f} copies", flush=True)


def raw_engine(config, model, context):
    """SGLang without rlcore. Its engine takes over the process, so this comes after everything else that starts one."""
    import os

    import sglang

    os.environ.update(engine_environment(config, context, []))
    options = engine_options(config, model, context, read_limits(model.path))
    engine = sglang.Engine(**options)

    def draw():
        asked = requests()
        params = [
            {"temperature": 1.0, "max_new_tokens": RESPONSE, "sampling_seed": one.seed, "ignore_eos": True}
            for one in asked
        ]
        outputs = engine.generate(
            input_ids=[one.prompt_ids for one in asked], sampling_params=params, return_logprob=True
        )
        return sum(len(output["output_ids"]) for output in outputs)

    return draw


def drain(engine):
    async def count():
        return sum([len(sample.token_ids) async for sample in engine.generate(requests())])

    return asyncio.run(count())


def requests():
    """Prompts that no cache has seen."""
    return [
        Request(
            request_id=i,
            prompt_ids=[random.randrange(3, 250) for _ in range(PROMPT)],
            sampling=SAMPLING,
            seed=random.randrange(2**60),
        )
        for i in range(REQUESTS)
    ]


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def save_model(directory, hidden, layers, vocab):
    """A random Llama that ends no response of its own, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main()
