"""Engines and servers of the ranks of a pool."""

from __future__ import annotations

from rlcore.errors import ConfigError
from rlcore.kits.engine.config import EngineConfig
from rlcore.kits.http import JsonClient, bearer
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import Mesh


def engine_mesh(config: EngineConfig, context: RolloutContext) -> Mesh:
    """Assign consecutive ranks to one engine, whose first rank returns its samples; each rank has its own server.

    Raises:
        ConfigError: the pool cannot be divided into engines of this size.
    """
    size = 1 if config.url else config.tensor_parallel
    rank, world_size = context.rank, context.world_size
    if world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"rollout.tensor_parallel={size} does not divide the {world_size} ranks of the rollout's pool\n"
            f"Type  rollout.tensor_parallel={fitting[-1]}   ({', '.join(fitting)} are possible)"
        )
    return Mesh(
        rank=rank, world_size=world_size, dp_rank=rank // size, dp_size=world_size // size, returns=rank % size == 0
    )


def server_url(config: EngineConfig, context: RolloutContext) -> str:
    """Return the address of this rank's server.

    Raises:
        ConfigError: the number of servers is not the number of ranks.
    """
    urls = config.urls
    if len(urls) != context.world_size:
        raise ConfigError(
            f"rollout.url names {len(urls)} servers, but the rollout's pool has {context.world_size} ranks\n"
            f"Type  placement=split pools.rollout.device=cpu pools.rollout.devices_per_node={len(urls)}"
        )
    return urls[context.rank]


def server_client(config: EngineConfig, url: str) -> JsonClient:
    """Return a client with the deadline and the key of the settings."""
    start = f"python -m {config.SERVE} MODEL --port PORT"
    return JsonClient(url, config.ENGINE, config.timeout_s, start, "rollout.timeout_s", bearer(config.api_key_variable))
