"""Load models and tokenizers from directories in Hugging Face layout. Nothing is downloaded, and their code is not run."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ModelError, did_you_mean_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SAMPLE_BYTES = 2**16
_BY_LENGTH = frozenset({"dynamic", "longrope"})
_COPIED_FILES = ("tokenizer*", "vocab.*", "merges.txt", "added_tokens.*", "special_tokens_map.*", "chat_template*")


def check_directory(path: str, setting: str = "model.path") -> Path:
    """Return the path of a model directory; `setting` is the setting with this path.

    Raises:
        ModelError: the directory, config or weights are missing.
    """
    if not path:
        raise ModelError(f"{setting} is empty\nType  {setting}=DIR")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        siblings = [p for p in directory.parent.iterdir() if p.is_dir()] if directory.parent.is_dir() else []
        raise ModelError(
            f"{setting}={path}: there is no such directory.{did_you_mean_path(directory, siblings)}\n"
            "It must be a local directory in Hugging Face layout:  hf download OWNER/NAME --local-dir DIR"
        )
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{setting}={path} has no config.json, so it is not a model in Hugging Face layout\nSee  ls {path}"
        )
    if not list(directory.glob("*.safetensors")):
        pickled = [p.name for p in (*directory.glob("*.bin"), *directory.glob("*.pt"))]
        found = f"; it has {', '.join(pickled[:3])}, which rlcore does not unpickle" if pickled else ""
        raise ModelError(
            f"{setting}={path} has no *.safetensors{found}\n"
            "Convert it once:  AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    for index in directory.glob("*.safetensors.index.json"):
        absent = sorted(
            {f for f in json.loads(index.read_text())["weight_map"].values() if not (directory / f).is_file()}
        )
        if absent:
            raise ModelError(
                f"{setting}={path} lacks {len(absent)} of its weight files, the first is {absent[0]}\n"
                "Download them again:  hf download OWNER/NAME --local-dir DIR"
            )
    return directory


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a model directory; one object per process and path.

    Raises:
        ModelError: no tokenizer files.
    """
    directory = check_directory(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path={path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})\n"
            "Copy the tokenizer files of the model to it."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ModelError(
            f"model.path={path} has a tokenizer that cannot be loaded: {type(error).__name__}: {error}\n"
            "Copy the whole directory again:  hf download OWNER/NAME --local-dir DIR"
        ) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer from one directory to another."""
    for pattern in _COPIED_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def read_config(directory: Path) -> Any:
    """Read config.json, without running code that it names.

    Raises:
        ModelError: transformers does not accept it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason, _, _ = str(cause).partition("\n")
        raise ModelError(
            f"model.path={directory}: config.json cannot be used: {reason}\n"
            "Copy the whole directory again, or install a newer transformers:  pip install --upgrade transformers"
        ) from error


def load_model(
    path: str,
    *,
    device: str = "cpu",
    dtype: Any = None,
    attention: str = "eager",
    auto_class: str = "AutoModelForCausalLM",
) -> Any:
    """Load a model in evaluation mode (no dropout), parameters in `dtype` (default float32).

    Args:
        auto_class: class of transformers that loads it.

    Raises:
        ModelError: it cannot be loaded, weights and config.json do not match, or some weights are not finite.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    from rlcore.models.weights import check_finite, check_names

    directory = check_directory(path)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(directory)
    try:
        model, found = getattr(transformers, auto_class).from_pretrained(
            directory,
            config=config,
            dtype=dtype or torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        reason, _, _ = str(error).partition("\n")
        raise ModelError(
            f"model.path={path} cannot be loaded by {auto_class}: {reason}\n"
            "Copy the whole directory again, or install a newer transformers:  pip install --upgrade transformers"
        ) from error
    check_positions(config, path)
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"model.path={path} lacks {len(missing)} weights of {type(model).__name__}, the first is {missing[0]}\n"
            "Copy the whole directory again:  hf download OWNER/NAME --local-dir DIR"
        )
    check_names(found["unexpected_keys"], path, model._keys_to_ignore_on_load_unexpected or ())
    model = model.to(device).eval()
    check_finite(model.named_parameters(), path)
    return model


def check_positions(config: Any, path: str | Path) -> None:
    """Refuse a configuration in which the positions of a sample depend on the other samples of its batch.

    Raises:
        ModelError: the configuration has such a rope_type.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, Mapping)}
    if by_length := sorted(_BY_LENGTH & kinds):
        raise ModelError(
            f"model.path={path} has rope_type={by_length[0]}: its positions depend on the longest sample of a batch, so"
            " a sample's log-probs would depend on the other samples\n"
            "Set a fixed rope_type in config.json, such as yarn or default, or choose another model."
        )


def fingerprint(files: Iterable[Path]) -> int:
    """Return 56 bits of a hash of the files' names, sizes and a sample of their bytes."""
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return int.from_bytes(digest.digest()[:7], "big")


def check_same_files(directory: Path, device: Any) -> None:
    """Check that all ranks read the same files, by names, sizes and a sample of the bytes. Every rank calls it.

    Raises:
        ModelError: the files differ.
    """
    import torch
    import torch.distributed as dist

    files = [directory / "config.json", *directory.glob("*.safetensors")]
    own = torch.tensor([fingerprint(files)], device=device)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    if any(int(other) != int(own) for other in found):
        raise ModelError(f"the ranks have read different weights from {directory}\nCopy the same model to every node.")
