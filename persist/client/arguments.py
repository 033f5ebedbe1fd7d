"""Checks of callers' arguments, addresses and TLS of servers, opening of named files, and what a notebook shows."""

from __future__ import annotations

import errno
import json
import os
import re
import ssl
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blob import without_secrets
from persist.core.attribute import KEY_BYTES, AttributeUpdate, attribute_key, named_key
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import TIME_MAX, Antichain
from persist.formats.http_messages import named_once

# Checks of arguments: each raises InvalidUsage, naming the argument and what it must be.

NUMBER_MAX = 2**62
SPLITS_MAX = 100_000
NUMBER_DIGITS_MAX = 19  # of an int64


def checked(what: str, value: object, *kinds: type) -> None:
    """Raise InvalidUsage unless `value` has one of these types; `type(None)` stands for None."""
    if isinstance(value, Antichain) and Antichain not in kinds:
        raise InvalidUsage(
            f"{what} is the frontier {value}; it must be a time: upper().element - 1 is the latest complete one, "
            "since().element the earliest that can be read"
        )
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InvalidUsage(f"{what} is {shown(value)}; it must be {wanted}")
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidUsage(f"{what} is {value!a:.100}; it is not valid Unicode text: it contains a lone surrogate")


def check_int(what: str, value: object, least: int, most: int, remedy: str = "") -> None:
    """Raise InvalidUsage unless `value` is an int in `[least, most]`; `remedy` is appended to the message."""
    checked(what, value, int)
    if not isinstance(value, int) or not least <= value <= most:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be in [{least}, {most}]{remedy}")


def checked_time(what: str, value: object, least: int = 0) -> None:
    """Raise InvalidUsage unless `value` is a time in `[least, TIME_MAX]`, or None, which means the latest one.

    Wall clocks, which a caller may also pass, are resolved before.
    """
    if not isinstance(value, (int, Antichain, type(None))):
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a time (int), a wall clock (datetime) or None")
    checked(what, value, int, type(None))
    if isinstance(value, int) and not least <= value <= TIME_MAX:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a time in [{least}, {TIME_MAX}] or None")


def checked_wait(what: str, value: object) -> None:
    """Raise InvalidUsage unless `value` is a number of seconds; zero and negative values do not wait."""
    checked(what, value, int, float)
    if not isinstance(value, (int, float)) or not abs(value) <= NUMBER_MAX:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a number of seconds, at most {NUMBER_MAX}")


def read_attribute(what: str, text: str) -> AttributeUpdate:
    """Parse `KEY=VALUE` into an update; `KEY=` unsets the attribute. Raises InvalidUsage."""
    key, equals, value = text.rpartition("=")
    number = value.removeprefix("-")
    is_number = number.isascii() and number.isdecimal() and len(number) <= NUMBER_DIGITS_MAX
    if not equals or not key or not (is_number or not value):
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be KEY=VALUE with a whole number, or KEY= to unset it")
    return _attribute(key, int(value) if value else None)


def read_attributes(what: str, text: str) -> tuple[AttributeUpdate, ...]:
    """Parse a JSON object of keys and numbers into updates; null unsets. Raises InvalidUsage."""
    example = '{"position": 7, "other": null}'
    values = json_object(what, text, example)
    if not all(value is None or type(value) is int for value in values.values()):
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be a JSON object, as {example}")
    return tuple(_attribute(key, value) for key, value in values.items())


def json_object(what: str, text: str, example: str) -> dict[str, Any]:
    """Parse a JSON object without repeated keys. Raises InvalidUsage, which shows the `example`."""
    try:
        parsed = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be a JSON object, as {example}")
    return parsed


def _attribute(key: str, value: int | None) -> AttributeUpdate:
    """The update of one key: a UUID, 32 hex digits, or any other name."""
    digits = key.replace("-", "").lower()
    is_hex = len(digits) == 2 * KEY_BYTES and not set(digits) - set("0123456789abcdef")
    attribute = attribute_key(digits) if is_hex else named_key(key)
    return AttributeUpdate.delete(attribute) if value is None else AttributeUpdate.replace(attribute, value)


def checked_sets(what: str, sets: object) -> dict[str, Any]:
    """Raise InvalidUsage unless `sets` maps at least one column name to a value."""
    if not isinstance(sets, Mapping) or not sets or not all(isinstance(name, str) for name in sets):
        raise InvalidUsage(f"{what} is {shown(sets)}; it must map column names to values")
    return dict(sets)


def check_numbers(settings: Any) -> None:
    """Check the numeric fields of a settings dataclass: integers are positive, seconds are not negative."""
    for field in fields(settings):
        value, is_whole = getattr(settings, field.name), field.type == "int"
        if is_whole or field.type == "float":
            checked(field.name, value, int, *(() if is_whole else (float,)))
            if not is_whole <= value <= NUMBER_MAX:
                raise InvalidUsage(f"{field.name} is {shown(value)}; it must be in [{int(is_whole)}, {NUMBER_MAX}]")


def names(what: str, value: object) -> tuple[str, ...]:
    """Convert a list of names to a tuple. Raises InvalidUsage."""
    if isinstance(value, str):
        raise InvalidUsage(f"{what} is the string {value!r:.100}; it must be a list of names, such as [{value!r:.100}]")
    try:
        listed = tuple(value)  # type: ignore[var-annotated, arg-type]
    except TypeError:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a list of names") from None
    for name in listed:
        checked(f"one of {what}", name, str)
    return listed


def key_values(key: Any) -> tuple[Any, ...]:
    """The values of the first key columns: those of a tuple or list, or a single value."""
    return tuple(key) if isinstance(key, (tuple, list)) else (key,)


def columns_of(names_text: str | None) -> list[str] | None:
    """The names in a comma-separated list; None: all."""
    return None if names_text is None else [column for column in names_text.split(",") if column]


# Opening a named file: a pipe, a device or a directory is refused and never blocks.

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def opens_regular(path: str, flags: int) -> int:
    """An opener for `open` that never blocks on a pipe. Raises OSError if it is not a regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_with_mode(path: str | Path, bytes_max: int) -> tuple[bytes, int]:
    """Read at most `bytes_max` bytes of a regular file, and its permission bits. Raises OSError."""
    with open(path, "rb", opener=opens_regular) as file:
        return file.read(bytes_max), stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def read_bounded(what: str, path: str | Path, bytes_max: int, *, own: bool = False) -> bytes:
    """Read a file of at most `bytes_max` bytes; `what` names it in messages, as in `the quotas file q.json`.

    Raises InvalidUsage: it cannot be read or is too large, or, with `own`, users other than its owner can write it.
    """
    try:
        data, mode = read_with_mode(path, bytes_max + 1)
    except OSError as error:
        raise InvalidUsage(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidUsage(f"{what} has more than {bytes_max} bytes")
    if own and mode & OTHERS_WRITE:
        raise InvalidUsage(f"{what} has the mode {mode:04o}, so others may write it: run chmod go-w {path}")
    return data


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A titled table of names and values. Everything is escaped."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return f"<div><strong>{escape(title)}</strong><table>{cells}</table></div>"


# Addresses of servers, and TLS of a client: trusted CAs and the client certificate.

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
                why = certificate_error_text(error)
                raise InvalidUsage(f"certificate_file {self.certificate_file!r:.200} cannot be used: {why}") from error
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
