"""Small parts of knowing where a peer can be dialled; the whole is in tests/real/test_nat.py."""

from __future__ import annotations

import sys

import pytest

import moshpit
from moshpit.errors import ConfigError
from moshpit.identity.tickets import RunKey
from moshpit.runtime.doubles import WINDOW_S, Doubles
from moshpit.runtime.record import own_record, worth_dialling
from moshpit.runtime.upnp import PortMapper
from moshpit.types import Address, PeerId, Role
from moshpit.wire.messages import Admission

OWN = frozenset({"10.0.0.5", "127.0.0.1"})


@pytest.mark.parametrize(
    ("hosts", "dialled"),
    [
        (["10.0.0.7", "127.0.0.1"], ["10.0.0.7"]),  # somebody else answers at this loopback
        (["10.0.0.5", "127.0.0.1"], ["10.0.0.5", "127.0.0.1"]),
        (["127.0.0.1", "::1"], ["127.0.0.1", "::1"]),
        (["my.home.example", "10.0.0.7", "::1"], ["my.home.example", "10.0.0.7"]),
        ([], []),
    ],
)
def test_the_loopback_of_another_machine_is_not_dialled(
    hosts: list[str], dialled: list[str]
) -> None:
    admission = Admission(b"", (), 0, b"", b"")
    addresses = tuple(Address(host, 7000) for host in hosts)
    record = own_record(PeerId(bytes(32)), Role.WORKER, addresses, admission)
    assert [a.host for a in worth_dialling(record, OWN)] == dialled


def test_refusals_are_forgotten() -> None:
    doubles = Doubles()
    one, two = PeerId(b"1"), PeerId(b"2")
    assert not doubles.refused(one, 1, 0.0)
    assert not doubles.refused(one, 1, 1.0), "one witness is one, however often it says so"
    assert not doubles.refused(two, 1, 2.0 + WINDOW_S)
    assert doubles.refused(one, 1, 3.0 + WINDOW_S)
    assert Doubles().refused(one, 0, 0.0), "who is connected to nobody has nothing to lose"


def test_upnp_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'moshpit\[upnp\]'"):
        PortMapper()


def test_a_client_has_no_use_for_ports_and_addresses() -> None:
    ticket = RunKey.generate().invite().ticket(())
    with pytest.raises(ConfigError, match="drop `upnp`"):
        moshpit.join(ticket, role="client", upnp=True, identity="new")
    with pytest.raises(ConfigError, match="drop `advertise`"):
        moshpit.join(ticket, role="client", advertise="a.example:7000", identity="new")
