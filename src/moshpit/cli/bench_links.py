"""Links of a given bandwidth between processes of one machine: namespaces and `tc`.

Every peer gets a network namespace with one interface, a cable (veth) from there to a bridge in
a hub namespace, and a token bucket (`tbf`) at both ends of the cable: what the peer sends is
shaped at its own end, what it receives at the hub's. Nothing is connected to the machine's own
network, so addresses cannot clash, and two runs do not meet.

The bucket counts Ethernet frames: of 1514 bytes 1448 are payload, 95.6 %. Loss drops whole
packets where they arrive (nftables); the sender then sends packets of one segment each, or else
up to 64 KB would be lost at a time.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

from moshpit.errors import ConfigError, LocalError

PREFIX = "moshpit-bench"
INTERFACE = "eth0"
PEERS_MAX = 250  # addresses in one /24
NETWORK = "10.77.0"

_BURST_S = 0.002  # so that a late timer of the kernel costs no bandwidth
_BURST_BYTES_MIN = 128 * 1024  # a packet that the sender has not cut yet has up to 64 KB
_QUEUE_S = 0.05  # guess: a home router's buffer; one of a few ms would need many losses
_COMMAND_S = 20.0


def check_root(*, loss: bool) -> None:
    """Say early what is missing.

    Raises:
        ConfigError: not Linux, not root, or a program that is not installed.
    """
    wanted = {"ip": "iproute2", "tc": "iproute2"} | ({"nft": "nftables"} if loss else {})
    for program, package in wanted.items():
        if shutil.which(program) is None:
            raise ConfigError(
                f"--link-mbit needs the program `{program}` (package {package}), on Linux"
            )
    if os.geteuid() != 0:
        raise ConfigError(
            "--link-mbit makes network namespaces, which needs root: run it with sudo, or in a "
            "container with --privileged. Without --link-mbit the peers share the loopback"
        )


class Links:
    """One namespace per peer, on one bridge. Use in a ``with`` block: made at the beginning,
    deleted at the end, whatever happened between.

    Attributes:
        hosts: the address of each peer.
    """

    def __init__(self, mbit: Sequence[float], *, loss_percent: float = 0.0) -> None:
        self._mbit = mbit
        self._loss_percent = loss_percent
        run = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._hub = f"{run}-hub"
        self._peers = [f"{run}-{index}" for index in range(len(mbit))]
        self._made: list[str] = []
        self.hosts = [f"{NETWORK}.{index + 1}" for index in range(len(mbit))]

    def prefix(self, index: int) -> list[str]:
        """Return what to write before a command that is to run in a peer's namespace."""
        return ["ip", "netns", "exec", self._peers[index]]

    def __enter__(self) -> Links:
        try:
            self._make()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._delete()

    def _make(self) -> None:
        _delete_leftovers()
        try:
            self._namespace(self._hub)
        except LocalError as error:
            raise LocalError(
                f"{error}; root alone is not enough in a container: it must be allowed to make "
                "network namespaces (docker run --privileged)"
            ) from None
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for index, name in enumerate(self._peers):
            self._namespace(name)
            self._connect(index, name)

    def _namespace(self, name: str) -> None:
        self._made.append(name)  # first: who is interrupted in between must delete it, too
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _connect(self, index: int, name: str) -> None:
        port, mbit = f"port{index}", self._mbit[index]
        cable = ("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "-n", self._hub, *cable)
        _run("ip", "-n", self._hub, "link", "set", "dev", port, "master", "bridge", "up")
        address = f"{self.hosts[index]}/24"
        _run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
        if self._loss_percent:
            _run("ip", "-n", name, "link", "set", "dev", INTERFACE, "gso_max_segs", "1")
        _run("ip", "-n", name, "link", "set", "dev", INTERFACE, "up")
        for namespace, interface in ((name, INTERFACE), (self._hub, port)):
            shape = ("qdisc", "add", "dev", interface, "root", *bucket(mbit))
            _run("tc", "-n", namespace, *shape)
        if self._loss_percent:
            _run("ip", "netns", "exec", name, "nft", _loss_rules(self._loss_percent))

    def _delete(self) -> None:
        left = [name for name in reversed(self._made) if not _deleted(name)]
        self._made.clear()
        if left:
            raise LocalError(f"could not delete; do it by hand: ip netns delete {' '.join(left)}")


def bucket(mbit: float) -> list[str]:
    """Return the words for `tc` that shape to so many Mbit/s.

    >>> " ".join(bucket(100))
    'tbf rate 100000000bit burst 131072 latency 50ms'
    """
    burst = max(_BURST_BYTES_MIN, round(mbit * 125_000 * _BURST_S))
    latency = f"{round(_QUEUE_S * 1000)}ms"
    return ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "latency", latency]


def _loss_rules(percent: float) -> str:
    of_a_million = round(percent * 10_000)
    return (
        "add table inet bench; "
        "add chain inet bench arriving { type filter hook input priority 0 ; }; "
        f'add rule inet bench arriving iifname "{INTERFACE}" '
        f"numgen random mod 1000000 < {of_a_million} drop"
    )


def _run(*command: str) -> str:
    """Run a command to its end. In a session of its own: Ctrl-C is ours, not its."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"`{' '.join(command)}` does not end") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LocalError(f"`{' '.join(command)}`: {said}")
    return done.stdout


def namespaces() -> list[str]:
    """Return the names of the benchmark's namespaces that exist, of all runs."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def _deleted(name: str) -> bool:
    try:
        _run("ip", "netns", "delete", name)
    except LocalError:
        return name not in namespaces()
    return True


def _delete_leftovers() -> None:
    """Delete what runs have left that were killed (SIGKILL) and could not do it themselves."""
    for name in namespaces():
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if owner.isdigit() and not _lives(int(owner)):
            _deleted(name)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
