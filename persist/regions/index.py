"""The index of regions: for each region the servers at its home, and those near here that read it.

A small JSON file with a checksum, which the administrator of each region sets: `persist regions`. Every server with
`--index FILE` tells it at `/v1/regions`, and clients find their way by it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from persist.core.errors import Corruption, InvalidUsage, UpgradeNeeded
from persist.regions.opening import check_region

VERSION = 1
REGIONS_MAX = 1_000
URLS_MAX = 256
FILE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """`write`: servers at the region's home. `read`: servers near here that read it; where it is home these are both.

    `home_blob` and `copy_blob`: URLs of its blob store at home, and of the copy near here. "": not told.
    """

    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    home_blob: str = ""
    copy_blob: str = ""

    def check(self) -> None:
        """Raises InvalidUsage where a URL is none of a server, or there are too many."""
        for urls in (self.write, self.read):
            if len(urls) > URLS_MAX:
                raise InvalidUsage(f"a region has at most {URLS_MAX} servers, not {len(urls)}")
            for url in urls:
                parts = urlsplit(url)
                if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
                    raise InvalidUsage(f"{url[:200]!r} is no URL of a server: http(s)://host:port")


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


def region_of(name: str) -> str:
    """The region that the name of a shard begins with; "": it belongs to the server that is asked."""
    region, slash, _ = name.partition("/")
    return region if slash else ""


def encode_index(index: Index) -> bytes:
    """The bytes of the file. Raises InvalidUsage."""
    index.check()
    body = {
        name: {"write": entry.write, "read": entry.read, "home_blob": entry.home_blob, "copy_blob": entry.copy_blob}
        for name, entry in sorted(index.regions.items())
    }
    told = {"persist": "regions", "version": VERSION, "regions": body, "crc32": _crc(body)}
    return (json.dumps(told, indent=1) + "\n").encode()


def decode_index(data: bytes, where: str) -> Index:
    """Read the file. Raises Corruption (it was damaged, or changed by hand), InvalidUsage, UpgradeNeeded."""
    try:
        told = json.loads(data)
    except ValueError as error:
        raise InvalidUsage(f"{where} is no index of regions: it is no JSON") from error
    if not isinstance(told, dict) or told.get("persist") != "regions":
        raise InvalidUsage(f"{where} is no index of regions; `persist regions set` makes one")
    if type(told.get("version")) is not int or told["version"] > VERSION:
        raise UpgradeNeeded(f"{where} is of a later version than this persist knows: upgrade it")
    body = told.get("regions")
    if not isinstance(body, dict) or told.get("crc32") != _crc(body):
        raise Corruption(f"{where} fails its checksum: set it by `persist regions`, not by hand")
    try:
        regions = {
            name: Entry(tuple(one["write"]), tuple(one["read"]), one["home_blob"], one["copy_blob"])
            for name, one in body.items()
        }
    except (KeyError, TypeError) as error:
        raise Corruption(f"{where} does not make sense: {error!r}") from error
    index = Index(regions)
    index.check()
    return index


def read_index(path: str | Path) -> Index:
    """The index in a file. Raises what `decode_index` raises, and InvalidUsage: there is no such file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidUsage(f"the index {path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidUsage(f"the index {path} is larger than {FILE_BYTES_MAX} bytes")
    return decode_index(data, str(path))


def write_index(path: str | Path, index: Index) -> None:
    """Put the file in its place in one step. Raises InvalidUsage."""
    data = encode_index(index)
    fresh = f"{path}.{os.getpid()}"
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise InvalidUsage(f"the index {path} cannot be written: {error.strerror}") from error


class IndexFile:
    """The index in a file, read anew when the file changes. One that turns bad is told, and the last good one stays."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self.index = read_index(path)
        self.failed = ""

    def now(self) -> Index:
        """The index as the file has it now."""
        try:
            stat = os.stat(self._path)
            stamp = stat.st_mtime_ns, stat.st_size
            if stamp != self._stamp:
                self.index, self._stamp, self.failed = read_index(self._path), stamp, ""
        except (OSError, InvalidUsage, Corruption, UpgradeNeeded) as error:
            self.failed = str(error)
        return self.index


def _crc(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
