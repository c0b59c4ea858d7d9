"""Tokens drawn per second: an engine alone, the same engine under rlcore, and `rollout=hf`.

    python benchmarks/rollout.py vllm         (about a minute; in an environment with rlcore-vllm)
    python benchmarks/rollout.py sglang       (two to three minutes; in an environment with rlcore-sglang)

Prompts and responses of 64 tokens, float32 on a CPU; the best of some turns, taken one after the other in one process.
Alone means the engine's own `generate`, one call for all, with log-probs of the drawn token, seeds and no text. Processor
time is that of this process and all that it started. SGLang's attention on a CPU is a loop over sequences: the figures
compare two ways to the same engine, not engines.
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

PROMPT, RESPONSE, TURNS = 64, 64, 6
SIZES = {"0.4 M": (128, 2), "3 M": (256, 4)}
"""Name -> (hidden size, layers)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ALONE))
    parser.add_argument("--requests", type=int, help="in one call (64 for vllm, 32 for sglang, as their budgets say)")
    parser.add_argument("--size", choices=list(SIZES), help="only this one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.size is None:  # a process for each
        for size in SIZES:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--size", size], check=True)
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        save_model(directory, *SIZES[asked.size])
        measure(asked.engine, asked.size, directory, asked.requests or {"vllm": 64, "sglang": 32}[asked.engine])


def measure(engine, size, path, num):
    if engine == "sglang":  # its engine takes over the process, so it comes last
        under, alone = make(engine, path, num), ALONE[engine](path, num)
    else:  # before rlcore changes it
        alone, under = ALONE[engine](path, num), make(engine, path, num)
    hf = HFRollout(HFConfig(), model=ModelConfig(path=path), context=RolloutContext())
    ways = {
        "alone": lambda: alone(requests(num)),
        f"rollout={engine}": lambda: drain(under, num),
        "rollout=hf": lambda: drain(hf, num),
    }
    walls, processors = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for _ in range(TURNS):
        for way, draw in ways.items():
            start, used = time.perf_counter(), processor_time()
            tokens = draw()
            walls[way] = max(walls[way], tokens / (time.perf_counter() - start))
            processors[way] = max(processors[way], tokens / (processor_time() - used))
    under.close()
    print(f"\n{engine}, {size} parameters, {num} requests; tokens drawn in a second | of processor time")
    for way in ways:
        wall, processor = walls[way] / walls["alone"], processors[way] / processors["alone"]
        print(
            f"  {way:<16}{walls[way]:>9,.0f}   {wall:.2f} × alone | {processors[way]:>9,.0f}   {processor:.2f} × alone"
        )
    print(f"  budget: rollout={engine} ≥ 0.95 × alone; load {os.getloadavg()[0]:.0f}", flush=True)


def kind_of(engine):
    """The class behind `rollout=engine`."""
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

    def draw(asked):
        options = [
            SamplingParams(max_tokens=RESPONSE, ignore_eos=True, logprobs=0, seed=one.seed, detokenize=False)
            for one in asked
        ]
        done = llm.generate([{"prompt_token_ids": one.prompt_ids} for one in asked], options, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return draw


def sglang_alone(path, num):
    """With the options of the plugin, as a server of the plugin has them."""
    from rlcore_sglang import SGLangConfig
    from rlcore_sglang.own import engine_environment, engine_options

    from rlcore.rollouts.checks import read_limits

    config, model, context = SGLangConfig(max_batch_size=num), ModelConfig(path=path), RolloutContext()
    os.environ.update(engine_environment(config, context, []))
    import sglang

    engine = sglang.Engine(**engine_options(config, model, context, read_limits(path)))

    def draw(asked):
        params = [
            {"temperature": 1.0, "max_new_tokens": RESPONSE, "sampling_seed": one.seed, "ignore_eos": True}
            for one in asked
        ]
        prompts = [one.prompt_ids for one in asked]
        done = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return sum(len(one["output_ids"]) for one in done)

    return draw


ALONE = {"vllm": vllm_alone, "sglang": sglang_alone}


def drain(engine, num):
    async def count():
        return sum([len(sample.token_ids) async for sample in engine.generate(requests(num))])

    return asyncio.run(count())


def requests(num):
    """Prompts that no cache has seen."""
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
    """Seconds of this process and of all that run below it."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def save_model(directory, hidden, layers):
    """A random Llama that ends no response of its own, and a tokenizer of one word."""
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
