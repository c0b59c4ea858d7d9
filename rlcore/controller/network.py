"""Addresses and network interfaces of this machine.

By default gloo listens at the address of the host name. On many machines that is a loopback address, which other
machines cannot reach.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys

logger = logging.getLogger(__name__)
_SIOCGIFADDR = 0x8915


def use_interface_of(address: str, *, alone: bool) -> None:
    """Make gloo and NCCL use the interface with this address, unless environment variables name another.

    Args:
        alone: whether the pool is on one machine, so that gloo can use the loopback interface.
    """
    if sys.platform != "linux":
        return
    name = interface_of(address)
    if name is None:
        logger.warning("no network interface of this machine has %s; gloo uses the address of the host name", address)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if alone else name)
    if name != "lo":  # groups for weights extend beyond the pool
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; Linux only."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; Linux only."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def address_toward(host: str) -> str:
    """Return the address from which this machine reaches another one.

    Raises:
        OSError: there is no route.
    """
    family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # UDP: sends nothing, only chooses a route
        return str(probe.getsockname()[0])
