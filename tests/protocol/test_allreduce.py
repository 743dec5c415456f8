"""A round of one seat against a script: whole lists of effects, rule by rule."""

from __future__ import annotations

from fractions import Fraction

import pytest

from moshpit.events import Blame, Notice, Outcome, RoundReport
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    CancelSends,
    ChunkArrived,
    CloseRound,
    Effect,
    Emit,
    Finalize,
    LinkDown,
    Received,
    ResetSum,
    RoundEnded,
    Send,
    SendContribution,
    SendResult,
    TakeResult,
    Tick,
)
from moshpit.protocol.serving import SERVED_FACTOR
from moshpit.sim.signer import SimSigner
from moshpit.types import PeerId, short
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import (
    Beat,
    GroupAsk,
    Held,
    MemberDone,
    Message,
    Redo,
    Refusal,
    RoundOver,
    Takeover,
    Want,
    pack_mask,
)

from .harness_allreduce import CONFIG, DEADLINE_S, GROUP, World, group_of, peer_of

A, B, C = peer_of(0), peer_of(1), peer_of(2)
BEAT = Beat(GROUP)


def seat_of_three(seat: int = 0, masses: tuple[float, ...] = (1.0, 1.0, 1.0)) -> AllReduce:
    """One chunk a part; seat s reduces chunk s."""
    formed = group_of(3, ["worker"] * 3)
    return AllReduce(formed, seat, masses, SimSigner(peer_of(seat)), CONFIG, 0.0)


def got(machine: AllReduce, peer: PeerId, message: Message, now: float = 0.1) -> list[Effect]:
    return machine.handle(Received(peer, message), now)


def chunk(
    machine: AllReduce,
    peer: PeerId,
    number: int,
    *,
    now: float = 0.2,
    kind: ChunkKind = ChunkKind.CONTRIBUTION,
    ballot: int = 0,
    mass: float = 1.0,
    seats: int = 0,
    fault: str = "",
) -> list[Effect]:
    header = ChunkHeader(kind, ballot, number, 4, 0, GROUP, mass, seats)
    return machine.handle(ChunkArrived(peer, header, fault), now)


def result(
    machine: AllReduce, peer: PeerId, number: int, *, ballot: int = 0, fault: str = ""
) -> list[Effect]:
    return chunk(
        machine,
        peer,
        number,
        kind=ChunkKind.RESULT,
        ballot=ballot,
        mass=3.0,
        seats=0b111,
        fault=fault,
    )


def contribution(peer: PeerId, number: int, ballot: int = 0, mass: float = 1.0) -> Effect:
    return SendContribution(peer, GROUP, number, ballot, mass)


def sent(peer: PeerId, message: Message) -> Effect:
    return Send(peer, message)


def greeted() -> AllReduce:
    """Seat 0 of three, when both others have come."""
    machine = seat_of_three()
    machine.start(0.0)
    got(machine, B, BEAT)
    got(machine, C, BEAT)
    return machine


def test_a_round_without_faults() -> None:
    machine = seat_of_three()
    assert machine.start(0.0) == [sent(B, BEAT), sent(C, BEAT)]
    assert got(machine, C, BEAT) == [sent(C, BEAT), contribution(C, 2)]
    assert got(machine, B, BEAT) == [sent(B, BEAT), contribution(B, 1)]
    assert chunk(machine, B, 0) == [Accumulate(GROUP, 0, 1.0)]
    assert chunk(machine, C, 0) == [
        Accumulate(GROUP, 0, 1.0),
        AccumulateOwn(GROUP, 0, 1.0),
        Finalize(GROUP, 0, 0, 3.0, 0b111),
        SendResult(B, GROUP, 0, 0, 3.0, 0b111),
        SendResult(C, GROUP, 0, 0, 3.0, 0b111),
    ]
    assert result(machine, C, 2) == [TakeResult(GROUP, 2)]
    report = RoundReport(
        epoch=3,
        axis=1,
        group=GROUP,
        peers=(A, B, C),
        seat=0,
        outcome=Outcome.COMPLETE,
        ledger=(0b111,) * 3,
        masses=(3.0,) * 3,
        missing=(),
        attempts=(0, 0, 0),
        moving_s=0.2,
        deadline_s=DEADLINE_S,
    )
    assert result(machine, B, 1) == [
        TakeResult(GROUP, 1),
        RoundEnded(report),
        sent(B, MemberDone(GROUP)),
        sent(C, MemberDone(GROUP)),
    ]
    assert (machine.ended, machine.closed, machine.report) == (True, False, report)
    assert machine.masses_after == [3.0, 3.0, 3.0]
    assert got(machine, B, MemberDone(GROUP)) == []
    assert got(machine, C, MemberDone(GROUP)) == [CloseRound(GROUP)]
    assert machine.closed
    assert machine.wakeup is None
    assert got(machine, C, BEAT) == []


