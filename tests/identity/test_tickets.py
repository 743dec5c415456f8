"""Tickets: what they carry, and how each way of spoiling one is told."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.errors import ConfigError, TicketError
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import (
    ADDRESSES_MAX,
    EXPIRES_AT_MAX,
    EXPIRY_LEEWAY_S,
    RunKey,
    Ticket,
    admission_fault,
)
from moshpit.types import Address, Role

WHERE = (Address("10.1.2.3", 7000), Address("::1", 65535))
NOW = 1_900_000_000.0


def make(expires_at: int = 0, roles: tuple[Role, ...] = tuple(Role)) -> Ticket:
    return RunKey.generate().invite(roles, expires_at).ticket(WHERE)


def rebuilt(text: str, change) -> str:
    """A ticket with other contents but a right length and checksum."""
    prefix, code = text.split("_", 1)
    data = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4))
    body = msgspec.msgpack.encode(change(msgspec.msgpack.decode(data[2:-4])))
    data = len(body).to_bytes(2, "big") + body
    data += hashlib.sha256(data).digest()[:4]
    return f"{prefix}_" + base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_a_ticket_comes_back_from_its_text() -> None:
    ticket = make(expires_at=2_000_000_000, roles=(Role.CLIENT, Role.WORKER))
    text = ticket.encode()
    assert re.fullmatch(r"moshpit1_[A-Za-z0-9_-]+", text)
    assert len(text) < 260
    assert Ticket.decode(text, NOW) == ticket
    assert ticket.roles == (Role.WORKER, Role.CLIENT)
    wrapped = f"  {text[:50]}\n  {text[50:]}\r\n"
    assert Ticket.decode(wrapped, NOW) == ticket


def test_tickets_do_not_show_their_secret() -> None:
    ticket = make()
    assert "key" not in repr(ticket)


def test_cut_tickets_are_called_cut() -> None:
    text = make().encode()
    for length in range(len("moshpit1_"), len(text)):
        with pytest.raises(TicketError, match="cut"):
            Ticket.decode(text[:length], NOW)


GIVEN = (
    # Made once: neither examples nor runs differ, and old tickets must go on to be read.
    "moshpit1_AJ-WxCDlIVf_8zqQWxc-7o-vnAU0y4_eCuoOfj1xkGted2fwf8QgdqN3affIV8w36rhlBDSV5GKPP"
    "F7ST5FUulkIIwL1IqEHAMRAtnIEPGgSTzEfiACk-Gm3IDFK59bQa0iG52p3c7xGC-Of3_kiJB0xvi9aYgZePKs"
    "tO0gPsbvWm_1f5mHDDqVfCJKSqDEwLjEuMi4zzRtYkqM6OjHN__8sP_Og"
)


def test_an_old_ticket_is_read() -> None:
    ticket = Ticket.decode(GIVEN, NOW)
    assert (ticket.addresses, ticket.roles, ticket.expires_at) == (WHERE, tuple(Role), 0)
    assert ticket.encode() == GIVEN


@given(st.data())
def test_mistyped_tickets_are_never_taken(data: st.DataObject) -> None:
    text = GIVEN
    # The last character holds unused bits, which do not matter.
    at = data.draw(st.integers(len("moshpit1_") + 3, len(text) - 2))
    other = data.draw(st.sampled_from("abcXYZ019_-").filter(lambda c: c != text[at]))
    with pytest.raises(TicketError, match="mistyped"):
        Ticket.decode(text[:at] + other + text[at + 1 :], NOW)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: [f[0], f[1], 7, *f[3:]],
        lambda f: [*f[:3], 0, *f[4:]],
        lambda f: [RunKey.generate().run, *f[1:]],
        lambda f: [f[0], bytes(32), *f[2:]],
        lambda f: [*f[:4], bytes(64), f[5]],
        lambda f: [f[0], f[1], 0, *f[3:]],
        lambda f: [f[0], f[1], 255, *f[3:]],
        lambda f: [f[0], f[1], -1, *f[3:]],
        lambda f: [*f[:3], -5, *f[4:]],
        lambda f: [*f[:3], 1 << 60, *f[4:]],
        lambda f: [f[0][:31], *f[1:]],
        lambda f: [*f[:5], [["h", 1]] * 100],
        lambda f: f[:4],
        lambda f: ["text"],
    ],
)
def test_altered_tickets_are_called_altered(change) -> None:
    text = make(expires_at=2_000_000_000, roles=(Role.CLIENT,)).encode()
    with pytest.raises(TicketError, match="altered"):
        Ticket.decode(rebuilt(text, change), NOW)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.replace("moshpit1_", "moshpit2_"), "version 2"),
        (lambda t: t.replace("moshpit1_", "moshpit99999999999_"), "version 99999999"),
        (lambda t: "https://example.org/", "no ticket"),
        (lambda t: "", "no ticket"),
        (lambda t: t[9:], "no ticket"),
        (lambda t: t[:40] + "§" + t[41:], "characters"),
        (lambda t: t + "AAAA", "mistyped"),
    ],
)
def test_other_texts_say_what_they_are(spoil, says: str) -> None:
    with pytest.raises(TicketError, match=says):
        Ticket.decode(spoil(make().encode()), NOW)


def test_expiry_leaves_room_for_clocks() -> None:
    text = make(expires_at=int(NOW)).encode()
    Ticket.decode(text, NOW + EXPIRY_LEEWAY_S - 1)
    with pytest.raises(TicketError, match="expired on 2030-03-17"):
        Ticket.decode(text, NOW + EXPIRY_LEEWAY_S + 1)


@given(st.text(max_size=300))
def test_any_text_is_a_ticket_error(text: str) -> None:
    for candidate in (text, "moshpit1_" + text):
        with pytest.raises(TicketError):
            Ticket.decode(candidate, NOW)


def test_invites_have_roles_and_limits() -> None:
    owner = RunKey.generate()
    with pytest.raises(ConfigError):
        owner.invite(roles=())
    for expires_at in (-1, EXPIRES_AT_MAX + 1):
        with pytest.raises(ConfigError):
            owner.invite(expires_at=expires_at)
    assert Ticket.decode(owner.invite(expires_at=EXPIRES_AT_MAX).ticket(()).encode())
    with pytest.raises(ConfigError, match="addresses"):
        owner.invite().ticket((Address("h", 1),) * (ADDRESSES_MAX + 1))


def test_run_keys_come_back(tmp_path: Path) -> None:
    owner = RunKey.generate()
    owner.save(tmp_path / "run.key")
    assert RunKey.load(tmp_path / "run.key").run == owner.run


def test_the_chain_of_an_admission() -> None:
    ticket, peer = make(expires_at=int(NOW)), PeerKey.generate().peer
    other = PeerKey.generate().peer
    good = ticket.admit(peer)
    late = NOW + EXPIRY_LEEWAY_S + 1
    replace = msgspec.structs.replace
    assert admission_fault(good, ticket.run, peer, NOW) == ""
    assert admission_fault(good, ticket.run, peer, late) == "expired"
    assert admission_fault(good, ticket.run, peer, None) == ""
    for forged, run_id, who in (
        (good, ticket.run, other),
        (good, RunKey.generate().run, peer),
        (good, ticket.run, b"short"),
        (replace(good, expires_at=0), ticket.run, peer),
        (replace(good, expires_at=1 << 80), ticket.run, peer),
        (replace(good, roles=("worker",)), ticket.run, peer),
        (replace(good, roles=("x",) * 1000), ticket.run, peer),
        (replace(good, invite=bytes(32)), ticket.run, peer),
        (replace(good, invite=b""), ticket.run, peer),
        (replace(good, invite_signature=b""), ticket.run, peer),
        (replace(good, peer_signature=make().admit(peer).peer_signature), ticket.run, peer),
    ):
        assert admission_fault(forged, run_id, who, late) == "not-admitted"
