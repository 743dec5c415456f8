"""Who a peer is: its Ed25519 key, where the key is kept, and what it signs and checks.

A peer that restarts should be the same peer, and several processes on one machine should be
different ones. So keys lie in numbered slots of a state directory, and a process takes the
first slot that no living process holds (`peer_key`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final, TypeVar, final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from moshpit.errors import LocalError
from moshpit.identity.keyfiles import load_private, save_private
from moshpit.identity.tickets import admission_fault, verify
from moshpit.types import PeerId, RunId, short
from moshpit.wire.messages import PeerRecord, Signed, signing_bytes

S = TypeVar("S", bound=Signed)

SLOTS_MAX: Final = 1024  # guess: processes of one run on one machine
VERIFIED_MAX: Final = 8192  # signatures remembered as good; 64 bytes each

# A slot's lock lives as long as the process, whatever becomes of the key object.
_slot_locks: list[int] = []


@final
class PeerKey:
    """A peer's private key; its public half is the peer's name.

    Example:
        >>> key = PeerKey.generate()
        >>> len(key.peer), len(key.sign(b"words"))
        (32, 64)
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._peer = PeerId(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> PeerKey:
        """Make a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> PeerKey:
        """Read a key; raises `LocalError` saying what is wrong with the file."""
        return cls(load_private(path))

    def save(self, path: Path) -> None:
        """Write the key atomically with mode 0600; raises `LocalError`."""
        save_private(self._private, path)

    @property
    def peer(self) -> PeerId:
        """The peer's id: the public key."""
        return self._peer

    @property
    def private(self) -> Ed25519PrivateKey:
        """The private key, for the peer's TLS certificate."""
        return self._private

    def sign(self, payload: bytes) -> bytes:
        """Return the 64-byte signature over a payload."""
        return self._private.sign(payload)

    def __repr__(self) -> str:
        return f"PeerKey({short(self._peer)})"


def state_dir(run: RunId) -> Path:
    """Return where this user's keys for a run are kept (XDG base directories)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    return root / "moshpit" / short(run)


def peer_key(directory: Path) -> PeerKey:
    """Take the first free key slot of a directory, making its key if there is none.

    The slot stays this process's until the process ends, however it ends: a restarted
    process gets the same key back, and processes side by side get different ones.

    Raises:
        LocalError: the directory cannot be used, a key is damaged, or all slots are taken.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for slot in range(SLOTS_MAX):
            lock = os.open(directory / f"peer-{slot}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            _slot_locks.append(lock)
            return _slot_key(directory / f"peer-{slot}.key")
    except OSError as error:
        raise LocalError(f"key directory {directory}: {error.strerror}") from error
    raise LocalError(f"key directory {directory}: all {SLOTS_MAX} slots are taken")


def _slot_key(path: Path) -> PeerKey:
    if path.exists():
        return PeerKey.load(path)
    key = PeerKey.generate()
    key.save(path)
    return key


@final
class KeySigner:
    """Signs by a peer's key and checks others' (implements `protocol.machine.Signer`).

    Good signatures are remembered, so that a record that many peers pass on is verified
    once. Bad ones are not: a forger must not be able to push good ones out.
    """

    def __init__(self, key: PeerKey, run: RunId) -> None:
        self._key = key
        self._run = run
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    @property
    def peer(self) -> PeerId:
        """Whose key this is."""
        return self._key.peer

    @property
    def run(self) -> RunId:
        """The run whose admissions count."""
        return self._run

    def sign(self, payload: bytes) -> bytes:
        """Sign by this peer's key."""
        return self._key.sign(payload)

    def verify(self, peer: bytes, payload: bytes, signature: bytes) -> bool:
        """Whether ``peer`` signed the payload."""
        if len(peer) != 32 or len(signature) != 64:
            return False
        known = hashlib.sha256(peer + signature + payload).digest()
        if self._recall(known):
            return True
        if not verify(peer, payload, signature):
            return False
        self._remember(known)
        return True

    def admitted(self, record: PeerRecord) -> bool:
        """Whether the record's admission leads from the run key to its peer and role.

        The invite's expiry does not count here: it ends the time in which newcomers are
        let in, which the handshake judges, and not the stay of those who are in.
        """
        admission = record.admission
        if record.role not in admission.roles:
            return False
        known = hashlib.sha256(record.peer + msgspec.msgpack.encode(admission)).digest()
        if self._recall(known):
            return True
        if admission_fault(admission, self._run, record.peer, now=None):
            return False
        self._remember(known)
        return True

    def sign_message(self, message: S) -> S:
        """Return the message with this peer's signature in it."""
        return msgspec.structs.replace(message, signature=self.sign(signing_bytes(message)))

    def verify_message(self, message: Signed, signer: bytes) -> bool:
        """Whether ``signer`` signed this message."""
        try:
            payload = signing_bytes(message)
        except (ValueError, OverflowError, msgspec.MsgspecError):
            return False
        return self.verify(signer, payload, message.signature)

    def _recall(self, known: bytes) -> bool:
        if known not in self._verified:
            return False
        self._verified.move_to_end(known)
        return True

    def _remember(self, known: bytes) -> None:
        self._verified[known] = None
        if len(self._verified) > VERIFIED_MAX:
            self._verified.popitem(last=False)