def test_a_group_of_one_keeps_its_value_and_is_complete() -> None:
    formed = group_of(2, ["worker"])
    machine = AllReduce(formed, 0, (5.0, 6.0), SimSigner(A), CONFIG, 1.0)
    effects = machine.start(1.0)
    assert [type(e) for e in effects] == [RoundEnded, CloseRound]
    assert machine.report is not None
    assert machine.report.outcome is Outcome.COMPLETE
    assert machine.report.missing == (0, 1)
    assert machine.masses_after == [5.0, 6.0]


def test_a_group_in_which_nobody_weighs_ends_at_once() -> None:
    formed = group_of(2, ["aux", "worker"], weighs=[False, False])
    machine = AllReduce(formed, 0, (0.0, 0.0), SimSigner(A), CONFIG, 0.0)
    machine.start(0.0)
    assert machine.ended
    assert machine.report is not None
    assert machine.report.outcome is Outcome.COMPLETE


def test_members_that_bring_the_same_value_share_its_mass() -> None:
    formed = group_of(3, ["worker"] * 3, origins=[b"row", b"row", b"other"])
    machine = AllReduce(formed, 0, (6.0, 6.0, 6.0), SimSigner(A), CONFIG, 0.0)
    machine.start(0.0)
    assert contribution(C, 2, mass=3.0) in got(machine, C, BEAT)


def test_a_member_of_the_same_origin_that_weighs_nothing_takes_no_share() -> None:
    formed = group_of(2, ["worker"] * 2, origins=[b"row", b"row"], weighs=[True, False])
    machine = AllReduce(formed, 0, (6.0, 6.0), SimSigner(A), CONFIG, 0.0)
    machine.start(0.0)
    assert contribution(B, 1, mass=6.0) in got(machine, B, BEAT)


def test_results_go_to_a_member_that_comes_later() -> None:
    machine = seat_of_three()
    machine.start(0.0)
    got(machine, B, BEAT)
    chunk(machine, B, 0)
    machine.handle(LinkDown(C, True, "gone"), 0.3)
    assert machine._ledger.have == 0b001
    late = seat_of_three()
    late.start(0.0)
    got(late, B, BEAT)
    chunk(late, B, 0)
    # A chunk is a sign of life as good as a beat.
    assert SendResult(C, GROUP, 0, 0, 3.0, 0b111) in chunk(late, C, 0)


def test_a_repeated_contribution_is_dropped() -> None:
    machine = greeted()
    assert chunk(machine, B, 0) == [Accumulate(GROUP, 0, 1.0)]
    assert chunk(machine, B, 0) == []
    assert chunk(machine, B, 0, mass=float("nan")) == []


def test_a_lost_sender_is_left_out_and_named() -> None:
    machine = greeted()
    chunk(machine, B, 0)
    effects = machine.handle(LinkDown(C, True, "refused"), 0.3)
    assert effects == [
        Emit(Notice("lost", C, "link-down: refused")),
        CancelSends(C, GROUP),
        AccumulateOwn(GROUP, 0, 1.0),
        Finalize(GROUP, 0, 0, 2.0, 0b011),
        SendResult(B, GROUP, 0, 0, 2.0, 0b011),
        Emit(Notice("takeover", C, "part 2 at ballot 1")),
        sent(B, Takeover(GROUP, 2, 1)),
    ]


