"""Private keys on disk: readable by their owner only, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from moshpit.errors import LocalError

_PEM = b"-----BEGIN "


def load_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key file that only its owner can read.

    Raises:
        LocalError: no such file, not an Ed25519 key, damaged, or readable by others.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except OSError as error:
        raise LocalError(f"key {path}: {error.strerror}") from error
    if not data.startswith(_PEM):
        raise LocalError(f"{path} is no key file: name another, or one that does not exist yet")
    if mode & 0o077:
        raise LocalError(f"key {path} can be read by others: run chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise LocalError(f"key {path} is damaged; restore it, or delete it to make anew") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise LocalError(f"key {path} is not an Ed25519 key")
    return key


def save_private(key: Ed25519PrivateKey, path: Path) -> None:
    """Write a private key with mode 0600, whole or not at all.

    Raises:
        LocalError: the file cannot be written.
    """
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LocalError(f"key {path} cannot be written: {error.strerror}") from error
