"""TLS of a server: certificate files that are reloaded when they change, and the client's identity."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from persist.client.arguments import certificate_error_text
from persist.core.errors import InvalidUsage

LOOK_AGAIN_S = 0.5


class ChangedFiles:
    """Detects changes of files. Construct it before reading them, so that no change is missed. Not thread-safe."""

    def __init__(self, paths: Iterable[str], now_s: Callable[[], float]) -> None:
        self._paths = tuple(paths)
        self._now_s = now_s
        self._looked_s = now_s()
        self._stamps = self._stamped()

    def is_due(self) -> bool:
        """Whether the last check is at least LOOK_AGAIN_S old."""
        return abs(self._now_s() - self._looked_s) >= LOOK_AGAIN_S

    def check(self) -> bool:
        """Whether a file's identity, content or mode changed since the last check. False: the check is not due."""
        if not self.is_due():
            return False
        self._looked_s = self._now_s()
        before, self._stamps = self._stamps, self._stamped()
        return self._stamps != before

    def again(self) -> None:
        """Treat the files as changed at the next check, because they could not be read now."""
        self._stamps = []

    def _stamped(self) -> list[tuple[int, int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


# A connection keeps the certificate with which it began; a new one uses the current files. If these cannot be used, for
# example while only the certificate has been rotated, the last valid ones stay in use.

MINIMUM = ssl.TLSVersion.TLSv1_2
NAME_CHARS_MAX = 1000
_KINDS = {"DNS": "DNS", "URI": "URI", "email": "email", "IP Address": "IP"}
_SHORT = {
    "commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C",
    "localityName": "L", "stateOrProvinceName": "ST", "domainComponent": "DC", "userId": "UID",
}  # fmt: skip
_NAME = re.compile(rf"(DNS|URI|email|IP|subject):[^\x00-\x1f\x7f]{{1,{NAME_CHARS_MAX}}}\Z")
_log = logging.getLogger("persist.rpc")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate chain, its key, and the CA certificates for clients."""

    certificate: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A client's identity by its certificate: all names in it, and its expiry (seconds since 1970)."""

    names: frozenset[str]
    until_s: float


class TlsContext(ssl.SSLContext):
    """Creates the TLS state of each new connection. Raises InvalidUsage if the files are invalid at the start."""

    _current: ssl.SSLContext

    def __new__(cls, files: TlsFiles, now_s: Callable[[], float]) -> TlsContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles, now_s: Callable[[], float]) -> None:
        self._files = files
        self._changed = ChangedFiles(filter(None, (files.certificate, files.key, files.client_ca)), now_s)
        self._current = context_of(files)
        self._problem = ""  # why the files are invalid now

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Called by asyncio and uvloop for each connection, on the event loop only."""
        if self._changed.check():
            self._reload()
        return self._current.wrap_bio(*arguments, **named)

    def _reload(self) -> None:
        try:
            self._current = context_of(self._files)
        except InvalidUsage as error:
            self._changed.again()  # the cause may be temporary
            if error.message != self._problem:
                _log.warning("new connections still use the last valid certificate: %s", error.message)
            self._problem = error.message
        else:
            self._problem = ""
            _log.info("the TLS files were reloaded: new connections use the new certificate")


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """An SSL context from these files. Client certificates are optional; a client without one needs a token.

    Raises InvalidUsage if a file is invalid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM
    try:
        for path in filter(None, (files.certificate, files.key, files.client_ca)):
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                raise OSError(f"{path} is not a regular file")
        # Without this callback OpenSSL would ask for the passphrase of an encrypted key on the terminal.
        context.load_cert_chain(files.certificate, files.key, lambda: b"")
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            if not context.get_ca_certs():
                raise OSError(f"{files.client_ca} contains no CA certificate")
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ValueError) as error:
        names = " and ".join(filter(None, (files.certificate, files.key, files.client_ca)))
        raise InvalidUsage(f"the TLS files {names} cannot be used: {certificate_error_text(error)}") from error
    return context


def peer_of(transport: Any) -> Peer | None:
    """The client's identity; None: it has shown no certificate. The handshake has validated the certificate."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    return Peer(frozenset(names_of(certificate)), float(ssl.cert_time_to_seconds(certificate["notAfter"])))


def names_of(certificate: Mapping[str, Any]) -> list[str]:
    """The names in a certificate as `ssl` returns it: `DNS:…`, `URI:…`, `email:…`, `IP:…`, and `subject:CN=…,O=…`."""
    names = [f"{_KINDS[kind]}:{value}" for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    subject = [
        "+".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in attributes)
        for attributes in certificate.get("subject", ())
    ]
    if subject:
        names.append(f"subject:{','.join(subject)}")
    return [plain_name(name) for name in names]


def plain_name(name: str) -> str:
    """The canonical spelling of a name: lower case for host names, one form for IP addresses."""
    if name.startswith("DNS:"):
        return name.lower().replace("dns:", "DNS:", 1)
    if name.startswith("IP:"):
        with contextlib.suppress(ValueError):
            return f"IP:{ipaddress.ip_address(name.removeprefix('IP:').strip())}"
    return name


def checked_name(name: object) -> str:
    """A name from an entry of a tokens file. Raises ValueError if it is invalid."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"certificate is DNS:…, URI:…, email:…, IP:… or subject:CN=…, not {name!r:.200}")
    return plain_name(name)


def _escaped(value: str) -> str:
    """Escape separators, so that a value that a client chose cannot be read as another attribute."""
    return re.sub(r'([,+="\\<>;])', r"\\\1", value)
