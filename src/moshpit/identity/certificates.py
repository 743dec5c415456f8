"""A peer's TLS certificate: self-signed by its Ed25519 key, checked by that key alone.

Names, issuers and dates in it mean nothing. The dates lie centuries apart, so that a wrong
clock does no harm; whoever dials compares the certificate's key with the peer's id itself.
"""

from __future__ import annotations

import datetime
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.x509.oid import NameOID

from moshpit.types import PeerId, short


class ServerTls(NamedTuple):
    """What a listening peer needs: its context, and the certificate that others will see."""

    context: ssl.SSLContext
    certificate: bytes
    """The certificate's DER bytes."""


def certificate_for(private: Ed25519PrivateKey) -> x509.Certificate:
    """Return a self-signed certificate of this key."""
    public = private.public_key()
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"moshpit {short(public.public_bytes_raw())}")]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC))
        .sign(private, None)
    )


def key_of_certificate(der: bytes) -> PeerId | None:
    """Return the peer id in a certificate; None if it is none, or of another kind of key."""
    try:
        public = x509.load_der_x509_certificate(der).public_key()
    except Exception:  # the parser raises several unrelated types on hostile bytes
        return None
    if not isinstance(public, Ed25519PublicKey):
        return None
    return PeerId(public.public_bytes_raw())


def server_tls(private: Ed25519PrivateKey) -> ServerTls:
    """Return the TLS 1.3 context by which a peer is dialled."""
    certificate = certificate_for(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection shows the certificate anew
    # `ssl` reads keys from files only; the file is encrypted by a password of this moment.
    password = secrets.token_bytes(32).hex().encode()
    pem = certificate.public_bytes(serialization.Encoding.PEM) + private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="moshpit-") as directory:
        path = Path(directory) / "peer.pem"
        path.write_bytes(pem)
        context.load_cert_chain(path, password=password)
    return ServerTls(context, certificate.public_bytes(serialization.Encoding.DER))


def client_tls() -> ssl.SSLContext:
    """Return the TLS 1.3 context for dialling; the caller checks the certificate's key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
