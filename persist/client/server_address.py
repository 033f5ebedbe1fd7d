"""Addresses of servers, and TLS of a client: trusted CAs and the client certificate."""

from __future__ import annotations

import os
import re
import ssl
import stat
from dataclasses import dataclass
from urllib.parse import urlsplit

from blob import without_secrets
from persist.core.errors import InvalidUsage

_TOKEN = re.compile(r"[\x20-\x7e]+")


def normalize_url(url: str) -> str:
    """The canonical form of a server's base URL. Raises InvalidUsage."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # its message quotes the alleged port, which may be a part of a password
        raise InvalidUsage(f"{without_secrets(url)!r} has no valid host and port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.path not in ("", "/"):
        raise InvalidUsage(f"a server is named http(s)://host:port, not {without_secrets(url)!r}")
    if parts.username or parts.password:
        raise InvalidUsage("a server's URL takes no user and password; give a token")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def checked_token(name: str, token: str | None) -> str | None:
    """The token; None if there is none. Raises InvalidUsage, which does not show it, if no header can contain it."""
    if not token:
        return None
    if not _TOKEN.fullmatch(token):
        raise InvalidUsage(f"{name} holds no token: it has a line break, or another character that no header has")
    return token


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. `ca_file`: trusted CAs; None: those of the system. `certificate_file`: a certificate with its key."""

    ca_file: str | None = None
    certificate_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises InvalidUsage: one of the files cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise InvalidUsage(f"ca_file {self.ca_file!r:.200} cannot be used: {error.strerror or error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate_file is not None:
            try:
                if not stat.S_ISREG(os.stat(self.certificate_file).st_mode):
                    raise OSError("it is no regular file")
                # A key with a passphrase is refused; otherwise OpenSSL would prompt for it on the terminal.
                context.load_cert_chain(self.certificate_file, password=lambda: b"")
            except (OSError, ValueError) as error:
                reason = certificate_error_text(error)
                raise InvalidUsage(
                    f"certificate_file {self.certificate_file!r:.200} cannot be used: {reason}"
                ) from error
        return context


def certificate_error_text(error: Exception) -> str:
    """Why a certificate and its key cannot be used; OpenSSL's own messages only say where it has stopped."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        if not error.reason:
            return (
                "there is no certificate with its key in PEM, or the key has a passphrase: write it without one, as by "
                "openssl pkey -in KEY -out PLAIN"
            )
    return str(getattr(error, "strerror", None) or error)
