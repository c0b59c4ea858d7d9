"""Log-probs and entropy from hidden states equal the definitions in float64, for the logits of every family."""

import math

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.models import attention
from rlcore.models.attention import Packing
from rlcore.models.head import TokenHead, hidden_states, use_packed_attention
from tests.models import FAMILIES, VOCAB_SIZE, make_model, random_ids

KINDS = {"tied": ("llama", {}), "untied": ("qwen2", {}), "soft caps": ("gemma2", {})}


def make_head(kind):
    attention.register()
    family, changes = KINDS[kind]
    model = make_model(family, attention=attention.NAME, **changes)
    return model, TokenHead(model)


def some_tokens(model, number=23):
    """Return hidden states [n, 32] of a real model, and other tokens [n] as targets."""
    ids = torch.tensor(random_ids([number], seed=2))
    with torch.no_grad():
        hidden = hidden_states(model, ids, Packing([number], "cpu"))
    return hidden, torch.tensor(random_ids([number], seed=3)[0])


def reference(model, hidden, targets, temperature):
    """Compute [n] log-probs and entropy by definition, from all logits, in float64."""
    logits = hidden.double() @ model.get_output_embeddings().weight.double().T
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("chunk", [None, 7, 1], ids=["one chunk", "chunks of 7", "token by token"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_entropy_and_gradients_equal_the_definition_in_float64(kind, chunk, temperature):
    model, head = make_head(kind)
    head._chunk = chunk or head._chunk
    weight = model.get_output_embeddings().weight
    hidden, targets = some_tokens(model)
    ours, theirs = (hidden.clone().requires_grad_() for _ in range(2))
    factors = torch.linspace(-1.0, 1.0, len(targets)).double()

    found = head(ours, targets, temperature)
    expected = reference(model, theirs, targets, temperature)

    for one, other in zip(found, expected):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    of_weight = []
    for log_probs, entropy in (found, expected):
        weight.grad = None
        ((log_probs + 0.3 * entropy) * factors).sum().backward()
        of_weight.append(weight.grad)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(of_weight[0], of_weight[1], atol=2e-5, rtol=1e-4)


def test_soft_cap_bounds_the_logits_and_changes_them():
    model, head = make_head("soft caps")
    hidden, _ = some_tokens(model)
    with torch.no_grad():
        capped, plain = head.logits(hidden), model.get_output_embeddings()(hidden)

    assert float(capped.abs().max()) <= 3.0
    assert float(plain.abs().max()) > 4.0


def test_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    _, head = make_head("untied")
    log_probs, entropy = head(torch.zeros(2, 32), torch.tensor([3, 60]), 1.0)

    assert log_probs.tolist() == pytest.approx([-math.log(VOCAB_SIZE)] * 2, abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(VOCAB_SIZE)] * 2, abs=1e-6)


def test_huge_logits_give_finite_numbers():
    model, head = make_head("untied")
    hidden, targets = some_tokens(model)

    with torch.no_grad():
        log_probs, entropy = head(hidden * 1e4, targets, 1.0)

    assert bool(torch.isfinite(log_probs).all())
    assert bool(torch.isfinite(entropy).all())
    assert float(log_probs.min()) < -1e4


@pytest.mark.parametrize("grad", [True, False], ids=["training", "scoring"])
def test_logits_of_one_chunk_at_a_time_exist(grad):
    model, head = make_head("untied")
    head._chunk = 4
    hidden, targets = some_tokens(model)
    shapes = []
    model.get_output_embeddings().register_forward_hook(lambda module, given, out: shapes.append(len(out)))

    with torch.set_grad_enabled(grad):
        log_probs, _ = head(hidden, targets, 1.0)
    if grad:
        log_probs.sum().backward()

    parts = [4, 4, 4, 4, 4, 3]
    assert shapes == parts + (parts[::-1] if grad else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_switched_to_packed_attention(family):
    attention.register()
    model = make_model(family)

    use_packed_attention(model, TokenHead(model))

    assert model.config._attn_implementation == attention.NAME


def test_class_that_does_more_to_its_logits_is_refused():
    attention.register()
    model = make_model("llama")
    plain = model.forward

    def doubled(*args, **options):
        out = plain(*args, **options)
        out.logits = out.logits * 2
        return out

    model.forward = doubled

    with pytest.raises(
        ModelError, match=r"cannot train LlamaForCausalLM: its logits differ by .*\nNo backend takes it"
    ):
        use_packed_attention(model, TokenHead(model))


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}


def of_class(config_class, **options):
    import transformers

    attention.register()
    config = getattr(transformers, config_class)(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("config_class", "options"),
    [("CohereConfig", {"logit_scale": 0.25}), ("GraniteConfig", {"logits_scaling": 4.0})],
    ids=["cohere multiplies", "granite divides"],
)
def test_scaled_logits_are_known(config_class, options):
    model = of_class(config_class, **SMALL, **options)

    use_packed_attention(model, TokenHead(model))


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        ("MambaConfig", {"state_size": 4}, "cannot train MambaForCausalLM: its logits differ"),
        ("BloomConfig", {"n_head": 4}, "cannot train BloomForCausalLM: its logits differ"),
        ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssAttention .*s_aux"),
    ],
    ids=["a state that runs over borders", "attention of its own", "attention sinks"],
)
def test_family_whose_samples_would_not_stay_apart_is_refused(config_class, options, message):
    model = of_class(config_class, **{**SMALL, **options})

    with pytest.raises(ModelError, match=message + ".*\nNo backend takes it"):
        use_packed_attention(model, TokenHead(model))