def test_what_a_lost_seat_sends_is_late_and_it_is_told_once() -> None:
    machine = greeted()
    machine.handle(LinkDown(C, True, "refused"), 0.3)
    told = [sent(C, Refusal(GROUP, "lost", "you were silent too long"))]
    assert chunk(machine, C, 0) == told
    assert chunk(machine, C, 0) == []
    assert got(machine, C, Takeover(GROUP, 1, 1)) == []
    assert got(machine, C, Redo(GROUP, 1, 1, pack_mask(0b010))) == []


def test_a_takeover_passes_on_what_is_held_and_reduces_the_rest_afresh() -> None:
    """Seat 0 takes part 2 of four chunks over; one of its two chunks is held by seat 1."""
    formed = group_of(4, ["worker"] * 3, bounds=[0, 1, 2, 4])
    machine = AllReduce(formed, 0, (1.0,) * 4, SimSigner(A), CONFIG, 0.0)
    machine.start(0.0)
    got(machine, B, BEAT)
    got(machine, C, BEAT)
    effects = machine.handle(LinkDown(C, True, "refused"), 0.3)
    assert sent(B, Takeover(GROUP, 2, 1)) in effects
    assert got(machine, B, Held(GROUP, 2, 1, pack_mask(0b0100))) == [
        sent(B, Want(GROUP, pack_mask(0b0100))),
        sent(B, Redo(GROUP, 2, 1, pack_mask(0b1000))),
    ]
    assert chunk(machine, B, 3, ballot=0) == [
        sent(B, Refusal(GROUP, "wrong-part", "chunk 3, ballot 0, mass 1.0")),
        Emit(Notice("wrong-part", B, "chunk 3, ballot 0, mass 1.0")),
        AccumulateOwn(GROUP, 0, 1.0),
        Finalize(GROUP, 0, 0, 1.0, 0b001),
        SendResult(B, GROUP, 0, 0, 1.0, 0b001),
        AccumulateOwn(GROUP, 3, 1.0),
        Finalize(GROUP, 3, 1, 1.0, 0b001),
        SendResult(B, GROUP, 3, 1, 1.0, 0b001),
    ]
    # The old result, made at ballot 0, is taken from the one who was asked; B has it.
    assert result(machine, B, 2, ballot=0) == [TakeResult(GROUP, 2)]


def test_a_fresh_reduction_after_a_takeover() -> None:
    machine = greeted()
    machine.handle(LinkDown(C, True, "refused"), 0.3)
    assert sent(B, Redo(GROUP, 2, 1, pack_mask(0b100))) in got(machine, B, Held(GROUP, 2, 1, b""))
    assert chunk(machine, B, 2, ballot=1) == [
        Accumulate(GROUP, 2, 1.0),
        AccumulateOwn(GROUP, 2, 1.0),
        Finalize(GROUP, 2, 1, 2.0, 0b011),
        SendResult(B, GROUP, 2, 1, 2.0, 0b011),
    ]


def test_a_promise_is_given_when_the_reducer_is_lost_here_too_and_then_kept() -> None:
    machine = seat_of_three(seat=1)
    machine.start(0.0)
    got(machine, A, BEAT)
    got(machine, C, BEAT)
    assert got(machine, A, Takeover(GROUP, 2, 1)) == []  # C is alive, as far as B can tell
    effects = machine.handle(LinkDown(C, True, "refused"), 0.3)
    assert effects[-1] == sent(A, Held(GROUP, 2, 1, b""))
    assert result(machine, C, 2, ballot=0) == [
        sent(C, Refusal(GROUP, "lost", "you were silent too long"))
    ]
    assert got(machine, A, Redo(GROUP, 2, 1, pack_mask(0b111))) == [contribution(A, 2, ballot=1)]
    assert result(machine, A, 2, ballot=0) == [TakeResult(GROUP, 2)]  # passed on as it was


def test_a_result_that_came_before_the_promise_is_reported() -> None:
    machine = seat_of_three(seat=1)
    machine.start(0.0)
    got(machine, A, BEAT)
    got(machine, C, BEAT)
    machine.handle(LinkDown(C, True, "refused"), 0.3)
    assert TakeResult(GROUP, 2) in result(machine, C, 2)  # on its way when the link broke
    assert got(machine, A, Takeover(GROUP, 2, 1)) == [sent(A, Held(GROUP, 2, 1, pack_mask(4)))]


