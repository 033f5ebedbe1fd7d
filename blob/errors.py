"""Errors of blob stores, named by what the caller does next, and URLs as messages show them, without secrets.

A blob is written once and never changed, so *every* failed call may be repeated: there is no "may have
happened" class here. A put that failed after the bytes landed is simply confirmed by the retry.

    BlobError
      BlobNotFound        no blob of that key
      BlobExists          the key holds other bytes; a caller's bug, never retry
      BlobUnavailable     the store did not answer or refused for now; retrying is safe
        BlobNotWritable   the disk is full or read-only: reads and deletions may work
      BlobMisconfigured   a setting is wrong; retrying cannot help; also a key that breaks the rules
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, unquote_plus, urlsplit


class BlobError(Exception):
    """Root of every error a blob store raises on purpose."""


class BlobNotFound(BlobError):
    """No blob of that key; for a range read also: the blob ends before the range does."""


class BlobExists(BlobError):
    """The key already holds different bytes. Keys are single-use, so this is a bug of the caller."""


class BlobUnavailable(BlobError):
    """The store did not answer in time, broke the connection or refused for now. Retrying is safe."""


class BlobNotWritable(BlobUnavailable):
    """The disk is full or read-only, and nothing was written. Reads work, and on a full disk deletions."""


class BlobMisconfigured(BlobError):
    """A setting, a URL, a key or an argument is wrong. The message names it. Retrying cannot help."""


# Libraries that only some installations have.


def optional(module: str, what: str, install: str, error: type[Exception]) -> Any:
    """Import `module`. Where a library that it needs is missing, raise `error`: `what` needs it, `pip install` so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise error(f'{what} needs {missing.name}: pip install "{install}"') from missing


# Locations in messages: what `url` says without its user, password and options.

ESCAPES = "write / ? # @ % in a user or password as %2F %3F %23 %40 %25"
OPTION_CHARS_MIN = 4  # shorter values of options are no secrets, and occur in any text

_SCHEME = re.compile(r"[A-Za-z0-9+.-]*:")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(:[0-9]{0,5})?")


def without_secrets(url: str) -> str:
    """`url` fit for a message. Where a password may be anywhere else than before its last @, only the scheme is left.

    That is so where `?` or `#` come before an `@`, and where what looks like a port is none.
    """
    scheme = _SCHEME.match(url)
    start = f"{scheme.group()}//…" if scheme else "…"
    place, *options = re.split(r"[?#]", url, maxsplit=1)
    if options and "@" in options[0]:
        return start
    if "@" in place:
        behind = place.rpartition("@")[2]
        return f"{start}@{behind}" if _has_hosts(behind) else start
    return place if scheme is None or _has_hosts(place[scheme.end() :].removeprefix("//")) else start


def is_ambiguous(url: str) -> bool:
    """Whether a part of a password may be taken for a part of a host, a port, a path or an option.

    Such a `url` has to be refused before anything else is told of it, and before a library takes it apart.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    hosts = parts.netloc.rpartition("@")[2]
    has_more = "@" in parts.path + parts.query + parts.fragment
    return parts.netloc.count("@") > 1 or not _has_hosts(hosts) or (has_more and (":" in hosts or "@" in parts.netloc))


def said_without(url: str, said: str) -> str:
    """What somebody else's code says of `url`, for a message, without any secret of it, however that is spelled."""
    said = said.replace(url, without_secrets(url))
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        said = re.sub("".join(map(_escaped_or_not, secret)), "…", said)
    return said


def _escaped_or_not(char: str) -> str:
    """What matches a character as it is, or as it stands in a URL. Libraries differ in which ones they escape."""
    escaped = "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
    return f"(?:{re.escape(char)}|(?i:{escaped}){'|[+]' if char == ' ' else ''})"


def option_said(name: str, value: str) -> str:
    """An option that is not known, for a message. One without a value may be the rest of a secret that has an `&`."""
    return f"option {name!r}" if value else "an option without a value"


def _has_hosts(place: str) -> bool:
    """Whether `place` begins with names of hosts, each with a number for a port if there is one."""
    return all(_HOST.fullmatch(host) for host in re.split(r"[/?#]", place, maxsplit=1)[0].split(","))


def _secrets(url: str) -> Iterator[str]:
    place, _, query = url.partition("?")
    password = place.partition("//")[2].rpartition("@")[0].partition(":")[2]
    values = (value or name for name, _, value in (option.partition("=") for option in query.split("&")))
    yield from filter(None, (password, unquote(password)))
    for value in (*values, query):
        yield from (one for one in (value, unquote(value), unquote_plus(value)) if len(one) >= OPTION_CHARS_MIN)
