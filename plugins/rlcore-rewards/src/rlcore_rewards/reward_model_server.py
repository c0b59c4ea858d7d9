"""A reward model behind a server of vLLM or SGLang. One request per sample; the server forms batches.

| api | request | score |
|---|---|---|
| classify | vLLM `/classify` with messages | data[0].probs |
| pooling | vLLM `/pooling` with messages | data[0].data, of the last token if there is one for each |
| score | vLLM `/score` with prompt and response as two texts | data[0].score |
| sglang | SGLang `/classify` with one text | [0].embedding |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.errors import ConfigError, SampleError, require, require_at_least
from rlcore.protocols.reward import RewardResult
from rlcore_rewards.client import Client, ServerConfig

_PATHS = {"classify": "/classify", "pooling": "/pooling", "score": "/score", "sglang": "/classify"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelServerConfig(ServerConfig):
    """Options of `reward_model_server`; `url` is the base address, such as http://localhost:8000"""

    model: str
    """Name of the model on the server."""
    api: Literal["classify", "pooling", "score", "sglang"] = "classify"
    """Interface of the server."""
    activation: bool = False
    """Let vLLM apply a sigmoid or softmax to the outputs of the model."""
    output: int = 0
    """Number of the output that is the reward, for a model with several."""
    system: str = ""
    """System message before the prompt."""
    tokenizer: str = ""
    """Directory with the chat template for api=sglang, which takes rendered text. Without it, the response follows the
    text of the prompt."""

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        require_at_least(self, output=0)
        require(self.api in _PATHS, "api", ", ".join(_PATHS), self.api, "classify")
        renders, api = self.api == "sglang", self.api
        require(renders or not self.tokenizer, "tokenizer", f"nothing with api={api}", self.tokenizer, "''")
        require(not (renders and self.activation), "activation", "false with api=sglang", self.activation, "false")
        reads = api in ("classify", "pooling") or bool(self.tokenizer)
        require(reads or not self.system, "system", f"nothing with api={api} without messages", self.system, "''")


class RewardModelServer:
    """Reward from a reward model that another process serves.

    Example: rlcore train reward='[{name: reward_model_server, url: "http://localhost:8000", model: MODEL}]'
    """

    Config = RewardModelServerConfig

    def __init__(self, config: RewardModelServerConfig) -> None:
        self._config, self._path = config, _PATHS[config.api]
        self._client = Client(config, "reward model")
        self._tokenizer = _tokenizer(config.tokenizer) if config.tokenizer else None

    async def __call__(self, completion: str, prompt: Any) -> RewardResult:
        body = {"model": self._config.model, **self._input(completion, prompt)}
        answer = await self._client.post(self._path, body)
        try:
            score = self._outputs(answer)[self._config.output]
        except (KeyError, IndexError, TypeError) as error:
            raise SampleError(
                f"the server returned {answer!r:.100}, which has no output {self._config.output} of {self._path}\n"
                "Compare  api  and  output  with the server and its model."
            ) from error
        return RewardResult(score)

    def _input(self, completion: str, prompt: Any) -> dict[str, Any]:
        """Return the fields of a request that depend on the interface."""
        if self._config.api == "sglang":
            return {"text": [self._rendered(completion, prompt)]}
        if self._config.api == "score":
            texts = {"text_1": _as_text(prompt), "text_2": completion}
            return {**texts, "use_activation": self._config.activation}
        return {"messages": self._messages(completion, prompt), "use_activation": self._config.activation}

    def _messages(self, completion: str, prompt: Any) -> list[Mapping[str, Any]]:
        before = [{"role": "system", "content": self._config.system}] if self._config.system else []
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*before, *asked, {"role": "assistant", "content": completion}]

    def _rendered(self, completion: str, prompt: Any) -> str:
        if self._tokenizer is None:
            return _as_text(prompt) + completion
        text = str(self._tokenizer.apply_chat_template(self._messages(completion, prompt), tokenize=False))
        return text.removeprefix(self._tokenizer.bos_token or "")  # the server adds it

    def _outputs(self, answer: Any) -> Sequence[Any]:
        """Return the outputs of the model in an answer."""
        if self._config.api == "sglang":
            return answer[0]["embedding"]  # type: ignore[no-any-return]
        found = answer["data"][0]
        if self._config.api == "score":
            return [found["score"]]
        outputs = found["probs"] if self._config.api == "classify" else found["data"]
        return outputs[-1] if isinstance(outputs[-1], list) else outputs


def _tokenizer(path: str) -> Any:
    """Load a tokenizer with a chat template; its model may be on another machine."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer={path} of reward 'reward_model_server' cannot be loaded: {error}\n"
            "Give the directory of the served model, or of its tokenizer files."
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"tokenizer={path} of reward 'reward_model_server' has no chat template\nAdd a chat_template.jinja to it."
        )
    return tokenizer


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise SampleError(
        "the prompt is a list of messages; type  tokenizer: DIR  with api=sglang, or  api: classify  or  api: pooling"
    )