def test_wanted_results_are_sent_now_or_when_they_come() -> None:
    machine = greeted()
    result(machine, C, 2)
    assert got(machine, B, Want(GROUP, pack_mask(0b101))) == [
        SendResult(B, GROUP, 2, 0, 3.0, 0b111)
    ]
    # Chunk 0 is pushed when it is made, and wanted: it goes once.
    chunk(machine, B, 0)
    sends = [e for e in chunk(machine, C, 0) if isinstance(e, SendResult) and e.peer == B]
    assert len(sends) == 1


def test_a_new_want_replaces_the_one_before() -> None:
    machine = greeted()
    got(machine, C, Want(GROUP, pack_mask(0b010)))
    got(machine, C, Want(GROUP, b""))
    assert SendResult(C, GROUP, 1, 0, 3.0, 0b111) not in result(machine, B, 1)


def test_a_seat_cannot_make_us_send_for_ever() -> None:
    machine = greeted()
    result(machine, C, 2)
    sends = sum(len(got(machine, B, Want(GROUP, pack_mask(0b100)))) for _ in range(100))
    assert sends == SERVED_FACTOR * 3


def test_results_of_others_parts_are_not_taken_unasked() -> None:
    machine = greeted()
    assert result(machine, B, 2) == []
    assert not machine._ledger.have


@pytest.mark.parametrize("fault", ["non-finite", "wrong-size", "undecodable"])
def test_a_bad_contribution_puts_its_sender_out(fault: str) -> None:
    machine = greeted()
    chunk(machine, C, 0)
    detail = "chunk 0, ballot 0, mass 1.0"
    assert chunk(machine, B, 0, fault=fault) == [
        sent(B, Refusal(GROUP, fault, detail)),
        Emit(Notice(fault, B, detail)),
        AccumulateOwn(GROUP, 0, 1.0),
        Finalize(GROUP, 0, 0, 2.0, 0b101),
        SendResult(B, GROUP, 0, 0, 2.0, 0b101),
        SendResult(C, GROUP, 0, 0, 2.0, 0b101),
    ]
    result(machine, B, 1)
    result(machine, C, 2)
    assert machine.report is not None
    assert machine.report.outcome is Outcome.PARTIAL
    assert machine.report.blames == (Blame(B, fault, detail),)


@pytest.mark.parametrize("mass", [float("nan"), float("inf"), -1.0, 1e31])
def test_a_mass_without_sense_puts_its_sender_out(mass: float) -> None:
    machine = greeted()
    effects = chunk(machine, B, 0, mass=mass)
    assert isinstance(effects[0], Send)
    assert isinstance(effects[0].message, Refusal)
    assert effects[0].message.reason == "bad-mass"
    assert chunk(machine, B, 0) == []


def test_a_bad_result_makes_its_reducer_lost() -> None:
    machine = greeted()
    effects = result(machine, C, 2, fault="non-finite")
    assert effects[0] == sent(C, Refusal(GROUP, "non-finite", "result of chunk 2"))
    assert sent(B, Takeover(GROUP, 2, 1)) in effects
    assert TakeResult(GROUP, 2) not in effects


def test_a_contribution_of_mass_0_only_says_that_there_is_none() -> None:
    machine = greeted()
    assert chunk(machine, B, 0, mass=0.0, fault="wrong-size") == []
    assert chunk(machine, C, 0, mass=2.0)[:3] == [
        Accumulate(GROUP, 0, 2.0),
        AccumulateOwn(GROUP, 0, 1.0),
        Finalize(GROUP, 0, 0, 3.0, 0b111),
    ]


def test_a_chunk_of_which_nobody_has_a_value_ends_as_missing_everywhere() -> None:
    machine = seat_of_three(masses=(0.0, 1.0, 1.0))
    machine.start(0.0)
    got(machine, B, BEAT)
    got(machine, C, BEAT)
    chunk(machine, B, 0, mass=0.0)
    assert chunk(machine, C, 0, mass=0.0) == [
        SendResult(B, GROUP, 0, 0, 0.0, 0),
        SendResult(C, GROUP, 0, 0, 0.0, 0),
    ]
    other = seat_of_three(seat=1)
    other.start(0.0)
    got(other, A, BEAT)
    assert chunk(other, A, 0, kind=ChunkKind.RESULT, mass=0.0, fault="non-finite") == []
    assert other._ledger.have == 0b001
    assert other._ledger.report(1.0).missing == (0, 1, 2)


