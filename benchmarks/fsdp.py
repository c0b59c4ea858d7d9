"""Compare `backend=fsdp` with plain PyTorch loops in one run; needs plugins/rlcore-fsdp.

    python benchmarks/fsdp.py                  (about three minutes; one core per worker)

Training: tokens per second with one and two workers (gloo), relative to PyTorch DDP and to a bare FSDP2 loop of the same
model. The three are interleaved in the same processes and also measured in processor time, for machines that are shared.
All three get the same samples of equal length, so there is no padding. The bare loops compute the logits of all tokens;
the backend computes those of the responses, and their entropy. Memory: peak of a rank while it loads a model and while it
takes two steps. Weights: streaming, relative to one copy of the same bytes. Head: log-probs with a vocabulary of 151,936.
"""

import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

SAMPLES, LENGTH, PROMPT, VOCAB = 2, 256, 64, 8192
REPEATS = 5
TIMEOUT_S = 300.0
MB = 1e6


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        path = _save_model(Path(directory) / "model")
        for world in (1, 2):
            _run(world, _training, directory, path)
        for world in (1, 2):
            _run(world, _streaming, directory, path)
        for what in ("plain", "chunks of 128"):
            _run(1, _head, directory, what)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = (
            "1048576"  # return freed memory to the system, so that only memory in use is measured
        )
        for world in (1, 2):
            for name in LOOPS:
                _run(world, _memory, directory, path, name)


