"""TLS of a server: certificate files that are read again when they change, and the client's identity."""

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

from persist.client.server_address import said_of
from persist.core.errors import InvalidUsage

# Files that are read again when they change: how that is seen.


LOOK_AGAIN_S = 0.5


class ChangedFiles:
    """Whether files were changed. Make it before they are read, so that no change is missed. Not thread-safe."""

    def __init__(self, paths: Iterable[str], now_s: Callable[[], float]) -> None:
        self._paths = tuple(paths)
        self._now_s = now_s
        self._looked_s = now_s()
        self._stamps = self._stamped()

    def is_due(self) -> bool:
        """Whether the last look is LOOK_AGAIN_S old."""
        return abs(self._now_s() - self._looked_s) >= LOOK_AGAIN_S

    def look(self) -> bool:
        """Whether one of them is another file than at the last look, or has other bytes or rights. False: not due."""
        if not self.is_due():
            return False
        self._looked_s = self._now_s()
        before, self._stamps = self._stamps, self._stamped()
        return self._stamps != before

    def again(self) -> None:
        """They could not be read for now: the next look tells that they have changed."""
        self._stamps = []

    def _stamped(self) -> list[tuple[int, int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


# TLS of a server: files that are read again when they change, and who a client is by its certificate.
#
# A connection keeps the certificate with which it began. A new one has what the files hold by then. Files that cannot
# be used, such as a certificate whose key has not come yet, leave the last good ones in place.


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
    """PEM files: our certificate with those that signed it, its key, and those that sign certificates of clients."""

    certificate: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Who a client is by its certificate: all its names, and until when it is (seconds since 1970)."""

    names: frozenset[str]
    until_s: float


class TlsContext(ssl.SSLContext):
    """What servers hand each new connection to. Raises InvalidUsage where the files cannot be used at the start."""

    _current: ssl.SSLContext

    def __new__(cls, files: TlsFiles, now_s: Callable[[], float]) -> TlsContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles, now_s: Callable[[], float]) -> None:
        self._files = files
        self._changed = ChangedFiles(filter(None, (files.certificate, files.key, files.client_ca)), now_s)
        self._current = context_of(files)
        self._said = ""  # what is wrong with them now

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """What asyncio and uvloop call for each connection, on the event loop alone."""
        if self._changed.look():
            self._reload()
        return self._current.wrap_bio(*arguments, **named)

    def _reload(self) -> None:
        try:
            self._current = context_of(self._files)
        except InvalidUsage as error:
            self._changed.again()  # they may have been out of reach for now
            if error.message != self._said:
                _log.warning("new connections still get the last good certificate: %s", error.message)
            self._said = error.message
        else:
            self._said = ""
            _log.info("the TLS files were read again: new connections get the new certificate")


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """What these files make. A client may leave its certificate out, and is asked for a token then.

    Raises InvalidUsage: one of them cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM
    try:
        for path in filter(None, (files.certificate, files.key, files.client_ca)):
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for who writes to it
                raise OSError(f"{path} is no regular file")
        # A key with a passphrase is refused: without this OpenSSL would ask for it on the terminal.
        context.load_cert_chain(files.certificate, files.key, lambda: b"")
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            if not context.get_ca_certs():
                raise OSError(f"{files.client_ca} holds no certificate of who signs others")
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ValueError) as error:
        names = " and ".join(filter(None, (files.certificate, files.key, files.client_ca)))
        raise InvalidUsage(f"the TLS files {names} cannot be used: {said_of(error)}") from error
    return context


def peer_of(transport: Any) -> Peer | None:
    """Who is at the other end; None: it has shown no certificate. That it is good was seen as the connection began."""
    found = transport.get_extra_info("peercert")
    if not found:
        return None
    return Peer(frozenset(names_in(found)), float(ssl.cert_time_to_seconds(found["notAfter"])))


def names_in(certificate: Mapping[str, Any]) -> list[str]:
    """The names of a certificate as `ssl` tells it: `DNS:…`, `URI:…`, `email:…`, `IP:…`, and `subject:CN=…,O=…`."""
    found = [f"{_KINDS[kind]}:{value}" for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    subject = [
        "+".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in together)
        for together in certificate.get("subject", ())
    ]
    if subject:
        found.append(f"subject:{','.join(subject)}")
    return [plain_name(one) for one in found]


def plain_name(name: str) -> str:
    """One spelling of a name: that of a host has no case, and an address is written in many ways."""
    if name.startswith("DNS:"):
        return name.lower().replace("dns:", "DNS:", 1)
    if name.startswith("IP:"):
        with contextlib.suppress(ValueError):
            return f"IP:{ipaddress.ip_address(name.removeprefix('IP:').strip())}"
    return name


def checked_name(name: object) -> str:
    """A name as an entry of a tokens file has it. Raises ValueError: it is none."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"certificate is DNS:…, URI:…, email:…, IP:… or subject:CN=…, not {name!r:.200}")
    return plain_name(name)


def _escaped(value: str) -> str:
    """So that no value can be read as another attribute: a name that a client chose must not be somebody else's."""
    return re.sub(r'([,+="\\<>;])', r"\\\1", value)
