"""Finding out whether others can dial this peer, and being what the answer makes of it.

A worker that nobody can dial would cost every group that meets at it, or has it reduce, the time
to see that. So some others are asked to dial it back (`DialBack`), soon after it has joined, when
its addresses change, and now and then. What to believe is in `verdicts`; what follows is here:

* it cannot be dialled: it becomes a *client* by itself, which reduces nothing and needs no way
  in, and says so. It goes on listening and asking, and becomes a worker again when it can.
* it can, but at another address than it advertises: it advertises that one, too.
* it is an aux peer, or its ticket allows no clients: it can only say so.

The role changes between averagings. Clients are told when there is nobody who could reduce.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Final, final

from moshpit.config import SwarmConfig
from moshpit.events import Notice
from moshpit.protocol.machine import Effect
from moshpit.protocol.node import Node
from moshpit.runtime.helpdesk import ADDRESSES_MAX, is_loopback, plain_host
from moshpit.runtime.record import advertised
from moshpit.runtime.upnp import Mapping, PortMapper
from moshpit.runtime.verdicts import (
    AGREEING,
    UNKNOWN,
    Finding,
    Patience,
    Verdict,
    agree,
    finding,
    reply_fault,
)
from moshpit.transport.base import Transport
from moshpit.types import Address, PeerId, Role, short
from moshpit.wire.help import DialBack, DialBackReply

TICK_S: Final = 1.0  # guess: how often it is looked whether something is due
ANSWER_S: Final = 5.0  # guess: for an answer, beyond the dial and the handshake
RECORD_ADDRESSES_MAX: Final = 8  # as judge.ADDRESSES_MAX
PAGE: Final = "docs/howto/behind-a-router.md"


@final
class Reach:
    """Watches whether this peer can be dialled. Used in the network's loop only.

    Args:
        transport: by which others are asked.
        config: settings.
        given: where the user says that others can dial this peer; empty: at the machine's own
            addresses.
        mapper: asks the router to let others in; None: do not.
    """

    def __init__(
        self,
        transport: Transport,
        config: SwarmConfig,
        *,
        given: Sequence[Address] = (),
        mapper: PortMapper | None = None,
    ) -> None:
        self._transport = transport
        self._settings = config.reach
        dial = config.transport
        self._answer_s = dial.dial_timeout_s + dial.handshake_timeout_s + ANSWER_S
        self._given = tuple(given)
        self._mapper = mapper
        self._own: tuple[Address, ...] = ()
        self._mapped: tuple[Address, ...] = ()
        self._asking_router = mapper is not None
        self._found: tuple[Address, ...] = ()  # by others
        self._near: dict[PeerId, None] = {}  # on this machine: no witnesses
        self._waiting: dict[int, tuple[PeerId, asyncio.Future[DialBackReply]]] = {}
        self._seq = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._told: dict[str, float] = {}
        self._lonely_since: float | None = None
        self._node: Node
        self._run: Callable[[list[Effect]], None]
        self._tell: Callable[[Notice], None]
        self._rng: Random
        self._patience: Patience

    def addresses(self) -> tuple[Address, ...]:
        """Return where to dial this peer, the best first; the transport must listen."""
        self._own = self._given or advertised(self._transport.addresses)
        known = dict.fromkeys((*self._found, *self._mapped, *self._own))
        return tuple(known)[:RECORD_ADDRESSES_MAX]

    def begin(
        self,
        node: Node,
        run: Callable[[list[Effect]], None],
        tell: Callable[[Notice], None],
        rng: Random,
    ) -> None:
        """Go to work.

        Args:
            node: this peer's.
            run: executes what it wants done.
            tell: tells the user.
            rng: chooses whom to ask.
        """
        self._node, self._run, self._tell, self._rng = node, run, tell, rng
        self._patience = Patience(self._settings, self._now())
        self._spawn(self._watch())
        if self._mapper is not None:
            self._spawn(self._keep_mapping(self._mapper))

    async def close(self) -> None:
        """End the tasks, and what the router was asked for. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._mapper is not None:
            await self._mapper.close()

    def answered(self, peer: PeerId, reply: DialBackReply) -> bool:
        """Take an answer; return whether it was asked for."""
        asked, future = self._waiting.get(reply.seq, (None, None))
        if asked != peer or future is None or future.done():
            return False
        future.set_result(reply)
        return True

    # --- watching -------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _publish(self, **fields: object) -> None:
        self._run(self._node.publish(fields, self._now()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(_report)

    async def _watch(self) -> None:
        looked_at = self._now()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._now()
            self._look_for_reducers(now)
            if not self._listens_to_others():
                continue
            if now >= looked_at + self._settings.addresses_s:
                looked_at = now
                self._look_at_addresses()
            if now >= self._patience.due and not self._asking_router and self._others():
                await self._find_out()

    def _listens_to_others(self) -> bool:
        """Whether there is something to find out: it listens, and not to this machine only."""
        return any(not is_loopback(a.host) for a in self._transport.addresses)

    def _look_at_addresses(self) -> None:
        before = self._own
        now = self.addresses()
        if self._own != before and not self._given:
            self._found = ()
            self._advertise(now)
            self._patience.soon(self._now())

    def _advertise(self, addresses: Sequence[Address]) -> None:
        if Role(self._node.view.me.role).reduces:
            self._publish(addresses=tuple((a.host, a.port) for a in addresses))

    # --- asking ---------------------------------------------------------------------------

    def _others(self) -> list[PeerId]:
        """Return whom to ask, in the order of preference."""
        view = self._node.view
        me = PeerId(view.me.peer)
        able = [p for p in view.live if p not in self._near and p != me and view.reachable(p)]
        able = [p for p in able if view.dialable(p) or view.linked(p)]
        self._rng.shuffle(able)
        return sorted(able, key=lambda p: not view.dialable(p))

    async def _find_out(self) -> None:
        """Ask, and do what follows."""
        others = self._others()
        heard: list[Finding] = []
        asked = 0
        believed = UNKNOWN
        # Whoever cannot tell is replaced by another one, once.
        for count in (self._settings.witnesses, AGREEING):
            group, asked = others[asked : asked + count], asked + count
            heard += await asyncio.gather(*(self._ask(peer) for peer in group))
            believed = agree(heard, len([p for p in others if p not in self._near]))
            if believed.verdict is not Verdict.UNKNOWN:
                break
        if believed.verdict is Verdict.ELSEWHERE and believed.at is not None:
            self._adopt(believed.at, believed)
        changed = self._patience.conclude(believed.verdict, self._now())
        if self._bound():
            self._complain(believed)
        elif changed:
            await self._change(believed)

    def _bound(self) -> bool:
        """Whether this peer cannot become a client."""
        me = self._node.view.me
        return me.role == Role.AUX.value or Role.CLIENT.value not in me.admission.roles

    async def _ask(self, peer: PeerId) -> Finding:
        """Have one peer dial back."""
        known = self.addresses()
        ports = [a.port for a in (*self._given, *self._mapped, *self._transport.addresses)]
        asked = [("", port) for port in dict.fromkeys(ports[:2])]
        asked += [(a.host, a.port) for a in known if not is_loopback(a.host)]
        self._seq += 1
        question = DialBack(self._seq, tuple(asked[:ADDRESSES_MAX]))
        future: asyncio.Future[DialBackReply] = asyncio.get_running_loop().create_future()
        self._waiting[self._seq] = peer, future
        self._transport.send(peer, question)
        try:
            async with asyncio.timeout(self._answer_s):
                reply = await future
        except TimeoutError:
            return UNKNOWN
        finally:
            del self._waiting[question.seq]
        fault = reply_fault(question, reply)
        if fault:
            self._tell(Notice("bad-answer", peer, fault))
            return UNKNOWN
        if self._is_near(peer):
            self._near[peer] = None
            return UNKNOWN
        if is_loopback(reply.seen):
            return UNKNOWN
        return finding(peer, reply, known, given=bool(self._given))

    def _is_near(self, peer: PeerId) -> bool:
        """Whether a peer is on this machine: that it can dial this peer means nothing."""
        remote = self._transport.remote(peer)
        own = [a.host for a in advertised(self._transport.addresses)]
        return remote is not None and (
            is_loopback(remote.host) or plain_host(remote.host) in map(plain_host, own)
        )

    # --- what follows ---------------------------------------------------------------------

    def _adopt(self, at: Address, believed: Finding) -> None:
        """Advertise an address that others have found."""
        if at not in self.addresses():
            self._found = (at,)
            names = _names(believed.witnesses)
            self._tell(Notice("address-found", None, f"{at}, where {names} can dial this peer"))
            self._advertise(self.addresses())

    async def _change(self, believed: Finding) -> None:
        """Become a client, or a worker again, once no averaging is under way."""
        hidden, own = self._patience.hidden, self.addresses()
        while self._node.averaging:
            await asyncio.sleep(TICK_S / 4)
        if hidden:
            fact = self._fact(believed)
            self._found = ()
            self._publish(role=Role.CLIENT.value, addresses=())
            text = f"It goes on as a client: it trains, and reduces nothing. {self._advice()}"
            self._tell(Notice("unreachable", None, fact + text))
        else:
            addresses = tuple((a.host, a.port) for a in own)
            self._publish(role=Role.WORKER.value, addresses=addresses, via=())
            fact = f"{_names(believed.witnesses)} can dial this peer"
            at = ", ".join(map(str, own))
            self._tell(Notice("reachable", None, f"{fact}: it is a worker again, at {at}"))

    def _complain(self, believed: Finding) -> None:
        """Say now, and rarely again, that this peer is in the others' way."""
        hidden = self._patience.hidden
        if hidden and believed.verdict is not Verdict.UNREACHED:
            return
        aux = self._node.view.me.role == Role.AUX.value
        why = "An aux peer is of no use like this" if aux else "Its ticket allows no clients"
        text = f"{self._fact(believed)}{why}. {self._advice()}" if hidden else ""
        self._remind("unreachable", text, wanted=hidden)

    def _fact(self, believed: Finding) -> str:
        at = ", ".join(map(str, self.addresses())) or "no address"
        who = _names(believed.witnesses)
        return f"{who} cannot dial this peer ({believed.detail}; it advertises {at}). "

    def _advice(self) -> str:
        port = self._transport.addresses[0].port
        mapping = "" if self._mapper is not None else " or try --upnp,"
        return (
            f"To be dialled, forward TCP port {port} of the router to this machine,{mapping} and "
            f"open it in this machine's firewall; {PAGE}"
        )

    def _remind(self, code: str, text: str, *, wanted: bool) -> None:
        """Say something that stays true now, and rarely again."""
        if not wanted:
            self._told.pop(code, None)
            return
        now = self._now()
        if now >= self._told.get(code, float("-inf")) + self._settings.remind_s:
            self._told[code] = now
            self._tell(Notice(code, None, text))

    def _look_for_reducers(self, now: float) -> None:
        """Say what to start where there are clients only."""
        view = self._node.view
        alone = view.me.role == Role.CLIENT.value and not any(
            view.dialable(p) and view.reachable(p) for p in view.live
        )
        if not alone:
            self._lonely_since = None
            self._remind("no-reducer", "", wanted=False)
            return
        if self._lonely_since is None:
            self._lonely_since = now
        if now >= self._lonely_since + self._settings.no_reducer_s:
            clients = len(view.live)
            who = "this client is alone" if clients == 1 else f"all {clients} peers are clients"
            text = (
                f"{who}: nobody can be dialled, so nothing is averaged. On a machine that can be "
                "dialled, start a worker, or a peer that needs no GPU: moshpit run --ticket ... "
                f"--role aux --listen 0.0.0.0:7000; its address belongs in the ticket; {PAGE}"
            )
            self._remind("no-reducer", text, wanted=True)

    # --- the router -----------------------------------------------------------------------

    async def _keep_mapping(self, mapper: PortMapper) -> None:
        """Have the router let others in, as long as this runs."""
        while True:
            mapping = await mapper.map(self._transport.addresses[0])
            self._asking_router = False
            if isinstance(mapping, Mapping):
                self._take_mapping(mapping)
            else:
                self._mapped = ()
                self._remind("upnp-failed", mapping.detail, wanted=True)
            await asyncio.sleep(mapping.again_s)

    def _take_mapping(self, mapping: Mapping) -> None:
        self._remind("upnp-failed", "", wanted=False)
        if self._mapped != (mapping.outside,):
            self._mapped = (mapping.outside,)
            self._tell(Notice("upnp", None, f"{mapping.outside} leads here, by {mapping.by}"))
            self._advertise(self.addresses())
            self._patience.soon(self._now())


def _names(peers: Sequence[PeerId]) -> str:
    *most, last = [short(peer) for peer in peers]
    return f"{', '.join(most)} and {last}" if most else last


def _report(task: asyncio.Task[None]) -> None:
    """A task that fails has a bug, and the loop says so."""
    if not task.cancelled() and task.exception() is not None:
        context = {"message": "the watch over reachability failed", "exception": task.exception()}
        task.get_loop().call_exception_handler(context)
