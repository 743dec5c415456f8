"""Who trains together: a list of peers that all of them agree on.

Methods that go step by step need ranks and a size that are the same at everybody. Views differ
for moments, when somebody comes or dies. So there is a *muster*: every peer tells all that it
sees whom it sees; when all of them say the same, that is the world, until somebody finds out
that it is not any more.

A muster has a round number, and whoever hears of a higher one joins it with what it sees by then.
Views become equal once changes stop (membership does that), so the last round ends with one
world. Who waits in vain for a groupmate looks for musters in between; so nobody stays behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch

from moshpit.baselines.kinds import Kind
from moshpit.errors import ConfigError, PeerLostError, WaitTimeoutError
from moshpit.tensors.parcel import Parcel, Tag
from moshpit.training.parcels import ParcelSwarm
from moshpit.types import PeerId, short

PART_BITS: Final = 12  # a ring of 2000 peers
ROUND_SHIFT: Final = 44  # 32 bits for steps, and 19 for musters
ROUNDS_MAX: Final = 1 << 19
STEPS_MAX: Final = 1 << (ROUND_SHIFT - PART_BITS)
JUMP_MAX: Final = 1000  # guess: more musters than one can have missed; numbers must not run out
SLICE_S: Final = 0.1  # guess: how soon who waits in vain looks for a muster
_BASE: Final = 1 << 20  # float32 holds integers up to 2**24
_NUMBERS: Final = 8
_FAREWELL: Final = 0  # in the place of a round


class Regroup(Exception):
    """The world is not what it was: muster, and do the step again."""


@final
@dataclass(frozen=True, slots=True)
class World:
    """Who trains together.

    Attributes:
        round: of the muster that made it; part of the tags of its parcels, so that nothing of
            an earlier world is taken for one of this.
        members: all of them, sorted by id.
        rank: this peer's place among them.
        fronts: for each member, how many steps it had completed before.
        insiders: for each member, whether it was in the world before this one; in the first
            world all are.
    """

    round: int
    members: tuple[PeerId, ...]
    rank: int
    fronts: tuple[int, ...]
    insiders: tuple[bool, ...]

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.members)

    @property
    def front(self) -> int:
        """How many steps the furthest insider had completed; from here all go on."""
        pairs = zip(self.fronts, self.insiders, strict=True)
        return max(front for front, inside in pairs if inside)

    @property
    def donor(self) -> int:
        """The rank of the first member that is at the front."""
        return next(rank for rank in range(self.size) if self.at_front(rank))

    def at_front(self, rank: int) -> bool:
        """Whether a member is an insider and as far as any."""
        return self.insiders[rank] and self.fronts[rank] == self.front

    def tag(self, kind: Kind, step: int, part: int = 0) -> Tag:
        """Return the tag of a parcel that belongs to a step of this world."""
        return kind, self.round << ROUND_SHIFT | step << PART_BITS | part


@dataclass(frozen=True, slots=True)
class _Call:
    """What a peer says in a muster."""

    round: int
    sees: int
    front: int
    last: int

    def vector(self) -> torch.Tensor:
        numbers = (self.round, self.sees, self.front, self.last)
        parts = [part for n in numbers for part in divmod(n, _BASE)]
        return torch.tensor(parts, dtype=torch.float32)

    @classmethod
    def of(cls, vector: torch.Tensor) -> _Call | None:
        """Read a call; None if it is none."""
        parts = cast("list[float]", cast(Any, vector).tolist())
        if len(parts) != _NUMBERS or not all(0 <= p < _BASE and p == int(p) for p in parts):
            return None
        values = [int(h) * _BASE + int(low) for h, low in zip(parts[::2], parts[1::2], strict=True)]
        return cls(*values) if values[0] < ROUNDS_MAX and values[2] < STEPS_MAX else None


@final
class Muster:
    """Finds the world, and waits for parcels in it.

    Args:
        swarm: the swarm.
        peers_min: how many there must be before the first step.
        patience_s: how long to wait for the others at most.
    """

    def __init__(self, swarm: ParcelSwarm, peers_min: int, patience_s: float) -> None:
        self._swarm = swarm
        self._parcels = swarm.parcels
        self._peers_min = peers_min
        self._patience_s = patience_s
        self._round = 0
        self._last = 0
        self._calls: list[Parcel] = []
        self._kept: list[Parcel] = []
        self._finished: dict[PeerId, None] = {}
        self._rounds: dict[PeerId, int] = {}  # the highest that was heard of each
        self.world: World | None = None

    def current(self) -> World:
        """Return the world; raises `Regroup` if there is none, or it has changed."""
        if self.world is None or self._called():
            raise Regroup
        if tuple(self._present()) != self.world.members:
            raise Regroup
        return self.world

    def take(self, tag: Tag, sender: PeerId) -> Parcel:
        """Wait for a parcel of a member.

        Raises:
            Regroup: it will not come, since the world has changed.
            WaitTimeoutError: it has not come, although all are said to be alive.
        """
        kept = self._from_kept(tag, sender)
        if kept is not None:
            return kept
        end = self._swarm.clock() + self._patience_s
        while True:
            try:
                return self._parcels.take(tag, sender=sender, timeout_s=SLICE_S)
            except PeerLostError:
                raise Regroup from None
            except WaitTimeoutError:
                self.current()
                if self._swarm.clock() > end:
                    raise WaitTimeoutError(
                        f"peer {short(sender)} is alive, but nothing has come from it within "
                        f"{self._patience_s:g} s; does it still train? A larger patience_s waits "
                        "longer"
                    ) from None

    def _from_kept(self, tag: Tag, sender: PeerId) -> Parcel | None:
        for index, parcel in enumerate(self._kept):
            if parcel.tag == tag and parcel.sender == sender:
                return self._kept.pop(index)
        return None

    def left_over(self, kind: Kind) -> list[Parcel]:
        """Take all parcels of a kind that belong to earlier worlds; those of this one are kept
        for `take`."""
        assert self.world is not None, "there is a world first"
        while (parcel := self._parcels.poll(kind)) is not None:
            self._kept.append(parcel)
        old = [p for p in self._kept if p.tag[0] == kind and self._is_old(p)]
        self._kept = [p for p in self._kept if p.tag[0] != kind or not self._is_old(p)]
        return old

    def _is_old(self, parcel: Parcel) -> bool:
        return self.world is not None and parcel.tag[1] >> ROUND_SHIFT < self.world.round

    # --- mustering --------------------------------------------------------------------------

    def agree(self, front: int) -> World:
        """Find the world anew.

        Args:
            front: how many steps this peer has completed.

        Raises:
            ConfigError: this peer cannot take part.
            WaitTimeoutError: the others did not come.
        """
        self._round += 1
        end = self._swarm.clock() + self._patience_s
        members: list[PeerId] = []
        heard: dict[PeerId, _Call] = {}
        while True:
            seen = self._present()
            if seen != members:
                self._round += bool(members)
                members, heard = seen, {}
                self._tell(members, front)
            if self._agreed(members, heard):
                return self._enter(members, front, heard)
            if self._hear(heard):
                self._tell(members, front)
            if self._swarm.clock() > end:
                raise WaitTimeoutError(self._complaint(members, heard))

    def _agreed(self, members: Sequence[PeerId], heard: dict[PeerId, _Call]) -> bool:
        if not self._last and len(members) < self._peers_min:
            return False
        sees = _name(members)
        return all(
            p == self._swarm.peer_id or (p in heard and heard[p].sees == sees) for p in members
        )

    def _hear(self, heard: dict[PeerId, _Call]) -> bool:
        """Take a call, if one comes soon; return whether it is of a later round than ours."""
        if self._calls:
            parcel = self._calls.pop(0)
        else:
            try:
                parcel = self._parcels.take((Kind.MUSTER, 0), timeout_s=SLICE_S)
            except WaitTimeoutError:
                return False
        call = self._read(parcel)
        if call is None or call.round < self._round:
            return False
        later = call.round > self._round
        if later:
            self._round = call.round
            heard.clear()
        heard[parcel.sender] = call
        return later

    def _tell(self, members: Sequence[PeerId], front: int) -> None:
        call = _Call(self._round, _name(members), front, self._last).vector()
        for peer in members:
            if peer != self._swarm.peer_id:
                self._parcels.send(peer, (Kind.MUSTER, 0), call)

    def _enter(self, members: list[PeerId], front: int, heard: dict[PeerId, _Call]) -> World:
        me = self._swarm.peer_id
        own = _Call(self._round, 0, front, self._last)
        calls = [own if p == me else heard[p] for p in members]
        last = max(call.last for call in calls)
        fronts = tuple(call.front for call in calls)
        self.world = World(
            round=self._round,
            members=tuple(members),
            rank=members.index(me),
            fronts=fronts,
            insiders=tuple(call.last == last for call in calls),
        )
        return self.world

    def settle(self, world: World) -> None:
        """This peer has what it needs in this world; in the next one it is an insider."""
        self._last = world.round

    def _called(self) -> bool:
        """Whether somebody calls for a later muster than the last."""
        while (parcel := self._parcels.poll(Kind.MUSTER)) is not None:
            call = self._read(parcel)
            world = self.world
            outside = world is None or parcel.sender not in world.members
            if call is not None and (outside or call.round > self._round):
                self._calls.append(parcel)
        return bool(self._calls)

    def _read(self, parcel: Parcel) -> _Call | None:
        """Read a call, and note who has finished."""
        call = _Call.of(parcel.vector)
        if call is None or (self._last and call.round > self._round + JUMP_MAX):
            return None
        if call.round == _FAREWELL:
            if call.last >= self._rounds.get(parcel.sender, 0):
                self._finished[parcel.sender] = None
            return None
        self._rounds[parcel.sender] = max(call.round, self._rounds.get(parcel.sender, 0))
        self._finished.pop(parcel.sender, None)
        return call

    def _present(self) -> list[PeerId]:
        return [peer for peer in workers(self._swarm) if peer not in self._finished]

    def finish(self) -> None:
        """Say that this peer makes no more steps: nobody is to wait for it. If it does make
        another one, that begins with a muster."""
        world, self.world = self.world, None
        if world is not None:
            farewell = _Call(_FAREWELL, 0, 0, self._round).vector()
            for peer in world.members:
                if peer != self._swarm.peer_id:
                    self._parcels.send(peer, (Kind.MUSTER, 0), farewell)

    def _complaint(self, members: Sequence[PeerId], heard: dict[PeerId, _Call]) -> str:
        if len(members) < self._peers_min:
            return too_few(len(members), self._peers_min, self._patience_s)
        silent = [short(p) for p in members if p not in heard and p != self._swarm.peer_id]
        return (
            f"the peers do not agree on who is here after {self._patience_s:g} s; nothing was "
            f"heard of {', '.join(silent) or 'nobody'}"
        )


def workers(swarm: ParcelSwarm) -> list[PeerId]:
    """Return who trains the same, sorted by id.

    Raises:
        ConfigError: this peer is not among them.
    """
    present = swarm.peers_now()
    if swarm.peer_id not in present:
        raise ConfigError(
            "this peer is not among the workers that others can dial, and baselines need that; "
            "see docs/howto/behind-a-router.md"
        )
    return present


def too_few(here: int, wanted: int, waited_s: float) -> str:
    """Say that not enough peers came."""
    return (
        f"{here} of {wanted} workers that train the same are here after {waited_s:g} s; are the "
        "others started, with the same model and strategy?"
    )


def _name(members: Sequence[PeerId]) -> int:
    digest = hashlib.blake2b(b"".join(members), digest_size=5).digest()
    return int.from_bytes(digest, "little")
