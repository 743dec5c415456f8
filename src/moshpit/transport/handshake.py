"""How two peers prove their keys and admissions inside TLS (design §4).

Both sides say hello at once: magic, version, run, a fresh nonce, and the instance (a random
name of the process). Then the dialer proves itself, and the other side answers in kind::

    dialer   Proof: signs (context, run, the server's nonce, its certificate as seen, its id)
    server   Proof: signs (another context, run, the dialer's nonce, the certificate, its id)
             or Reject: why not

The certificate's hash in the signature binds it to this TLS connection: somebody in the middle
has another certificate, and what it passes on does not verify. The nonces make a replayed proof
worthless. Whoever dialled also checks that the certificate's key is the peer's id.

A hello starts with magic and version in a layout that never changes, so that peers of
different versions can tell each other so. Nothing else is parsed before the proof is good.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, final

import msgspec

from moshpit.errors import AdmissionError, HandshakeError, RemoteError
from moshpit.identity.certificates import key_of_certificate
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import verify
from moshpit.transport.control import ControlLink
from moshpit.types import PeerId, RunId, short
from moshpit.wire.messages import PROTOCOL_VERSION, Admission

_PREFIX = struct.Struct("<8sH")
_MAGIC: Final = b"moshpit\0"
_DIALER: Final = b"moshpit/1 handshake dialer\0"
_SERVER: Final = b"moshpit/1 handshake server\0"
NONCE_BYTES: Final = 32
DETAIL_MAX: Final = 300  # characters of a refusal that are believed
COUNT_MAX: Final = 1 << 62

REASONS: Final = (
    *("other-version", "other-run", "not-admitted", "expired", "bad-signature"),
    *("swapped-certificate", "duplicate-key", "self-dial", "plaintext-mismatch", "crossed"),
    *("withdrawn", "full", "closing", "undecodable", "oversized", "not-moshpit"),
)

# Reasons that are about the admission; all others are about the handshake itself.
_ADMISSION_REASONS: Final = ("not-admitted", "expired")


class CrossedError(HandshakeError):
    """Both peers dialled at once, and the other connection is the one that stays."""


class WithdrawnError(HandshakeError):
    """The dialer does not need this connection after all; nobody did anything wrong."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    run: bytes
    nonce: bytes
    instance: bytes
    peer: bytes
    """The server's id; the dialer does not say who it is before it must: empty."""


class _Proof(msgspec.Struct, frozen=True, array_like=True, tag=1):
    peer: bytes
    admission: Admission
    sealed: bool
    listens: bool
    attempt: int
    """Number of this dial among all of the dialer's."""
    void: int
    """The server's own dials up to this number are given up in favour of this connection."""
    signature: bytes = b""


class _Reject(msgspec.Struct, frozen=True, array_like=True, tag=2):
    reason: str
    detail: str


_encode = msgspec.msgpack.Encoder().encode
_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_answer_decoder: msgspec.msgpack.Decoder[_Proof | _Reject] = msgspec.msgpack.Decoder(
    _Proof | _Reject
)
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Self:
    """What this side of every handshake is and shows.

    Attributes:
        key, run, admission: who this peer is, in which run, and by what right.
        sealed: whether bulk data is encrypted here; both sides must agree.
        listens: whether others can dial this peer.
        instance: a random name of this process, 16 bytes.
        judge: given a peer, its admission, and whether it is the side that was dialled: what is
            wrong with it, as a reason code, or "".
        certificate: the DER bytes of the certificate that dialers see.
    """

    key: PeerKey
    run: RunId
    admission: Admission
    sealed: bool
    listens: bool
    instance: bytes
    judge: Callable[[PeerId, Admission, bool], str]
    certificate: bytes


@final
@dataclass(frozen=True, slots=True)
class Proved:
    """What is known of a peer once it has proved itself."""

    peer: PeerId
    admission: Admission
    instance: bytes
    listens: bool
    attempt: int
    """The dialer's number of this dial."""
    void: int
    """Dials of the other side up to this number are void; see `TcpTransport`."""
    rtt_s: float


