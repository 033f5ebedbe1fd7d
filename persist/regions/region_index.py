"""The index of regions: servers at home and nearby, changes of its file, and requests to the servers in it."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blob import without_secrets
from blob.private_files import locked, replace_file
from persist.client.arguments import ClientTls, read_bounded
from persist.commit.clocks_and_ids import Clock
from persist.core.errors import Corruption, InvalidUsage, PersistError, Unavailable, UpgradeNeeded
from persist.formats.records import json_crc
from persist.http_client.http_connection import Broken, ConnectionPool, NotSent, Reply, TimedOut, tls_of

# The index: for each region the servers at its home, and those nearby that read it.
#
# A small JSON file with a checksum, which the administrator of each region sets by `persist region`. Servers with
# `--index FILE` serve it at `/v1/regions`, and clients find servers by it.

VERSION = 1
REGIONS_MAX = 1_000
URLS_MAX = 256
EPOCH_MAX = 2**31
FETCH_S = 5.0  # interval of requests for an index, and their timeout
FILE_BYTES_MAX = 4 * 1024 * 1024
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """`write`: servers at the region's home. `read`: nearby servers that read it; at home both are the same.

    `home_blob` and `copy_blob`: URLs of its blob store at home, and of the nearby copy. "": unknown. `epoch`: at least
    that of its home; homes of earlier epochs are read-only. 0: unknown.
    """

    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    home_blob: str = ""
    copy_blob: str = ""
    epoch: int = 0

    def check(self) -> None:
        """Raises InvalidUsage: a URL is not one of a server, there are too many, or the epoch is invalid."""
        if type(self.epoch) is not int or not 0 <= self.epoch <= EPOCH_MAX:
            raise InvalidUsage(f"epoch is {self.epoch!r:.60}; it must be in [0, {EPOCH_MAX}]")
        for urls in (self.write, self.read):
            if len(urls) > URLS_MAX:
                raise InvalidUsage(f"a region has at most {URLS_MAX} servers, not {len(urls)}")
            for url in urls:
                check_server(url)
        for note in (self.home_blob, self.copy_blob):
            if not isinstance(note, str):
                raise InvalidUsage(f"{note!r:.60} is not a URL of a blob store")


@dataclass(frozen=True, slots=True)
class RegionIndex:
    """The entries of the regions, by name."""

    regions: Mapping[str, RegionEntry] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidUsage."""
        if len(self.regions) > REGIONS_MAX:
            raise InvalidUsage(f"an index has at most {REGIONS_MAX} regions, not {len(self.regions)}")
        for name, entry in self.regions.items():
            check_region(name)
            entry.check()


def check_region(region: str) -> str:
    """Return it unchanged. Raises InvalidUsage: it is not a valid name of a region."""
    if not _REGION.match(region):
        raise InvalidUsage(f"{region[:60]!r} is not a valid region name: 1 to 32 of a-z 0-9 -, not beginning with -")
    return region


def check_server(url: object) -> None:
    """Raise InvalidUsage if it is not a URL of a server."""
    shown = without_secrets(url)[:200] if isinstance(url, str) else url
    error = InvalidUsage(f"{shown!r:.210} is not a URL of a server: http(s)://host:port")
    if not isinstance(url, str) or not url.isprintable() or " " in url or "\\" in url:
        raise error
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError unless it is a number up to 65535
    except ValueError:
        raise error from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise error
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise error
    if "@" in parts.netloc:
        raise InvalidUsage(f"{shown!r:.210}: the URL of a server takes no user and password; give a token")


def region_of(name: str) -> str:
    """The region in the name of a shard; "": the shard belongs to the server that is asked."""
    region, slash, _ = name.partition("/")
    return region if slash else ""


def urls_of(text: str) -> tuple[str, ...]:
    """Split URLs at commas."""
    return tuple(dict.fromkeys(url.strip().rstrip("/") for url in text.split(",") if url.strip()))


def encode_index(index: RegionIndex) -> bytes:
    """The bytes of the file. Raises InvalidUsage."""
    index.check()
    body = index_json(index)
    document = {"persist": "regions", "version": VERSION, "regions": body, "crc32": json_crc(body)}
    return (json.dumps(document, indent=1) + "\n").encode()


