"""What a peer says of itself at the start: role, addresses, admission."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from moshpit.runtime.helpdesk import is_loopback, plain_host
from moshpit.types import Address, PeerId, Role
from moshpit.wire.messages import Admission, PeerRecord


def own_record(
    peer: PeerId,
    role: Role,
    addresses: tuple[Address, ...],
    admission: Admission,
    bandwidth: float = 0.0,
) -> PeerRecord:
    """Return a peer's first record, still unsigned.

    Args:
        peer: whose it is.
        role: what it does.
        addresses: where it can be dialled; empty for clients.
        admission: its admission to the run.
        bandwidth: bytes per second each way; 0 if unknown.
    """
    return PeerRecord(
        peer=peer,
        incarnation=1,
        version=1,
        role=role.value,
        addresses=tuple((a.host, a.port) for a in addresses) if role.reduces else (),
        via=(),
        up=bandwidth,
        down=bandwidth,
        schema=b"",
        epoch=0,
        samples=0.0,
        rate=0.0,
        group_key=(),
        step_s=0.0,
        left=False,
        admission=admission,
    )


def advertised(listening: tuple[Address, ...]) -> tuple[Address, ...]:
    """Return the addresses by which others may reach what listens here.

    A wildcard address stands for every address of this machine's interfaces that is up;
    loopback comes last, for peers on the same machine.
    """
    found: list[Address] = []
    for address in listening:
        hosts = _interface_hosts(address.host) if address.wildcard else [address.host]
        found += [Address(host, address.port) for host in hosts]
    return tuple(dict.fromkeys(found))


def worth_dialling(record: PeerRecord, own: frozenset[str]) -> list[Address]:
    """Return where a peer says that it can be dialled, the best first.

    Its loopback is left out, where it is another machine's: somebody else answers at this one's.

    Args:
        record: the peer's.
        own: `own_hosts` of this machine.
    """
    addresses = [Address(host, port) for host, port in record.addresses]
    outside = [a for a in addresses if not is_loopback(a.host)]
    here = not outside or any(plain_host(a.host) in own for a in outside)
    return addresses if here else outside


def own_hosts() -> frozenset[str]:
    """Return the addresses of this machine's interfaces that are up."""
    return frozenset(plain_host(host) for host in _interface_hosts("::"))


def _interface_hosts(wildcard: str) -> list[str]:
    families = {socket.AF_INET} if wildcard == "0.0.0.0" else {socket.AF_INET, socket.AF_INET6}
    stats = psutil.net_if_stats()
    usable: list[tuple[bool, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        if name in stats and not stats[name].isup:
            continue
        for entry in entries:
            if entry.family in families:
                ip = ipaddress.ip_address(entry.address.split("%")[0])
                if not ip.is_link_local and not ip.is_multicast:
                    usable.append((ip.is_loopback, str(ip)))
    return [host for _, host in sorted(usable)][:8]