@final
@dataclass(frozen=True, slots=True)
class Greeting:
    """A handshake between hello and proof."""

    nonce: bytes
    """Mine."""
    theirs: bytes
    """The other side's nonce."""
    instance: bytes
    peer: PeerId
    """At the dialer: the server's id, which is its certificate's key. Else empty."""
    certificate: bytes
    """Hash of the certificate of this connection."""


def _say_hello(link: ControlLink, me: Self, peer: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = _Hello(me.run, nonce, me.instance, peer)
    link.write_frame(_PREFIX.pack(_MAGIC, PROTOCOL_VERSION) + _encode(hello))
    return nonce


async def _hear_hello(link: ControlLink, me: Self) -> _Hello:
    frame = await link.read_frame()
    if len(frame) < _PREFIX.size:
        raise HandshakeError(link.where, "not-moshpit", "its hello is too short")
    magic, version = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise HandshakeError(link.where, "not-moshpit", "its hello is not one of this protocol")
    if version != PROTOCOL_VERSION:
        raise HandshakeError(
            link.where,
            "other-version",
            f"it speaks protocol version {version}, this peer {PROTOCOL_VERSION}",
        )
    hello = _decode(_hello_decoder, frame[_PREFIX.size :], link.where)
    if len(hello.nonce) != NONCE_BYTES or len(hello.instance) != 16:
        raise HandshakeError(link.where, "undecodable", "its hello has fields of wrong sizes")
    if hello.run != me.run:
        raise HandshakeError(
            link.where,
            "other-run",
            f"it is of run {short(hello.run)}, this peer of {short(me.run)}",
        )
    return hello


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, where: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HandshakeError(where, "undecodable", str(error)) from error


def _signed_bytes(context: bytes, bound: bytes, proof: _Proof) -> bytes:
    bare = msgspec.structs.replace(proof, signature=b"")
    return context + bound + hashlib.sha256(_encode(bare)).digest()


def _prove(context: bytes, me: Self, greeting: Greeting, other: PeerId, proof: _Proof) -> bytes:
    bound = me.run + greeting.theirs + greeting.certificate + other
    signature = me.key.sign(_signed_bytes(context, bound, proof))
    return _encode(msgspec.structs.replace(proof, signature=signature))


def _check(context: bytes, me: Self, greeting: Greeting, proof: _Proof, link: ControlLink) -> None:
    """Check signature, admission and settings of a proof, in this order, so that blame is sure."""
    where = link.where
    counts = 0 <= proof.attempt < COUNT_MAX and 0 <= proof.void < COUNT_MAX
    if len(proof.peer) != 32 or not counts:
        raise HandshakeError(where, "undecodable", "its proof has impossible fields")
    bound = me.run + greeting.nonce + greeting.certificate + me.key.peer
    if not verify(proof.peer, _signed_bytes(context, bound, proof), proof.signature):
        raise HandshakeError(
            where, "bad-signature", f"it does not hold the key of {short(proof.peer)}"
        )
    link.proved = PeerId(proof.peer)
    named = f"{short(proof.peer)} at {where}"
    fault = me.judge(PeerId(proof.peer), proof.admission, context == _SERVER)
    if fault:
        raise AdmissionError(named, fault, _ADVICE.get(fault, ""))
    if proof.sealed != me.sealed:
        mine, its = ("sealed", "plain") if me.sealed else ("plain", "sealed")
        raise HandshakeError(
            named, "plaintext-mismatch", f"its bulk data is {its}, this peer's {mine}"
        )


_ADVICE: Final = {
    "not-admitted": "no ticket of this run admits it",
    "expired": "by this peer's clock the ticket that admits it has expired: it needs a new one, or "
    "this peer's clock is wrong (`moshpit doctor` compares the two)",
}


def reject(link: ControlLink, reason: str, detail: str) -> None:
    """Tell the other side why it is refused."""
    link.write_frame(_encode(_Reject(reason, detail[:DETAIL_MAX])))


def withdraw(link: ControlLink, detail: str) -> None:
    """End a dial of this side in good order. Not after the proof: nobody reads it then."""
    reject(link, "withdrawn", detail)


# --- the dialer's side --------------------------------------------------------------------


async def greet_server(link: ControlLink, me: Self, expect: PeerId | None) -> Greeting:
    """Say hello as the dialer, and check whose certificate this is.

    Raises:
        HandshakeError: another version or run, or a certificate of another key.
    """
    der = link.certificate()
    key = key_of_certificate(der)
    if key is None or (expect is not None and key != expect):
        shown = "no peer's" if key is None else f"that of {short(key)}"
        wanted = "a peer's" if expect is None else f"that of {short(expect)}"
        raise HandshakeError(
            link.where, "swapped-certificate", f"its certificate is {shown}, expected {wanted}"
        )
    nonce = _say_hello(link, me, b"")
    hello = await _hear_hello(link, me)
    if hello.peer != key:
        raise HandshakeError(
            link.where,
            "swapped-certificate",
            f"it calls itself {short(hello.peer)}, but its certificate is that of {short(key)}",
        )
    return Greeting(nonce, hello.nonce, hello.instance, key, hashlib.sha256(der).digest())


async def prove_to_server(link: ControlLink, me: Self, greeting: Greeting, attempt: int) -> Proved:
    """Prove this peer as the dialer, and check the server's proof.

    Raises:
        CrossedError: the other side's own dial stays instead.
        HandshakeError, AdmissionError: either side refuses the other.
    """
    began = time.monotonic()
    proof = _Proof(me.key.peer, me.admission, me.sealed, me.listens, attempt, 0)
    link.write_frame(_prove(_DIALER, me, greeting, greeting.peer, proof))
    answer = _decode(_answer_decoder, await link.read_frame(), link.where)
    rtt_s = time.monotonic() - began
    if isinstance(answer, _Reject):
        raise _refusal(answer, link.where)
    if answer.peer != greeting.peer:
        raise HandshakeError(
            link.where, "swapped-certificate", "its proof is not by its certificate's key"
        )
    _check(_SERVER, me, greeting, answer, link)
    return Proved(
        greeting.peer,
        answer.admission,
        greeting.instance,
        answer.listens,
        attempt,
        answer.void,
        rtt_s,
    )


def _refusal(told: _Reject, where: str) -> RemoteError:
    """Return the error for a refusal; its words come from somebody who has proved nothing."""
    reason = told.reason if told.reason in REASONS else "refused"
    detail = f"it refused this peer: {told.detail[:DETAIL_MAX]}"
    if reason == "crossed":
        return CrossedError(where, reason, detail)
    if reason == "withdrawn":
        return WithdrawnError(where, reason, detail)
    if reason in _ADMISSION_REASONS:
        return AdmissionError(where, reason, detail)
    return HandshakeError(where, reason, detail)


# --- the server's side --------------------------------------------------------------------


async def greet_dialer(link: ControlLink, me: Self) -> tuple[Greeting, Proved]:
    """Say hello as the server and check the dialer's proof, but do not answer it yet.

    Raises:
        HandshakeError, AdmissionError: the dialer is refused, and has been told.
    """
    nonce = _say_hello(link, me, me.key.peer)
    try:
        hello = await _hear_hello(link, me)
        began = time.monotonic()
        certificate = hashlib.sha256(me.certificate).digest()
        greeting = Greeting(nonce, hello.nonce, hello.instance, PeerId(b""), certificate)
        proof = _decode(_answer_decoder, await link.read_frame(), link.where)
        rtt_s = time.monotonic() - began
        if isinstance(proof, _Reject):
            raise _refusal(proof, link.where)
        _check(_DIALER, me, greeting, proof, link)
    except RemoteError as error:
        reject(link, error.reason, error.detail)
        raise
    proved = Proved(
        PeerId(proof.peer),
        proof.admission,
        hello.instance,
        proof.listens,
        proof.attempt,
        proof.attempt,
        rtt_s,
    )
    return greeting, proved


def prove_to_dialer(
    link: ControlLink, me: Self, greeting: Greeting, dialer: PeerId, void: int
) -> None:
    """Accept the dialer: send this peer's own proof."""
    proof = _Proof(me.key.peer, me.admission, me.sealed, me.listens, 0, void)
    link.write_frame(_prove(_SERVER, me, greeting, dialer, proof))
