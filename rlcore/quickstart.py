"""Model and data of `preset=quickstart`: created locally in about ten seconds, without a download, and cached.

`rlcore train` calls `locate` for a path that starts with `quickstart:` (model, train, eval). The task is to sort five
digits, `sort 42913=` -> `12349`. The tiny model is trained on demonstrations with the digits in random order: it knows
that an answer has these digits and ends, but nothing about sorting, which only the reward teaches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlcore.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from rlcore.config.schema import Config

PREFIX: Final = "quickstart:"

_SPECIAL: Final = ("<pad>", "<eos>", "<bos>")
_CHARACTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyz =+-.,"
_HELD_OUT: Final = 8
"""One in this many numbers, chosen by hash, is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All parameters of the assets; the key of the cache."""

    version: int = 1
    """Increased when the code below produces different assets from the same parameters."""
    seed: int = 0
    digits: int = 5
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    """Number of heads with 32 dimensions each, the minimum of the inference engines' attention kernels."""
    warm_steps: int = 200
    warm_batch: int = 128
    lr: float = 3e-3
    train_prompts: int = 8192
    eval_prompts: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """Paths of the assets."""

    model: Path
    """Directory in Hugging Face layout, with the tokenizer."""
    train: Path
    """JSONL with the columns `prompt` and `digits`."""
    eval: Path
    """JSONL with the same columns, for held-out numbers."""


def locate_assets(config: Config, progress: Callable[[str], None] = lambda line: None) -> Config:
    """Return the config with `quickstart:` paths replaced by real ones."""
    model = replace(config.model, path=locate(config.model.path, progress))
    train, held_out = (
        {name: locate(path, progress) for name, path in it.items()} if isinstance(it, Mapping) else locate(it, progress)
        for it in (config.data.train, config.data.eval)
    )
    data = replace(config.data, train=train, eval=held_out)
    return replace(config, model=model, data=data)


def locate(path: str, progress: Callable[[str], None] = lambda line: None) -> str:
    """Return the path for `quickstart:model`, `quickstart:train` or `quickstart:eval`, and any other path unchanged."""
    if not path.startswith(PREFIX):
        return path
    name = path.removeprefix(PREFIX)
    known = ["model", "train", "eval"]
    if name not in known:
        raise ConfigError(
            f"there is no '{path}'.{did_you_mean(name, known)}\nThere are: {', '.join(PREFIX + item for item in known)}."
        )
    return str(getattr(prepare(cache_directory(), progress=progress), name))


def cache_directory() -> Path:
    """Return $RLCORE_CACHE, or else rlcore/ in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RLCORE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "rlcore"


def prepare(
    directory: Path, recipe: Recipe | None = None, progress: Callable[[str], None] = lambda line: None
) -> Assets:
    """Return the assets below `directory`, created if missing."""
    recipe = recipe or Recipe()
    key = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]
    final = directory / f"quickstart-{key}"
    if not final.is_dir():
        make_once(final, lambda beside: _make(beside, recipe, progress))
        progress(f"quickstart: model and data are in {final}")
    return Assets(model=final / "model", train=final / "train.jsonl", eval=final / "eval.jsonl")


def make_once(final: Path, make: Callable[[Path], None]) -> Path:
    """Return the directory `final`, filled by `make` unless it exists.

    `make` fills a temporary directory, which is then renamed, so that `final` is complete even if several processes
    create it at the same time.
    """
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        try:
            make(beside)
            beside.chmod(0o755)
            beside.rename(final)
        except OSError:
            if not final.is_dir():  # another process was first and made the same files
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return final


def _make(directory: Path, recipe: Recipe, progress: Callable[[str], None]) -> None:
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    train, held_out = _numbers(recipe, generator)
    for name, numbers in (("train", train), ("eval", held_out)):
        lines = [json.dumps({"prompt": f"sort {number}=", "digits": number}) for number in numbers]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for matrices this small
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = _model(recipe)
        _warm_start(model, train, recipe, generator, progress)
    finally:
        torch.set_num_threads(threads)
    _save(model, directory / "model")


def _save(model: Any, directory: Path) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
        _tokenizer().save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()


def _numbers(recipe: Recipe, generator: torch.Generator) -> tuple[list[str], list[str]]:
    """Return disjoint numbers for training and evaluation, in random order."""
    import torch

    order = torch.randperm(10**recipe.digits, generator=generator).tolist()
    train: list[str] = []
    held_out: list[str] = []
    for number in (str(item).zfill(recipe.digits) for item in order):
        side = held_out if hashlib.sha256(number.encode()).digest()[0] % _HELD_OUT == 0 else train
        side.append(number)
    return train[: recipe.train_prompts], held_out[: recipe.eval_prompts]


def _tokenizer() -> Any:
    """Return a tokenizer with one token per character, without chat template and added tokens."""
    from transformers import Qwen2Tokenizer

    pad, eos, bos = _SPECIAL
    characters = _CHARACTERS.replace(" ", "Ġ")  # as byte-level vocabularies spell the space
    words = {word: index for index, word in enumerate((*_SPECIAL, *characters))}
    return Qwen2Tokenizer(vocab=words, merges=[], unk_token=None, pad_token=pad, eos_token=eos, bos_token=bos)


def _model(recipe: Recipe) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    pad, eos, bos = range(len(_SPECIAL))
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(_SPECIAL) + len(_CHARACTERS),
            hidden_size=recipe.hidden,
            intermediate_size=4 * recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=pad,
            eos_token_id=eos,
            bos_token_id=bos,
        )
    )


def _warm_start(
    model: Any, numbers: list[str], recipe: Recipe, generator: torch.Generator, progress: Callable[[str], None]
) -> None:
    """Teach the format of an answer, with demonstrations whose digits are in random order."""
    import torch

    tokenizer = _tokenizer()
    prompts_NT = torch.tensor(tokenizer([f"sort {number}=" for number in numbers])["input_ids"])
    digits_ND = prompts_NT[:, -1 - recipe.digits : -1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.warm_steps, pct_start=0.1)
    for step in range(1, recipe.warm_steps + 1):
        rows = torch.randint(len(numbers), (recipe.warm_batch,), generator=generator)
        order = torch.rand(recipe.warm_batch, recipe.digits, generator=generator).argsort(dim=1)
        ends = torch.full((recipe.warm_batch, 1), tokenizer.eos_token_id)
        input_ids = torch.cat([prompts_NT[rows], digits_ND[rows].gather(1, order), ends], dim=1)
        labels = input_ids.clone()
        labels[:, : prompts_NT.shape[1]] = -100
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            progress(f"quickstart: training the model, step {step} of {recipe.warm_steps}, loss {loss.item():.2f}")