def decode_index(data: bytes, where: str) -> RegionIndex:
    """Decode the file. Raises Corruption (it was damaged, or edited manually), InvalidUsage, UpgradeNeeded."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{where} is not an index of regions: it is not JSON") from error
    if not isinstance(document, dict) or document.get("persist") != "regions":
        raise InvalidUsage(f"{where} is not an index of regions; `persist region set` creates one")
    if type(document.get("version")) is not int or document["version"] > VERSION:
        raise UpgradeNeeded(f"{where} is of a later version than this persist supports: upgrade persist")
    body = document.get("regions")
    if not isinstance(body, dict) or document.get("crc32") != json_crc(body):
        raise Corruption(f"{where} fails its checksum: change it by `persist region`, not manually")
    try:
        return index_of(body)
    except (Corruption, InvalidUsage) as error:
        raise type(error)(f"{where}: {error.message}") from error


def read_index(path: str | Path) -> RegionIndex:
    """The index in a file.

    Raises what `decode_index` raises, and InvalidUsage: there is no such file, or others can write it. Clients send
    their tokens to the servers in it.
    """
    if not str(path):
        raise InvalidUsage("the name of the index is empty: give a file")
    return decode_index(read_bounded(f"the index {path}", path, FILE_BYTES_MAX, own=True), str(path))


def write_index(path: str | Path, index: RegionIndex) -> None:
    """Replace the file atomically, whatever it contains; `change_index` preserves other changes.

    Raises InvalidUsage: it cannot be written, or the index is invalid.
    """
    data = encode_index(index)
    temporary = f"{path}.{os.getpid()}"
    try:
        # Others cannot write it, whatever the umask.
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise InvalidUsage(f"the index {path} cannot be written: {error.strerror}") from error


class OlderIndex(Unavailable):
    """The index cannot be read now; `index` is the last one that was."""

    def __init__(self, message: str, index: RegionIndex | None = None) -> None:
        super().__init__(message)
        self.index = index or RegionIndex()


class IndexFile:
    """The index in a file, read again when the file changes. After an error the last good one remains."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self.index = read_index(path)
        self.failed = ""

    def now(self) -> RegionIndex:
        """The current index."""
        try:
            stat = os.stat(self._path)
            stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if stamp != self._stamp:
                self.index, self._stamp, self.failed = read_index(self._path), stamp, ""
        except (OSError, InvalidUsage, Corruption, UpgradeNeeded) as error:
            self.failed, self._stamp = str(error), None  # the same file may become readable again
        return self.index

    def fetch(self) -> RegionIndex:
        """As `now`. Raises OlderIndex: the file cannot be read now."""
        index = self.now()
        if self.failed:
            raise OlderIndex(self.failed, index)
        return index


class IndexUrl:
    """The index of another server, for example in another region. The last one remains after errors.

    `now` has it fetched in the background if it is old.
    """

    def __init__(self, url: str, token: str | None, clock: Clock, trust: ClientTls | None = None) -> None:
        self.index = RegionIndex()
        self.failed = "it has not been fetched yet"
        self._url = url
        self._server = RegionServer(url, token, trust)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s = clock.monotonic()

    def now(self) -> RegionIndex:
        """The last index, without a request."""
        with self._lock:
            if self._clock.monotonic() < self._due_s:
                return self.index
            self._due_s = self._clock.monotonic() + 2 * FETCH_S
        threading.Thread(target=self._fetch_quietly, name="persist-index", daemon=True).start()
        return self.index

    def _fetch_quietly(self) -> None:
        with suppress(PersistError):
            self.fetch()

    def fetch(self) -> RegionIndex:
        """Fetch it now. Raises Unavailable: the server does not answer, has no index, or only an older one."""
        self._due_s = self._clock.monotonic() + FETCH_S
        try:
            response = self._server.ask(FETCH_S)
            body = response.get("index")
            if not isinstance(body, dict):
                raise InvalidUsage("it has none")
            self.index = index_of(body)
            if problem := response.get("index_failed"):
                raise OlderIndex(f"{self._url} has only an older index of regions: {problem}", self.index)
        except (InvalidUsage, Corruption) as error:
            self.failed = f"{self._url} has no valid index of regions: {error.message}"
            raise Unavailable(self.failed) from error
        except Unavailable as error:
            self.failed = error.message
            raise
        self.failed = ""
        return self.index


def open_index(where: str, token: str | None, clock: Clock, trust: ClientTls | None = None) -> IndexFile | IndexUrl:
    """The index in a file, or that of the server at a URL.

    Raises what `read_index` raises, and InvalidUsage: a PEM file of `trust` cannot be used.
    """
    if where.startswith(("http://", "https://")):
        RegionEntry((where,)).check()
        return IndexUrl(where, token, clock, trust)
    return IndexFile(where)


def index_json(index: RegionIndex) -> dict[str, Any]:
    """The index as JSON, in a file and over HTTP."""
    return {name: asdict(entry) for name, entry in sorted(index.regions.items())}


def index_of(body: dict[str, Any]) -> RegionIndex:
    """Decode what `index_json`, also of an earlier version, has made. Raises Corruption, InvalidUsage."""
    try:
        regions = {}
        for name, entry in body.items():
            later = {field: entry[field] for field in ("home_blob", "copy_blob", "epoch") if field in entry}
            regions[name] = RegionEntry(tuple(entry["write"]), tuple(entry["read"]), **later)
    except (AttributeError, KeyError, TypeError) as error:
        raise Corruption(f"an index of regions is malformed: {error!r}") from error
    index = RegionIndex(regions)
    index.check()
    return index


