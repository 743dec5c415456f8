"""News that is only mentioned: whoever lacks it asks for it, of one peer at a time.

Most of what a peer is told about a change it has heard before, and a record is forty times as
long as its mention. So rumours are told in full once by each peer and mentioned after that
(`gossip`). A mention says which news it is, by a peer's short id and the number of its record, so
that who has that, or newer, need not ask.
"""

from __future__ import annotations

from typing import Final, final

from moshpit.protocol.gossip import DEAD, PAGE_ITEMS, SHORT_ID_BYTES, beliefs, pages
from moshpit.protocol.judge import COUNTER_MAX
from moshpit.protocol.machine import Send
from moshpit.protocol.roster import Roster
from moshpit.protocol.view import Status
from moshpit.types import PeerId
from moshpit.wire.messages import Mention, News, NewsAsk

ASKED_MAX: Final = 4096  # guess: news asked for that is remembered to be due


@final
class Mentions:
    """What one peer asks for, and is asked for.

    Args:
        roster: what it believes. Effects go into its ``out``.
        answer_s: how long an answer may be under way before somebody else is asked.
    """

    def __init__(self, roster: Roster, answer_s: float) -> None:
        self._roster = roster
        self._view = roster.view
        self._answer_s = answer_s
        self._asked: dict[Mention, float] = {}  # oldest first

    def heard(self, peer: PeerId, mentions: tuple[Mention, ...], now: float) -> None:
        """Ask a peer for what it has mentioned and is news here."""
        flaw = _flaw(tuple(mention.peer for mention in mentions))
        if not flaw and not all(
            0 <= m.incarnation < COUNTER_MAX and DEAD <= m.version < COUNTER_MAX for m in mentions
        ):
            flaw = "counter out of range"
        if flaw:
            self._roster.refuse(peer, flaw)
            return
        wanted = [m.peer for m in mentions if self._lacks(m) and self._may_ask(m, now)]
        if wanted:
            self._roster.out.append(Send(peer, NewsAsk(tuple(dict.fromkeys(wanted)))))

    def asked(self, peer: PeerId, message: NewsAsk) -> None:
        """Tell a peer what is believed here of those that it asks for."""
        flaw = _flaw(message.peers)
        if flaw:
            self._roster.refuse(peer, flaw)
            return
        me, entries = self._roster.me, self._view.entries
        told = [
            rumor
            for short_id in dict.fromkeys(message.peers)
            for found in self._view.called(short_id)
            for rumor in beliefs(entries[found], me)
        ]
        if told:
            self._roster.out += [Send(peer, News(page)) for page in pages(told)]

    def _lacks(self, mention: Mention) -> bool:
        """Whether what is mentioned is not known here."""
        found = self._view.called(mention.peer)
        if not found:
            # Who does not know the dead need not learn of them.
            return mention.version >= 0
        news = (mention.incarnation, mention.version)
        return any(self._is_news(peer, *news) for peer in found)

    def _is_news(self, peer: PeerId, incarnation: int, version: int) -> bool:
        record, status = self._view.record(peer), self._view.status(peer)
        if record is None or status is None:
            return version >= 0
        if version >= 0:
            newer = (incarnation, version) > (record.incarnation, record.version)
            return newer and (status.live or incarnation > record.incarnation)
        if incarnation != record.incarnation:
            return False
        return status is Status.ALIVE or (version == DEAD and status.live)

    def _may_ask(self, mention: Mention, now: float) -> bool:
        """Whether it is not on its way from somebody else; it is from now on."""
        asked = self._asked
        while asked and now - next(iter(asked.values())) > self._answer_s:
            del asked[next(iter(asked))]
        if mention in asked or len(asked) >= ASKED_MAX:
            return False
        asked[mention] = now
        return True


def _flaw(short_ids: tuple[bytes, ...]) -> str:
    if len(short_ids) > PAGE_ITEMS:
        return "too many mentions"
    return "" if all(len(i) == SHORT_ID_BYTES for i in short_ids) else "short id of a wrong length"
