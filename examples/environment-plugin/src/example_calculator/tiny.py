"""A tiny model for this environment, created with:  python -m example_calculator.tiny tiny

Its demonstrations teach the format of a call, which numbers it needs, and to answer with the tool's result.
Most of their operators are random: the model learns from the reward which operator a problem needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from example_calculator import calculate, called

PROBLEMS = {"+": "{a} pears and {b} more", "-": "{a} pears, {b} eaten", "*": "{a} bags of {b} pears"}

_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=,.:?"
_TARGET_LOSS = 0.115
"""Nats per token; the random operator, one token in twelve, costs 0.09."""
_MAX_STEPS = 3000
_RIGHT_OPERATORS = 0.2
"""Share of demonstrations with the right operator; the others have a random one, which is right once in three."""
_SPECIAL = ("<pad>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>")
_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<eos>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make(directory: Path, *, seed: int = 0) -> Path:
    """Write model/, train.jsonl and eval.jsonl below `directory`."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads are slower for such small matrices
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    model = _model(len(tokenizer), tokenizer)
    _teach(model, tokenizer)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, problems in (("train", _problems(0, 4096)), ("eval", _problems(1, 128))):
        rows = [
            {"prompt": PROBLEMS[sign].format(a=a, b=b), "answer": calculate(f"{a}{sign}{b}")} for a, b, sign in problems
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _problems(held_out: int, count: int) -> list[tuple[int, int, str]]:
    """Make problems with two two-digit numbers; one pair of numbers in nine is held out."""
    numbers = torch.randint(10, 100, (9 * count * 2, 2)).tolist()
    pairs = [(a, b) for a, b in numbers if ((7 * a + b) % 9 == 0) == bool(held_out)][:count]
    signs = torch.randint(3, (count,)).tolist()
    return [(a, b, list(PROBLEMS)[sign]) for (a, b), sign in zip(pairs, signs, strict=True)]


def _tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token for each character, for each role, and for both ends of a call."""
    words = [*_SPECIAL, *_CHARACTERS.replace(" ", "Ġ")]
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token=None,
        bos_token=None,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(_SPECIAL[2:]),
    )
    tokenizer.add_tokens(called("\n").split("\n"))
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _model(vocab_size: int, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def _teach(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Train on demonstrations without their prompts, until all but the operators is learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    all_ids, all_labels = _demonstrations(tokenizer, 4096)
    mean = 3.0
    for step in range(1, _MAX_STEPS + 1):
        rows = torch.randint(len(all_ids), (64,))
        loss = model(input_ids=all_ids[rows], labels=all_labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.95 * mean + 0.05 * loss.item()
        if step % 100 == 0:
            print(f"making the model, step {step}, loss {mean:.3f}")
        if mean < _TARGET_LOSS:
            return
    raise RuntimeError(f"the demonstrations were not learned in {_MAX_STEPS} steps; try another seed")


def _demonstrations(tokenizer: Qwen2Tokenizer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for a, b, sign in _problems(0, count):
        guess = list(PROBLEMS)[int(torch.randint(3, ()))]
        operator = sign if torch.rand(()) < _RIGHT_OPERATORS else guess
        expression = f"{a}{operator}{b}"
        question = [{"role": "user", "content": PROBLEMS[sign].format(a=a, b=b)}]
        responses = [called(expression), calculate(expression)]
        between = f"<tool>{calculate(expression)}<eos><assistant>"
        begin = tokenizer.apply_chat_template(question, tools=[calculate], add_generation_prompt=True, tokenize=False)
        parts = [(begin, False), (responses[0] + "<eos>", True), (between, False), (responses[1] + "<eos>", True)]
        ids = [(token, trained) for text, trained in parts for token in tokenizer(text)["input_ids"]]
        rows.append(ids)
    longest = max(map(len, rows))
    input_ids = torch.zeros(count, longest, dtype=torch.int64)
    labels = torch.full((count, longest), -100)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor([token for token, _ in row])
        labels[i, : len(row)] = torch.tensor([token if trained else -100 for token, trained in row])
    return input_ids, labels


if __name__ == "__main__":
    print(f"wrote model and problems to {make(Path(sys.argv[1] if len(sys.argv) > 1 else 'tiny'))}")
