"""A long, thin, lossy link between two network namespaces: packets pass through this process.

Each end is a TUN device that was moved into a namespace of its own; the process keeps the
descriptors. Whatever one end sends is held for the delay, at the rate, in a queue that drops
its tail, and is lost at random (from a seed). So TCP meets what it would meet on the internet.

    with long_link(Link(rate_mbit=100, rtt_ms=50, loss=0.01)) as link:
        subprocess.run([*link.inside(0), "ping", "-c1", link.address(1)])

Needs Linux, root, `ip` and /dev/net/tun; `unable()` says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN_NO_PI = 0x1001
MTU = 1500
FRAMING_BYTES = 38  # what Ethernet adds to each packet on the wire
READS_PER_TURN = 64


def unable() -> str:
    """Return why no link can be made here; empty if one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip command"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"no {TUN}"
    name = f"mpprobe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if probe.returncode:
        return "no permission to make network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@dataclass(frozen=True)
class Link:
    """What a link is like.

    Attributes:
        rate_mbit: bits on the wire per second and direction, in millions.
        rtt_ms: round trip without queueing.
        loss: share of packets that are lost at random, in each direction.
        queue_ms: how long a packet may wait in the queue before the rate; later ones are dropped.
        seed: of the losses.
    """

    rate_mbit: float = 100.0
    rtt_ms: float = 50.0
    loss: float = 0.0
    queue_ms: float = 50.0
    seed: int = 1


@dataclass
class Direction:
    """Packets on their way from one end to the other."""

    link: Link
    fates: random.Random
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    busy_until: float = 0.0
    passed: int = 0
    lost: int = 0
    dropped: int = 0
    late_s: float = 0.0

    def take(self, packet: bytes, now: float) -> None:
        """Queue a packet, lose it, or drop it."""
        if self.fates.random() < self.link.loss:
            self.lost += 1
            return
        start = max(self.busy_until, now)
        if start - now > self.link.queue_ms / 1e3:
            self.dropped += 1
            return
        self.busy_until = start + (len(packet) + FRAMING_BYTES) * 8 / (self.link.rate_mbit * 1e6)
        self.waiting.append((self.busy_until + self.link.rtt_ms / 2e3, packet))

    def deliver(self, device: int, now: float) -> float | None:
        """Write what is due; returns when the next packet is."""
        while self.waiting:
            due, packet = self.waiting[0]
            if due > now:
                return due
            self.waiting.popleft()
            self.late_s = max(self.late_s, now - due)
            try:
                os.write(device, packet)
                self.passed += 1
            except OSError:  # its interface is not up (yet)
                self.lost += 1
        return None


def open_device(name: str) -> int:
    """Make a TUN device that lives as long as its descriptor."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_NO_PI))
    return device


def forward(devices: tuple[int, int], link: Link, parent: int) -> None:
    """Pass packets until standard input ends; print the counts. A line of it is a new link."""
    ways = tuple(Direction(link, random.Random(2 * link.seed + end)) for end in (0, 1))
    while True:
        now = time.monotonic()
        dues = [ways[end].deliver(devices[1 - end], now) for end in (0, 1)]
        pause = min((due for due in dues if due is not None), default=now + 1.0) - now
        readable, _, _ = select.select([*devices, parent], [], [], max(0.0, pause))
        if parent in readable:
            said = os.read(parent, select.PIPE_BUF)
            if not said:
                break
            for way in ways:
                way.link = Link(**json.loads(said.splitlines()[-1]))
        for end in (0, 1):
            if devices[end] in readable:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(READS_PER_TURN):
                        ways[end].take(os.read(devices[end], MTU + 64), time.monotonic())
    for way in ways:
        counts = f"{way.passed} packets passed, {way.lost} lost, {way.dropped} dropped"
        print(f"{counts}, at most {way.late_s * 1e3:.1f} ms late", flush=True)


@dataclass(frozen=True)
class LongLink:
    """Two namespaces with a link between them."""

    names: tuple[str, str]

    def inside(self, end: int) -> list[str]:
        """Return the command prefix that runs something at one end."""
        return ["ip", "netns", "exec", self.names[end]]

    def address(self, end: int) -> str:
        """Return the address of one end."""
        return f"10.99.0.{end + 1}"


@contextmanager
def long_link(link: Link) -> Iterator[LongLink]:
    """A link for the block; its namespaces and its process are gone afterwards."""
    names = (f"mp{os.getpid()}a", f"mp{os.getpid()}b")
    command = [sys.executable, __file__, json.dumps(asdict(link)), *names]
    made: list[str] = []
    relay = None
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n", "the relay did not start"
        result = LongLink(names)
        for end, name in enumerate(names):
            _ip("link", "set", name, "netns", name)
            inside = ("-n", name)
            _ip(*inside, "addr", "add", f"{result.address(end)}/24", "dev", name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", name, "mtu", str(MTU), "txqueuelen", "2000", "up")
        yield result
    finally:
        if relay is not None:
            counts, _ = relay.communicate()  # its input ends
            print(counts, end="", file=sys.stderr)
        for name in made:
            _ip("netns", "del", name)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def main() -> None:
    """The relay's process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("link")
    parser.add_argument("names", nargs=2)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a network is not slowed by a busy machine
    devices = (open_device(args.names[0]), open_device(args.names[1]))
    print("ready", flush=True)
    forward(devices, Link(**json.loads(args.link)), sys.stdin.fileno())


if __name__ == "__main__":
    main()
