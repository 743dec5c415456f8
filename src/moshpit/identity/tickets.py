"""Who may take part in a run: run key → invite → peer (design §4).

The run's owner keeps the `RunKey` and signs `Invite`s: key pairs with roles and an expiry. A
`Ticket` carries an invite's private half, so whoever holds it can admit its own peer id, and
the run key never travels. Anybody can check the chain with nothing but the run id.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from moshpit.errors import ConfigError, TicketError
from moshpit.identity.keyfiles import load_private, save_private
from moshpit.types import Address, PeerId, Role, RunId, short
from moshpit.wire.messages import Admission

TICKET_VERSION: Final = 1
EXPIRY_LEEWAY_S: Final = 600.0  # clocks may be off by this much
EXPIRES_AT_MAX: Final = 253_402_300_799  # the end of the year 9999; calendars go no further
ADDRESSES_MAX: Final = 16  # guess: a ticket stays short enough to paste
_CHECKSUM_BYTES: Final = 4
_PREFIX = re.compile(r"moshpit(\d+)_")
_ROLES: Final = tuple(Role)


def verify(public: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether the key signed the payload; False for anything that is no key or signature."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, payload)
    except (InvalidSignature, ValueError):
        return False
    return True


def _invite_bytes(invite: bytes, roles: tuple[str, ...], expires_at: int) -> bytes:
    return b"moshpit/1 invite\0" + msgspec.msgpack.encode((invite, roles, expires_at))


def _admission_bytes(run: bytes, peer: bytes) -> bytes:
    return b"moshpit/1 admission\0" + run + peer


def expired(expires_at: int, now: float) -> bool:
    """Whether an invite's time is over, even for a clock that is off by the leeway."""
    return expires_at != 0 and now > expires_at + EXPIRY_LEEWAY_S


def admission_fault(admission: Admission, run: bytes, peer: bytes, now: float | None) -> str:
    """Say what is wrong with a peer's admission to a run: nothing, or a reason code.

    Args:
        admission: the chain that the peer shows.
        run: the run's id, 32 bytes.
        peer: the peer's id, 32 bytes.
        now: Unix seconds; None leaves the expiry out.

    Returns:
        ``""``, ``"not-admitted"`` or ``"expired"``.
    """
    if len(peer) != 32 or len(admission.roles) > len(_ROLES):
        return "not-admitted"
    try:
        invite = _invite_bytes(admission.invite, admission.roles, admission.expires_at)
    except (ValueError, OverflowError):
        return "not-admitted"
    chained = verify(run, invite, admission.invite_signature) and verify(
        admission.invite, _admission_bytes(run, peer), admission.peer_signature
    )
    if not chained:
        return "not-admitted"
    if now is not None and expired(admission.expires_at, now):
        return "expired"
    return ""


@final
@dataclass(frozen=True, slots=True)
class Ticket:
    """What a person is given to join a run.

    Attributes:
        run: the run.
        invite_key: the invite's private half, 32 bytes; as secret as a password.
        roles: the roles that it allows.
        expires_at: Unix seconds after which it admits nobody new; 0 is never.
        invite_signature: the run key's signature over the invite.
        addresses: whom to dial first.

    Example:
        >>> ticket = RunKey.generate().invite().ticket((Address("my.host", 7000),))
        >>> ticket.roles[0].value, str(ticket.addresses[0]), ticket.encode()[:9]
        ('worker', 'my.host:7000', 'moshpit1_')
    """

    run: RunId
    invite_key: bytes = field(repr=False)
    roles: tuple[Role, ...]
    expires_at: int
    invite_signature: bytes = field(repr=False)
    addresses: tuple[Address, ...]

    def admit(self, peer: PeerId) -> Admission:
        """Sign a peer into the run; the result is what the peer shows to others."""
        private = Ed25519PrivateKey.from_private_bytes(self.invite_key)
        return Admission(
            invite=private.public_key().public_bytes_raw(),
            roles=tuple(str(r) for r in self.roles),
            expires_at=self.expires_at,
            invite_signature=self.invite_signature,
            peer_signature=private.sign(_admission_bytes(self.run, peer)),
        )

    def encode(self) -> str:
        """Return the ticket as one URL-safe word.

        >>> ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", 7000),))
        >>> Ticket.decode(ticket.encode()) == ticket
        True
        """
        mask = sum(1 << i for i, role in enumerate(_ROLES) if role in self.roles)
        body = msgspec.msgpack.encode(
            (
                self.run,
                self.invite_key,
                mask,
                self.expires_at,
                self.invite_signature,
                self.addresses,
            )
        )
        data = len(body).to_bytes(2, "big") + body
        data += hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
        return f"moshpit{TICKET_VERSION}_" + base64.urlsafe_b64encode(data).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, now: float | None = None) -> Ticket:
        """Read and check a ticket; white space in it, as mail adds, does not matter.

        Args:
            text: what `encode` returned.
            now: Unix seconds; None takes the clock.

        Raises:
            TicketError: it is cut, mistyped, altered, expired or of another version; the
                message says which, and what to do.
        """
        ticket = _parse(_body(text))
        public = Ed25519PrivateKey.from_private_bytes(ticket.invite_key).public_key()
        roles = tuple(str(r) for r in ticket.roles)
        invite = _invite_bytes(public.public_bytes_raw(), roles, ticket.expires_at)
        if not verify(ticket.run, invite, ticket.invite_signature):
            raise TicketError(
                "this ticket was altered: the run's key did not sign what it says. "
                "Ask whoever runs the training for another one"
            )
        if expired(ticket.expires_at, time.time() if now is None else now):
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ticket.expires_at))
            raise TicketError(
                f"this ticket expired on {when}. Ask for a new one, or check this machine's clock"
            )
        return ticket


