"""Tokens drawn per second: vLLM alone, the same engine under rlcore, and `rollout=hf`.

    python benchmarks/rollout.py               (about a minute; in an environment with rlcore-vllm)

64 requests, prompts and responses of 64 tokens, float32 on a CPU; the best of some turns, taken one after the other, by the
clock and in processor time, which neighbours on a busy machine disturb less. vLLM alone is its own `LLM.generate` with
log-probs of the drawn token, seeds and no text.
"""

import asyncio
import random
import subprocess
import sys
import tempfile
import time

import torch
from rlcore_vllm import VLLMConfig, VLLMRollout
from rlcore_vllm.host import set_environment

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.types import Request, Sampling

REQUESTS, PROMPT, RESPONSE, TURNS = 64, 64, 64, 6
SIZES = {"0.4 M": (128, 2), "3 M": (256, 4)}
"""Name -> (hidden size, layers)."""


def main() -> None:
    torch.set_num_threads(1)
    set_environment("cpu")
    if len(sys.argv) == 1:  # a process for each, so that vLLM alone is made before rlcore's changes to it
        for name in SIZES:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    name = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        save_model(directory, *SIZES[name])
        measure(name, directory)


def measure(name, path):
    context, model = RolloutContext(), ModelConfig(path=path)
    alone = raw_engine(path)
    under = VLLMRollout(VLLMConfig(max_batch_size=REQUESTS), model=model, context=context)
    hf = HFRollout(HFConfig(), model=model, context=context)
    ways = {"vLLM alone": alone, "rollout=vllm": lambda: drain(under), "rollout=hf": lambda: drain(hf)}
    clocks = {"of the clock": time.perf_counter, "of processor time": time.process_time}
    best = {clock: dict.fromkeys(ways, 0.0) for clock in clocks}
    for _ in range(TURNS):
        for way, draw in ways.items():
            start = {clock: read() for clock, read in clocks.items()}
            tokens = draw()
            for clock, read in clocks.items():
                best[clock][way] = max(best[clock][way], tokens / (read() - start[clock]))
    under.close()
    for clock, rates in best.items():
        print(f"\n{name} parameters, tokens drawn per second {clock}")
        for way, rate in rates.items():
            print(f"  {way:<14}{rate:>9,.0f}   {rate / rates['vLLM alone']:.2f} × vLLM alone")
    print("  budget: rollout=vllm ≥ 0.95 × vLLM alone", flush=True)


def raw_engine(path):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=path,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=2**28,
        block_size=32,
        use_tqdm_on_load=False,
    )

    def draw():
        asked = requests()
        options = [
            SamplingParams(max_tokens=RESPONSE, ignore_eos=True, logprobs=0, seed=one.seed, detokenize=False)
            for one in asked
        ]
        done = llm.generate([{"prompt_token_ids": one.prompt_ids} for one in asked], options, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return draw


def drain(engine):
    async def count():
        return sum([len(sample.token_ids) async for sample in engine.generate(requests())])

    return asyncio.run(count())


def requests():
    """Prompts that no cache has seen."""
    sampling = Sampling(max_response_tokens=RESPONSE)
    return [
        Request(
            request_id=i,
            prompt_ids=[random.randrange(3, 250) for _ in range(PROMPT)],
            sampling=sampling,
            seed=random.randrange(2**60),
        )
        for i in range(REQUESTS)
    ]


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
