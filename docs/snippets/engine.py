"""An engine without a model: all tokens have the same probability. It shows the protocol, not performance."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore import Mesh, Request, Sample
from rlcore.errors import SampleError
from rlcore.protocols import ModelConfig, RolloutContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DiceConfig:
    sides: int = 20
    """Number of token ids to sample from."""


class Dice:
    Config = DiceConfig

    def __init__(self, config: DiceConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )
        self._sides, self._version = config.sides, 0
        self._room = json.loads((Path(model.path) / "config.json").read_text())["max_position_embeddings"]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        for request in requests:
            if len(request.prompt_ids) >= self._room:
                raise SampleError(f"request {request.request_id}: the prompt fills all {self._room} tokens")
        for request in requests:
            dice = random.Random(request.seed)  # the response depends on its seed only
            room = min(request.sampling.max_response_tokens, self._room - len(request.prompt_ids))
            token_ids = [dice.randrange(self._sides) for _ in range(room)]
            yield Sample(
                request_id=request.request_id,
                token_ids=token_ids,
                log_probs=[-math.log(self._sides)] * room,
                finish_reason="length",
                policy_version=self._version,
            )

    def load_weights(self, weights: Iterator[tuple[str, Any]], version: int) -> None:
        for _ in weights:
            pass  # a model would copy each tensor, and raise if one is missing or unknown
        self._version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
