"""Where the peers of a chaos run stand: `tests.real.namespaces`, and lines with a delay.

Each peer has a `Site`: a place for its process, and the place where its packets meet the
others', at which links are shaped, lossy and cut. They are the same machine, or the second is a
router: with NAT, or at the end of a long line, on which packets pass through a relay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import final

from tests.real import relay
from tests.real.namespaces import PUBLIC, WIRE, Internet, Machine, Namespace, internet

from .schedule import Place

FASTEST_MBIT = 10_000.0  # of the long line's relay; what shapes is elsewhere
QUEUE_MS = 1000.0
FAR_ADDRESSES = 254  # from here down; the others' come from below


class Site:
    """A peer's place.

    Attributes:
        inside: where its process runs.
        outside: where its packets pass.
        address: at which others dial it; empty: they cannot.
    """

    def __init__(self, inside: Namespace, outside: Machine, address: str) -> None:
        self.inside, self.outside, self.address = inside, outside, address

    def delay(self, rtt_ms: float) -> None:
        raise NotImplementedError("only a far machine's line has a delay")

    def close(self) -> None:
        """End what is not a namespace."""


@final
class FarSite(Site):
    """A machine at the end of a long line, with an address of its own, which its router claims."""

    def __init__(self, net: Internet, number: int) -> None:
        outside = net.machine()
        inside = Namespace(f"{outside.name}x")
        address = f"{PUBLIC}.{FAR_ADDRESSES - number}"
        super().__init__(inside, outside, address)
        near, far = (f"mp{os.getpid() % 10**7}{end}{number}" for end in "nf")
        self._relay = subprocess.Popen(
            [sys.executable, relay.__file__, _link(0.0), near, far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "ready\n", "the relay did not start"
        for namespace, device in ((outside, near), (inside, far)):
            subprocess.run(["ip", "link", "set", device, "netns", namespace.name], check=True)
            namespace.ip("link", "set", device, "mtu", str(relay.MTU), "txqueuelen", "2000", "up")
        inside.ip("address", "add", f"{address}/32", "dev", far)
        inside.ip("route", "add", "default", "dev", far)
        outside.ip("route", "add", f"{address}/32", "dev", near)
        outside.run("sysctl", "-qw", "net.ipv4.ip_forward=1", f"net.ipv4.conf.{WIRE}.proxy_arp=1")

    def delay(self, rtt_ms: float) -> None:
        assert self._relay.stdin is not None
        self._relay.stdin.write(_link(rtt_ms) + "\n")
        self._relay.stdin.flush()

    def close(self) -> None:
        self._relay.communicate()  # its input ends


def _link(rtt_ms: float) -> str:
    return json.dumps(asdict(relay.Link(FASTEST_MBIT, rtt_ms, queue_ms=QUEUE_MS)))


Cut = tuple[tuple[Site, ...], tuple[Site, ...], bool]
"""From whom to whom, and whether the way back is open."""


@final
class Network:
    """All sites and what is wrong between them."""

    def __init__(self, net: Internet) -> None:
        self._net = net
        self.sites: list[Site] = []
        self._cuts: dict[object, Cut] = {}

    def add(self, place: Place) -> Site:
        """Make a place for one more peer."""
        match place:
            case Place.PUBLIC:
                machine = self._net.machine()
                site = Site(machine, machine, machine.address)
            case Place.HIDDEN:
                router = self._net.router()
                site = Site(router.machine(), router, "")
            case Place.FAR:
                site = FarSite(self._net, sum(isinstance(s, FarSite) for s in self.sites))
        self.sites.append(site)
        return site

    def cut(self, why: object, side: list[Site], other: list[Site], *, one_way: bool) -> None:
        """Let nothing pass from one side to the other, and back unless ``one_way``."""
        self._cuts[why] = (tuple(side), tuple(other), one_way)
        self._apply()

    def mend(self, why: object) -> None:
        """Undo one cut; the others stay."""
        del self._cuts[why]
        self._apply()

    def _apply(self) -> None:
        pairs: dict[str, None] = {}
        for side, other, one_way in self._cuts.values():
            for a in side:
                for b in other:
                    pairs[f'"{a.outside.port}" . "{b.outside.port}"'] = None
                    if not one_way:
                        pairs[f'"{b.outside.port}" . "{a.outside.port}"'] = None
        # In one transaction, so that no packet slips through between two cuts.
        add = f"; add element bridge cuts pairs {{ {', '.join(pairs)} }}" if pairs else ""
        self._net.nft(f"flush set bridge cuts pairs{add}")


@contextmanager
def network() -> Iterator[Network]:
    """Give a network without sites; afterwards all of it is gone."""
    with internet() as net:
        made = Network(net)
        try:
            yield made
        finally:
            for site in made.sites:
                site.close()
