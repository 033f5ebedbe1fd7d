"""Blobs as files under one directory, for one machine (or a shared file system with hard links).

Its files and directories are their owner's alone, unless the root is open to more: see `_follow_root`.

A put writes `~tmp/<first segment of its key>-<unique>`, syncs it, links it to its key (a link never overwrites, so
write-once holds between processes) and syncs the key's directory: one fsync of a file, one of a directory. `~` cannot
occur in a key, so temporary files are never listed, but told as unfinished; those of crashed writers are swept when the
store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blob.errors import BlobError, BlobExists, BlobMisconfigured, BlobNotFound, BlobNotWritable, BlobUnavailable
from blob.interface import (
    Blob,
    BlobStat,
    Unfinished,
    aside_name,
    check_key,
    check_prefix,
    check_range,
    is_aside,
)
from blob.private_files import DIRECTORY_MODE, FILE_MODE, make_directories

STALE_TEMP_S = 3600.0
"""Temporary files older than this many seconds belong to a crashed writer and are swept at open."""

KNOWN_DIRS_MAX = 4096
"""How many directories are remembered as durable; beyond it the memory starts anew (costs a few fsyncs)."""

MAKE_ATTEMPTS_MAX = 100
"""How often a put makes its directory again when other processes' deletes prune it as empty."""

