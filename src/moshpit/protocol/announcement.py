"""Announcements of groups: how a host makes one, and how a member judges one.

A `GroupFormed` carries the joins that the members themselves signed, so a host can neither
invent members nor alter what they said; what it adds (who reduces what, where to go next, how
long it may last) is checked for sense here and signed by the host.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from moshpit.config import RoundConfig
from moshpit.protocol import partition, torus
from moshpit.protocol.grid import Path
from moshpit.protocol.machine import Signer, View
from moshpit.types import GroupId, PeerId, Role, RunId
from moshpit.wire.messages import Columns, GroupFormed, GroupKey, Join

CHUNKS_MAX = 1 << 24  # 8 TB in chunks of 512 KiB; a bound against nonsense
CHUNK_BYTES_MAX = 1 << 20  # config.TransportConfig.chunk_bytes: where a size is not known
VECTOR_BYTES_MAX = 1 << 44
SCHEMA_BYTES_MAX = 64
GROUP_ID_BYTES = 16
AXES_MAX = 64  # 2^64 peers in groups of 2
COORDINATE_MAX = 1 << 32
EPOCH_MAX = 1 << 48
NONCE_MAX = 1 << 63
DEADLINE_S_MAX = 7 * 86400.0  # guess
ROWS_MAX = 64  # seats of a column fit the 64-bit mask of a chunk header

_ROLES = {role.value: role for role in Role}


def role_of(text: str) -> Role | None:
    """Return the role of that name, None if there is no such role."""
    return _ROLES.get(text)


def can_host(view: View, peer: bytes) -> bool:
    """Whether a peer can be dialled, as far as its record says, and so host and reduce."""
    return view.dialable(peer)


def is_live(view: View, peer: PeerId) -> bool:
    """Whether the view believes a peer to be alive."""
    at = bisect_left(view.live, peer)
    return at < len(view.live) and view.live[at] == peer


def key_hash(run: RunId, key: GroupKey) -> bytes:
    """Return the point of the ring of ids at which a key's hosts begin."""
    numbers = (key.epoch, key.axis, *key.path, *key.span)
    packed = b"".join(number.to_bytes(9, "little", signed=True) for number in numbers)
    return hashlib.blake2b(run + packed, digest_size=32).digest()


def candidates(view: View, start: bytes) -> Iterator[PeerId]:
    """Yield the live dialable peers, from the first at or after ``start`` round the ring."""
    live = view.live
    first = bisect_left(live, PeerId(start))
    for step in range(len(live)):
        peer = live[(first + step) % len(live)]
        if can_host(view, peer):
            yield peer


def comes_before(start: bytes, first: bytes, second: bytes) -> bool:
    """Whether ``first`` comes before ``second`` on the ring that begins at ``start``."""
    return (first < start, first) < (second < start, second)


def key_flaw(key: GroupKey) -> str:
    """Return what is wrong with a key, or nothing."""
    if not 0 <= key.epoch <= EPOCH_MAX or not 0 <= key.axis < AXES_MAX:
        return f"epoch {key.epoch}, axis {key.axis}"
    if key.span and not (len(key.span) == 2 and 0 <= key.span[0] < key.span[1] <= CHUNKS_MAX):
        return "span of no chunks"
    return path_flaw(key.path, key.axis)


def path_flaw(path: Path, axis: int) -> str:
    """Return what is wrong with the path of a key on this axis, or nothing."""
    if len(path) != axis + 1:
        return f"path of {len(path)} numbers on axis {axis}"
    if any(not 0 <= coordinate < COORDINATE_MAX for coordinate in path):
        return "path with a number out of range"
    return ""


def join_flaw(join: Join) -> str:
    """Return what is wrong with a join apart from its signature, or nothing."""
    flaw = key_flaw(join.key)
    if not flaw and role_of(join.role) is None:
        flaw = f"role {join.role[:20]!r}"
    if not flaw and not 0 < len(join.schema) <= SCHEMA_BYTES_MAX:
        flaw = f"schema of {len(join.schema)} bytes"
    if not flaw and not 1 <= join.vector_chunks <= CHUNKS_MAX:
        flaw = f"{join.vector_chunks} chunks"
    if not flaw and join.key.span and join.key.span[1] > join.vector_chunks:
        flaw = "a span beyond its chunks"
    if not flaw and not 0 <= join.vector_bytes <= VECTOR_BYTES_MAX:
        flaw = f"{join.vector_bytes} bytes"
    if not flaw and not (math.isfinite(join.bandwidth) and join.bandwidth >= 0):
        flaw = f"bandwidth {join.bandwidth}"
    if not flaw and not 0 <= join.fill_s <= DEADLINE_S_MAX:
        flaw = f"a vector that is complete in {join.fill_s} s"
    if not flaw and not 0 < join.nonce < NONCE_MAX:
        flaw = f"nonce {join.nonce}"
    if not flaw and len(join.origin) not in (0, GROUP_ID_BYTES):
        flaw = f"origin of {len(join.origin)} bytes"
    return flaw


def reduces(join: Join) -> bool:
    """Whether a member can be dialled and so reduce."""
    return role_of(join.role) in (Role.WORKER, Role.AUX)


class Row(NamedTuple):
    """What makes a group a row of the torus schedule.

    Attributes:
        seats: how it is seated; the joins are in this order.
        rows: how many members a whole column has.
        wait_s: how long a column may take to meet.
    """

    seats: torus.Seats
    rows: int
    wait_s: float