def test_one_laggard_is_waited_for_by_the_others_pace_then_left_out() -> None:
    machine = greeted()
    chunk(machine, B, 0, now=0.5)  # B took 0.4 s: C has 3 × 0.4 + 1 s
    effects: list[Effect] = []
    at = 0.25
    while not effects or not any(isinstance(e, Finalize) for e in effects):
        got(machine, C, BEAT, now=at)
        got(machine, B, BEAT, now=at)
        effects = machine.handle(Tick(), at)
        at += 0.25
        assert at < 5
    assert 0.1 + 2.2 <= at - 0.25 <= 0.1 + 2.2 + 0.5
    assert machine._ledger.blames[2, "lagging"].peer == C
    assert Finalize(GROUP, 0, 0, 2.0, 0b011) in effects
    assert chunk(machine, C, 0, now=at) == []


def test_silence_makes_a_seat_lost_after_stall_s() -> None:
    machine = greeted()
    at = 0.25
    while not machine._seating.lost:
        got(machine, B, BEAT, now=at)
        effects = machine.handle(Tick(), at)
        at += 0.25
        assert at < 3
    assert Emit(Notice("lost", C, "silent: for 1.15 s")) in effects


def test_a_late_tick_is_our_own_fault() -> None:
    machine = greeted()
    machine.handle(Tick(), 9.0)
    assert not machine._seating.lost


def test_at_the_deadline_the_round_ends_with_what_is_there() -> None:
    machine = greeted()
    result(machine, B, 1)
    got(machine, B, BEAT, now=DEADLINE_S - 0.1)
    got(machine, C, BEAT, now=DEADLINE_S - 0.1)
    machine._next_beat = DEADLINE_S + 0.1
    assert machine.wakeup == DEADLINE_S
    effects = machine.handle(Tick(), DEADLINE_S)
    assert machine.report is not None
    assert RoundEnded(machine.report) in effects
    assert machine.report.missing == (0, 2)
    assert machine.report.outcome is Outcome.PARTIAL
    assert machine.masses_after == [1.0, 3.0, 1.0]
    assert not machine.closed


def test_when_all_others_have_left_the_round_it_ends_at_once() -> None:
    machine = greeted()
    chunk(machine, B, 0)
    got(machine, B, RoundOver(GROUP, 9))
    effects = got(machine, C, RoundOver(GROUP, 9))
    assert [type(e) for e in effects[-2:]] == [RoundEnded, CloseRound]
    assert machine.report is not None
    assert machine.report.ledger == (0b011, 1, 1)
    assert machine.report.outcome is Outcome.PARTIAL
    assert [b.reason for b in machine.report.blames] == ["round-over", "round-over"]


def test_alone_without_anything_of_others_it_failed() -> None:
    machine = greeted()
    machine.handle(LinkDown(B, True, "gone"), 0.2)
    machine.handle(LinkDown(C, True, "gone"), 0.2)
    assert machine.report is not None
    assert machine.report.outcome is Outcome.FAILED
    assert machine.report.missing == (0, 1, 2)
    assert machine.closed


def test_a_seat_that_holds_us_for_lost_is_asked_for_results() -> None:
    machine = greeted()
    got(machine, C, Refusal(GROUP, "lost", ""), now=0.2)
    got(machine, B, BEAT, now=0.2)
    assert sent(B, Want(GROUP, pack_mask(0b100))) in machine.handle(Tick(), 0.25)


def test_whom_everybody_holds_for_lost_gives_up_reducing_and_asks() -> None:
    """As after a long pause: others have taken its part over, and it takes what they made."""
    machine = greeted()
    chunk(machine, B, 0)
    assert got(machine, B, Refusal(GROUP, "lost", ""))[-1] == CancelSends(B, GROUP)
    effects = got(machine, C, Refusal(GROUP, "lost", ""))
    assert ResetSum(GROUP, 0) in effects
    assert not any(isinstance(e, Finalize) for e in effects)
    assert sent(B, Want(GROUP, pack_mask(0b111))) in machine.handle(Tick(), 0.25)
    assert result(machine, B, 0, ballot=1) == [TakeResult(GROUP, 0)]


