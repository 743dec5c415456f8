"""A swarm in one process that averages, and carries parcels at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moshpit.errors import ConfigError
from moshpit.runtime.parcels import Mailbox
from moshpit.runtime.waiting import REAL_TIME
from moshpit.tensors.parcel import Parcel, Tag, tag_fault
from moshpit.types import PeerId
from tests.training.conftest import MemoryPeer, MemorySwarm, together


class MemoryParcels:
    """One peer's parcels; what is served is handled in the sender's thread."""

    def __init__(self, swarm: ParcelSwarm, me: PeerId) -> None:
        self.swarm, self.me = swarm, me
        self.mailbox = Mailbox(REAL_TIME)
        self.handlers: dict[int, Callable[[Parcel], None]] = {}

    def send(self, to: PeerId, tag: Tag, vector: torch.Tensor, weight: float = 1.0) -> None:
        assert not tag_fault(tag)
        assert vector.dim() == 1
        assert vector.dtype == torch.float32
        if not vector.isfinite().all():
            raise ConfigError("a parcel with NaN or infinite values")
        with self.swarm.lock:
            other = self.swarm.living.get(to)
        if other is not None:
            other.parcels.deliver(Parcel(self.me, tag, vector.detach().clone(), weight))

    def deliver(self, parcel: Parcel) -> None:
        handler = self.handlers.get(parcel.tag[0])
        if handler is None:
            self.mailbox.put(parcel)
        else:
            handler(parcel)

    def take(
        self, tag: Tag, *, sender: PeerId | None = None, timeout_s: float | None = None
    ) -> Parcel:
        return self.mailbox.wait(tag, sender, timeout_s)

    def poll(self, kind: int) -> Parcel | None:
        return self.mailbox.first(lambda parcel: parcel.tag[0] == kind)

    def serve(self, kind: int, handler: Callable[[Parcel], None]) -> None:
        self.handlers[kind] = handler


class ParcelPeer(MemoryPeer):
    """The `ParcelSwarm` that one trainer holds."""

    def __init__(self, swarm: ParcelSwarm, index: int) -> None:
        super().__init__(swarm, index)
        self.parcels = MemoryParcels(swarm, self.peer_id)

    def attach(self, *args: object, **how: object) -> None:
        super().attach(*args, **how)
        self.swarm.changed()

    def peers_now(self) -> list[PeerId]:
        with self.swarm.lock:
            return [
                p.peer_id
                for p in self.swarm.living.values()
                if p.attached is not None and p.attached[0] == self.attached[0]
            ]


class ParcelSwarm(MemorySwarm):
    """Peers that may die, and come."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.peers = [ParcelPeer(self, index) for index in range(size)]
        self.living = {p.peer_id: p for p in self.peers}
        self.changed()

    def changed(self) -> None:
        with self.lock:
            for peer in self.living.values():
                peer.parcels.mailbox.view(self.living)

    def kill(self, index: int) -> None:
        """A peer is dead, and found dead at once."""
        with self.lock:
            self.here.remove(index)
            del self.living[self.peers[index].peer_id]
            self.changed()
            self._end_if_all_are_here()

    def add(self) -> ParcelPeer:
        """Another peer comes."""
        with self.lock:
            peer = ParcelPeer(self, len(self.peers))
            self.peers.append(peer)
            self.here.append(peer.index)
            self.living[peer.peer_id] = peer
            return peer


@pytest.fixture
def parcel_swarm() -> type[ParcelSwarm]:
    return ParcelSwarm


@pytest.fixture
def memory_swarm_without_parcels() -> MemoryPeer:
    return MemorySwarm(1).peers[0]


@pytest.fixture(name="together")
def together_fixture() -> Callable[..., list[object]]:
    return together


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many trainers in threads, with tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
