"""Tiny random models of several families, saved in Hugging Face layout, and trained models."""

from pathlib import Path

import torch
from rlcore_tests.assets import made_assets, real_assets

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.data.batch import Batch
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig

VOCAB_SIZE = 61

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # the default of 0.02 makes attention and logits almost uniform
}

FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "initializer_range": 0.2,
        },
    ),
}
"""Name -> (configuration class of transformers, changes to the sizes above). Each has one additional feature
than plain attention: tied weights, biases, normalized queries, a window shorter than the samples, soft caps."""


TRAINED = {"stories": made_assets, "pretrained": real_assets} if real_assets() else {"stories": made_assets}
"""Name -> function that returns the folder of the model; the pretrained one is optional."""


def trained_model(name: str) -> str:
    """Return the path of a model in TRAINED."""
    return str(TRAINED[name]() / "models" / "stories260k")


def make_model(family: str, *, seed: int = 0, attention: str = "eager", **changes):
    """Return a model of a family in transformers' own implementation, float32, in evaluation mode."""
    import transformers

    config_class, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.float().eval()


def save_model(family: str, directory: Path, **options) -> str:
    """Save a model of a family and return its path as a user types it."""
    make_model(family, **options).save_pretrained(directory)
    return str(directory)


def random_ids(lengths, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Return random token ids, one list per length, without the special tokens 0, 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def make_batch(samples, *, prompt_lengths=None) -> Batch:
    """Return a batch of these samples; the loss covers the tokens after each prompt, by default two tokens long."""
    prompt_lengths = prompt_lengths or [2] * len(samples)
    mask = [[place >= prompt for place in range(len(ids))] for ids, prompt in zip(samples, prompt_lengths, strict=True)]
    return Batch.of(
        lengths=[len(ids) for ids in samples],
        tokens={
            "input_ids": torch.tensor([token for ids in samples for token in ids], dtype=torch.int64),
            "loss_mask": torch.tensor([seen for row in mask for seen in row], dtype=torch.bool),
        },
        rows={"num_loss_tokens": torch.tensor([sum(row) for row in mask], dtype=torch.int64)},
    )


def make_backend(path: str, *, optimizer: OptimizerConfig | None = None, context=None, **model) -> LocalBackend:
    """Return a `local` backend; `model` are fields of ModelConfig."""
    return LocalBackend(
        LocalConfig(),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        context=context or BackendContext(),
    )


def log_probs_of(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return [n] float64 log-probs of the tokens given those before them, by a plain forward pass; the first is 0."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double() / temperature
    chosen = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), chosen])
