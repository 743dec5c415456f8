"""Sockets: their options, connecting them, and what the kernel knows of them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from moshpit.types import Address

_TCP_INFO: Final = struct.Struct("=68x I 28x I 16x Q 20x I 4x I 8x Q Q Q")
"""The parts of Linux's ``struct tcp_info`` that `TcpInfo` has, by their offsets."""

UNSENT_BYTES: Final = 128 * 1024  # guess: 10 ms of 100 Mbit/s

COUNTS_FLOW: Final = sys.platform == "linux"

_SO_MAX_PACING_RATE: Final = 47  # Linux's; Python does not name it
_PACE_MIN: Final = 16 * 1024  # guess, bytes/s: a flow that is held back still shows its speed
_PACE_MAX: Final = 1 << 31  # bytes/s; the option is an int


@final
@dataclass(frozen=True, slots=True)
class TcpInfo:
    """What the kernel counts for one connection, since it was made.

    Attributes:
        rtt_s, rtt_s_min: the smoothed round trip, and the shortest lately.
        retransmitted, segments: data segments sent again, and sent.
        acknowledged: bytes that the other side's kernel has.
        limited_s: how long data waited for the network, and not for the other side's program.
    """

    rtt_s: float
    rtt_s_min: float
    retransmitted: int
    segments: int
    acknowledged: int
    limited_s: float


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Ask the kernel about a connection; None if it cannot say."""
    if not COUNTS_FLOW:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # closed meanwhile
        return None
    if len(data) < _TCP_INFO.size:
        return None
    rtt, again, acknowledged, rtt_min, segments, busy, reader, buffer = _TCP_INFO.unpack(data)
    return TcpInfo(
        rtt_s=rtt / 1e6,
        rtt_s_min=rtt_min / 1e6,
        retransmitted=again,
        segments=segments,
        acknowledged=acknowledged,
        limited_s=max(0, busy - reader - buffer) / 1e6,
    )


def same_machine(sock: socket.socket) -> bool:
    """Whether both ends of a connection are on this machine."""
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # closed meanwhile
        return True
    return here == there or ipaddress.ip_address(there.split("%")[0]).is_loopback


def congestion(sock: socket.socket) -> str:
    """Return the name of a connection's congestion control; empty if the system does not say."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return ""
    return name.split(b"\0")[0].decode("ascii", "replace")


def tune(sock: socket.socket, congestion: str = "") -> None:
    """Set the options of a connection; what the system does not know is left out.

    Args:
        sock: the connection.
        congestion: the algorithm that a bulk connection asks for; empty leaves the default.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = [
        ("TCP_KEEPIDLE", 15),  # guess, seconds
        ("TCP_KEEPINTVL", 5),  # guess, seconds
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 20_000),  # guess, milliseconds without an acknowledgement
    ]
    for name, value in options:
        option = getattr(socket, name, None)
        if option is not None:
            _try_option(sock, option, value)
    if congestion:
        set_congestion(sock, congestion)


def set_congestion(sock: socket.socket, name: str) -> None:
    """Ask for a congestion control, also in the middle of a connection; the system may refuse."""
    if hasattr(socket, "TCP_CONGESTION"):
        _try_option(sock, socket.TCP_CONGESTION, name.encode())


def pace(sock: socket.socket, bytes_per_s: float) -> None:
    """Let a connection send at most so fast; infinite is as fast as it can."""
    if COUNTS_FLOW:
        rate = -1 if bytes_per_s >= _PACE_MAX else max(_PACE_MIN, round(bytes_per_s))
        _try_option(sock, _SO_MAX_PACING_RATE, rate, level=socket.SOL_SOCKET)


def keep_queue_short(sock: socket.socket) -> None:
    """Let the kernel take hardly more than it can send, so that what is urgent (the outbox sorts)
    does not wait behind megabytes. Within one machine nothing waits, and it would cost CPU."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    remote = sock.family in (socket.AF_INET, socket.AF_INET6) and not same_machine(sock)
    if option is not None and remote:
        _try_option(sock, option, UNSENT_BYTES)


def _try_option(
    sock: socket.socket, option: int, value: int | bytes, level: int = socket.IPPROTO_TCP
) -> None:
    try:
        sock.setsockopt(level, option, value)
    except OSError:  # not allowed here, or not in this kernel
        return


async def connect_any(
    addresses: Sequence[Address], timeout_s: float, congestion: str = ""
) -> tuple[socket.socket, str]:
    """Connect to the first address that answers; raises the last `OSError`."""
    failure: OSError = OSError("it has no address that can be dialled")
    for address in addresses:
        try:
            async with asyncio.timeout(timeout_s):
                return await _connect(address, congestion), str(address)
        except TimeoutError:
            failure = OSError(f"{address} did not answer within {timeout_s} s")
        except ConnectionRefusedError as error:
            failure = error
        except (OSError, UnicodeError) as error:
            failure = OSError(f"{address}: {error}")
    raise failure


async def _connect(address: Address, congestion: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{address} has no address")
    for family, kind, proto, _, where in found:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            tune(sock, congestion)
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            failure = error
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failure