def _save_model(directory: Path) -> str:
    """Save a Llama with 38 M parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def _run(world: int, function: Callable[..., None], directory: str, *args: Any) -> None:
    """Run `function(rank, world, *args)` in one process per rank."""
    context = multiprocessing.get_context("spawn")
    store = f"{directory}/{time.monotonic_ns()}"
    ranks = [context.Process(target=_rank, args=(rank, world, store, function, args)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    failed = [process for process in ranks if process.exitcode != 0]
    for process in failed:
        process.kill()
    if failed:
        sys.exit(f"{function.__name__}: {len(failed)} of {world} ranks failed")


def _rank(rank: int, world: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    function(rank, world, *args)
    dist.destroy_process_group()


def _training(rank: int, world: int, path: str) -> None:
    loops = {name: make(path, rank, world) for name, make in LOOPS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    processor: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(REPEATS + 1):
        for name, loop in loops.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            loop.step()
            dist.barrier()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
    if rank == 0:
        tokens = SAMPLES * LENGTH * world
        rates = {name: tokens / min(taken) for name, taken in seconds.items()}
        print(f"training, {world} workers: " + ", ".join(f"{n} {r:,.0f} tokens/s" for n, r in rates.items()))
        for name in ("bare FSDP2", "DDP"):
            budget = "   budget ≥ 0.95 ×" if name != "DDP" else ""
            in_processor_time = min(processor[name]) / min(processor["backend=fsdp"])
            print(
                f"  backend=fsdp / {name:11} {rates['backend=fsdp'] / rates[name]:.2f} ×{budget}"
                f"   ({in_processor_time:.2f} × per second of rank 0's processor)",
                flush=True,
            )


def _ids(rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(rank))


def _new_backend(path: str, rank: int, world: int) -> Any:
    from rlcore_fsdp import FSDPBackend, FSDPConfig

    from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig

    context = BackendContext(rank=rank, world_size=world)
    return FSDPBackend(FSDPConfig(), model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-4), context=context)


class _Backend:
    def __init__(self, path: str, rank: int, world: int) -> None:
        from rlcore.data.batch import Batch

        self._backend = _new_backend(path, rank, world)
        mask = (torch.arange(LENGTH) >= PROMPT).repeat(SAMPLES)
        self._batch = Batch.of(lengths=[LENGTH] * SAMPLES, tokens={"input_ids": _ids(rank).view(-1), "loss_mask": mask})

    def step(self) -> None:
        self._backend.forward_backward(self._batch, lambda out, batch: (-out.log_probs.mean(), {}), temperature=1.0)
        self._backend.step()


class _Bare:
    """Loop with transformers, one padded batch, and log_softmax over all logits."""

    def __init__(self, path: str, rank: int, world: int, *, sharded: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from rlcore.models.load import load_model

        model = load_model(path)
        if sharded:
            mesh = init_device_mesh("cpu", (world,))
            for layer in (*model.model.layers, model.model.embed_tokens):
                fully_shard(layer, mesh=mesh)
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
            self._model: Any = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        else:
            self._model = torch.nn.parallel.DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._ids = _ids(rank)

    def step(self) -> None:
        logits = self._model(input_ids=self._ids, use_cache=False).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, self._ids[:, 1:, None]).squeeze(-1)
        (-log_probs[:, PROMPT - 1 :].mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


LOOPS: dict[str, Callable[[str, int, int], Any]] = {
    "backend=fsdp": _Backend,
    "bare FSDP2": functools.partial(_Bare, sharded=True),
    "DDP": functools.partial(_Bare, sharded=False),
}


def _memory(rank: int, world: int, path: str, name: str) -> None:
    import rlcore_fsdp
    import transformers.models.llama.modeling_llama

    assert rlcore_fsdp and transformers.models.llama.modeling_llama
    before = _own_memory()
    with _Peak() as loading:
        loop = LOOPS[name](path, rank, world)
    with _Peak() as training:
        for _ in range(2):
            loop.step()
    if rank == 0:
        whole = sum(Path(file).stat().st_size for file in Path(path).glob("*.safetensors")) / MB
        print(
            f"memory, {world} workers, {name}: peak of rank 0 {loading.most - before / MB:.0f} MB while loading,"
            f" {training.most - before / MB:.0f} MB in training; its share of the parameters"
            f" {whole / (1 if name == 'DDP' else world):.0f} MB, of them with gradients and moments four times as much",
            flush=True,
        )


def _streaming(rank: int, world: int, path: str) -> None:
    backend = _new_backend(path, rank, world)
    copied, streamed, num_bytes = [], [], 0
    for _ in range(REPEATS):
        dist.barrier()
        start, tensors = time.perf_counter(), 0
        for _, tensor in backend.weights():
            tensors += tensor.numel() * tensor.element_size()
        streamed.append(time.perf_counter() - start)
        num_bytes = tensors
        source = torch.ones(num_bytes // 4)
        start = time.perf_counter()
        source.clone()
        copied.append(time.perf_counter() - start)
    if rank == 0:
        rates = num_bytes / MB / min(streamed), num_bytes / MB / min(copied)
        print(
            f"weights, {world} workers: {rates[0]:,.0f} MB/s; one copy of these bytes {rates[1]:,.0f} MB/s", flush=True
        )


def _head(rank: int, world: int, what: str) -> None:
    from rlcore.kits.backend.head import token_statistics

    tokens, width, vocab = 512, 256, 151_936
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    start = time.perf_counter()
    with _Peak() as peak:
        if what == "plain":
            log_p = (hidden @ weight.t()).log_softmax(-1)
            log_probs, entropy = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
        else:
            log_probs, entropy = token_statistics(hidden, weight, targets, temperature=1.0, chunk=128)
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
    seconds = time.perf_counter() - start
    all_logits = tokens * vocab * 4 / MB
    print(
        f"head, {what}: peak +{peak.megabytes:,.0f} MB, {seconds:.1f} s; all logits {all_logits:.0f} MB, the"
        f" gradient of the embedding {vocab * width * 4 / MB:.0f} MB",
        flush=True,
    )


class _Peak:
    """Peak of this process's own memory (without mapped files) during the block, above the memory at its start."""

    def __enter__(self) -> "_Peak":
        self._ended = threading.Event()
        self._before = self._bytes = _own_memory()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bytes = max(self._bytes, _own_memory())

    @property
    def megabytes(self) -> float:
        return (self._bytes - self._before) / MB

    @property
    def most(self) -> float:
        """Return the peak in megabytes, including the memory at the start."""
        return self._bytes / MB

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._bytes = max(self._bytes, _own_memory())


def _own_memory() -> float:
    """Return the bytes of anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
