"""The simulated things: machines that stand somewhere, and processes that run on them."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Protocol

from moshpit.protocol.machine import Effect, Event, View
from moshpit.sim.signer import SIM_ADMISSION
from moshpit.sim.store import Payload, Store
from moshpit.types import PeerId, Role
from moshpit.wire.messages import PeerRecord

if TYPE_CHECKING:
    from moshpit.sim.network import Bulk, Link
    from moshpit.sim.states import Desk
    from moshpit.sim.trainer import Trainer


class NodeMachine(Protocol):
    """What the simulator holds of `moshpit.protocol.node.Node`."""

    @property
    def wakeup(self) -> float | None: ...
    @property
    def view(self) -> View: ...
    @property
    def epoch(self) -> int: ...
    @property
    def merging(self) -> float | None: ...
    def handle(self, event: Event, now: float) -> list[Effect]: ...
    def attach(self, schema: bytes, target: float, now: float, epoch: int) -> list[Effect]: ...


class Host:
    """A machine: where it stands, what its line carries, and which process runs on it."""

    __slots__ = (
        "bulk_queue", "dark", "down", "down_free", "index", "last", "lives", "loss", "nat",
        "process", "region", "sides", "slow", "up", "up_busy",
    )  # fmt: skip

    def __init__(self, index: int, region: int, up: float, down: float, nat: bool) -> None:
        self.index = index
        self.region = region
        self.up = up  # bytes/s
        self.down = down  # bytes/s
        self.nat = nat
        self.loss = 0.0
        self.slow = 1.0  # how much longer a step takes
        self.sides: tuple[tuple[int, int], ...] = ()
        """Its side of every partition in force; those on other sides cannot be reached."""
        self.dark = False
        """Without power: nothing answers, not even that nobody listens."""
        self.process: Process | None = None
        self.last: Process | None = None
        """The latest that ran here."""
        self.lives = 0
        self.bulk_queue: deque[Bulk] = deque()
        self.up_busy = False
        self.down_free = 0.0


class Traffic:
    """What a process has sent and received."""

    __slots__ = (
        "bulk_received", "bulk_sent", "control_bytes", "control_messages", "membership_bytes",
        "membership_messages",
    )  # fmt: skip

    def __init__(self) -> None:
        self.membership_messages = 0
        self.membership_bytes = 0
        self.control_messages = 0
        self.control_bytes = 0
        self.bulk_sent = 0
        self.bulk_received = 0


class Process:
    """One life of one peer; a restart makes a new one."""

    __slots__ = (
        "alive", "born", "clock", "corrupt", "desk", "died", "host", "inbox", "index", "leaving",
        "links", "name", "node", "offset", "paused", "peer", "role", "store", "timer", "traffic",
        "trainer",
    )  # fmt: skip

    node: NodeMachine
    trainer: Trainer

    def __init__(
        self, index: int, peer: PeerId, host: Host, role: Role, *, born: float, offset: float
    ) -> None:
        self.index = index
        self.peer = peer
        self.host = host
        self.role = role
        self.name = f"p{host.index}" if host.lives == 0 else f"p{host.index}.{host.lives + 1}"
        host.lives += 1
        self.alive = True
        self.paused = False
        self.leaving = False
        self.born = born
        self.died: float | None = None
        self.offset = offset
        """Its clock minus the world's: no two machines agree about the time."""
        self.clock = offset
        self.timer: float | None = None
        self.inbox: list[tuple[Event, Payload | None]] = []
        self.links: dict[PeerId, Link] = {}
        self.corrupt = ""
        """How the contributions that it sends are broken; empty: they are sound."""
        self.store = Store()
        self.desk: Desk | None = None
        """Its state transfer, where the scenario has any."""
        self.traffic = Traffic()


def first_record(process: Process, schema: bytes, port: int) -> PeerRecord:
    """Return what a process says of itself when it starts."""
    host = process.host
    return PeerRecord(
        peer=process.peer,
        incarnation=1,
        version=1,
        role=process.role.value,
        addresses=() if host.nat else ((f"h{host.index}", port),),
        via=(),
        up=host.up,
        down=host.down,
        schema=schema if process.role.trains else b"",
        epoch=0,
        samples=0.0,
        rate=0.0,
        group_key=(),
        step_s=0.0,
        left=False,
        admission=SIM_ADMISSION,
    )


def peer_id(seed: int, number: int) -> PeerId:
    """Return the key of the number-th peer of a seed."""
    return PeerId(random.Random(f"{seed}/key/{number}").randbytes(32))
