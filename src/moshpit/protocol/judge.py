"""Is what a peer says of itself believable? Limits on records and rumours, by schema and size.

`msgspec` has checked types; these are the limits on values. Comparisons are written so that
NaN fails them. What is accepted here is passed on to everybody, so the limits also bound the
size of a record on the wire (`RECORD_BYTES_MAX`) and with it the size of a page of records.
"""

from __future__ import annotations

from typing import Final

from moshpit.protocol.lineage import lineage_flaw
from moshpit.types import Role
from moshpit.wire.messages import Admission, PeerRecord, Suspicion

PEER_BYTES: Final = 32
COUNTER_MAX: Final = 1 << 48  # incarnations, versions, epochs: never reached by counting
ADDRESSES_MAX: Final = 8  # guess
HOST_CHARS_MAX: Final = 253  # DNS
VIA_MAX: Final = 8  # guess: clients publish 3
SCHEMA_BYTES_MAX: Final = 32
GROUP_KEY_MAX: Final = 16  # grid axes
SIGNATURE_BYTES_MAX: Final = 64
SAMPLES_MAX: Final = 1e15
RATE_MAX: Final = 1e9  # samples/s of one peer
STEP_S_MAX: Final = 1e7
BANDWIDTH_MAX: Final = 1e13  # bytes/s
ROLES_MAX: Final = 8
RECORD_BYTES_MAX: Final = 3800  # all limits above at once, UTF-8 hosts excluded (ASCII only)

_ROLES: Final = frozenset(str(role) for role in Role)


def record_flaw(record: PeerRecord) -> str | None:
    """Return why a record cannot be believed whoever signed it, or None."""
    if len(record.peer) != PEER_BYTES:
        return "peer id of a wrong length"
    if not (
        0 <= record.incarnation < COUNTER_MAX
        and 0 <= record.version < COUNTER_MAX
        and 0 <= record.epoch < COUNTER_MAX
    ):
        return "counter out of range"
    if record.role not in _ROLES:
        return "unknown role"
    if not (
        0.0 <= record.samples <= SAMPLES_MAX
        and 0.0 <= record.rate <= RATE_MAX
        and 0.0 <= record.step_s <= STEP_S_MAX
        and 0.0 <= record.up <= BANDWIDTH_MAX
        and 0.0 <= record.down <= BANDWIDTH_MAX
    ):
        return "number out of range"
    if len(record.schema) > SCHEMA_BYTES_MAX:
        return "schema too long"
    if len(record.group_key) > GROUP_KEY_MAX or not all(
        0 <= k < COUNTER_MAX for k in record.group_key
    ):
        return "group key out of range"
    if not -1 <= record.merges_from < COUNTER_MAX:
        return "counter out of range"
    return (
        lineage_flaw(record.lineage)
        or _reach_flaw(record)
        or _admission_flaw(record.admission, record.signature)
    )


def _reach_flaw(record: PeerRecord) -> str | None:
    if len(record.addresses) > ADDRESSES_MAX:
        return "too many addresses"
    for host, port in record.addresses:
        if not 0 < len(host) <= HOST_CHARS_MAX or not host.isascii() or not host.isprintable():
            return "host name out of range"
        if not 0 < port < 1 << 16:
            return "port out of range"
    if len(record.via) > VIA_MAX or any(len(peer) != PEER_BYTES for peer in record.via):
        return "via out of range"
    return None


def _admission_flaw(admission: Admission, signature: bytes) -> str | None:
    if (
        len(admission.invite) > PEER_BYTES
        or len(admission.roles) > ROLES_MAX
        or any(len(role) > 16 or not role.isascii() for role in admission.roles)
        or not 0 <= admission.expires_at < COUNTER_MAX
        or len(admission.invite_signature) > SIGNATURE_BYTES_MAX
        or len(admission.peer_signature) > SIGNATURE_BYTES_MAX
        or len(signature) > SIGNATURE_BYTES_MAX
    ):
        return "admission out of range"
    return None


def suspicion_flaw(suspicion: Suspicion) -> str | None:
    """Return why a rumour about a peer cannot be believed whoever spreads it, or None."""
    if len(suspicion.peer) != PEER_BYTES or len(suspicion.by) != PEER_BYTES:
        return "peer id of a wrong length"
    if not 0 <= suspicion.incarnation < COUNTER_MAX:
        return "counter out of range"
    return None
