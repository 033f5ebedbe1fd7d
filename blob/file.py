"""Blobs as files under one directory, for one machine (or a shared file system with hard links).

Its files and directories are private to their owner, unless the root grants more: see `_adopt_root_mode`.

A put writes `~tmp/<first segment of its key>-<unique>`, syncs it, links it to its key (a link never overwrites, so
write-once holds between processes) and syncs the key's directory: one fsync of a file, one of a directory. `~` cannot
occur in a key, so temporary files are never listed as blobs, only as unfinished puts; those of crashed writers are
deleted when the store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat as stat_module
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blob.errors import BlobError, BlobExists, BlobMisconfigured, BlobNotFound, BlobNotWritable, BlobUnavailable
from blob.interface import (
    Blob,
    BlobStat,
    Unfinished,
    check_key,
    check_prefix,
    check_range,
    is_temp_of,
    temp_name,
    walk_directories,
)
from blob.private_files import DIRECTORY_MODE, FILE_MODE, make_directories

STALE_TEMP_S = 3600.0  # temporary files older than this many seconds belong to a crashed writer and are deleted at open
DURABLE_DIRS_MAX = 4096  # directories that are remembered as durable; then the set is cleared: that costs a few fsyncs
MAKE_ATTEMPTS_MAX = 100  # how often a put recreates its directory when deletes of other processes prune it as empty

_TEMP_DIR = "~tmp"
_NOT_BLOBS = frozenset({_TEMP_DIR, "lost+found"})  # skipped by listings
_NOT_WRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is full",
    errno.EROFS: "the file system is read-only",
}
_NO_FILE = {errno.ELOOP, errno.ENXIO}  # a cycle of links; a socket
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_BLOB_FLAGS = _READ_FLAGS | getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for its writer
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class FileBlob(Blob):
    """Files below `root`, which is created if it is missing. `now_s` (Unix time) decides which temp files are stale.

    Without `makes` nothing is created or deleted at open; BlobMisconfigured if the directory does not exist.
    `fsync` and `link` are the system calls that make a put durable; tests record their order.
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
        self._durable_dirs: dict[str, int] = {}  # directory -> inode
        self._active_puts: Counter[str] = Counter()  # by directory
        self._counter = itertools.count()
        self._unique = os.urandom(8).hex()
        self._directory_mode, self._file_mode = DIRECTORY_MODE, FILE_MODE
        if not makes:
            if not os.path.isdir(self._root):
                raise BlobMisconfigured(f"blob directory {self._root} does not exist")
            self._adopt_root_mode()
            return
        try:
            make_directories(self._root)
            self._adopt_root_mode()
            self._make_dirs(self._temp_dir)
        except OSError as error:
            if error.errno in _NOT_WRITABLE and os.path.isdir(self._root):
                return  # existing blobs can be read; a put reports the problem
            raise BlobMisconfigured(f"blob directory {self._root} cannot be made: {error.strerror}") from error
        self._delete_stale_temps()

    @property
    def url(self) -> str:
        return Path(self._root).as_uri()

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(check_key(key))
        with _translate_errors(key), _translate_clashes(key):
            temp = self._write_temp(key, data)
            directory = os.path.dirname(path)
            try:
                with self._active_put(directory):
                    for _ in range(MAKE_ATTEMPTS_MAX):
                        try:
                            self._publish(temp, path, key, data)
                            return
                        except FileNotFoundError:
                            # A delete of another process pruned the directory as empty; recreate it.
                            self._forget_directory(directory)
                    raise BlobUnavailable(f"blob {key}: its directory was removed repeatedly; put it again")
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)

    def get(self, key: str) -> bytes:
        with self._open_blob(key) as (fd, size):
            return _read_exactly(fd, key, 0, size)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        with self._open_blob(key) as (fd, size):
            if start + length > size:
                raise BlobNotFound(f"blob {key} ends at byte {size}, before {start + length}")
            return _read_exactly(fd, key, start, length)

    @contextlib.contextmanager
    def _open_blob(self, key: str) -> Iterator[tuple[int, int]]:
        """The descriptor and the size of a blob's file."""
        path = self._path(check_key(key))
        with _translate_errors(key):
            fd = os.open(path, _BLOB_FLAGS)
            try:
                yield fd, _file_size(fd, key)
            finally:
                os.close(fd)

    def stat(self, key: str) -> BlobStat | None:
        path = self._path(check_key(key))
        try:
            with _translate_errors(key):
                return _to_stat(key, os.stat(path))
        except BlobNotFound:
            return None

    def delete(self, keys: Sequence[str]) -> None:
        # Not synced: a blob that reappears after a crash is an orphan, and the orphan sweep deletes it.
        paths = [self._path(check_key(key)) for key in keys]
        for key, path in zip(keys, paths, strict=True):
            with contextlib.suppress(BlobNotFound), _translate_errors(key):
                os.unlink(path)
        for directory in {os.path.dirname(path) for path in paths}:
            self._prune(directory)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return walk_directories(prefix, self._scan, _stat_entry)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        check_prefix(prefix)
        with contextlib.suppress(BlobNotFound), _translate_errors(_TEMP_DIR), os.scandir(self._temp_dir) as entries:
            for entry in entries:
                if is_temp_of(entry.name, prefix):
                    with contextlib.suppress(FileNotFoundError):  # completed meanwhile
                        stat = entry.stat()
                        where = f"{_TEMP_DIR}/{entry.name}"
                        yield Unfinished(where, stat.st_size, stat.st_mtime_ns // 1_000_000, entry.name)

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:
        for put in unfinished:
            with contextlib.suppress(BlobNotFound), _translate_errors(put.where):
                os.unlink(f"{self._temp_dir}/{os.path.basename(put.token)}")

    def local_path(self, key: str) -> str | None:
        return self._path(check_key(key))

    def check(self) -> None:
        try:
            super().check()
        except (BlobMisconfigured, BlobNotWritable):
            raise
        except BlobError as error:
            raise BlobMisconfigured(f"blob directory {self._root} does not work: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._durable_dirs.clear()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _adopt_root_mode(self) -> None:
        """Give new blobs the access rights of the root, so that a store can be shared with a group."""
        mode = stat_module.S_IMODE(os.stat(self._root).st_mode) & 0o777
        self._directory_mode, self._file_mode = mode | DIRECTORY_MODE, mode & 0o666 | FILE_MODE

    def _make_dirs(self, directory: str) -> None:
        """Create a directory below the root, and its parents."""
        make_directories(directory, self._directory_mode, self._root)

    def _write_temp(self, key: str, data: bytes | memoryview) -> str:
        temp = f"{self._temp_dir}/{temp_name(key, f'{self._unique}-{os.getpid()}-{next(self._counter)}')}"
        try:
            fd = os.open(temp, _WRITE_FLAGS, self._file_mode)
        except FileNotFoundError as error:
            if not os.path.isdir(self._root):  # moved or unmounted: do not begin another store in its place
                raise BlobUnavailable(f"blob {key} was not written: the directory of the store is gone") from error
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
            with open(os.open(path, _BLOB_FLAGS), "rb") as existing:
                is_file = stat_module.S_ISREG(os.fstat(existing.fileno()).st_mode)
                if not is_file or existing.read() != bytes(data):
                    raise BlobExists(f"blob {key} exists with other bytes; keys are single-use") from None
                # The first attempt may have crashed before its fsync.
                self._fsync(existing.fileno())

    def _open_dir(self, directory: str) -> int:
        """Open `directory`, created and durable up to the root. A changed inode shows that it was recreated."""
        try:
            fd = os.open(directory, _READ_FLAGS)
        except FileNotFoundError:
            self._make_dirs(directory)
            fd = os.open(directory, _READ_FLAGS)
        inode = os.fstat(fd).st_ino
        with self._lock:
            is_durable = self._durable_dirs.get(directory) == inode
        if not is_durable:
            try:
                self._sync_parents(directory)
            except OSError:
                os.close(fd)
                raise
            with self._lock:
                if len(self._durable_dirs) >= DURABLE_DIRS_MAX:
                    self._durable_dirs.clear()
                self._durable_dirs[directory] = inode
        return fd

    def _sync_parents(self, directory: str) -> None:
        while directory != self._root:
            directory = os.path.dirname(directory)
            fd = os.open(directory, _READ_FLAGS)
            try:
                self._fsync(fd)
            finally:
                os.close(fd)

    def _forget_directory(self, directory: str) -> None:
        with self._lock:
            self._durable_dirs.pop(directory, None)

    @contextlib.contextmanager
    def _active_put(self, directory: str) -> Iterator[None]:
        """Keep `directory` from being pruned by this store during the `with`."""
        with self._lock:
            self._active_puts[directory] += 1
        try:
            yield
        finally:
            with self._lock:
                self._active_puts[directory] -= 1
                if not self._active_puts[directory]:
                    del self._active_puts[directory]

    def _prune(self, directory: str) -> None:
        """Remove `directory` and its parents while they are empty and have no active put of this store."""
        while directory != self._root:
            with self._lock:
                below = directory + "/"
                if any(active == directory or active.startswith(below) for active in self._active_puts):
                    return
                try:
                    os.rmdir(directory)
                except OSError:
                    return
                self._durable_dirs.pop(directory, None)
            directory = os.path.dirname(directory)

    def _scan(self, directory: str) -> Sequence[tuple[str, bool, os.DirEntry[str]]]:
        try:
            with os.scandir(f"{self._root}/{directory}") as entries:
                names = ((entry.name, entry.is_dir(follow_symlinks=False), entry) for entry in entries)
                return [entry for entry in names if entry[0] not in _NOT_BLOBS]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise BlobUnavailable(f"blob directory {self._root}/{directory} cannot be listed: {error}") from error

    def _delete_stale_temps(self) -> None:
        oldest = self._now_s() - STALE_TEMP_S
        with contextlib.suppress(OSError), os.scandir(self._temp_dir) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)


def _file_size(fd: int, key: str) -> int:
    """The size of an open file in bytes. Raises BlobNotFound for a pipe, a device or a directory, which is no blob."""
    stat = os.fstat(fd)
    if not stat_module.S_ISREG(stat.st_mode):
        raise BlobNotFound(f"no blob {key}: it is not a regular file")
    return stat.st_size


def _to_stat(key: str, stat: os.stat_result) -> BlobStat | None:
    """None unless it is a regular file."""
    return BlobStat(key, stat.st_size, stat.st_mtime_ns // 1_000_000) if stat_module.S_ISREG(stat.st_mode) else None


def _stat_entry(key: str, entry: os.DirEntry[str]) -> BlobStat | None:
    """None if the file was deleted or is not a regular file."""
    try:
        return _to_stat(key, entry.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise BlobUnavailable(f"blob file {entry.path} cannot be read: {error}") from error


def _read_exactly(fd: int, key: str, start: int, length: int) -> bytes:
    pieces: list[bytes] = []
    while length:
        piece = os.pread(fd, length, start)
        if not piece:
            raise BlobUnavailable(f"blob {key} ended early at byte {start}; check its file system")
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextlib.contextmanager
def _translate_clashes(key: str) -> Iterator[None]:
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise BlobMisconfigured(f"blob key {key} needs a file where a directory is, or the reverse") from error


@contextlib.contextmanager
def _translate_errors(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise BlobNotFound(f"no blob {key}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise BlobNotFound(f"no blob {key}: it is not a regular file") from error
        reason = f"{error.strerror} ({errno.errorcode.get(error.errno or 0)})"
        if error.errno in _NOT_WRITABLE:
            message = f"blob {key} was not written, {_NOT_WRITABLE[error.errno]}: {reason}"
            raise BlobNotWritable(message, is_read_only=error.errno == errno.EROFS) from error
        raise BlobUnavailable(f"blob {key}: {reason}") from error
