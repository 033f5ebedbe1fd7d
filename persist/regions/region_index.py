"""The index of regions: servers at home and near readers, changes of its file, and what servers say of regions."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blob import without_secrets
from blob.private_files import locked, replace_file
from persist.client.arguments import read_bounded
from persist.client.server_address import Trust
from persist.commit.system import Clock
from persist.core.errors import Corruption, InvalidUsage, PersistError, Unavailable, UpgradeNeeded
from persist.formats.records import json_crc
from persist.http_client.http_connection import Broken, ConnectionPool, NotSent, Reply, TimedOut, tls_of

# The index of regions: for each region the servers at its home, and those near here that read it.
#
# A small JSON file with a checksum, which the administrator of each region sets: `persist region`. Every server with
# `--index FILE` tells it at `/v1/regions`, and clients find their way by it.


VERSION = 1
REGIONS_MAX = 1_000
URLS_MAX = 256
EPOCH_MAX = 2**31
FETCH_S = 5.0  # between requests for an index, and for how long one may take
FILE_BYTES_MAX = 4 * 1024 * 1024
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """`write`: servers at the region's home. `read`: servers near here that read it; where it is home these are both.

    `home_blob` and `copy_blob`: URLs of its blob store at home, and of the copy near here. "": not told. `epoch`: that
    of its home, at least. A home of an earlier one only reads. 0: not told.
    """

    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    home_blob: str = ""
    copy_blob: str = ""
    epoch: int = 0

    def check(self) -> None:
        """Raises InvalidUsage where a URL is none of a server, or there are too many, or the epoch is none."""
        if type(self.epoch) is not int or not 0 <= self.epoch <= EPOCH_MAX:
            raise InvalidUsage(f"epoch is {self.epoch!r:.60}; it must be in [0, {EPOCH_MAX}]")
        for urls in (self.write, self.read):
            if len(urls) > URLS_MAX:
                raise InvalidUsage(f"a region has at most {URLS_MAX} servers, not {len(urls)}")
            for url in urls:
                check_server(url)
        for note in (self.home_blob, self.copy_blob):
            if not isinstance(note, str):
                raise InvalidUsage(f"{note!r:.60} is no URL of a blob store")


@dataclass(frozen=True, slots=True)
class RegionIndex:
    """What is known of each region, by its name."""

    regions: Mapping[str, RegionEntry] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidUsage."""
        if len(self.regions) > REGIONS_MAX:
            raise InvalidUsage(f"an index has at most {REGIONS_MAX} regions, not {len(self.regions)}")
        for name, entry in self.regions.items():
            check_region(name)
            entry.check()


def check_region(region: str) -> str:
    """Return it unchanged. Raises InvalidUsage: no region can be called so."""
    if not _REGION.match(region):
        raise InvalidUsage(f"{region[:60]!r} is no name of a region: 1 to 32 of a-z 0-9 -, and not - first")
    return region


def check_server(url: object) -> None:
    """Raises InvalidUsage where that is no URL by which a client can ask a server."""
    told = without_secrets(url)[:200] if isinstance(url, str) else url
    refused = InvalidUsage(f"{told!r:.210} is no URL of a server: http(s)://host:port")
    if not isinstance(url, str) or not url.isprintable() or " " in url or "\\" in url:
        raise refused
    try:
        parts = urlsplit(url)
        port = parts.port  # none that is no number, or beyond 65535
    except ValueError:
        raise refused from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise refused
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise refused
    if "@" in parts.netloc:
        raise InvalidUsage(f"{told!r:.210}: the URL of a server takes no user and password; give a token")


def region_of(name: str) -> str:
    """The region that the name of a shard begins with; "": it belongs to the server that is asked."""
    region, slash, _ = name.partition("/")
    return region if slash else ""


def urls_of(text: str) -> tuple[str, ...]:
    """URLs that are given with commas between them."""
    return tuple(dict.fromkeys(url.strip().rstrip("/") for url in text.split(",") if url.strip()))


def encode_index(index: RegionIndex) -> bytes:
    """The bytes of the file. Raises InvalidUsage."""
    index.check()
    body = index_json(index)
    told = {"persist": "regions", "version": VERSION, "regions": body, "crc32": json_crc(body)}
    return (json.dumps(told, indent=1) + "\n").encode()


