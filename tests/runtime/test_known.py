"""An invite that has expired lets nobody new in, and keeps nobody out who is in."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import moshpit
from moshpit.config import TransportConfig
from moshpit.errors import AdmissionError
from moshpit.events import Notice
from moshpit.identity import tickets
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.transport.conformance import Recorder
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address
from tests.real.harness import free_port


def new_ticket() -> Ticket:
    invite = RunKey.generate().invite(expires_at=int(time.time()) + 3600)
    return invite.ticket((Address("127.0.0.1", free_port()),))


async def dial_as_a_stranger(ticket: Ticket) -> None:
    key = PeerKey.generate()
    transport = TcpTransport(key, ticket.run, ticket.admit(key.peer), TransportConfig())
    await transport.start(Recorder({}))
    try:
        await transport.dial(ticket.addresses[0])
    finally:
        await transport.close()


def test_members_come_back_although_their_invite_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticket = new_ticket()
    told: list[Notice] = []
    back = threading.Event()
    with (
        moshpit.join(ticket, listen=str(ticket.addresses[0]), identity="new") as one,
        moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as other,
    ):
        one.wait_for_peers(2)
        other.wait_for_peers(2)
        one.listen(told.append)
        monkeypatch.setattr(tickets, "EXPIRY_LEEWAY_S", -7200.0)  # every expiry is over

        # As after a restart of `one`: it knows `other` by its record only.
        async def forget_and_drop() -> None:
            transport = one._driver._transport
            assert isinstance(transport, TcpTransport)
            transport._proved_before.clear()
            on_link = one._driver.on_link

            def note(peer, admission) -> None:
                on_link(peer, admission)
                if peer == other.peer_id:
                    back.set()

            monkeypatch.setattr(one._driver, "on_link", note)
            transport.drop(other.peer_id, "a test")

        one._thread.call(forget_and_drop())
        assert back.wait(100.0), told
        assert "expired" not in [notice.code for notice in told]
        with pytest.raises(AdmissionError, match="expired"):
            asyncio.run(dial_as_a_stranger(ticket))


def test_a_newcomer_with_a_fresh_ticket_finds_members_whose_invite_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = RunKey.generate()
    address = Address("127.0.0.1", free_port())
    soon = owner.invite(expires_at=int(time.time()) + 3600).ticket((address,))
    with moshpit.join(soon, listen=str(address), identity="new") as member:
        monkeypatch.setattr(tickets, "EXPIRY_LEEWAY_S", -7200.0)
        fresh = owner.invite(expires_at=int(time.time()) + 36_000).ticket((address,))
        with moshpit.join(fresh, listen="127.0.0.1:0", identity="new") as newcomer:
            newcomer.wait_for_peers(2, timeout_s=100.0)
            member.wait_for_peers(2, timeout_s=100.0)
