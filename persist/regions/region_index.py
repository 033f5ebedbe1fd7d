"""The index of regions: servers at home and near readers, and changes of its file."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blob import without_secrets
from blob.private_files import replace_file
from persist.client.arguments import read_bounded
from persist.client.server_address import Trust
from persist.commit.system import Clock
from persist.core.errors import Corruption, InvalidUsage, PersistError, Unavailable, UpgradeNeeded
from persist.formats.records import json_crc
from persist.regions.asking import RegionServer
from persist.regions.opening import check_region

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


@dataclass(frozen=True, slots=True)
class Entry:
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
class Index:
    """What is known of each region, by its name."""

    regions: Mapping[str, Entry] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidUsage."""
        if len(self.regions) > REGIONS_MAX:
            raise InvalidUsage(f"an index has at most {REGIONS_MAX} regions, not {len(self.regions)}")
        for name, entry in self.regions.items():
            check_region(name)
            entry.check()


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


def encode_index(index: Index) -> bytes:
    """The bytes of the file. Raises InvalidUsage."""
    index.check()
    body = index_json(index)
    told = {"persist": "regions", "version": VERSION, "regions": body, "crc32": json_crc(body)}
    return (json.dumps(told, indent=1) + "\n").encode()


def decode_index(data: bytes, where: str) -> Index:
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


def read_index(path: str | Path) -> Index:
    """The index in a file.

    Raises what `decode_index` raises, and InvalidUsage: there is no such file, or others may write it. It tells clients
    where to send their tokens.
    """
    if not str(path):
        raise InvalidUsage("the name of the index is empty: give a file")
    return decode_index(read_bounded(f"the index {path}", path, FILE_BYTES_MAX, own=True), str(path))


def write_index(path: str | Path, index: Index) -> None:
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

    def __init__(self, message: str, index: Index | None = None) -> None:
        super().__init__(message)
        self.index = index or Index()


class IndexFile:
    """The index in a file, read anew when the file changes. One that turns bad is told, and the last good one stays."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self.index = read_index(path)
        self.failed = ""

    def now(self) -> Index:
        """The index as the file has it now."""
        try:
            stat = os.stat(self._path)
            stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if stamp != self._stamp:
                self.index, self._stamp, self.failed = read_index(self._path), stamp, ""
        except (OSError, InvalidUsage, Corruption, UpgradeNeeded) as error:
            self.failed, self._stamp = str(error), None  # it may come back just as it was
        return self.index

    def fetch(self) -> Index:
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
        self.index = Index()
        self.failed = "it was not fetched yet"
        self._url = url
        self._server = RegionServer(url, token, trust)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s = clock.monotonic()

    def now(self) -> Index:
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

    def fetch(self) -> Index:
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

    def _asked(self) -> tuple[Index, str]:
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
        Entry((where,)).check()
        return IndexUrl(where, token, clock, trust)
    return IndexFile(where)


def index_json(index: Index) -> dict[str, Any]:
    """As a file has it, and a server tells it."""
    return {name: _entry_json(entry) for name, entry in sorted(index.regions.items())}


def _entry_json(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {"write": list(entry.write), "read": list(entry.read)}
    return {**told, "home_blob": entry.home_blob, "copy_blob": entry.copy_blob, "epoch": entry.epoch}


def index_of(told: dict[str, Any]) -> Index:
    """The index of what `index_json` has made, or an earlier build. Raises Corruption, InvalidUsage."""
    try:
        regions = {
            name: Entry(
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
    index = Index(regions)
    index.check()
    return index


# Changes of the index in its file, one at a time: who changes it reads, decides and writes while no other one does.


LOCK_S = 10.0  # for so long a change waits for another one, which takes milliseconds
LOOK_S = 0.02

Change = Callable[[Index], Index]


def change_index(path: str | Path, change: Change, *, makes: bool = False) -> Index:
    """Change the index in a file; as it is then. `makes`: where no file is yet, the change is of an empty index.

    `change` may be called twice. Raises what it raises, what `read_index` raises, InvalidUsage (the file cannot be
    written), Unavailable (another one changes the index, and does not end).
    """
    change(_read(path, makes)).check()  # what is refused leaves nothing behind, not even a lock
    with _locked(path):
        changed = change(_read(path, makes))
        write_index(path, changed)
    return changed


def _read(path: str | Path, makes: bool) -> Index:
    return Index() if makes and str(path) and not Path(path).exists() else read_index(path)


@contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Hold the file beside the index, which stays: one that is deleted could be locked twice.

    The index itself does not do, since each change puts another file in its place.
    """
    lock = f"{path}.lock"
    try:
        held = _opened(lock)
    except OSError as error:
        raise InvalidUsage(f"the index {path} cannot be changed: {lock}: {error.strerror}") from error
    try:
        for _ in range(max(1, int(LOCK_S / LOOK_S))):
            if _taken(held, lock):
                break
            time.sleep(LOOK_S)
        else:
            raise Unavailable(f"another command has been changing the index {path} for {LOCK_S:g} s: retry")
        yield
    finally:
        os.close(held)  # which lets it go


def _opened(lock: str) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user has made it; to read it is enough, but on NFS
        return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)


def _taken(held: int, lock: str) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InvalidUsage(f"{lock} cannot be locked: {error.strerror}") from error
    return True