# Changes of the file, one at a time under a lock.

Change = Callable[[RegionIndex], RegionIndex]


def change_index(path: str | Path, change: Change, *, makes: bool = False) -> RegionIndex:
    """Change the index in a file; returns the new one. `makes`: a missing file counts as an empty index.

    `change` may be called twice. Raises what it raises, what `read_index` raises, InvalidUsage (the file cannot be
    written), Unavailable (another process keeps it locked).
    """
    change(_read(path, makes)).check()  # a rejected change leaves nothing behind, not even a lock
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(f"{path}.lock", 0o666))
        except TimeoutError as error:
            raise Unavailable(f"another command has locked the index {path} for some seconds: retry") from error
        except OSError as error:
            raise InvalidUsage(f"the index {path} cannot be changed: {path}.lock: {error.strerror}") from error
        changed = change(_read(path, makes))
        write_index(path, changed)
    return changed


def _read(path: str | Path, makes: bool) -> RegionIndex:
    return RegionIndex() if makes and str(path) and not Path(path).exists() else read_index(path)


# Requests to servers: `GET /v1/regions`; and whether anything answers at a URL.

ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
PATH = "/v1/regions"
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class RegionServer:
    """A server, by its URL. Requests are rare, so connections are not kept. Raises InvalidUsage: a bad PEM file."""

    def __init__(self, url: str, token: str | None = None, trust: ClientTls | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._tls = tls_of([url], trust)

    def ask(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The status of its region, and the index. Raises Unavailable: it does not answer, or not as expected."""
        url = self.url
        try:
            reply = _request(url, self._headers, self._tls, ANSWER_S, timeout_s)
            if 300 <= reply.status < 400:  # not followed: the token is for this server
                raise Unavailable(f"{url} redirects elsewhere: give the URL of the server itself")
            if reply.status >= 400:
                raise Unavailable(f"{url} does not answer: HTTP error {reply.status}")
            document = json.loads(reply.data)
        except (NotSent, Broken, InvalidUsage, ValueError, RecursionError) as error:
            raise Unavailable(f"{url} does not answer: {_in_a_line(error)}") from error
        if not isinstance(document, dict):
            raise Unavailable(f"{url} does not answer as a server of persist")
        return document


@dataclass(frozen=True, slots=True)
class ServerPresence:
    """Whether a server may be at a URL, and the evidence. `is_silent`: no answer, which is not proof."""

    url: str
    is_silent: bool
    why: str

    def __str__(self) -> str:
        return f"{self.url} ({self.why})"


def probe_server(url: str, timeout_s: float = ANSWER_S) -> ServerPresence:
    """Whether anything answers at a URL.

    Only a refused connection, an unreachable machine, and a timeout count as silence. A server with an untrusted
    certificate, one that refuses or fails, or does not speak HTTP, is alive. A name that cannot be resolved proves
    nothing: it may be misspelt.
    """
    tls = tls_of([url], None)
    try:
        reply = _request(url, {}, tls, timeout_s, timeout_s)
        return ServerPresence(url, False, f"it answers with HTTP {reply.status}")
    except InvalidUsage as error:
        return ServerPresence(url, False, f"it answers, and TLS fails: {_in_a_line(error)}")
    except (NotSent, Broken) as error:
        return _presence(url, error, timeout_s)


def _request(
    url: str, headers: dict[str, str], tls: ssl.SSLContext | None, connect_s: float, timeout_s: float
) -> Reply:
    """The response to one request, on a connection of its own. Raises as `ConnectionPool.request` does."""
    with closing(ConnectionPool(url, connect_s=connect_s, tls=tls, probes=False)) as pool:
        return pool.request("GET", PATH, headers, None, timeout_s, ANSWER_BYTES_MAX)


def _presence(url: str, error: NotSent | Broken, timeout_s: float) -> ServerPresence:
    cause, text = error.__cause__, _in_a_line(error)
    if isinstance(error, TimedOut) or isinstance(cause, TimeoutError):
        return ServerPresence(url, True, f"it did not answer within {timeout_s:g} s")
    if isinstance(cause, ssl.SSLError):
        return ServerPresence(url, False, f"it answers, and TLS fails: {text}")
    if isinstance(cause, socket.gaierror):
        return ServerPresence(url, False, f"or may: its name cannot be resolved, which proves nothing: {text}")
    if isinstance(cause, OSError) and cause.errno in _UNREACHABLE:
        return ServerPresence(url, True, text)
    return ServerPresence(url, False, f"it answers, but not as HTTP: {text}")


def _in_a_line(error: Exception) -> str:
    """The message on one line, shortened: it may contain text of the server."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__
