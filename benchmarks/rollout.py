"""Measure sampled tokens per second: an engine alone, the same engine in rlcore, and `rollout=hf`.

    python benchmarks/rollout.py vllm         (about a minute; needs rlcore-vllm)
    python benchmarks/rollout.py sglang       (two to three minutes; needs rlcore-sglang)

Prompts and responses have 64 tokens, in float32 on a CPU. Each result is the best of several repeats, interleaved in one
process. "Alone" means one call of the engine's own `generate` for all requests, with log-probs of the sampled token and
seeds, without text. Processor time includes all child processes. SGLang's attention on a CPU is a loop over sequences,
so the results compare two ways to use the same engine, not two engines.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time

import psutil
import torch

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.registry import resolve
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.types import Request, Sampling

PROMPT, RESPONSE, REPEATS = 64, 64, 6
SIZES = {"0.4 M": (128, 2), "3 M": (256, 4)}
"""Name -> (hidden size, layers)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ALONE))
    parser.add_argument("--requests", type=int, help="number of requests per call; default: 64 for vllm, 32 for sglang")
    parser.add_argument("--size", choices=list(SIZES), help="measure only this model size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.size is None:  # one process per size
        for size in SIZES:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--size", size], check=True)
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        save_model(directory, *SIZES[options.size])
        measure(options.engine, options.size, directory, options.requests or {"vllm": 64, "sglang": 32}[options.engine])


def measure(engine, size, path, num):
    if engine == "sglang":  # SGLang's engine takes over the process, so it is created last
        under, alone = make(engine, path, num), ALONE[engine](path, num)
    else:  # created before rlcore changes the process
        alone, under = ALONE[engine](path, num), make(engine, path, num)
    hf = HFRollout(HFConfig(), model=ModelConfig(path=path), context=RolloutContext())
    ways = {
        "alone": lambda: alone(requests(num)),
        f"rollout={engine}": lambda: drain(under, num),
        "rollout=hf": lambda: drain(hf, num),
    }
    walls, processors = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for _ in range(REPEATS):
        for way, generate in ways.items():
            start, used = time.perf_counter(), processor_time()
            tokens = generate()
            walls[way] = max(walls[way], tokens / (time.perf_counter() - start))
            processors[way] = max(processors[way], tokens / (processor_time() - used))
    under.close()
    print(f"\n{engine}, {size} parameters, {num} requests; sampled tokens per second | per second of processor time")
    for way in ways:
        wall, processor = walls[way] / walls["alone"], processors[way] / processors["alone"]
        print(
            f"  {way:<16}{walls[way]:>9,.0f}   {wall:.2f} × alone | {processors[way]:>9,.0f}   {processor:.2f} × alone"
        )
    print(f"  budget: rollout={engine} ≥ 0.95 × alone; load {os.getloadavg()[0]:.0f}", flush=True)


def kind_of(engine):
    """Return the class behind `rollout=engine`."""
    return resolve("rollout", engine).object


def make(engine, path, num):
    kind = kind_of(engine)
    return kind(kind.Config(max_batch_size=num), model=ModelConfig(path=path), context=RolloutContext())


def vllm_alone(path, num):
    from rlcore_vllm.host import set_environment

    set_environment("cpu")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=path,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=num,
        kv_cache_memory_bytes=2**28,
        block_size=32,
        use_tqdm_on_load=False,
    )

    def generate(requested):
        options = [
            SamplingParams(max_tokens=RESPONSE, ignore_eos=True, logprobs=0, seed=one.seed, detokenize=False)
            for one in requested
        ]
        done = llm.generate([{"prompt_token_ids": one.prompt_ids} for one in requested], options, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return generate


def sglang_alone(path, num):
    """Return a generate function of SGLang with the options that a server of the plugin has."""
    from rlcore_sglang import SGLangConfig
    from rlcore_sglang.own import engine_environment, engine_options

    from rlcore.kits.engine.checks import read_limits

    config, model, context = SGLangConfig(max_batch_size=num), ModelConfig(path=path), RolloutContext()
    os.environ.update(engine_environment(config, context, []))
    import sglang

    engine = sglang.Engine(**engine_options(config, model, context, read_limits(path)))

    def generate(requested):
        params = [
            {"temperature": 1.0, "max_new_tokens": RESPONSE, "sampling_seed": one.seed, "ignore_eos": True}
            for one in requested
        ]
        prompts = [one.prompt_ids for one in requested]
        done = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return sum(len(one["output_ids"]) for one in done)

    return generate


ALONE = {"vllm": vllm_alone, "sglang": sglang_alone}


def drain(engine, num):
    async def count():
        return sum([len(sample.token_ids) async for sample in engine.generate(requests(num))])

    return asyncio.run(count())


def requests(num):
    """Return requests with random prompts, so that no prefix cache helps."""
    sampling = Sampling(max_response_tokens=RESPONSE)
    return [
        Request(
            request_id=i,
            prompt_ids=[random.randrange(3, 250) for _ in range(PROMPT)],
            sampling=sampling,
            seed=random.randrange(2**60),
        )
        for i in range(num)
    ]


def processor_time():
    """Return the processor seconds of this process and its running descendants."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def save_model(directory, hidden, layers):
    """Save a random Llama without an end token, and a tokenizer with one word."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=256,
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
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    main()