_TEMP_DIR = "~tmp"
_NOT_OURS = frozenset({_TEMP_DIR, "lost+found"})  # names that no key can hold
_NOT_WRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is full",
    errno.EROFS: "the file system is read-only",
}
_NO_FILE = {errno.ELOOP, errno.ENXIO}  # links in a circle; a socket
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_BLOB_FLAGS = _READ_FLAGS | getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for who writes to it
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class FileBlob(Blob):
    """Files below `root`, which is made if it is missing. `now_s` (Unix time) decides what sweeping finds stale.

    Without `makes` opening it makes nothing and sweeps nothing; BlobMisconfigured where the directory is not there.
    `fsync` and `link` are the system calls of which durability is made; tests record their order.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        makes: bool = True,
        now_s: Callable[[], float] = time.time,
        fsync: Callable[[int], None] = os.fsync,
        link: Callable[[str, str], None] = os.link,
    ) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._temp_dir = os.path.join(self._root, _TEMP_DIR)
        self._now_s = now_s
        self._fsync = fsync
        self._link_file = link
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._putting: dict[str, int] = {}
        self._counter = itertools.count()
        self._unique = os.urandom(8).hex()
        self._directory_mode, self._file_mode = DIRECTORY_MODE, FILE_MODE
        if not makes:
            if not os.path.isdir(self._root):
                raise BlobMisconfigured(f"blob directory {self._root} does not exist")
            self._follow_root()
            return
        try:
            make_directories(self._root)
            self._follow_root()
            self._make_dirs(self._temp_dir)
        except OSError as error:
            if error.errno in _NOT_WRITABLE and os.path.isdir(self._root):
                return  # what is there can be read; a put says what is wrong
            raise BlobMisconfigured(f"blob directory {self._root} cannot be made: {error.strerror}") from error
        self._sweep()

    @property
    def url(self) -> str:
        return Path(self._root).as_uri()

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(check_key(key))
        with _translated(key), _clashes_named(key):
            temp = self._write_temp(key, data)
            directory = os.path.dirname(path)
            self._begin_put(directory)
            try:
                for _ in range(MAKE_ATTEMPTS_MAX):
                    try:
                        self._publish(temp, path, key, data)
                        return
                    except FileNotFoundError:
                        # A delete of another process pruned the directory as empty; make it again.
                        self._forget(directory)
                raise BlobUnavailable(f"blob {key}: its directory kept being removed; put it again")
            finally:
                self._end_put(directory)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)

    def get(self, key: str) -> bytes:
        path = self._path(check_key(key))
        with _translated(key):
            fd = os.open(path, _BLOB_FLAGS)
            try:
                return _read_exactly(fd, key, 0, _regular(fd, key).st_size)
            finally:
                os.close(fd)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(check_key(key))
        with _translated(key):
            fd = os.open(path, _BLOB_FLAGS)
            try:
                size = _regular(fd, key).st_size
                if start + length > size:
                    raise BlobNotFound(f"blob {key} ends at byte {size}, before {start + length}")
                return _read_exactly(fd, key, start, length)
            finally:
                os.close(fd)

    def stat(self, key: str) -> BlobStat | None:
        path = self._path(check_key(key))
        try:
            with _translated(key):
                found = os.stat(path)
        except BlobNotFound:
            return None
        if not stat_module.S_ISREG(found.st_mode):
            return None
        return BlobStat(key, found.st_size, found.st_mtime_ns // 1_000_000)

    def delete(self, keys: Sequence[str]) -> None:
        # Not synced: a blob that a crash brings back is an orphan, and the orphan sweep takes it.
        paths = [self._path(check_key(key)) for key in keys]
        for key, path in zip(keys, paths, strict=True):
            with contextlib.suppress(BlobNotFound), _translated(key):
                os.unlink(path)
        for directory in {os.path.dirname(path) for path in paths}:
            self._prune(directory)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        start = prefix.rpartition("/")[0]
        return self._walk(start + "/" if start else "", prefix)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        check_prefix(prefix)
        with contextlib.suppress(BlobNotFound), _translated(_TEMP_DIR), os.scandir(self._temp_dir) as entries:
            for entry in entries:
                if is_aside(entry.name, prefix):
                    with contextlib.suppress(FileNotFoundError):  # it was ended meanwhile
                        held = entry.stat()
                        where = f"{_TEMP_DIR}/{entry.name}"
                        yield Unfinished(where, held.st_size, held.st_mtime_ns // 1_000_000, entry.name)

    def abandon(self, found: Sequence[Unfinished]) -> None:
        for one in found:
            with contextlib.suppress(BlobNotFound), _translated(one.where):
                os.unlink(f"{self._temp_dir}/{os.path.basename(one.token)}")

    def local_path(self, key: str) -> str | None:
        return self._path(check_key(key))

    def check(self) -> None:
        key = f"check-{self._unique}-{next(self._counter)}"
        try:
            self.put(key, b"check")
            if self.get(key) != b"check":
                raise BlobMisconfigured(f"blob directory {self._root} does not return what was written to it")
            self.delete([key])
        except (BlobMisconfigured, BlobNotWritable):
            raise
        except BlobError as error:
            raise BlobMisconfigured(f"blob directory {self._root} does not work: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._known.clear()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _follow_root(self) -> None:
        """Who may read the root may read what is put there from now on: that is how a store is shared with a group."""
        rights = stat_module.S_IMODE(os.stat(self._root).st_mode) & 0o777
        self._directory_mode, self._file_mode = rights | DIRECTORY_MODE, rights & 0o666 | FILE_MODE

    def _make_dirs(self, directory: str) -> None:
        """Make a directory below the root, and those above it."""
        make_directories(directory, self._directory_mode, self._root)

    def _write_temp(self, key: str, data: bytes | memoryview) -> str:
        temp = f"{self._temp_dir}/{aside_name(key, f'{self._unique}-{os.getpid()}-{next(self._counter)}')}"
        try:
            fd = os.open(temp, _WRITE_FLAGS, self._file_mode)
        except FileNotFoundError:
            self._make_dirs(self._temp_dir)
            fd = os.open(temp, _WRITE_FLAGS, self._file_mode)
        try:
            rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
            while rest:
                rest = rest[os.write(fd, rest) :]
            self._fsync(fd)
        except BaseException:
            os.unlink(temp)
            raise
        finally:
            os.close(fd)
        return temp

    def _publish(self, temp: str, path: str, key: str, data: bytes | memoryview) -> None:
        directory = self._open_dir(os.path.dirname(path))
        try:
            self._link(temp, path, key, data)
            self._fsync(directory)
        finally:
            os.close(directory)

    def _link(self, temp: str, path: str, key: str, data: bytes | memoryview) -> None:
        try:
            self._link_file(temp, path)
        except FileExistsError:
            with open(os.open(path, _BLOB_FLAGS), "rb") as held:
                is_file = stat_module.S_ISREG(os.fstat(held.fileno()).st_mode)
                if not is_file or held.read() != bytes(data):
                    raise BlobExists(f"blob {key} exists with other bytes; keys are single-use") from None
                # The first attempt may have crashed before its sync: only now is it durable for sure.
                self._fsync(held.fileno())

    def _open_dir(self, directory: str) -> int:
        """Open `directory`, made and durable up to the root. Its inode tells whether it was made anew since."""
        try:
            fd = os.open(directory, _READ_FLAGS)
        except FileNotFoundError:
            self._make_dirs(directory)
            fd = os.open(directory, _READ_FLAGS)
        inode = os.fstat(fd).st_ino
        with self._lock:
            known = self._known.get(directory) == inode
        if not known:
            try:
                self._sync_parents(directory)
            except OSError:
                os.close(fd)
                raise
            with self._lock:
                if len(self._known) >= KNOWN_DIRS_MAX:
                    self._known.clear()
                self._known[directory] = inode
        return fd

    def _sync_parents(self, directory: str) -> None:
        while directory != self._root:
            directory = os.path.dirname(directory)
            fd = os.open(directory, _READ_FLAGS)
            try:
                self._fsync(fd)
            finally:
                os.close(fd)

    def _forget(self, directory: str) -> None:
        with self._lock:
            self._known.pop(directory, None)

    def _begin_put(self, directory: str) -> None:
        with self._lock:
            self._putting[directory] = self._putting.get(directory, 0) + 1

    def _end_put(self, directory: str) -> None:
        with self._lock:
            self._putting[directory] -= 1
            if not self._putting[directory]:
                del self._putting[directory]

    def _prune(self, directory: str) -> None:
        """Remove `directory` and its parents as far as they are empty and no put of this store is under way there."""
        while directory != self._root:
            with self._lock:
                below = directory + "/"
                if any(each == directory or each.startswith(below) for each in self._putting):
                    return
                try:
                    os.rmdir(directory)
                except OSError:
                    return
                self._known.pop(directory, None)
            directory = os.path.dirname(directory)

    def _walk(self, below: str, prefix: str) -> Iterator[BlobStat]:
        # A directory sorts as its name and a slash: then the walk is in the order of whole keys.
        found: list[tuple[str, os.DirEntry[str]]] = []
        try:
            with os.scandir(f"{self._root}/{below}") as entries:
                for entry in entries:
                    name = below + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                    if entry.name not in _NOT_OURS and (name.startswith(prefix) or prefix.startswith(name)):
                        found.append((name, entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise BlobUnavailable(f"blob directory {self._root}/{below} cannot be listed: {error}") from error
        for name, entry in sorted(found, key=lambda pair: pair[0]):
            if name.endswith("/"):
                yield from self._walk(name, prefix)
            elif name.startswith(prefix):
                held = _stat_of(entry)
                if held is not None:
                    yield BlobStat(name, held.st_size, held.st_mtime_ns // 1_000_000)

    def _sweep(self) -> None:
        oldest = self._now_s() - STALE_TEMP_S
        with contextlib.suppress(OSError), os.scandir(self._temp_dir) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)


def _regular(fd: int, key: str) -> os.stat_result:
    """Of an open file. Raises BlobNotFound: it is a pipe, a device or a directory, so no put has made it."""
    found = os.fstat(fd)
    if not stat_module.S_ISREG(found.st_mode):
        raise BlobNotFound(f"no blob {key}: what lies there is no regular file")
    return found


def _stat_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None: it is gone, or is no regular file. `stat` finds no blob there either."""
    try:
        found = entry.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise BlobUnavailable(f"blob file {entry.path} cannot be looked at: {error}") from error
    return found if stat_module.S_ISREG(found.st_mode) else None


def _read_exactly(fd: int, key: str, start: int, length: int) -> bytes:
    pieces: list[bytes] = []
    while length:
        piece = os.pread(fd, length, start)
        if not piece:
            raise BlobUnavailable(f"blob {key} ended early at byte {start}; is its file system healthy?")
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextlib.contextmanager
def _clashes_named(key: str) -> Iterator[None]:
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise BlobMisconfigured(f"blob key {key} needs a file where a directory is, or the reverse") from error


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise BlobNotFound(f"no blob {key}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise BlobNotFound(f"no blob {key}: what lies there is no regular file") from error
        said = f"{error.strerror} ({errno.errorcode.get(error.errno or 0)})"
        if error.errno in _NOT_WRITABLE:
            raise BlobNotWritable(f"blob {key} was not written, {_NOT_WRITABLE[error.errno]}: {said}") from error
        raise BlobUnavailable(f"blob {key}: {said}") from error
