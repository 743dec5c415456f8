"""What `moshpit doctor` looks at in this machine's network: ports, IPv6, congestion, speed.

Everything here stays on this machine: sockets that are opened are dialled from here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moshpit.cli.checks import Check, Status
from moshpit.config import TransportConfig
from moshpit.types import Address
from moshpit.wire.framing import TAG_BYTES

SEAL_S = 0.2
"""How long the sealing speed is measured."""
SEAL_BYTES_PER_S_MIN = 300e6  # guess: below it, sealing and not a 1 Gbit/s link is the limit
DIAL_S = 2.0
_PROC = Path("/proc/sys/net/ipv4")


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a host's first address; raises `OSError` if it has none."""
    return socket.AddressFamily(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0])


def check_listening(address: Address) -> Check:
    """Bind the address, dial it from this machine, and see that bytes arrive."""
    subject = "listen"
    try:
        family = family_of(address.host)
        server = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        return Check(subject, Status.FAIL, str(error), _listen_advice(error))
    with server:
        host, port = server.getsockname()[:2]
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        try:
            with socket.create_connection((loopback, port), timeout=DIAL_S) as dialer:
                server.settimeout(DIAL_S)
                accepted = server.accept()[0]
                with accepted:
                    accepted.settimeout(DIAL_S)
                    dialer.sendall(b"moshpit")
                    got = accepted.recv(16)
        except OSError as error:
            return Check(
                subject, Status.FAIL, f"bound to port {port}, but dialling it from here: {error}",
                "a firewall on this machine drops it; allow the port",
            )  # fmt: skip
    if got != b"moshpit":
        return Check(subject, Status.FAIL, f"port {port} answered {got!r}", "something rewrites it")
    if loopback in ("127.0.0.1", "::1") and host == loopback:
        return Check(
            subject, Status.OK, f"port {port} is free and answers, to this machine only",
            "others need an address that they can dial: --listen 0.0.0.0:PORT",
        )  # fmt: skip
    return Check(subject, Status.OK, f"port {port} is free and answers from this machine")


def _listen_advice(error: OSError) -> str:
    import errno

    match error.errno:
        case errno.EADDRINUSE:
            return "another program has this port; choose another, or 0 for any free one"
        case errno.EACCES:
            return "ports below 1024 need privileges; choose a higher one"
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address; use 0.0.0.0 or [::] to listen, and "\
                "--advertise for the address that others dial"  # fmt: skip
        case _:
            return "use an address of this machine, or 0.0.0.0"


def check_ipv6() -> Check:
    """Whether IPv6 works on this machine, and whether it has an address that others can dial."""
    try:
        with (
            socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
            socket.create_connection(server.getsockname()[:2], timeout=DIAL_S),
        ):
            pass
    except OSError as error:
        return Check(
            "ipv6", Status.WARN, f"not here: {error}",
            "peers that have only IPv6 cannot be reached; nothing to do if there are none",
        )  # fmt: skip
    public = [a for a in _own_addresses(socket.AF_INET6) if not a.startswith(("fe80", "::1", "fd"))]
    if not public:
        return Check("ipv6", Status.OK, "on loopback only: this machine has no public IPv6 address")
    return Check("ipv6", Status.OK, f"public address {public[0]}")


def _own_addresses(family: socket.AddressFamily) -> list[str]:
    import psutil

    return [
        a.address.split("%")[0]
        for interface in psutil.net_if_addrs().values()
        for a in interface
        if a.family == family
    ]


def check_congestion_control() -> Check:
    """Whether bulk sockets may use BBR, which keeps its speed where packets get lost."""
    subject = "congestion"
    if sys.platform != "linux":
        return Check(subject, Status.OK, "chosen by the system; only Linux lets a socket choose")
    default = _read(_PROC / "tcp_congestion_control")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pass
        else:
            return Check(subject, Status.OK, f"bbr is allowed (the system's default is {default})")
    allowed = _read(_PROC / "tcp_allowed_congestion_control")
    if "bbr" in _read(_PROC / "tcp_available_congestion_control").split():
        do = f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{allowed} bbr"'
    else:
        do = (
            f'modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="{allowed} bbr"'
        )
    return Check(
        subject, Status.WARN,
        f"{default}, bbr is not allowed: 0.5 % loss on a long link costs nine tenths of its speed",
        f"as root: {do}",
    )  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def check_sealing() -> Check:
    """How fast one core seals and opens chunks, as every bulk connection does."""
    rate = sealing_speed()
    found = f"{rate / 1e9:.1f} GB/s on one core, {rate * 8 / 1e9:.0f} Gbit/s"
    if rate < SEAL_BYTES_PER_S_MIN:
        return Check(
            "encryption", Status.WARN, found,
            "this processor has no AES instructions; on a network that you trust, --plaintext",
            {"bytes_per_s": rate},
        )  # fmt: skip
    return Check("encryption", Status.OK, found, figures={"bytes_per_s": rate})


def sealing_speed(seconds: float = SEAL_S) -> float:
    """Return bytes per second that one core seals and opens again, in chunks of default size."""
    size = TransportConfig().chunk_bytes
    cipher = AESGCM(AESGCM.generate_key(256))
    plain, sealed, opened = os.urandom(size), bytearray(size + TAG_BYTES), bytearray(size)
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        nonce = done.to_bytes(12, "little")
        cipher.encrypt_into(nonce, plain, b"header", sealed)
        cipher.decrypt_into(nonce, sealed, b"header", opened)
        done += 1
    return done * size / elapsed


def check_loopback() -> Check:
    """How fast bytes go through this machine's own TCP: the ceiling for everything else."""
    rate = loopback_speed()
    found = f"{rate / 1e9:.1f} GB/s through TCP, without encryption"
    return Check("loopback", Status.OK, found, figures={"bytes_per_s": rate})


def loopback_speed(seconds: float = SEAL_S) -> float:
    """Return bytes per second between two threads over TCP on loopback."""
    size = TransportConfig().chunk_bytes
    buffer, received = bytearray(size), 0
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=DIAL_S) as sender,
        server.accept()[0] as receiver,
    ):
        start = time.perf_counter()

        def send() -> None:
            while time.perf_counter() < start + seconds:
                sender.sendall(bytes(size))
            sender.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send, name="doctor-loopback")
        thread.start()
        while count := receiver.recv_into(buffer):
            received += count
        elapsed = time.perf_counter() - start
        thread.join()
    return received / elapsed
