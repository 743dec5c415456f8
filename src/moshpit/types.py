"""The identifiers that every layer shares, and how they are shown to people."""

from __future__ import annotations

import base64
import ipaddress
from enum import StrEnum
from typing import NewType

import msgspec

from moshpit.errors import ConfigError

PeerId = NewType("PeerId", bytes)
"""A peer's Ed25519 public key, 32 raw bytes."""

RunId = NewType("RunId", bytes)
"""A run's Ed25519 public key, 32 raw bytes."""

GroupId = NewType("GroupId", bytes)
"""One attempt at one round by one group, 16 bytes, made by the group's host."""

NO_GROUP = GroupId(b"")
"""The origin of a value that no round has made yet."""


class Role(StrEnum):
    """What a peer does in a run (design §2)."""

    WORKER = "worker"
    CLIENT = "client"
    AUX = "aux"

    @property
    def trains(self) -> bool:
        """Whether peers of this role contribute samples."""
        return self is not Role.AUX

    @property
    def reduces(self) -> bool:
        """Whether peers of this role can be dialled and so reduce parts and host groups."""
        return self is not Role.CLIENT


def short(identifier: bytes) -> str:
    """Return the eight letters by which people see a peer, run or group.

    >>> short(bytes(32))
    'aaaaaaaa'
    """
    return base64.b32encode(identifier[:5]).decode().lower()


class Address(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a peer can be dialled: a host name or IP address, and a TCP port.

    >>> str(Address.parse("[::1]:7000"))
    '[::1]:7000'
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port`` or ``[ipv6]:port``; raises `ConfigError` saying what is wrong."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"address {text!r}: write an IPv6 address as [addr]:port")
        if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise ConfigError(f"address {text!r}: expected host:port with a port of 0 to 65535")
        return cls(host, int(port))

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of a machine: good to listen at, not to dial.

        >>> Address("0.0.0.0", 7000).wildcard, Address("10.0.0.7", 7000).wildcard
        (True, False)
        """
        try:
            return not self.host or ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False  # a name

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
