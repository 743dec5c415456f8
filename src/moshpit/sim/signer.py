"""A stand-in for keys in the simulator: who signed is kept, what was signed is not.

Ed25519 would cost a thousand simulated peers more than everything else together. Forgery is
tested with real keys (`moshpit.identity`). Signatures have the real size, so that the bytes
that the simulator counts are the bytes that travel.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from moshpit.types import PeerId, RunId
from moshpit.wire.messages import Admission, PeerRecord, Signed

S = TypeVar("S", bound=Signed)

SIM_RUN = RunId(b"simulated run".ljust(32, b"."))
SIM_ADMISSION = Admission(b"i" * 32, ("worker", "client", "aux"), 0, b"s" * 64, b"p" * 64)


class SimSigner:
    """Signs by name (implements `moshpit.protocol.machine.Signer`)."""

    def __init__(self, peer: PeerId, run: RunId = SIM_RUN) -> None:
        self._peer = peer
        self._run = run
        self._signature = peer + peer

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def run(self) -> RunId:
        return self._run

    def sign(self, payload: bytes) -> bytes:
        return self._signature

    def verify(self, peer: bytes, payload: bytes, signature: bytes) -> bool:
        return len(signature) == 2 * len(peer) and signature.startswith(peer)

    def admitted(self, record: PeerRecord) -> bool:
        return record.admission == SIM_ADMISSION

    def sign_message(self, message: S) -> S:
        return msgspec.structs.replace(message, signature=self._signature)

    def verify_message(self, message: Signed, signer: bytes) -> bool:
        signature = message.signature
        return len(signature) == 2 * len(signer) and signature.startswith(signer)
