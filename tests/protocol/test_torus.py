"""The torus schedule: who holds what, how rows are seated, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import RoundConfig
from moshpit.events import EpochReport, Outcome, RoundReport
from moshpit.protocol import announcement, grid, torus
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.sim.signer import SimSigner
from moshpit.types import GroupId
from moshpit.wire.messages import Call, CallReply, Columns, GroupFormed, GroupKey

from .harness_joins import A, B, H, fields, got, join, make, sent

CHUNKS = 64
ROW = GroupKey(0, 0, (0,))
COLUMN = GroupKey(0, 1, (1, 0), (16, 32))


def layout(n: int, group_size: int = 4) -> torus.Torus:
    made = torus.torus(grid.plan(n, group_size), [True] * n, CHUNKS, "auto")
    assert made is not None
    return made


# --- who holds what -----------------------------------------------------------------------


@pytest.mark.parametrize("n", range(5, 65))
def test_every_slice_goes_up_one_column_that_has_one_holder_of_every_row(n: int) -> None:
    plan = grid.plan(n, 8)
    if plan.axes != 2:
        assert torus.torus(plan, [True] * n, CHUNKS, "torus") is None
        return
    made = layout(n, 8)
    columns = [made.members((number, 0)) for number in range(made.columns)]
    held = [rank for column in columns for rank in column]
    assert len(held) == len(set(held))
    for column in columns:
        assert [next(i for i, row in enumerate(plan.rows) if r in row) for r in column] == [
            *range(len(plan.rows))
        ]
    assert made.members((made.columns, 0)) == ()
    assert made.members((0,)) == ()


def test_the_schedule_is_the_grids_where_the_torus_has_no_use() -> None:
    two = grid.plan(12, 4)
    assert torus.torus(two, [True] * 12, CHUNKS, "grid") is None
    assert torus.torus(grid.plan(4, 4), [True] * 4, CHUNKS, "torus") is None  # one axis
    assert torus.torus(grid.plan(65, 4), [True] * 65, CHUNKS, "torus") is None  # three and more
    assert torus.torus(grid.plan(3, 2), [True] * 3, CHUNKS, "auto") is None  # a single slice
    one_client = [True] * 11 + [False]
    assert torus.torus(two, one_client, CHUNKS, "auto") is None
    asked = torus.torus(two, one_client, CHUNKS, "torus")
    assert asked is not None
    assert asked.columns == min(sum(one_client[r] for r in row) for row in two.rows)
    assert all(one_client[rank] for row in asked.holders for rank in row)


def test_there_are_no_more_slices_than_chunks() -> None:
    made = torus.torus(grid.plan(16, 4), [True] * 16, 2, "auto")
    assert made is not None
    assert made.columns == 2


# --- how a row is seated ------------------------------------------------------------------


@given(st.data())
def test_parts_cover_the_vector_and_spans_lie_in_them(data: st.DataObject) -> None:
    n, chunks = data.draw(st.integers(5, 36)), data.draw(st.integers(1, 200))
    plan = grid.plan(n, 6)
    made = torus.torus(plan, [True] * n, chunks, "torus") if plan.axes == 2 else None
    if made is None:
        return
    row = data.draw(st.sampled_from(plan.rows))
    holders = made.holders[made.row(row)]
    planned = [holders.index(rank) if rank in holders else -1 for rank in row]
    columns = data.draw(st.lists(st.sampled_from(planned), min_size=1, unique=True))
    columns += [-1] * data.draw(st.integers(0, 2))  # newcomers
    reduces = [data.draw(st.booleans()) if c < 0 else True for c in columns]
    seats = torus.seat_row(made, chunks, columns, reduces)
    if seats is None:
        assert not any(reduces)
        return
    assert sorted(seats.order) == [*range(len(columns))]
    assert seats.bounds[0] == 0
    assert seats.bounds[-1] == chunks
    cuts = torus.edges(made.columns, chunks)
    taken = [number for number in seats.columns if number >= 0]
    assert len(set(taken)) == len(taken)
    able = [index for index in range(len(columns)) if reduces[index]]
    assert len(taken) == min(made.columns, len(able))
    for (start, end), span, number in zip(
        pairwise(seats.bounds), seats.spans, seats.columns, strict=True
    ):
        assert start <= end
        if number < 0:
            assert (start == end, span) == (True, (0, 0))
        else:
            assert span == (cuts[number], cuts[number + 1])
            assert start <= span[0] < span[1] <= end


def test_a_newcomer_takes_the_place_of_an_absent_holder() -> None:
    seats = torus.seat_row(layout(16), CHUNKS, [0, 2, 3, -1], [True] * 4)
    assert seats is not None
    assert seats.columns == (0, 1, 2, 3)
    assert seats.order == (0, 3, 1, 2)
    assert seats.bounds == (0, 16, 32, 48, 64)


def test_without_one_its_neighbour_reduces_the_slice_and_does_not_take_it_up() -> None:
    seats = torus.seat_row(layout(16), CHUNKS, [1, 3], [True] * 2)
    assert seats is not None
    assert seats.bounds == (0, 48, 64)
    assert seats.spans == ((16, 32), (48, 64))


# --- announcements ------------------------------------------------------------------------


def row_formed(**changes: object) -> GroupFormed:
    seats = torus.seat_row(layout(16), CHUNKS, [0, 1, 2], [True] * 3)
    assert seats is not None
    joins = [join(peer, vector_chunks=CHUNKS, key=ROW) for peer in (H, A, B)]
    formed = announcement.form(
        SimSigner(H), joins, [(0, 0), (1, 0), (2, 0)], RoundConfig(), b"serial",
        announcement.Row(seats, 4, 30.0),
    )  # fmt: skip
    assert formed is not None
    return SimSigner(H).sign_message(msgspec.structs.replace(formed, **changes))  # type: ignore[arg-type]


def test_a_rows_deadline_has_room_for_its_columns() -> None:
    formed = row_formed()
    assert announcement.formed_flaw(formed, SimSigner(A), 64) == ""
    assert formed.columns is not None
    assert formed.columns.hold_s == 30.0 + formed.columns.column_s
    assert formed.deadline_s >= formed.columns.hold_s + RoundConfig().deadline_s_min


SPANS = ((0, 16), (16, 32), (32, 48))


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"columns": Columns(SPANS[:2], 4, 20.0, 10.0)}, "other than all seats"),
        ({"columns": Columns(SPANS, 0, 20.0, 10.0)}, "0 rows"),
        ({"columns": Columns(SPANS, 65, 20.0, 10.0)}, "65 rows"),
        ({"columns": Columns(SPANS, 4, math.nan, 10.0)}, "may take nan s"),
        ({"columns": Columns(SPANS, 4, 1e9, 10.0)}, "may take"),
        ({"columns": Columns(SPANS, 4, 20.0, 21.0)}, "may take"),
        ({"columns": Columns(((0, 17), *SPANS[1:]), 4, 20.0, 10.0)}, "another seat's part"),
        ({"columns": Columns(((8, 8), *SPANS[1:]), 4, 20.0, 10.0)}, "without chunks"),
        ({"columns": Columns(((0, 0), *SPANS[1:]), 4, 20.0, 10.0)}, "without chunks"),
        ({"next_path": ((0, 0), (), (2, 0))}, "nowhere"),
        ({"next_path": ((0, 0), (1,), (2, 0))}, "nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], flaw: str) -> None:
    assert flaw in announcement.formed_flaw(row_formed(**changes), SimSigner(A), 64)


def test_a_column_has_parts_of_its_own_slice_only() -> None:
    joins = [join(peer, vector_chunks=CHUNKS, key=COLUMN) for peer in (H, A, B)]
    formed = announcement.form(SimSigner(H), joins, [()] * 3, RoundConfig(), b"serial")
    assert formed is not None
    assert (formed.bounds[0], formed.bounds[-1]) == (16, 32)
    assert announcement.formed_flaw(formed, SimSigner(A), 64) == ""
    wide = msgspec.structs.replace(formed, bounds=(0, *formed.bounds[1:]))
    assert "cover" in announcement.formed_flaw(SimSigner(H).sign_message(wide), SimSigner(A), 64)


@pytest.mark.parametrize("span", [(1,), (3, 3), (5, 2), (-1, 4), (0, CHUNKS + 1), (0, 1, 2)])
def test_a_span_of_no_chunks_is_refused(span: tuple[int, ...]) -> None:
    bad = join(A, vector_chunks=CHUNKS, key=msgspec.structs.replace(COLUMN, span=span))
    assert "span" in announcement.join_flaw(bad)


def test_rows_that_were_cut_otherwise_have_other_columns() -> None:
    other = msgspec.structs.replace(COLUMN, span=(16, 33))
    run = SimSigner(A).run
    assert announcement.key_hash(run, COLUMN) != announcement.key_hash(run, other)


# --- calls and reports --------------------------------------------------------------------


def test_calls_to_columns_that_are_not_ones_own_are_declined() -> None:
    def called(machine: Matchmaker, key: GroupKey) -> bool:
        (reply,) = sent(got(machine, H, Call(key)), H)
        assert isinstance(reply, CallReply)
        return reply.coming

    machine = make(A)
    other = msgspec.structs.replace(COLUMN, path=(2, 0))
    machine.bound = (0, 1), COLUMN
    assert not called(machine, other)
    assert called(machine, COLUMN)
    machine.bound = (0, 1), None  # holds nothing
    assert not called(machine, COLUMN)
    assert called(machine, GroupKey(1, 0, (0,)))  # the next epoch
    machine.bound = None
    assert called(machine, other)
    assert fields().origin == b""


def test_an_epoch_is_judged_by_its_rows() -> None:
    row = RoundReport(
        0, 0, GroupId(b"row"), (A, B), 0, Outcome.PARTIAL,
        ledger=(3, 3, 1), masses=(4.0, 4.0, 1.0), missing=(2,), attempts=(0, 0, 0),
        reach=(2, 0, 0),
    )  # fmt: skip
    column = RoundReport(
        0, 1, GroupId(b"column"), (A, H), 0, Outcome.FAILED,
        ledger=(1, 3), masses=(1.0, 4.0), missing=(1,), attempts=(0, 0), span=(1, 3),
    )  # fmt: skip
    assert EpochReport(0, (column, row), 1.0).outcome is Outcome.PARTIAL
    assert row.fallback == (1,)
    assert EpochReport(0, (column, row), 1.0).parted, "that row has its own mean in a chunk"
    some = msgspec.structs.replace(row, reach=(2, 1, 2))
    assert EpochReport(0, (some,), 1.0).parted, "another row may have its own mean there"
    whole = msgspec.structs.replace(row, reach=(2, 2, 2))
    assert not EpochReport(0, (column, whole), 1.0).parted, "what matters is what the row has"
    assert column.contributors() == (A, H)
