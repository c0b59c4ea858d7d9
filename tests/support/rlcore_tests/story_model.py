"""A small language model trained on generated stories, made in seconds and without a network.

Tests need it because random weights behave differently: their next-token distribution is almost flat, so rounding
decides between two tokens and no text ever ends.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from rlcore_tests.texts import write_story

_VOCAB = 512
_STORIES = 3000
_MAX_TOKENS = 72
_STEPS = 200
_BATCH = 16
_LR = 8e-3


def save_story_model(directory: Path) -> None:
    """Train a Llama with 0.26 M parameters and a context of 512 tokens; write it and its tokenizer."""
    draw = random.Random(0)
    texts = [write_story(draw) for _ in range(_STORIES)]
    tokenizer = _train_tokenizer(texts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for matrices this small
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _train_model(tokenizer(texts)["input_ids"], tokenizer)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _train_tokenizer(texts: list[str]) -> Any:
    """Learn byte-pair merges within words; characters outside the vocabulary become bytes."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import LlamaTokenizer

    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?\w+|."), "isolated")
    learned.train_from_iterator(
        [f" {text}" for text in texts], trainers.BpeTrainer(vocab_size=_VOCAB - len(fixed), show_progress=False)
    )
    found = json.loads(learned.to_str())["model"]
    vocab = {token: index for index, token in enumerate([*fixed, *found["vocab"]])}
    merges = [tuple(pair) for pair in found["merges"]]
    return LlamaTokenizer(vocab=vocab, merges=merges, pad_token="<unk>", add_bos_token=True)


def _train_model(samples: list[list[int]], tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    ends = [torch.tensor([*ids, tokenizer.eos_token_id][:_MAX_TOKENS]) for ids in samples]
    labels_NT = torch.nn.utils.rnn.pad_sequence(ends, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LR, total_steps=_STEPS, pct_start=0.1)
    for _ in range(_STEPS):
        labels_BT = labels_NT[torch.randint(len(labels_NT), (_BATCH,))]
        model(input_ids=labels_BT.clamp(min=0), labels=labels_BT).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model
