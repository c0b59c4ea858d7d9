"""A frozen reward model of transformers: `AutoModelForSequenceClassification` with one output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.data.conversations import as_messages
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.models.load import check_directory, load_model, load_tokenizer, read_config
from rlcore.models.size import ModelSize, frozen_bytes
from rlcore.protocols.worker import WorkerContext
from rlcore.workers.base import Worker
from rlcore.workers.plan import PoolFacts, RoleMemory, RunPlan

AUTO_CLASS = "AutoModelForSequenceClassification"


class ClassifierWorker(Worker):
    """Scores conversations with a model of any architecture that has a sequence classifier in transformers.

    The model reads text: `data.system`, the prompt and the response, rendered by its own chat template and tokenizer, so it need not
    be of the policy's family. Without a chat template, the response follows the prompt.
    """

    reads_text = True

    @classmethod
    def check(cls, plan: RunPlan, role: str) -> None:
        path, setting = plan.models[role], plan.roles[role].model
        config = read_config(check_directory(path, setting))
        if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
            raise ModelError(
                f"{setting}={path} is not a reward model: it has no value_head.safetensors, and the architecture in its"
                f" config.json is {', '.join(config.architectures or ['not given'])}, not …ForSequenceClassification\n"
                "Train one:  rlcore train algorithm=reward_model …   then give the output of  rlcore export RUN DIR"
            )
        if config.num_labels != 1:
            raise ModelError(
                f"{setting}={path} has {config.num_labels} outputs; a reward model has one\n"
                "Choose another model, or one output of it in a reward of your own:  reward=my_rewards.py:score"
            )
        if plan.config.environment.name:
            raise ConfigError(
                f"{setting}={path} reads a prompt and one response, but environment={plan.config.environment.name} plays"
                " several turns\nLeave out  environment , or use a model trained with  algorithm=reward_model"
            )
        if plan.config.data.system and not load_tokenizer(path).chat_template:
            raise ConfigError(
                f"data.system is set, but {setting}={path} has no chat template for it\n"
                "Add a chat_template.jinja to its directory, or choose another reward model."
            )

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        model = plan.config.model
        return {
            "path": plan.models[role],
            "policy_path": model.path,
            "system": plan.config.data.system,
            "dtype": torch.bfloat16 if model.precision == "bfloat16" else torch.float32,
            "max_tokens": model.max_tokens_per_device,
        }

    @classmethod
    def memory(cls, plan: RunPlan, role: str, pool: PoolFacts) -> RoleMemory:
        held = frozen_bytes(ModelSize.read(check_directory(plan.models[role])))
        return RoleMemory(device=held, offloaded=held)

    def __init__(
        self, context: WorkerContext, *, path: str, policy_path: str, system: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        super().__init__(context)
        self._model = load_model(path, device=context.device, dtype=dtype, auto_class=AUTO_CLASS)
        self._tokenizer, self._policys_tokenizer = load_tokenizer(path), load_tokenizer(policy_path)
        self._path, self._max_tokens = path, max_tokens
        self._before = [{"role": "system", "content": system}] if system else []
        self._longest = _num_positions(self._model)

    @dispatch("dp", reads=("input_ids", "loss_mask", "prompt"))
    def scores(self, batch: Batch) -> Batch:
        """Compute the row column `model_score`, the output of the model for each conversation.

        Raises:
            DataError: a conversation is longer than the model reads, or the model has no chat template for messages.
        """
        ids = [self._ids(prompt, text) for prompt, text in zip(batch["prompt"].tolist(), self._responses(batch))]
        scores = torch.zeros(len(batch))
        for rows in self._micro_batches([len(it) for it in ids]):
            scores[rows] = self._forward([ids[row] for row in rows])
        return Batch.of(lengths=batch.lengths, rows={"model_score": scores})

    @dispatch("all", on_device=False)
    def offload(self) -> None:
        """Move the model to host memory."""
        self._model.to("cpu")

    @dispatch("all", on_device=False)
    def reload(self) -> None:
        """Move the model back to the device."""
        self._model.to(self.context.device)

    def _responses(self, batch: Batch) -> Sequence[str]:
        ids, mask, offsets = batch["input_ids"], batch["loss_mask"], batch.offsets().tolist()
        responses = [ids[start:end][mask[start:end]].tolist() for start, end in pairwise(offsets)]
        return list(self._policys_tokenizer.batch_decode(responses, skip_special_tokens=True)) if responses else []

    def _ids(self, prompt: Any, response: str) -> list[int]:
        if self._tokenizer.chat_template:
            messages = [*self._before, *as_messages(prompt), {"role": "assistant", "content": response}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(prompt, str):
            ids = self._tokenizer(prompt + response)["input_ids"]
        else:
            raise DataError(
                f"the prompts are lists of messages, but the reward model {Path(self._path).name} has no chat template\n"
                "Add a chat_template.jinja to its directory, or choose another reward model."
            )
        if self._longest is not None and len(ids) > self._longest:
            raise DataError(
                f"a prompt with its response has {len(ids)} tokens, but the reward model reads {self._longest}\n"
                "Type smaller limits:  data.max_prompt_tokens=…  sampling.max_response_tokens=…"
            )
        return ids

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return row numbers of similar length, each batch within `max_tokens` when padded."""
        batches: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            fits = batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= self._max_tokens
            if fits and self._model.config.pad_token_id is not None:  # else the model takes one row at a time
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [B] float32 scores of token ids, padded on the right."""
        longest, pad = max(map(len, rows)), self._model.config.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        outputs = self._model(input_ids=ids.to(self.context.device), attention_mask=mask.to(self.context.device))
        return outputs.logits[:, 0].float().cpu()  # type: ignore[no-any-return]


def _num_positions(model: Any) -> int | None:
    """Return the maximum number of tokens that a model reads, or None if its positions are not limited."""
    size: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for module in model.modules():  # RoBERTa counts positions from padding_idx + 1
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == size and module.padding_idx is not None:
            return size - module.padding_idx - 1
    return size
