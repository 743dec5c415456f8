"""A small internet in network namespaces: machines, routers with NAT, slow links, loss, cuts.

    with internet() as net:
        public = net.machine(mbit=100)
        router = net.router()
        hidden = router.machine()
        subprocess.run(hidden.inside("ping", "-c1", public.address))
        net.cut([public], [router])
        net.heal()

Machines hang at a bridge in a namespace of its own, and nothing is connected to this machine's
own network, so addresses cannot clash. Everything is gone at the end, processes included; what a
killed test has left, the next one removes. What needs a router (`Router.machine`) hangs at a
bridge in the router's namespace.

Needs Linux, root, `ip`, `tc`, `nft` and `nsenter`: `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from moshpit.cli.bench_links import bucket

PREFIX = "moshpit-test"
WIRE = "eth0"  # a machine's only interface
BRIDGE = "bridge"
# Looks public: a UPnP gateway whose own address is private takes itself for one of two routers.
PUBLIC = "44.128.0"
COMMAND_S = 30.0
END_S = 10.0  # how long killed processes may take to be gone


@functools.cache
def why_not() -> str:
    """Say why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "nft", "nsenter"):
        if shutil.which(program) is None:
            return f"needs the program `{program}`"
    try:
        with internet() as net:
            net.router().machine(mbit=10).lose(0.5)
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    return ""


def needs_namespaces(test: object) -> object:
    """Mark a test that is skipped where there can be no namespaces."""
    reason = why_not()
    return pytest.mark.root(pytest.mark.skipif(bool(reason), reason=reason)(test))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise RuntimeError(f"`{' '.join(command)}`: {said}")
    return done.stdout


class Namespace:
    """A network namespace of this test."""

    def __init__(self, name: str) -> None:
        self.name = name
        run("ip", "netns", "add", name)
        self.ip("link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs another one in here, with the same process id."""
        return ["nsenter", f"--net=/run/netns/{self.name}", "--", *command]

    def run(self, *command: str) -> str:
        """Run a command in here to its end; returns what it prints."""
        return run(*self.inside(*command))

    def ip(self, *words: str) -> None:
        run("ip", "-n", self.name, *words)

    def nft(self, rules: str) -> None:
        self.run("nft", rules)

    def pids(self) -> list[int]:
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]


