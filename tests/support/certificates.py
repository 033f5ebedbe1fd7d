"""Certificates that tests make: an authority, and what it signs for servers and clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_KINDS = {"DNS": x509.DNSName, "URI": x509.UniformResourceIdentifier, "email": x509.RFC822Name}


def subject_of(*parts: tuple[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts])


class Authority:
    """Signs certificates, each with a key of its own, for a day."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = subject_of((NameOID.COMMON_NAME, name))
        signed = self._begun(self._name, self._key, days=1)
        signed = signed.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = signed.sign(self._key, hashes.SHA256())

    def file(self, path: Path) -> str:
        """The certificate of the authority, as a PEM file."""
        path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)

    def signed(self, *names: str, subject: x509.Name | None = None, days: int = 1) -> tuple[bytes, bytes]:
        """A certificate of these names, such as `DNS:host` and `IP:127.0.0.1`, and its key. Both are PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        begun = self._begun(subject or subject_of(), key, days)
        if names:
            begun = begun.add_extension(x509.SubjectAlternativeName(_general(names)), critical=subject is None)
        certificate = begun.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        form = serialization.PrivateFormat.PKCS8
        return certificate, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def client(self, path: Path, *names: str, subject: x509.Name | None = None) -> str:
        """A certificate and its key in one PEM file, as a client shows it."""
        path.write_bytes(b"".join(self.signed(*names, subject=subject)))
        return str(path)

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        begun = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        return begun.not_valid_before(now - timedelta(days=2)).not_valid_after(now + timedelta(days=days))


def _general(names: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in names:
        kind, _, value = name.partition(":")
        found.append(x509.IPAddress(ipaddress.ip_address(value)) if kind == "IP" else _KINDS[kind](value))
    return found
