"""Parts of a grid of devices: its process group, and errors for sizes that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch.distributed as dist

from rlcore.errors import ConfigError
from rlcore.protocols.backend import BackendContext


def need_process_group(context: BackendContext) -> None:
    """Check the process group that the host has initialized, or create one for a single rank."""
    if not dist.is_initialized():
        assert context.world_size == 1, f"torch.distributed is not initialized on one of {context.world_size} ranks"
        backend = "gloo" if context.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    found = dist.get_world_size()
    assert found == context.world_size, f"a process group of {found} for {context.world_size} ranks"


def check_devices(num_devices: int, sizes: Mapping[str, int]) -> None:
    """Check that the product of the axes divides the number of devices.

    Args:
        sizes: setting -> size of its axis.

    Raises:
        ConfigError: it does not; the message lists numbers that fit.
    """
    product = prod(sizes.values())
    if num_devices % product:
        above_1 = {name: size for name, size in sizes.items() if size > 1}
        what = " · ".join(f"{name} {size}" for name, size in above_1.items())
        fits = ", ".join(str(product * factor) for factor in range(1, 5))
        divisors = ", ".join(str(size) for size in range(1, num_devices + 1) if num_devices % size == 0)
        raise ConfigError(
            f"{num_devices} devices cannot be divided by {what} = {product}\n"
            f"Give the pool {fits}, … devices, or a product of {divisors}:  backend.{next(iter(above_1))}=1"
        )


def check_divides(setting: str, size: int, numbers: Mapping[str, int], of_what: str = "of this model") -> None:
    """Check that the size of an axis divides numbers of the model, such as those of its heads.

    Raises:
        ConfigError: it does not; the message lists the sizes that do.
    """
    for name, number in numbers.items():
        if number % size:
            fits = [n for n in range(1, max(numbers.values()) + 1) if all(other % n == 0 for other in numbers.values())]
            raise ConfigError(
                f"{setting}={size} does not divide {name}={number} {of_what}\n"
                f"Type  backend.{setting}=N  with N one of {', '.join(map(str, fits))}"
            )
