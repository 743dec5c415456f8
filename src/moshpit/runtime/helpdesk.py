"""What a peer answers to others that look for a fault (`moshpit doctor`): echoes, dials back.

Rules, so that nobody is hurt by helping:

* An asker may cost so many bytes and dials, and gets more of them slowly. What is beyond is not
  answered (dials: answered with no result), and told as ``help-limit``.
* Only the host that the asker's own connection comes from is dialled, and what its record says,
  which everybody dials: that only if it is a name or a public address, and then no answer tells
  more than whether the asker is there, nor does its time. So nobody can have others scanned.
  What is expected there is the asker's key, in a real handshake.
* An impossible question is refused: a notice names who asked it, and there is no answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, final

from moshpit.errors import MoshpitError, UnreachableError
from moshpit.events import Notice
from moshpit.transport.base import Transport
from moshpit.transport.notices import NoticeLimiter
from moshpit.types import Address, PeerId
from moshpit.wire.help import DialBack, DialBackReply, DialResult, Echo, EchoReply, HelpMessage

PADDING_BYTES_MAX: Final = 256 * 1024  # guess: a quarter of a control frame, each way
ECHO_BYTES_MIN: Final = 4096  # guess: what an echo costs at least, for the work that it makes
BYTES_PER_ASKER: Final = 64 << 20  # guess: four measurements at the doctor's highest speed
BYTES_PER_ASKER_PER_S: Final = float(1 << 20)  # guess: and then
DIAL_BACKS_PER_ASKER: Final = 10  # guess: a doctor needs one, a watch over reach a few
DIAL_BACKS_PER_ASKER_PER_S: Final = 1 / 20  # guess: and then
ADDRESSES_MAX: Final = 4  # of one question
DIAL_BACKS_MAX: Final = 8  # guess: questions of all askers that are under way
ASKERS_MAX: Final = 256  # guess: whose budgets are remembered
HOST_CHARS_MAX: Final = 255  # the longest name that DNS knows
DETAIL_CHARS_MAX: Final = 200
WALL_S_MAX: Final = 1e11  # the year 5138
SEQ_MAX: Final = 1 << 62


@cache
def padding(size: int) -> bytes:
    """Return bytes that no compression on the way makes smaller."""
    return os.urandom(size)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost.example")
    (True, False)
    """
    try:
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False


def may_be_public(host: str) -> bool:
    """Whether a host is a name, or an address that the whole world can dial.

    >>> may_be_public("my.home.example"), may_be_public("192.168.1.2"), may_be_public("9.9.9.9")
    (True, False, True)
    """
    try:
        return ipaddress.ip_address(plain_host(host)).is_global
    except ValueError:
        return True


