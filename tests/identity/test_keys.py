"""Keys: their files, their slots, what they sign; certificates."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from moshpit.errors import LocalError
from moshpit.identity.certificates import certificate_for, key_of_certificate, server_tls
from moshpit.identity.keys import VERIFIED_MAX, KeySigner, PeerKey, peer_key, state_dir
from moshpit.identity.tickets import RunKey
from moshpit.runtime.record import own_record
from moshpit.types import Address, PeerId, Role, short
from moshpit.wire.messages import Admission, GroupKey, Join, PeerRecord


def test_saved_keys_are_private_and_come_back(tmp_path: Path) -> None:
    key, path = PeerKey.generate(), tmp_path / "deep" / "peer.key"
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PeerKey.load(path).peer == key.peer
    assert [p.name for p in path.parent.iterdir()] == ["peer.key"]
    PeerKey.generate().save(path)  # replaced whole
    assert PeerKey.load(path).peer != key.peer


def test_bad_key_files_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    with pytest.raises(LocalError, match="No such file"):
        PeerKey.load(path)
    PeerKey.generate().save(path)
    path.chmod(0o644)
    with pytest.raises(LocalError, match="chmod 600"):
        PeerKey.load(path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(LocalError, match="damaged"):
        PeerKey.load(path)
    path.write_text("import moshpit\n")
    path.chmod(0o644)
    with pytest.raises(LocalError, match="no key file") as caught:
        PeerKey.load(path)
    assert "chmod" not in str(caught.value), "advice that would lock a script"
    assert "delete" not in str(caught.value), "advice that would lose it"
    with pytest.raises(LocalError, match="cannot be written"):
        PeerKey.generate().save(path / "below-a-file")
    with pytest.raises(LocalError, match="key directory"):
        peer_key(path)


def test_keys_do_not_show_their_secret() -> None:
    key = PeerKey.generate()
    assert repr(key) == f"PeerKey({short(key.peer)})"


def test_state_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunKey.generate().run
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir(run) == tmp_path / "moshpit" / short(run)
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")  # the specification: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir(run) == tmp_path / ".local" / "state" / "moshpit" / short(run)


HOLD = """
import sys
from pathlib import Path
from moshpit.identity.keys import peer_key
print(peer_key(Path(sys.argv[1])).peer.hex(), flush=True)
sys.stdin.read()
"""


def test_slots_belong_to_living_processes(tmp_path: Path) -> None:
    def hold() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return process, process.stdout.readline().strip()

    first, first_key = hold()
    second, second_key = hold()
    assert first_key != second_key
    first.kill()  # no chance to clean up
    first.communicate()
    third, third_key = hold()
    assert third_key == first_key
    assert peer_key(tmp_path).peer.hex() not in (first_key, second_key)
    for process in (second, third):
        process.communicate("")


# --- signing --------------------------------------------------------------------------------


def record_of(key: PeerKey, admission: Admission, role: Role = Role.WORKER) -> PeerRecord:
    return own_record(key.peer, role, (Address("127.0.0.1", 7),), admission)


def test_signed_messages_verify_and_altered_ones_do_not() -> None:
    owner, key, other = RunKey.generate(), PeerKey.generate(), PeerKey.generate()
    signer, judge = KeySigner(key, owner.run), KeySigner(other, owner.run)
    record = signer.sign_message(record_of(key, owner.invite().ticket(()).admit(key.peer)))
    for _ in range(2):  # the second time from memory
        assert judge.verify_message(record, key.peer)
        assert not judge.verify_message(record, other.peer)
        assert not judge.verify_message(msgspec.structs.replace(record, epoch=1), key.peer)
        assert not judge.verify_message(msgspec.structs.replace(record, signature=b""), key.peer)
        assert not judge.verify(b"short", b"payload", record.signature)
        assert not judge.verify(bytes(32), b"payload", bytes(64))
        assert judge.admitted(record)
    join = signer.sign_message(
        Join(key.peer, GroupKey(0, 0, ()), 1, "worker", b"", 1, 0.0, True, b"")
    )
    assert judge.verify_message(join, key.peer)
    # A signature over one kind of message is none over another.
    assert not judge.verify_message(
        msgspec.structs.replace(record, signature=join.signature), key.peer
    )


def test_impossible_numbers_are_not_signed_by_anybody() -> None:
    owner, key = RunKey.generate(), PeerKey.generate()
    record = record_of(key, owner.invite().ticket(()).admit(key.peer))
    huge = msgspec.structs.replace(record, epoch=1 << 70, signature=bytes(64))
    assert not KeySigner(key, owner.run).verify_message(huge, key.peer)


def test_admission_needs_run_peer_and_role() -> None:
    owner, key, other = RunKey.generate(), PeerKey.generate(), PeerKey.generate()
    judge = KeySigner(other, owner.run)
    clients = owner.invite(roles=(Role.CLIENT,)).ticket(())
    admission = clients.admit(key.peer)
    for _ in range(2):
        assert judge.admitted(record_of(key, admission, Role.CLIENT))
        assert not judge.admitted(record_of(key, admission, Role.WORKER))
        assert not judge.admitted(record_of(other, admission, Role.CLIENT))
        assert not KeySigner(other, RunKey.generate().run).admitted(
            record_of(key, admission, Role.CLIENT)
        )
        wider = msgspec.structs.replace(admission, roles=("worker", "client"))
        assert not judge.admitted(record_of(key, wider, Role.WORKER))


def test_the_memory_of_signatures_is_bounded() -> None:
    owner, key = RunKey.generate(), PeerKey.generate()
    signer = KeySigner(key, owner.run)
    signature = signer.sign(b"payload")
    assert signer.verify(key.peer, b"payload", signature)
    for number in range(VERIFIED_MAX + 10):
        signer._remember(number.to_bytes(32, "big"))
    assert len(signer._verified) == VERIFIED_MAX
    assert signer.verify(key.peer, b"payload", signature)


# --- certificates ---------------------------------------------------------------------------


def test_certificates_carry_the_key_for_centuries() -> None:
    key = PeerKey.generate()
    tls = server_tls(key.private)
    assert key_of_certificate(tls.certificate) == key.peer
    certificate = x509.load_der_x509_certificate(tls.certificate)
    assert certificate.not_valid_before_utc.year == 2000
    assert certificate.not_valid_after_utc.year == 2999
    certificate.verify_directly_issued_by(certificate)
    assert certificate_for(key.private).public_key() == key.private.public_key()


@pytest.mark.parametrize("der", [b"", b"noise", bytes(500)])
def test_what_is_no_certificate_has_no_key(der: bytes) -> None:
    assert key_of_certificate(der) is None


def test_peer_ids_are_public_keys() -> None:
    key = PeerKey.generate()
    assert key.peer == PeerId(key.private.public_key().public_bytes_raw())
