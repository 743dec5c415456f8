"""Who can be had: peers that came back, silent ones, and clients behind routers."""

from __future__ import annotations

from msgspec.structs import replace

from moshpit.config import MembershipConfig
from moshpit.protocol.machine import LinkDown, LinkUp, Received, Send
from moshpit.protocol.view import Status
from moshpit.types import PeerId
from moshpit.wire.messages import (
    Ack,
    Digest,
    Gossip,
    News,
    Ping,
    PingReq,
)

from .harness_membership import knowing, machine, peer_id, record_of, signed, tick

A, B, C = (peer_id(n) for n in (1, 2, 3))


def test_a_client_publishes_a_peer_whose_record_came_after_the_link() -> None:
    made = machine(0, role="client", addresses=())
    made.handle(LinkUp(A), 0.0)
    made.handle(Received(A, News(Gossip((signed(record_of(1)),)))), 0.1)
    tick(made)
    assert made.view.me.via == (A,)


def test_a_lost_client_that_nobody_else_is_known_to_reach_is_suspected() -> None:
    made = knowing(1, 2)
    client = signed(record_of(3, role="client", addresses=(), via=()))
    made.handle(LinkUp(C), 1.0)
    made.handle(Received(C, News(Gossip((client,)))), 1.0)
    made.handle(LinkDown(C, False, "gone"), 2.0)
    assert made.view.status(C) is Status.SUSPECT
    now = 2.0
    while now < 20.0 and made.view.status(C) is not Status.DEAD:
        now, effects = tick(made)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Ping):
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
    assert made.view.status(C) is Status.DEAD


def test_a_new_life_is_reachable_whatever_was_found_out_about_the_old_one() -> None:
    made = knowing(1, 2)
    made.handle(LinkDown(A, True, "nobody listens"), 1.0)
    assert not made.view.reachable(A)
    made.handle(Received(B, News(Gossip((signed(record_of(1, incarnation=2)),)))), 1.1)
    assert made.view.reachable(A)


def test_another_way_to_a_peer_is_tried_whatever_was_found_out_about_the_old_one() -> None:
    made = knowing(1, 2)
    for version, change in enumerate(
        [{"addresses": (("10.0.0.9", 7001),)}, {"role": "client", "addresses": ()}], 2
    ):
        made.handle(LinkDown(A, True, "nobody listens"), float(version))
        assert not made.view.reachable(A)
        # News of its progress is none of the way to it.
        old = made.view.record(A)
        assert old is not None
        same = replace(old, version=10 * version, samples=5.0 * version)
        made.handle(Received(B, News(Gossip((signed(same),)))), version + 0.1)
        assert not made.view.reachable(A)
        news = replace(old, version=10 * version + 1, **change)
        made.handle(Received(B, News(Gossip((signed(news),)))), version + 0.2)
        assert made.view.reachable(A)
        assert made.view.dialable(A) == ("role" not in change)


def test_those_that_cannot_be_had_are_probed_before_others() -> None:
    made = knowing(*range(1, 40))
    made.silent(A, 1.0)
    made.silent(B, 1.0)
    targets: list[PeerId] = []
    now = 1.0
    while now < 5.0:
        now, effects = tick(made)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Ping):
                targets.append(effect.peer)
                if effect.peer not in (A, B):
                    made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
            elif isinstance(effect, Send) and isinstance(effect.message, PingReq):
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
    assert targets.count(A) >= 2
    assert targets.count(B) >= 2


def test_the_one_that_can_be_dialled_is_found_among_many_that_cannot() -> None:
    made = knowing(1, config=MembershipConfig(exchange_interval_s=1.0))
    clients = tuple(signed(record_of(n, role="client", addresses=())) for n in range(2, 60))
    made.handle(Received(A, News(Gossip(clients))), 1.0)
    now, exchanges = 1.0, 0
    while now < 10.0:
        now, effects = tick(made)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Digest):
                assert effect.peer == A
                exchanges += 1
            if isinstance(effect, Send) and isinstance(effect.message, Ping):
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
    assert exchanges >= 5
