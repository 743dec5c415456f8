"""Peers that do not belong: another model, run, version, key or clock. Clear, or it just works."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moshpit
from moshpit.errors import (
    AdmissionError,
    ConfigError,
    HandshakeError,
    LayoutError,
    TicketError,
)
from moshpit.identity.tickets import RunKey
from moshpit.transport import handshake
from moshpit.types import Address, Role

from .harness import free_port


class Place:
    """One peer of a run, and tickets to it."""

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", free_port())
        self.run = RunKey.generate()
        self.ticket = self.new_ticket()
        self.swarm = moshpit.join(self.ticket, listen=str(self.address), identity="new")

    def new_ticket(self, *, roles: tuple[Role, ...] | None = None, expires_at: int = 0) -> str:
        invite = self.run.invite(roles or tuple(Role), expires_at)
        return invite.ticket((self.address,)).encode()

    def join(self, ticket: str | None = None, **options: object) -> moshpit.Swarm:
        options.setdefault("identity", "new")
        return moshpit.join(ticket or self.ticket, listen="127.0.0.1:0", **options)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.swarm.close()


def test_another_model_is_named_and_never_averaged(place: Place) -> None:
    notices: list[str] = []
    place.swarm.listen(lambda n: notices.append(n.code))
    place.swarm.average([torch.ones(5)])
    with place.join() as other:
        other.wait_for_peers(2)
        with pytest.raises(LayoutError, match="averages 5 numbers, this peer 6"):
            other.average([torch.zeros(6)])
        with pytest.raises(LayoutError):  # the same size, other shapes
            other.average([torch.zeros(5, 1)])
        (mine,), report = place.swarm.average([torch.ones(5)])
        assert mine.tolist() == [1.0] * 5
        assert report.rounds == ()


def test_the_ticket_of_another_run_is_refused_at_once(place: Place) -> None:
    stranger = RunKey.generate().invite().ticket((place.address,)).encode()
    with pytest.raises(HandshakeError, match="other-run") as caught:
        place.join(stranger)
    assert str(place.address) in str(caught.value)
    assert caught.value.__notes__ == [caught.value.remedy]
    assert "ask for a new ticket" in caught.value.remedy
    assert len(place.swarm.peers()) == 1


def test_a_role_that_the_ticket_does_not_allow(place: Place) -> None:
    only_aux = place.new_ticket(roles=(Role.AUX,))
    with pytest.raises(TicketError, match="worker"):
        place.join(only_aux)


def test_an_expired_ticket(place: Place) -> None:
    with pytest.raises(TicketError, match="expired"):
        place.join(place.new_ticket(expires_at=int(time.time()) - 3600))


@pytest.mark.parametrize("off_s", [-300, 300])
def test_a_clock_five_minutes_off_just_works(
    place: Place, off_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = place.new_ticket(expires_at=int(time.time()) + 60)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off_s)
    with place.join(fresh) as other, ThreadPoolExecutor(2) as pool:
        other.wait_for_peers(2)
        results = pool.map(
            lambda s: s[0].average([torch.full((3,), s[1])]), [(other, 1.0), (place.swarm, 3.0)]
        )
        assert [r[0][0].tolist() for r in results] == [[2.0] * 3] * 2


def test_an_old_version_is_told_both_versions(place: Place) -> None:
    version = handshake.PROTOCOL_VERSION
    script = f"""
import moshpit
from moshpit.transport import handshake
handshake.PROTOCOL_VERSION = {version + 1}
moshpit.join({place.ticket!r}, listen="127.0.0.1:0", identity="new")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    *_, last, advice = done.stderr.strip().splitlines()
    assert "HandshakeError" in last
    assert advice == "install the same version of moshpit on both machines"
    assert "other-version" in last
    assert {str(version), str(version + 1)} <= set(re.findall(r"\d+", last)), last


def test_plaintext_against_sealed_is_refused(place: Place) -> None:
    with pytest.raises(HandshakeError, match="plaintext-mismatch"):
        place.join(plaintext=True)


def test_a_cut_or_mistyped_ticket(place: Place) -> None:
    with pytest.raises(TicketError):
        place.join(place.ticket[:-7])
    middle = len(place.ticket) // 2
    swapped = "a" if place.ticket[middle] != "a" else "b"
    with pytest.raises(TicketError):
        place.join(place.ticket[:middle] + swapped + place.ticket[middle + 1 :])


def test_arguments_that_make_no_sense(place: Place) -> None:
    for options, words in (
        ({"role": "boss"}, "worker, client or aux"),
        ({"group_size": 1}, "choose 2"),
        ({"preset": "mars"}, "local, lan or internet"),
    ):
        with pytest.raises(ConfigError, match=words):
            place.join(**options)
    with pytest.raises(ConfigError, match="moshpit ticket new"):
        moshpit.join()


def test_an_admission_error_names_the_reason(place: Place) -> None:
    """A peer that was let in by a forged invite is out before it can say anything else."""
    forged = RunKey.generate()
    ticket = moshpit.Ticket.decode(place.ticket)
    wrong = forged.invite().ticket((place.address,))
    mixed = moshpit.Ticket(
        run=ticket.run,
        invite_key=wrong.invite_key,
        roles=wrong.roles,
        expires_at=wrong.expires_at,
        invite_signature=wrong.invite_signature,
        addresses=ticket.addresses,
    )
    with pytest.raises((AdmissionError, TicketError), match=r"not-admitted|altered|signature"):
        place.join(mixed.encode())
    assert len(place.swarm.peers()) == 1
