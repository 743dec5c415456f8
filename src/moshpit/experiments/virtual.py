"""A swarm in virtual time: real training and the real protocol, on a stated network.

Every virtual peer is a `moshpit.Swarm` with all that belongs to it (`moshpit.runtime`: driver,
node, rounds, state transfer) and trains by a script of its own. Three things are not real: the
clock and the threads (`virtual_time`), the lines (`virtual_net`), and the keys (signatures are by
name, as in `moshpit.sim`). How long computing takes is said by the script, see
`VirtualPeer.compute`; the computing itself is done, and its results are real.

    cluster = VirtualCluster(seed=1)
    for machine in machines:
        cluster.add(machine, script)
    with cluster:
        cluster.run(limit_s=3600.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Final, final

from moshpit.config import SwarmConfig, preset
from moshpit.errors import ConfigError
from moshpit.experiments.virtual_net import Line, ShapedWire
from moshpit.experiments.virtual_time import Script, Stage, VirtualBridge, VirtualLoop
from moshpit.runtime.swarm import Swarm
from moshpit.sim.signer import SIM_ADMISSION, SimSigner
from moshpit.transport.memory import Exchange, MemoryTransport
from moshpit.types import Address, PeerId, Role

CONTACTS: Final = 3  # how many first addresses a peer is told, as a ticket names them
STAGGER_S: Final = 0.02  # guess: peers that are started together are not, quite


@dataclass(frozen=True, slots=True)
class Machine:
    """What a peer runs on.

    Attributes:
        line: how it is connected.
        slowness: how many times as long as a machine of 1 it takes to compute.
        noise: how much that varies from time to time: the standard deviation of its logarithm.
    """

    line: Line
    slowness: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not (self.slowness > 0 and self.noise >= 0):
            raise ConfigError(f"{self}: slowness must be positive, and noise not negative")


@final
class VirtualPeer:
    """One peer, as its script sees it. Made by `VirtualCluster.add`.

    Attributes:
        index: its number in the cluster.
        machine: what it runs on.
        rng: for the script's own choices, such as its batches.
        alive: whether it has not been killed.
        died_s: when it was; infinite before.
    """

    def __init__(self, cluster: VirtualCluster, index: int, machine: Machine) -> None:
        self.index = index
        self.machine = machine
        self.alive = True
        self.died_s = math.inf
        self.rng = cluster.generator(f"script/{index}")
        self._cluster = cluster
        self._noise = cluster.generator(f"noise/{index}")
        self.peer_id = PeerId(cluster.generator(f"key/{index}").randbytes(32))
        self._transport = MemoryTransport(
            cluster.exchange, self.peer_id, SIM_ADMISSION, cluster.config.transport
        )
        self._bridge = VirtualBridge(cluster.stage, cluster.generator(f"node/{index}"))
        self._swarm: Swarm | None = None
        self.script: Script | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it listens, once it has joined."""
        return self._transport.addresses

    def join(self) -> Swarm:
        """Join the cluster's run; the script that joins closes the swarm when it ends.

        Raises:
            ConfigError: it has joined before.
        """
        if self._swarm is not None:
            raise ConfigError("a virtual peer joins once; add another one to join again")
        line = self.machine.line
        swarm = Swarm(
            SimSigner(self.peer_id),
            Role.WORKER,
            SIM_ADMISSION,
            self._transport,
            self._cluster.config,
            contacts=self._cluster.contacts(self),
            bandwidth=min(line.up, line.down),
            bridge=self._bridge,
        )
        self._swarm = swarm
        return swarm

    def compute(self, seconds: float) -> None:
        """Let as much time pass as this computing takes here: what takes ``seconds`` on a machine
        of slowness 1, without noise."""
        machine = self.machine
        noise = self._noise.gauss(0.0, machine.noise) if machine.noise else 0.0
        # The mean stays what it is, however noisy.
        self.sleep(seconds * machine.slowness * math.exp(noise - machine.noise**2 / 2))
        self._cluster.wire.computed(self.peer_id)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self._cluster.stage.sleep(seconds)

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self._cluster.now

    def kill(self, *, unnoticed_s: float = 0.0) -> None:
        """End it without a word, as the death of its process does, or of its machine.

        Args:
            unnoticed_s: when others' connections to it break, see `Exchange.kill`.
        """
        if not self.alive:
            return
        self.alive, self.died_s = False, self._cluster.now
        self._bridge.stop()
        self._cluster.exchange.kill(self._transport, unnoticed_s=unnoticed_s)
        if self._swarm is not None:
            self._swarm.close()  # nobody hears of it: the transport is dead
        if self.script is not None:
            self.script.kill()


@final
class VirtualCluster:
    """Many peers in virtual time. Use it in a ``with`` block.

    Args:
        seed: of everything random outside of the scripts' models.
        config: the peers' settings; the `lan` preset if there is none.
    """

    def __init__(self, seed: int, config: SwarmConfig | None = None) -> None:
        self.config = config or preset("lan")
        self._seed = seed
        self._loop = VirtualLoop()
        self.stage = Stage(self._loop)
        self.wire = ShapedWire(self._loop, self.generator("wire"))
        self.exchange = Exchange(self.wire)
        self.peers: list[VirtualPeer] = []
        self._starts: dict[float, int] = {}

    def generator(self, purpose: str) -> Random:
        """Return the source of randomness for something."""
        return Random(f"{self._seed}/{purpose}")

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._loop.time()

    def contacts(self, peer: VirtualPeer) -> list[Address]:
        """Return first addresses for a peer: those of the oldest that live."""
        known = [p.addresses[0] for p in self.peers if p is not peer and p.alive and p.addresses]
        return known[:CONTACTS]

    def add(
        self,
        machine: Machine,
        script: Callable[[VirtualPeer], object],
        *,
        at_s: float = 0.0,
        until_s: float = math.inf,
        unnoticed_s: float = 0.0,
    ) -> VirtualPeer:
        """Add a peer that runs ``script``.

        Args:
            machine: what it runs on.
            script: what it does; it ends with the peer's part in the run.
            at_s: when it starts; those that start together follow each other closely.
            until_s: when it is killed, if its script has not ended.
            unnoticed_s: as for `VirtualPeer.kill`.
        """
        peer = VirtualPeer(self, len(self.peers), machine)
        self.peers.append(peer)
        self.wire.connect(peer.peer_id, machine.line)
        name = f"peer {peer.index}"

        def start() -> None:
            peer.script = self.stage.start(lambda: script(peer), name)

        def kill() -> None:
            if peer.script is not None and not peer.script.ended:
                peer.kill(unnoticed_s=unnoticed_s)

        together = self._starts[at_s] = self._starts.get(at_s, -1) + 1
        self.stage.start_at(at_s + STAGGER_S * together, start)
        if until_s < math.inf:
            self.at(until_s, kill)
        return peer

    def at(self, when_s: float, deed: Callable[[], object]) -> None:
        """Have something done at a time, beside all scripts."""
        self._loop.call_at(when_s, deed)

    def stop(self) -> None:
        """End `run` now, as if all scripts had ended."""
        self.stage.stop()

    def run(self, limit_s: float) -> bool:
        """Run until all scripts have ended; return whether they have within ``limit_s``.

        Raises:
            Exception: what a script has raised.
            StalledError: all wait for each other.
        """
        return self.stage.run(limit_s)

    def close(self) -> None:
        """End everything."""
        for peer in self.peers:
            peer.kill()
        self.stage.close()

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