def test_a_lost_seat_that_speaks_again_is_served_even_what_was_queued_before() -> None:
    machine = greeted()
    chunk(machine, B, 0)
    assert SendResult(C, GROUP, 0, 0, 3.0, 0b111) in chunk(machine, C, 0)
    assert CancelSends(C, GROUP) in machine.handle(LinkDown(C, False, "cut"), 0.3)
    assert SendResult(C, GROUP, 0, 0, 3.0, 0b111) in got(machine, C, Want(GROUP, pack_mask(1)))


def test_a_promise_ends_what_was_asked_before_it() -> None:
    """The helper's answer may be on its way while the new reducer already counts us without."""
    formed = group_of(4, ["worker"] * 4)
    machine = AllReduce(formed, 2, (1.0,) * 4, SimSigner(C), CONFIG, 0.0)
    machine.start(0.0)
    helper = peer_of(3)
    for peer in (A, B, helper):
        got(machine, peer, BEAT)
    machine.handle(LinkDown(A, True, "refused"), 0.1)
    asked, at = False, 0.25
    while not asked:
        for peer in (B, helper):
            got(machine, peer, BEAT, now=at)
        asked = sent(helper, Want(GROUP, pack_mask(1))) in machine.handle(Tick(), at)
        at += 0.25
        assert at < 3.0
    assert got(machine, B, Takeover(GROUP, 0, 1)) == [sent(B, Held(GROUP, 0, 1, b""))]
    assert result(machine, helper, 0, ballot=0) == []
    assert result(machine, B, 0, ballot=0) == [TakeResult(GROUP, 0)]


def test_membership_is_believed_unless_the_seat_was_just_heard() -> None:
    machine = greeted()
    assert machine.lost(B, 0.2) == []
    assert Emit(Notice("lost", B, "dead: its death is known")) in machine.lost(B, 0.7)
    assert machine.lost(2, 0.7)[0] == Emit(Notice("lost", C, "dead: its death is known"))


def test_a_client_that_has_not_come_yet_is_not_given_up_because_it_cannot_be_dialled() -> None:
    formed = group_of(2, ["worker", "client"])
    machine = AllReduce(formed, 0, (1.0, 1.0), SimSigner(A), CONFIG, 0.0)
    assert machine.start(0.0) == []  # not even a beat: it dials us
    assert machine.handle(LinkDown(B, False, "no address"), 0.1) == []
    assert machine.lost(B, 0.6) == []
    assert got(machine, B, BEAT, now=0.7) == [sent(B, BEAT)]
    assert Emit(Notice("lost", B, "link-down: gone")) in machine.handle(
        LinkDown(B, False, "gone"), 0.8
    )


def test_asking_for_the_group_is_answered_and_no_permission_to_send() -> None:
    machine = seat_of_three()
    machine.start(0.0)
    assert got(machine, B, GroupAsk(GROUP)) == [sent(B, machine._round.formed)]
    assert not machine._seating.present


def test_strangers_are_named_and_ignored() -> None:
    machine = greeted()
    stranger = PeerId(b"?" * 32)
    for effects in (got(machine, stranger, BEAT), chunk(machine, stranger, 0)):
        assert isinstance(effects[0], Emit)
        assert effects[0].notice.code == "stranger"
        assert short(stranger) in effects[0].notice.detail


def test_two_clients_leave_each_other_alone() -> None:
    world = World(1, 4, ["client", "client", "worker"], [[1.0] * 4, [2.0] * 4, [3.0] * 4])
    world.run().check().check_exact()
    assert not any("0->1" in line or "1->0" in line for line in world.trace)
    assert all(p.report is not None and not p.report.blames for p in world.processes)


def test_values_are_exact_fractions_in_the_harness() -> None:
    world = World(3, 2, ["worker"] * 2, [[1.0] * 2, [3.0] * 2]).run().check().check_exact()
    assert isinstance(world.processes[0].results[0].value, Fraction)
