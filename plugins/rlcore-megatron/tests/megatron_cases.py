"""Models, batches and a loss for tests, and the `local` backend as the oracle."""

import warnings

import torch
from cpu_double import CPUMegatron
from rlcore_megatron import MegatronConfig

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.data.batch import Batch
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.types import LossTerms, Mean
from rlcore.workers.averaging import count, reduce_terms

PRELOAD = ("transformers.models.qwen3.modeling_qwen3", "rlcore_megatron.engine", "cpu_double")
VOCABULARY = 61  # odd: two tensor-parallel devices need padding
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # the default of 0.02 makes attention and logits almost uniform
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "tie_word_embeddings": False, **_EXPERTS}),
}
"""Name -> (configuration class of transformers, what differs from the sizes above)."""

SGD_LIKE = OptimizerConfig(lr=1e-2, eps=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.1, clip_grad_norm=0.5)
"""AdamW whose eps is no smaller than the gradients: dividing by their rounding would make a difference of any size."""
LENGTHS = [9, 4, 12, 2, 7, 5, 11, 3]
"""The fourth sample is all prompt."""


def save_model(family, directory, **changes):
    """A random model on disk, with norms and biases that are not all one or zero; returns its path."""
    import transformers

    config_class, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1 if "norm" in name else 0.3)
    model.save_pretrained(directory)
    return str(directory)


def make_batch(lengths=LENGTHS, *, seed=0):
    """Random samples; the loss sees what follows a prompt of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = [place >= 2 for length in lengths for place in range(length)]
    tokens = {
        "input_ids": torch.randint(3, VOCABULARY, (total,), generator=generator),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }
    rows = {
        "sample_id": torch.arange(len(lengths)),
        "num_loss_tokens": torch.tensor([max(0, length - 2) for length in lengths]),
    }
    return Batch.of(lengths=lengths, tokens=tokens, rows=rows)


def policy_loss(batch):
    """A loss over the whole mini-batch, as workers make it."""
    counts = count(batch["num_loss_tokens"])

    def loss(out, micro_batch):
        of_token = (micro_batch["input_ids"] % 7).float() - 3.0
        terms = out.log_probs * of_token + 0.1 * out.entropy if out.values is None else (out.values - of_token) ** 2
        scalar = reduce_terms(LossTerms(terms=terms, average="token-mean"), micro_batch, counts)
        return scalar, {"loss": Mean(float(scalar.detach()), 0.0)}

    return loss


def make_megatron(path, *, config=None, optimizer=SGD_LIKE, context=None, **model):
    """The backend on the CPU; `config` and `context` are fields, `model` are fields of ModelConfig."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # each test has a grid of its own
    return another_megatron(path, config=config, optimizer=optimizer, context=context, **model)


def another_megatron(path, *, config=None, optimizer=SGD_LIKE, context=None, **model):
    """The same, on the grid that is there."""
    return CPUMegatron(
        MegatronConfig(**(config or {})),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer,
        context=BackendContext(**(context or {})),
    )


def make_local(path, *, optimizer=SGD_LIKE, context=None, **model):
    """The oracle for the same."""
    about = BackendContext(**(context or {}))
    return LocalBackend(LocalConfig(), model=ModelConfig(path=path, **model), optimizer=optimizer, context=about)


def whole_weights(backend):
    """Name -> whole weight, a copy; every rank calls it."""
    return {name: tensor.clone() for name, tensor in backend.weights()}


def column(out):
    """One [T] tensor of all that a forward pass says."""
    return out.values if out.log_probs is None else out.log_probs + 0.5 * out.entropy


def train(backend, batch, steps, *, share=None):
    """[[loss of this rank, gradient norm, lr]] of some steps."""
    history = []
    for _ in range(steps):
        mine = batch if share is None else batch.take(share)
        metrics = backend.forward_backward(mine, policy_loss(batch), temperature=0.9)
        stepped = backend.step()
        history.append([metrics.get("loss", Mean(0.0)).total, stepped["grad_norm"].value, stepped["lr"].value])
    return history