def decode_index(data: bytes, where: str) -> RegionIndex:
    """Read the file. Raises Corruption (it was damaged, or changed by hand), InvalidUsage, UpgradeNeeded."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{where} is no index of regions: it is no JSON") from error
    if not isinstance(told, dict) or told.get("persist") != "regions":
        raise InvalidUsage(f"{where} is no index of regions; `persist region set` makes one")
    if type(told.get("version")) is not int or told["version"] > VERSION:
        raise UpgradeNeeded(f"{where} is of a later version than this persist knows: upgrade it")
    body = told.get("regions")
    if not isinstance(body, dict) or told.get("crc32") != json_crc(body):
        raise Corruption(f"{where} fails its checksum: set it by `persist region`, not by hand")
    try:
        return index_of(body)
    except (Corruption, InvalidUsage) as error:
        raise type(error)(f"{where}: {error.message}") from error


def read_index(path: str | Path) -> RegionIndex:
    """The index in a file.

    Raises what `decode_index` raises, and InvalidUsage: there is no such file, or others may write it. It tells clients
    where to send their tokens.
    """
    if not str(path):
        raise InvalidUsage("the name of the index is empty: give a file")
    return decode_index(read_bounded(f"the index {path}", path, FILE_BYTES_MAX, own=True), str(path))


def write_index(path: str | Path, index: RegionIndex) -> None:
    """Put the file in its place in one step, whatever was there: `change_index` keeps what others set.

    Raises InvalidUsage: it cannot be written, or the index makes no sense.
    """
    data = encode_index(index)
    fresh = f"{path}.{os.getpid()}"
    try:
        with open(fresh, "wb", opener=_opens_own) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(fresh, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(fresh)
        raise InvalidUsage(f"the index {path} cannot be written: {error.strerror}") from error


def _opens_own(path: str, flags: int) -> int:
    """An opener for `open` that makes a file which others may not write, whatever the umask."""
    return os.open(path, flags, 0o644)


class OlderIndex(Unavailable):
    """The index cannot be read now; this is the one that was told last."""

    def __init__(self, message: str, index: RegionIndex | None = None) -> None:
        super().__init__(message)
        self.index = index or RegionIndex()


class IndexFile:
    """The index in a file, read anew when the file changes. One that turns bad is told, and the last good one stays."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self.index = read_index(path)
        self.failed = ""

    def now(self) -> RegionIndex:
        """The index as the file has it now."""
        try:
            stat = os.stat(self._path)
            stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if stamp != self._stamp:
                self.index, self._stamp, self.failed = read_index(self._path), stamp, ""
        except (OSError, InvalidUsage, Corruption, UpgradeNeeded) as error:
            self.failed, self._stamp = str(error), None  # it may come back just as it was
        return self.index

    def fetch(self) -> RegionIndex:
        """As `now`. Raises OlderIndex: the file does not tell now."""
        index = self.now()
        if self.failed:
            raise OlderIndex(self.failed, index)
        return index


class IndexUrl:
    """The index that another server tells, such as one of another region. What it told last stays.

    `now` has it fetched in the background, when that was long ago.
    """

    def __init__(self, url: str, token: str | None, clock: Clock, trust: Trust | None = None) -> None:
        self.index = RegionIndex()
        self.failed = "it was not fetched yet"
        self._url = url
        self._server = RegionServer(url, token, trust)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s = clock.monotonic()

    def now(self) -> RegionIndex:
        """The index that was told last. Asks nobody."""
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
        """Ask now. Raises Unavailable: the server does not answer, tells no index, or cannot read it now."""
        self._due_s = self._clock.monotonic() + FETCH_S
        try:
            self.index, failed = self._asked()
            if failed:
                raise OlderIndex(f"{self._url} has only an older index of regions: {failed}", self.index)
        except Unavailable as error:
            self.failed = error.message
            raise
        self.failed = ""
        return self.index

    def _asked(self) -> tuple[RegionIndex, str]:
        """The index that the server tells, and why that is not the one of now."""
        answer = self._server.ask(FETCH_S)
        told = answer.get("index")
        try:
            if not isinstance(told, dict):
                raise InvalidUsage("it has none")
            return index_of(told), str(answer.get("index_failed") or "")
        except (InvalidUsage, Corruption) as error:
            raise Unavailable(f"{self._url} tells no index of regions: {error.message}") from error


def open_index(where: str, token: str | None, clock: Clock, trust: Trust | None = None) -> IndexFile | IndexUrl:
    """The index in a file, or the one that the server at a URL tells.

    Raises what `read_index` raises, and InvalidUsage: a PEM file of `trust` cannot be used.
    """
    if where.startswith(("http://", "https://")):
        RegionEntry((where,)).check()
        return IndexUrl(where, token, clock, trust)
    return IndexFile(where)


def index_json(index: RegionIndex) -> dict[str, Any]:
    """As a file has it, and a server tells it."""
    return {name: asdict(entry) for name, entry in sorted(index.regions.items())}


