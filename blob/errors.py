"""Errors of blob stores, named by what the caller does next, and redaction of secrets in URLs.

A blob is written once and never changed, so every failed call may be repeated: there is no "may have happened"
class. If a put failed after its bytes were written, the retry confirms them.

    BlobError
      BlobNotFound        no blob with that key
      BlobExists          the key holds other bytes; a bug of the caller, do not retry
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
    """Base of every error that a blob store raises."""


class BlobNotFound(BlobError):
    """No blob with that key, or the blob ends before the requested range does."""


class BlobExists(BlobError):
    """The key already holds different bytes. Keys are single-use, so this is a bug of the caller."""


class BlobUnavailable(BlobError):
    """The store did not answer in time, broke the connection or refused for now. Retrying is safe."""


class BlobNotWritable(BlobUnavailable):
    """The disk is full or read-only, and nothing was written. Reads work, and on a full disk deletions.

    `is_read_only`: the disk is read-only, so it has to be repaired or mounted again before a retry can succeed.
    """

    def __init__(self, message: str, *, is_read_only: bool = False) -> None:
        super().__init__(message)
        self.is_read_only = is_read_only


class BlobMisconfigured(BlobError):
    """A setting, a URL, a key or an argument is wrong. The message names it. Retrying cannot help."""


def optional(module: str, what: str, install: str, error: type[Exception]) -> Any:
    """Import `module`. If a library that it needs is missing, raise `error` with the `pip install` command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise error(f'{what} needs {missing.name}: pip install "{install}"') from missing


ESCAPES = "write / ? # @ % in a user or password as %2F %3F %23 %40 %25"
OPTION_CHARS_MIN = 4  # shorter option values are not secrets, and occur in any text

_SCHEME = re.compile(r"[A-Za-z0-9+.-]*:")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(:[0-9]{0,5})?")


def without_secrets(url: str) -> str:
    """`url` without its user, password and options, for messages.

    Only the scheme is left if a password may be elsewhere than before the last `@`: if `?` or `#` precede an `@`, or if
    the apparent port is not a number.
    """
    scheme = _SCHEME.match(url)
    start = f"{scheme.group()}//…" if scheme else "…"
    place, *options = re.split(r"[?#]", url, maxsplit=1)
    if options and "@" in options[0]:
        return start
    if "@" in place:
        hosts = place.rpartition("@")[2]
        return f"{start}@{hosts}" if _has_hosts(hosts) else start
    return place if scheme is None or _has_hosts(place[scheme.end() :].removeprefix("//")) else start


def is_ambiguous(url: str) -> bool:
    """Whether part of a password may be parsed as part of a host, a port, a path or an option.

    Reject such a `url` before it appears in a message and before a library parses it.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    hosts = parts.netloc.rpartition("@")[2]
    has_more = "@" in parts.path + parts.query + parts.fragment
    return parts.netloc.count("@") > 1 or not _has_hosts(hosts) or (has_more and (":" in hosts or "@" in parts.netloc))


def redact(url: str, text: str) -> str:
    """The error text of a library without the secrets of `url`, in any escaping."""
    text = text.replace(url, without_secrets(url))
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        text = re.sub("".join(map(_escaped_or_not, secret)), "…", text)
    return text


def _escaped_or_not(char: str) -> str:
    """A pattern for a character as it is or percent-encoded. Libraries differ in which characters they escape."""
    escaped = "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
    return f"(?:{re.escape(char)}|(?i:{escaped}){'|[+]' if char == ' ' else ''})"


def describe_option(name: str, value: str) -> str:
    """An unknown option, for a message. An option without a value may be the rest of a secret that contains `&`."""
    return f"option {name!r}" if value else "an option without a value"


def _has_hosts(place: str) -> bool:
    """Whether `place` begins with host names, each with an optional numeric port."""
    return all(_HOST.fullmatch(host) for host in re.split(r"[/?#]", place, maxsplit=1)[0].split(","))


def _secrets(url: str) -> Iterator[str]:
    place, _, query = url.partition("?")
    password = place.partition("//")[2].rpartition("@")[0].partition(":")[2]
    values = (value or name for name, _, value in (option.partition("=") for option in query.split("&")))
    yield from filter(None, (password, unquote(password)))
    for value in (*values, query):
        spellings = (value, unquote(value), unquote_plus(value))
        yield from (spelling for spelling in spellings if len(spelling) >= OPTION_CHARS_MIN)
