"""Models that vLLM's CPU attention supports: heads of at least 32 dimensions."""

from pathlib import Path

import torch

from rlcore.models.load import copy_tokenizer, load_model

_HEAD = 32
_VOCAB = 64


def save_tiny(family, directory, tokenizer, seed=0, tied=None):
    """Save a random model of a family with an existing tokenizer. Large weights make greedy choices unambiguous."""
    import transformers

    options = {
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": family != "Llama" if tied is None else tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "Qwen3Moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = getattr(transformers, f"{family}Config")(**options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(directory)
    copy_tokenizer(Path(tokenizer), directory)
    return str(directory)


def flattened(path):
    """Return the model with all logits halved. Its KV cache is unchanged, so it can continue with the original's."""
    model = load_model(path).requires_grad_(False)
    model.model.norm.weight.mul_(0.5)
    return model


@torch.no_grad()
def teacher_forced(model, prompt, sample):
    """Return the log-probs [T] of a sample's tokens under a model."""
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()


def save_widened_story(source, directory):
    """Save the story model with heads of 32 dimensions instead of 8, computing the same function.

    Dimension i of 8 rotates by theta^(-2i/8), as dimension 4i of 32 does: the first half of a head goes to positions
    0, 4, 8, 12, the second half to 16, 20, 24, 28, with zeros between. Attention scores are divided by sqrt(32) instead of
    sqrt(8), so queries are doubled.
    """
    model = load_model(str(source))
    config = model.config
    old = config.head_dim
    step = _HEAD // old
    places = torch.tensor([step * i for i in range(old)])
    state = model.state_dict()
    for name in [name for name in state if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        heads = state[name].view(-1, old, config.hidden_size)
        wide = heads.new_zeros(len(heads), _HEAD, config.hidden_size)
        wide[:, places] = heads * (step**0.5 if "q_proj" in name else 1.0)
        state[name] = wide.view(-1, config.hidden_size)
    for name in [name for name in state if name.endswith("o_proj.weight")]:
        heads = state[name].view(config.hidden_size, -1, old)
        wide = heads.new_zeros(config.hidden_size, heads.shape[1], _HEAD)
        wide[:, :, places] = heads
        state[name] = wide.view(config.hidden_size, -1)
    config.head_dim = _HEAD
    wider = type(model)(config)
    wider.load_state_dict(state)
    wider.save_pretrained(directory)
    copy_tokenizer(source, directory)
    return str(directory)