def index_of(told: dict[str, Any]) -> RegionIndex:
    """The index of what `index_json` has made, or an earlier build. Raises Corruption, InvalidUsage."""
    try:
        regions = {
            name: RegionEntry(
                tuple(one["write"]),
                tuple(one["read"]),
                one.get("home_blob", ""),
                one.get("copy_blob", ""),
                one.get("epoch", 0),
            )
            for name, one in told.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise Corruption(f"an index of regions does not make sense: {error!r}") from error
    index = RegionIndex(regions)
    index.check()
    return index


# Changes of the index in its file, one at a time: who changes it reads, decides and writes while no other one does.


Change = Callable[[RegionIndex], RegionIndex]


def change_index(path: str | Path, change: Change, *, makes: bool = False) -> RegionIndex:
    """Change the index in a file; as it is then. `makes`: where no file is yet, the change is of an empty index.

    `change` may be called twice. Raises what it raises, what `read_index` raises, InvalidUsage (the file cannot be
    written), Unavailable (another one changes the index, and does not end).
    """
    change(_read(path, makes)).check()  # what is refused leaves nothing behind, not even a lock
    with _locked(path):
        changed = change(_read(path, makes))
        write_index(path, changed)
    return changed


def _read(path: str | Path, makes: bool) -> RegionIndex:
    return RegionIndex() if makes and str(path) and not Path(path).exists() else read_index(path)


@contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Keep others from the index. Raises InvalidUsage, Unavailable: see `change_index`."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(f"{path}.lock", 0o666))
        except TimeoutError as error:
            raise Unavailable(f"another command has been changing the index {path} for some seconds: retry") from error
        except OSError as error:
            raise InvalidUsage(f"the index {path} cannot be changed: {path}.lock: {error.strerror}") from error
        yield


# Asks a server what it tells of its region: `GET /v1/regions`; and whether anything answers there at all.


ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
PATH = "/v1/regions"
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class RegionServer:
    """A server, by its URL. It is asked rarely, so no connection is kept. Raises InvalidUsage: a bad PEM file."""

    def __init__(self, url: str, token: str | None = None, trust: Trust | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._tls = tls_of([url], trust)

    def ask(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What it tells of its region, and of the index. Raises Unavailable: it does not answer, or not this."""
        url = self.url
        try:
            reply = _replied(url, self._headers, self._tls, ANSWER_S, timeout_s)
            if 300 <= reply.status < 400:  # it is not followed: the token is for this server
                raise Unavailable(f"{url} redirects elsewhere: name the server itself")
            if reply.status >= 400:
                raise Unavailable(f"{url} does not answer: HTTP error {reply.status}")
            told = json.loads(reply.data)
        except (NotSent, Broken, InvalidUsage, ValueError, RecursionError) as error:
            raise Unavailable(f"{url} does not answer: {_in_a_line(error)}") from error
        if not isinstance(told, dict):
            raise Unavailable(f"{url} does not answer as a server of persist")
        return told


@dataclass(frozen=True, slots=True)
class ServerPresence:
    """Whether a server may be at a URL, and what tells. `is_silent`: nothing came, which is not proof."""

    url: str
    is_silent: bool
    why: str

    def __str__(self) -> str:
        return f"{self.url} ({self.why})"


def presence(url: str, timeout_s: float = ANSWER_S) -> ServerPresence:
    """Whether anything answers there, whatever it says.

    Only a connection that is refused, a machine that cannot be reached, and no answer in time count as silence. A
    server that shows a certificate that is not known here, refuses, fails, or does not speak HTTP is there. A name that
    cannot be found tells nothing: it may be misspelt.
    """
    tls = tls_of([url], None)
    try:
        reply = _replied(url, {}, tls, timeout_s, timeout_s)
        return ServerPresence(url, False, f"it answers with HTTP {reply.status}")
    except InvalidUsage as error:
        return ServerPresence(url, False, f"it answers, and TLS fails: {_in_a_line(error)}")
    except (NotSent, Broken) as error:
        return _presence(url, error, timeout_s)


def _replied(
    url: str, headers: dict[str, str], tls: ssl.SSLContext | None, connect_s: float, timeout_s: float
) -> Reply:
    """The answer to one request, on a connection of its own. Raises as `ConnectionPool.request` does."""
    with closing(ConnectionPool(url, connect_s=connect_s, tls=tls, probes=False)) as pool:
        return pool.request("GET", PATH, headers, None, timeout_s, ANSWER_BYTES_MAX)


def _presence(url: str, error: NotSent | Broken, timeout_s: float) -> ServerPresence:
    cause, text = error.__cause__, _in_a_line(error)
    if isinstance(error, TimedOut) or isinstance(cause, TimeoutError):
        return ServerPresence(url, True, f"it did not answer within {timeout_s:g} s")
    if isinstance(cause, ssl.SSLError):
        return ServerPresence(url, False, f"it answers, and TLS fails: {text}")
    if isinstance(cause, socket.gaierror):
        return ServerPresence(url, False, f"or may: its name cannot be found, which tells nothing: {text}")
    if isinstance(cause, OSError) and cause.errno in _UNREACHABLE:
        return ServerPresence(url, True, text)
    return ServerPresence(url, False, f"it answers, and not as HTTP: {text}")


def _in_a_line(error: Exception) -> str:
    """A server may say anything."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__
