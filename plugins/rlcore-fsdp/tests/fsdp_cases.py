"""Models, batches and losses for tests, and the `local` backend as the oracle, with adapters where they are asked for."""

import torch
from rlcore_fsdp import FSDPBackend, FSDPConfig, lora

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.backends.optimizer import make_adamw
from rlcore.data.batch import Batch
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.types import LossTerms, Mean
from rlcore.workers.averaging import count, reduce_terms

PRELOAD = ("torch.distributed.fsdp", "rlcore_fsdp")
"""What the processes of ranks import once for all."""
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # the default of 0.02 makes attention and logits almost uniform
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 10}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "tie_word_embeddings": False, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Name -> (configuration class of transformers, what differs from the sizes above)."""

SGD_LIKE = OptimizerConfig(lr=1e-2, eps=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.1, clip_grad_norm=0.5)
"""AdamW whose eps is no smaller than the gradients: dividing by their rounding would make a difference of any size."""


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


def make_batch(lengths, *, seed=0, vocab_size=61):
    """Random samples; the loss sees what follows a prompt of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = [place >= 2 for length in lengths for place in range(length)]
    rows = {"num_loss_tokens": torch.tensor([max(0, length - 2) for length in lengths])}
    tokens = {
        "input_ids": torch.randint(3, vocab_size, (total,), generator=generator),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }
    return Batch.of(lengths=lengths, tokens=tokens, rows=rows)


LENGTHS = [9, 4, 12, 2, 7, 5, 11, 3]
"""The fourth sample is all prompt."""


def policy_loss(batch):
    """A loss over the whole mini-batch, as workers make it."""
    counts = count(batch["num_loss_tokens"])

    def loss(out, micro_batch):
        of_token = (micro_batch["input_ids"] % 7).float() - 3.0
        terms = out.log_probs * of_token + 0.1 * out.entropy if out.values is None else (out.values - of_token) ** 2
        scalar = reduce_terms(LossTerms(terms=terms, average="token-mean"), micro_batch, counts)
        return scalar, {"loss": Mean(float(scalar.detach()), 0.0)}

    return loss


def make_fsdp(path, *, config=None, optimizer=SGD_LIKE, context=None, **model):
    """An `fsdp` backend; `config` and `context` are fields, `model` are fields of ModelConfig."""
    return FSDPBackend(
        FSDPConfig(**(config or {})),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer,
        context=BackendContext(**(context or {})),
    )


def make_local(path, *, config=None, optimizer=SGD_LIKE, context=None, **model):
    """The oracle for the same."""
    settings, about = FSDPConfig(**(config or {})), BackendContext(**(context or {}))
    backend = LocalBackend(LocalConfig(), model=ModelConfig(path=path, **model), optimizer=optimizer, context=about)
    if settings.lora_rank:
        lora.add_adapters(backend._model, settings)
        adapters = {name: p for name, p in backend._model.named_parameters() if lora.is_adapter(name)}
        lora.start_adapters(adapters, about.seed)
        backend._names = {parameter: name for name, parameter in adapters.items()}
        backend._optimizer = make_adamw(list(backend._names), optimizer)
    return backend


def local_weights(backend):
    """Name -> weight of the oracle, adapters merged by peft itself."""
    import copy

    model = copy.deepcopy(backend._model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.merge()
    named = {lora.plain_name(n): p.detach() for n, p in model.named_parameters() if not lora.is_adapter(n)}
    head = backend._value_head
    return named | ({"value_head.weight": head.weight.detach()} if head is not None else {})


def fsdp_weights(backend):
    """Name -> whole weight, the value head too; every rank calls it."""
    named = {name: tensor.clone() for name, tensor in backend.weights()}
    head = backend._packed.value_head
    return named | ({"value_head.weight": head.weight.detach().full_tensor()} if head is not None else {})


def train(backend, batch, steps, *, share=None):
    """[[loss of this rank, gradient norm, lr]] of some steps."""
    history = []
    for _ in range(steps):
        mine = batch if share is None else batch.take(share)
        metrics = backend.forward_backward(mine, policy_loss(batch), temperature=0.9)
        stepped = backend.step()
        history.append([metrics.get("loss", Mean(0.0)).total, stepped["grad_norm"].value, stepped["lr"].value])
    return history