def _body(text: str) -> bytes:
    """Undo prefix, base64, length and checksum."""
    word = "".join(text.split())
    prefix = _PREFIX.match(word)
    if prefix is None:
        raise TicketError("this is no ticket: a ticket starts with moshpit1_")
    if prefix[1] != str(TICKET_VERSION):
        raise TicketError(
            f"this ticket is of version {prefix[1][:8]}, this program reads version "
            f"{TICKET_VERSION}: use the same version of moshpit as whoever made it"
        )
    code = word[prefix.end() :]
    if re.fullmatch(r"[A-Za-z0-9_-]*", code) is None:
        raise TicketError("this ticket holds characters that no ticket has: copy it anew")
    # A cut can leave a lone character that is no whole byte: it only matters to the length.
    usable = code[: len(code) - (len(code) % 4 == 1)]
    try:
        data = base64.urlsafe_b64decode(usable + "=" * (-len(usable) % 4))
    except binascii.Error as error:
        raise TicketError("this ticket cannot be read: copy it anew") from error
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    length = int.from_bytes(data[:2], "big")
    if len(data) < 2 or len(data) < 2 + length + _CHECKSUM_BYTES:
        raise TicketError("this ticket is cut: its end is missing, copy it whole")
    if hashlib.sha256(body).digest()[:_CHECKSUM_BYTES] != checksum:
        raise TicketError("this ticket is mistyped: its checksum is wrong, copy it anew")
    return body[2:]


_Body = tuple[bytes, bytes, int, int, bytes, tuple[Address, ...]]
_decoder: msgspec.msgpack.Decoder[_Body] = msgspec.msgpack.Decoder(_Body)


def _parse(body: bytes) -> Ticket:
    try:
        run, key, mask, expires_at, signature, addresses = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise TicketError(f"this ticket was altered: {error}. Ask for another one") from error
    sane = len(run) == 32 and len(key) == 32 and len(signature) == 64
    sane = sane and 0 <= expires_at <= EXPIRES_AT_MAX
    if not sane or mask >> len(_ROLES) or mask <= 0 or len(addresses) > ADDRESSES_MAX:
        raise TicketError("this ticket was altered: its fields make no sense. Ask for another one")
    roles = tuple(role for i, role in enumerate(_ROLES) if mask >> i & 1)
    return Ticket(RunId(run), key, roles, expires_at, signature, addresses)


@final
@dataclass(frozen=True, slots=True)
class Invite:
    """A key pair whose public half the run key has signed."""

    run: RunId
    key: bytes = field(repr=False)
    roles: tuple[Role, ...]
    expires_at: int
    signature: bytes = field(repr=False)

    def ticket(self, addresses: tuple[Address, ...]) -> Ticket:
        """Return the ticket that carries this invite; raises `ConfigError`."""
        if len(addresses) > ADDRESSES_MAX:
            raise ConfigError(f"{len(addresses)} addresses: a ticket takes up to {ADDRESSES_MAX}")
        return Ticket(
            self.run, self.key, self.roles, self.expires_at, self.signature, tuple(addresses)
        )


@final
class RunKey:
    """The key of a run's owner; its public half is the run's id."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._run = RunId(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> RunKey:
        """Make a new run."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """Read a run key; raises `LocalError` saying what is wrong with the file."""
        return cls(load_private(path))

    def save(self, path: Path) -> None:
        """Write the key atomically with mode 0600; raises `LocalError`."""
        save_private(self._private, path)

    @property
    def run(self) -> RunId:
        """The run's id: the public key."""
        return self._run

    def invite(self, roles: tuple[Role, ...] = _ROLES, expires_at: int = 0) -> Invite:
        """Make an invite for some roles, until some time (Unix seconds; 0: for good).

        Raises:
            ConfigError: no role, or a time before 1970 or after the year 9999.
        """
        allowed = tuple(role for role in _ROLES if role in roles)
        if not allowed or not 0 <= expires_at <= EXPIRES_AT_MAX:
            raise ConfigError("an invite needs a role, and an expiry from 0 to the year 9999")
        private = Ed25519PrivateKey.generate()
        public = private.public_key().public_bytes_raw()
        signed = _invite_bytes(public, tuple(str(r) for r in allowed), expires_at)
        return Invite(
            self._run,
            private.private_bytes_raw(),
            allowed,
            expires_at,
            self._private.sign(signed),
        )

    def __repr__(self) -> str:
        return f"RunKey({short(self._run)})"
