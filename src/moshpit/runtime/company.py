"""What a peer makes of the others: whether they average the same, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moshpit.errors import LayoutError
from moshpit.events import EpochReport
from moshpit.protocol.machine import View
from moshpit.types import PeerId, Role, short
from moshpit.wire.messages import PeerRecord

NUMEL_BYTES = 8
NAMED_MAX = 8  # guess: so many peers are named in a message


class SwarmStats(msgspec.Struct, frozen=True):
    """Counts over a peer's life; bytes are payload bytes of chunks.

    Attributes:
        bytes_sent, bytes_received: payload of contributions, results and parcels.
        rounds, rounds_partial, rounds_failed: by outcome, see `moshpit.Outcome`.
        epochs: averagings that ended.
        last_report: what the last of them did.
    """

    bytes_sent: int
    bytes_received: int
    rounds: int
    rounds_partial: int
    rounds_failed: int
    epochs: int
    last_report: EpochReport | None


def live_records(view: View) -> list[PeerRecord]:
    """Return the records of all live peers, sorted by id."""
    records = [view.record(peer) for peer in view.live]
    return [record for record in records if record is not None]


def missing_peers(there: Sequence[PeerRecord], me: PeerId, wanted: int, timeout_s: float) -> str:
    """Say that not as many peers have come as were waited for."""
    others = [short(record.peer) for record in there if record.peer != me]
    names = ", ".join(others[:NAMED_MAX]) + (", ..." if len(others) > NAMED_MAX else "")
    return (
        f"{1 + len(others)} of {wanted} peers after {timeout_s:g} s (this one and "
        f"{names or 'nobody else'}); are the others started with the same ticket, and is "
        "an address of the ticket reachable? `moshpit doctor --ticket T` looks into it"
    )


def all_attached(view: View) -> bool:
    """Whether everybody who trains has said what it averages."""
    return all(r.schema or not Role(r.role).trains for r in live_records(view))


def check_others(view: View, me: PeerId, schema: bytes) -> None:
    """Refuse to average what nobody else does: two models in one run never meet."""
    others = [r for r in live_records(view) if r.peer != me and r.schema]
    if others and all(r.schema != schema for r in others):
        theirs = int.from_bytes(others[0].schema[-NUMEL_BYTES:], "little")
        raise LayoutError(
            f"peer {short(others[0].peer)} averages {theirs} numbers, this peer "
            f"{int.from_bytes(schema[-NUMEL_BYTES:], 'little')}, or tensors of other names, shapes "
            "or dtypes, or gradients at other parameters; start all peers of a run with the same "
            "model and strategy (and, for GradientAveraging, the same seed or checkpoint)"
        )