def form(  # noqa: PLR0917 - all of them are needed
    signer: Signer,
    joins: Sequence[Join],
    next_path: Sequence[Path],
    config: RoundConfig,
    serial: bytes,
    row: Row | None = None,
) -> GroupFormed | None:
    """Return the signed announcement of a group; None where nobody in it reduces.

    Args:
        signer: the host's key.
        joins: by seat; at least one, all of one key.
        next_path: by seat.
        config: for the deadline.
        serial: bytes that no other group of this host has; they make the id unique.
        row: the torus schedule, where that is used.
    """
    bandwidths = partition.levelled([join.bandwidth for join in joins])
    first = joins[0]
    start, stop = first.key.span or (0, first.vector_chunks)
    if row is None:
        parts = partition.fractions(bandwidths, [reduces(join) for join in joins])
        if parts is None:
            return None
        bounds = tuple(start + edge for edge in partition.bounds(parts, stop - start))
    else:
        bounds = row.seats.bounds
        parts = [(end - begin) / stop for begin, end in pairwise(bounds)]
    size = max(join.vector_bytes for join in joins) or (stop - start) * CHUNK_BYTES_MAX

    def patience(seconds: float) -> float:
        return max(config.deadline_s_min, config.deadline_factor * seconds)

    # Twice, since contributions are waited for during half of the time (`reduction.CUT_SHARE`).
    fill_s = 2 * max(join.fill_s for join in joins)
    deadline_s = fill_s + patience(
        partition.seconds(bandwidths, parts, size, config.bandwidth_floor)
    )
    columns = None
    if row is not None:
        # A column moves twice its slice, whoever is in it; the slowest of this row stands for all.
        alike = [1 / row.rows] * len(joins)
        slice_bytes = size * max(end - begin for begin, end in row.seats.spans) / stop
        column_s = patience(
            partition.seconds(bandwidths, alike, 2 * slice_bytes, config.bandwidth_floor)
        )
        # The other rows may fill as slowly as this one.
        hold_s = row.wait_s + column_s + fill_s
        columns = Columns(row.seats.spans, row.rows, hold_s, column_s)
        deadline_s += columns.hold_s
    digest = hashlib.blake2b(
        signer.run + key_hash(signer.run, first.key) + signer.peer + serial,
        digest_size=GROUP_ID_BYTES,
    )
    formed = GroupFormed(
        group=GroupId(digest.digest()),
        host=signer.peer,
        key=first.key,
        joins=tuple(joins),
        bounds=bounds,
        next_path=tuple(next_path),
        deadline_s=min(DEADLINE_S_MAX, deadline_s),
        columns=columns,
    )
    return signer.sign_message(formed)


def formed_flaw(formed: GroupFormed, signer: Signer, size_max: int) -> str:
    """Return what is wrong with an announcement, signatures included, or nothing."""
    size = len(formed.joins)
    if not 1 <= size <= size_max:
        return f"{size} members"
    if len(formed.group) != GROUP_ID_BYTES:
        return f"id of {len(formed.group)} bytes"
    if not 0 < formed.deadline_s <= DEADLINE_S_MAX:
        return f"deadline of {formed.deadline_s} s"
    first = formed.joins[0]
    for join in formed.joins:
        flaw = join_flaw(join)
        if flaw:
            return f"a join with {flaw}"
        if join.key != formed.key:
            return "a join for another key"
        if (join.schema, join.vector_chunks) != (first.schema, first.vector_chunks):
            return "joins of different vectors"
    if len({join.peer for join in formed.joins}) != size:
        return "a member twice"
    return _layout_flaw(formed) or _signature_flaw(formed, signer)


def _layout_flaw(formed: GroupFormed) -> str:
    """Return what is wrong with the parts and the next paths, or nothing."""
    size, edges = len(formed.joins), formed.bounds
    start, stop = formed.key.span or (0, formed.joins[0].vector_chunks)
    if len(edges) != size + 1 or edges[0] != start or edges[-1] != stop:
        return "parts that do not cover the vector"
    for seat, join in enumerate(formed.joins):
        if edges[seat] > edges[seat + 1]:
            return "parts out of order"
        if size > 1 and role_of(join.role) is Role.CLIENT and edges[seat] < edges[seat + 1]:
            return "a part for a client"
    if len(formed.next_path) != size:
        return "next paths for other than all seats"
    if formed.columns is not None:
        return _columns_flaw(formed, formed.columns)
    ends = not formed.next_path[0]
    for path in formed.next_path:
        if bool(path) == ends or (path and path_flaw(path, formed.key.axis + 1)):
            return "a next path that is none"
    return ""


def _columns_flaw(formed: GroupFormed, columns: Columns) -> str:
    """Return what is wrong with what the seats take to their columns, or nothing."""
    if formed.key.span or len(columns.spans) != len(formed.joins):
        return "columns for other than all seats of a row"
    if not 1 <= columns.rows <= ROWS_MAX:
        return f"columns of {columns.rows} rows"
    if not 0 < columns.column_s <= columns.hold_s < formed.deadline_s:
        return f"columns that may take {columns.hold_s} s"
    for seat, (begin, end) in enumerate(columns.spans):
        path = formed.next_path[seat]
        if not begin < end:
            if path or (begin, end) != (0, 0):
                return "a column without chunks"
        elif not formed.bounds[seat] <= begin < end <= formed.bounds[seat + 1]:
            return "a column of another seat's part"
        elif not path or path_flaw(path, formed.key.axis + 1):
            return "a column that is nowhere"
    return ""


def _signature_flaw(formed: GroupFormed, signer: Signer) -> str:
    """Return which signature does not verify, or nothing."""
    if not signer.verify_message(formed, formed.host):
        return "a signature that is not its host's"
    for join in formed.joins:
        if join.peer != signer.peer and not signer.verify_message(join, join.peer):
            return "a join that its peer did not sign"
    return ""
