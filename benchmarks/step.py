"""Measure one GRPO step by phase, and the same work in the simplest correct loop.

    python benchmarks/step.py                  (about three minutes; one core for the model)

Two sizes: the quickstart (0.13 M parameters, responses of 6 tokens), and 30 M parameters with responses of 512 tokens.
The plain loop is a training loop without a framework: transformers, a padded batch, log_softmax over all logits. It uses
the samples of the run, the same mini-batches, and as many optimizer steps.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlcore.cli.train import plan_run
from rlcore.data.batch import Batch
from rlcore.quickstart import cache_directory, prepare
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import step

LARGE = ["trainer.prompts_per_step=1", "sampling.samples_per_prompt=4", "sampling.max_response_tokens=512"]
COLUMNS = ("input_ids", "loss_mask", "advantage")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        model = _large_model(Path(directory) / "model")
        for runtime in ("local", "ray"):
            own = [f"runtime={runtime}", f"run.directory={directory}"]
            _measure("quickstart", own, steps=30, repeats=8)
            _measure("30 M parameters, 512-token responses", [f"model.path={model}", *LARGE, *own], steps=2, repeats=2)


def _measure(name: str, overrides: list[str], steps: int, repeats: int) -> None:
    """Run some steps, then train on the samples of the last one again, alternating with the plain loop."""
    fixed = ["preset=quickstart", "trackers=[]", "trainer.steps=1000000", "algorithm.skip_zero_variance_groups=false"]
    run = launch(*plan_run([*fixed, f"run.name=b{time.time_ns()}", *overrides]))
    kept = _keep_samples(run)
    try:
        found = [step(run, run.next_step()) for _ in range(steps + 1)][1:]
        samples = kept[0].select(*COLUMNS).local()
        print(f"\n{name}, runtime={run.config.runtime.name}, {samples.num_tokens:,} tokens per step")
        _phases(found)
        plain = PlainLoop(run.config.model.path, samples, run.config.algorithm.options.get("minibatches", 1))
        own, other = [], []
        for _ in range(repeats):
            own.append(_timed(lambda: (run.roles.actor.log_probs(kept[0]), run.algorithm.update(run.roles, kept[0]))))
            other.append(_timed(plain.step))
    finally:
        run.runtime.shutdown()
    tokens = samples.num_tokens
    print(f"  trained tokens per second  rlcore {tokens / min(own):,.0f}, plain loop {tokens / min(other):,.0f}")
    print(f"  rlcore / plain loop        {min(other) / min(own):.2f} ×   budget ≥ 1 ×", flush=True)


def _keep_samples(run: Any) -> list[Any]:
    """Return a list that always holds the result of the last `collect`."""
    kept: list[Any] = [None]
    collect = run.algorithm.collect

    def keep(roles: Any, prompts: Any) -> Any:
        kept[0] = collect(roles, prompts)
        return kept[0]

    run.algorithm.collect = keep
    return kept


def _phases(found: list[dict[str, float]]) -> None:
    seconds = statistics.median(line["perf/step_s"] for line in found)
    for phase in sorted(name for name in found[0] if name.startswith("time_s/")):
        spent = statistics.median(line[phase] for line in found)
        print(f"  {phase.removeprefix('time_s/'):<22} {spent * 1e3:>9.1f} ms  {100 * spent / seconds:5.1f} %")
    share = statistics.median(line["perf/controller_share"] for line in found)
    print(f"  {'controller':<22} {share * seconds * 1e3:>9.1f} ms  {100 * share:5.1f} %   budget < 2 %")
    print(f"  {'step':<22} {seconds * 1e3:>9.1f} ms")


class PlainLoop:
    """Training part of GRPO without a framework."""

    def __init__(self, path: str, samples: Batch, minibatches: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        rows = [samples.take([i]) for i in range(len(samples))]
        self._parts = [[rows[i] for i in part] for part in torch.randperm(len(rows)).chunk(minibatches)]

    def step(self) -> None:
        """Compute the log-probs of the old policy, then take one optimizer step per mini-batch."""
        with torch.no_grad():
            old = [_log_probs(self._model, part)[0] for part in self._parts]
        for part, before in zip(self._parts, old):
            log_probs, mask = _log_probs(self._model, part)
            advantage = torch.tensor([float(row["advantage"]) for row in part])[:, None]
            ratio = (log_probs - before).exp()
            terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            ((terms * mask).sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _log_probs(model: Any, rows: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, L - 1] log-probs of the next tokens, and the mask of those that are trained on."""
    ids = _padded([row["input_ids"] for row in rows])
    attention = _padded([torch.ones(row.num_tokens, dtype=torch.int64) for row in rows])
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return log_probs, _padded([row["loss_mask"] for row in rows])[:, 1:]


def _padded(columns: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)


def _large_model(directory: Path) -> Path:
    """Save a random 30 M model with the quickstart's tokenizer that never samples the end of sequence."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    small = prepare(cache_directory(), progress=print).model
    tokenizer = AutoTokenizer.from_pretrained(small)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=448,
        intermediate_size=1792,
        num_hidden_layers=10,
        num_attention_heads=7,
        num_key_value_heads=7,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    print(f"model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