class Machine(Namespace):
    """A machine with one interface, at a bridge.

    Attributes:
        address: its IPv4 address.
        side: the bridge's namespace, and `port` the bridge's end of the cable.
    """

    def __init__(self, name: str, address: str, side: Namespace, port: str) -> None:
        super().__init__(name)
        self.address, self.side, self.port = address, side, port
        side.ip("link", "add", port, "type", "veth", "peer", "name", WIRE, "netns", name)
        side.ip("link", "set", "dev", port, "gso_max_segs", "1", "master", BRIDGE, "up")
        self.ip("address", "add", f"{address}/24", "dev", WIRE)
        # Packets as on a wire: else up to 64 KB at a time would be lost, or wait.
        self.ip("link", "set", "dev", WIRE, "gso_max_segs", "1")
        self.ip("link", "set", "dev", WIRE, "up")

    def shape(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Give its link a bandwidth each way; None: as fast as it goes."""
        for place, wire, mbit in ((self, WIRE, up_mbit), (self.side, self.port, down_mbit)):
            if mbit is not None:
                run(*f"tc -n {place.name} qdisc replace dev {wire} root".split(), *bucket(mbit))
            else:  # there may be none
                with contextlib.suppress(RuntimeError):
                    run(*f"tc -n {place.name} qdisc del dev {wire} root".split())

    def lose(self, share: float) -> None:
        """Drop a share of the packets that it sends, and of those that it is sent."""
        luck = "" if share >= 1 else f"numgen random mod 1000000 < {round(1e6 * share)} "
        for place, wire in ((self, WIRE), (self.side, self.port)):
            place.nft(
                f"add table netdev {wire}; delete table netdev {wire}; add table netdev {wire}; "
                f"add chain netdev {wire} in {{ type filter hook ingress device {wire} "
                "priority 0 ; }; "
                f"add rule netdev {wire} in {luck}drop"
            )


class Router(Machine):
    """A machine at the bridge of the public ones that hides others behind its own address."""

    def __init__(
        self, name: str, address: str, side: Namespace, port: str, number: int, *, silent: bool
    ) -> None:
        super().__init__(name, address, side, port)
        self._number, self._hosts = number, 0
        self.inner = f"192.168.{number}.1"
        self.ip("link", "add", BRIDGE, "type", "bridge")
        self.ip("address", "add", f"{self.inner}/24", "dev", BRIDGE)
        self.ip("link", "set", BRIDGE, "up")
        self.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        refuse = "drop" if silent else "reject with tcp reset"
        self.nft(
            "add table ip home; "
            "add chain ip home out { type nat hook postrouting priority 100 ; }; "
            f'add rule ip home out oifname "{WIRE}" masquerade; '
            "add chain ip home in { type nat hook prerouting priority -100 ; }; "
            "add chain ip home self { type filter hook input priority 0 ; }; "
            f'add rule ip home self iifname "{WIRE}" ip protocol tcp '
            f"ct state new {refuse}"
        )

    def machine(self, *, mbit: float | None = None) -> Machine:
        """Add a machine that others see at the router's address, and cannot dial."""
        self._hosts += 1
        name, address = f"{self.name}x{self._hosts}", f"192.168.{self._number}.{self._hosts + 1}"
        machine = Machine(name, address, self, f"lan{self._hosts}")
        machine.ip("route", "add", "default", "via", self.inner)
        machine.shape(mbit, mbit)
        return machine

    def forward(self, port: int, to: Machine) -> None:
        """Let the outside dial a machine of the inside at a port of this router."""
        self.nft(
            f'add rule ip home in iifname "{WIRE}" tcp dport {port} dnat to {to.address}:{port}'
        )

    def unforward(self) -> None:
        """Let nobody in again; connections that exist stay."""
        self.nft("flush chain ip home in")


class Internet(Namespace):
    """The bridge of the public machines."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.machines: list[Machine] = []
        self._ports = 0
        self.ip("link", "add", BRIDGE, "type", "bridge")
        self.ip("link", "set", BRIDGE, "up")
        self.nft(
            "add table bridge cuts; "
            "add set bridge cuts pairs { type ifname . ifname ; }; "
            "add chain bridge cuts f { type filter hook forward priority 0 ; }; "
            "add rule bridge cuts f iifname . oifname @pairs drop"
        )

    def _plug(self) -> tuple[str, str, Internet, str]:
        self._ports += 1
        assert self._ports < 250, "one /24 of public addresses"
        return f"{self.name}-{self._ports}", f"{PUBLIC}.{self._ports}", self, f"port{self._ports}"

    def machine(self, *, mbit: float | None = None) -> Machine:
        """Add a machine that everybody can dial, with a link of so many Mbit/s each way."""
        machine = Machine(*self._plug())
        machine.shape(mbit, mbit)
        self.machines.append(machine)
        return machine

    def router(self, *, silent: bool = False) -> Router:
        """Add a router with NAT; ``silent``: it drops what dials it instead of refusing."""
        router = Router(*self._plug(), self._ports, silent=silent)
        self.machines.append(router)
        return router

    def cut(
        self, side: Sequence[Machine], other: Sequence[Machine], *, one_way: bool = False
    ) -> None:
        """Let nothing through between two groups; machines behind a router are cut by it.

        ``one_way``: only what the first group sends to the other is lost.
        """
        pairs = [(a.port, b.port) for a in side for b in other]
        pairs += [] if one_way else [(b, a) for a, b in pairs]
        words = ", ".join(f'"{a}" . "{b}"' for a, b in pairs)
        self.nft(f"add element bridge cuts pairs {{ {words} }}")

    def heal(self) -> None:
        """Undo all cuts."""
        self.nft("flush set bridge cuts pairs")


@contextmanager
def internet() -> Iterator[Internet]:
    """Give a bridge to which machines can be added; afterwards all of it is gone."""
    _sweep()
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        yield Internet(name)
    finally:
        _remove([n for n in _names() if n == name or n.startswith(f"{name}-")])


def _names() -> list[str]:
    lines = run("ip", "netns", "list").splitlines()
    return [n for n in (line.split()[0] for line in lines if line) if n.startswith(f"{PREFIX}-")]


def _remove(names: list[str]) -> None:
    """Kill what runs in some namespaces and delete them."""
    deadline = time.monotonic() + END_S
    while pids := [pid for n in names for pid in run("ip", "netns", "pids", n).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            break  # a zombie that nobody waits for holds no namespace
        time.sleep(0.01)
    for name in names:
        with contextlib.suppress(RuntimeError):
            run("ip", "netns", "delete", name)


def _sweep() -> None:
    """Remove what tests have left that were killed and could not do it themselves."""
    left: list[str] = []
    for name in _names():
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            left.append(name)
    if left:
        _remove(left)