def plain_host(host: str) -> str:
    """Return an IP address in its one canonical form; any other name as it is.

    >>> plain_host("::ffff:192.0.2.7"), plain_host("2001:DB8::0:1")
    ('192.0.2.7', '2001:db8::1')
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


@final
@dataclass(slots=True)
class _Budget:
    """What one asker may still cost."""

    since: float
    bytes_left: float = BYTES_PER_ASKER
    dials_left: float = DIAL_BACKS_PER_ASKER

    def refill(self, now: float) -> None:
        """Give what time has brought."""
        passed, self.since = now - self.since, now
        self.bytes_left = min(BYTES_PER_ASKER, self.bytes_left + passed * BYTES_PER_ASKER_PER_S)
        self.dials_left = min(
            DIAL_BACKS_PER_ASKER, self.dials_left + passed * DIAL_BACKS_PER_ASKER_PER_S
        )


@final
class HelpDesk:
    """Answers `Echo` and `DialBack`. Used in the transport's loop only.

    Args:
        transport: by which questions come, answers go, and addresses are dialled.
        tell: whom to tell what was refused.
        dial_s: how long one dial back may take.
        known: where a peer's record says that it can be dialled.
        clock: seconds, for the budgets.
        wall: Unix seconds, for the answers.
    """

    def __init__(
        self,
        transport: Transport,
        tell: Callable[[Notice], None],
        *,
        dial_s: float,
        known: Callable[[PeerId], Sequence[Address]] = lambda peer: (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._transport = transport
        self._notices = NoticeLimiter(tell, clock)
        self._dial_s = dial_s
        self._known = known
        self.answered: Callable[[PeerId, DialBackReply], bool] = lambda peer, reply: False
        """Takes an answer to a question of this peer; false: it has not asked."""
        self._clock = clock
        self._wall = wall
        self._budgets: OrderedDict[PeerId, _Budget] = OrderedDict()
        self._dialling: list[asyncio.Task[None]] = []
        self._closed = False

    def handle(self, peer: PeerId, message: HelpMessage) -> None:
        """Take a question from a proved peer; its answer is sent now, or after the dials."""
        if self._closed:
            return
        match message:
            case Echo():
                self._echo(peer, message)
            case DialBack():
                self._dial_back(peer, message)
            case DialBackReply() if self.answered(peer, message):
                pass
            case EchoReply() | DialBackReply():
                detail = f"a {type(message).__name__} that nobody here has asked for"
                self._notices.tell("unasked-answer", peer, detail)

    async def close(self) -> None:
        """Give up what is being dialled. Idempotent."""
        self._closed = True
        for task in self._dialling:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)

    # --- echoes ---------------------------------------------------------------------------

    def _echo(self, peer: PeerId, message: Echo) -> None:
        fault = echo_fault(message)
        if fault:
            self._notices.tell("bad-echo", peer, fault)
            return
        budget = self._budget(peer)
        cost = max(ECHO_BYTES_MIN, len(message.padding) + message.reply_bytes)
        if budget.bytes_left < cost:
            self._notices.tell("help-limit", peer, f"more than {BYTES_PER_ASKER} bytes of echoes")
            return
        budget.bytes_left -= cost
        filling = padding(PADDING_BYTES_MAX)[: message.reply_bytes]
        answer = EchoReply(message.seq, message.sent_at, self._wall(), filling)
        self._transport.send(peer, answer)

    # --- dials back -----------------------------------------------------------------------

    def _dial_back(self, peer: PeerId, message: DialBack) -> None:
        fault = dial_back_fault(message)
        if fault:
            self._notices.tell("bad-dial-back", peer, fault)
            return
        remote = self._transport.remote(peer)
        seen = "" if remote is None else plain_host(remote.host)
        budget = self._budget(peer)
        if budget.dials_left < 1 or len(self._dialling) >= DIAL_BACKS_MAX:
            self._notices.tell("help-limit", peer, "too many questions to dial back")
            self._transport.send(peer, DialBackReply(message.seq, seen, ()))
            return
        budget.dials_left -= 1
        task = asyncio.get_running_loop().create_task(self._answer(peer, message, seen))
        self._dialling.append(task)
        task.add_done_callback(self._dialling.remove)

    async def _answer(self, peer: PeerId, message: DialBack, seen: str) -> None:
        results = await asyncio.gather(
            *(self._dial(peer, seen, host, port) for host, port in message.addresses)
        )
        if self._transport.connected(peer):  # nobody is dialled only to be answered
            self._transport.send(peer, DialBackReply(message.seq, seen, tuple(results)))

    async def _dial(self, peer: PeerId, seen: str, host: str, port: int) -> DialResult:
        if seen and (not host or plain_host(host) == seen):
            outcome, detail = await self._try(peer, Address(seen, port))
            return DialResult(host or seen, port, outcome, detail)
        if host and may_be_public(host) and Address(host, port) in self._known(peer):
            (outcome, _), _ = await asyncio.gather(
                self._try(peer, Address(host, port)), asyncio.sleep(self._dial_s)
            )
            return DialResult(host, port, "reached" if outcome == "reached" else "unreachable")
        detail = f"your connection comes from {seen or 'nowhere'}, and only that is dialled"
        return DialResult(host, port, "foreign", detail)

    async def _try(self, peer: PeerId, address: Address) -> tuple[str, str]:
        """Dial an address; return what came of it, and why."""
        outcome, detail = "reached", ""
        try:
            async with asyncio.timeout(self._dial_s):
                await self._transport.reach(address, peer)
        except TimeoutError:
            outcome, detail = "unreachable", f"no answer within {self._dial_s:g} s"
        except UnreachableError as error:
            outcome = "refused" if error.reason == "refused" else "unreachable"
            detail = error.detail
        except MoshpitError as error:
            outcome, detail = "no-handshake", str(error)
        return outcome, detail[:DETAIL_CHARS_MAX]

    def _budget(self, peer: PeerId) -> _Budget:
        now = self._clock()
        budget = self._budgets.get(peer)
        if budget is None:
            if len(self._budgets) >= ASKERS_MAX:
                self._budgets.popitem(last=False)
            budget = self._budgets[peer] = _Budget(now)
        self._budgets.move_to_end(peer)
        budget.refill(now)
        return budget


def echo_fault(message: Echo) -> str:
    """Say what is impossible about an echo; empty if nothing is."""
    if not 0 <= message.seq < SEQ_MAX:
        return f"number {message.seq}"
    if not 0 <= message.sent_at <= WALL_S_MAX:
        return f"sent at {message.sent_at}"
    if not 0 <= message.reply_bytes <= PADDING_BYTES_MAX:
        return f"{message.reply_bytes} bytes wanted, limit {PADDING_BYTES_MAX}"
    if len(message.padding) > PADDING_BYTES_MAX:
        return f"{len(message.padding)} bytes of padding, limit {PADDING_BYTES_MAX}"
    return ""


def dial_back_fault(message: DialBack) -> str:
    """Say what is impossible about a wish to be dialled; empty if nothing is."""
    if not 0 <= message.seq < SEQ_MAX:
        return f"number {message.seq}"
    if not 1 <= len(message.addresses) <= ADDRESSES_MAX:
        return f"{len(message.addresses)} addresses, limit {ADDRESSES_MAX}"
    for host, port in message.addresses:
        if len(host) > HOST_CHARS_MAX:
            return f"a host of {len(host)} characters"
        if not 1 <= port <= 65535:
            return f"port {port}"
    return ""
