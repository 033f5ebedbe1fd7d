"""Standard streams of a command, and files that are written atomically."""

from __future__ import annotations

import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from blob.private_files import replace_file
from persist.core.errors import InvalidUsage

# Standard streams, also if one was closed or output cannot be written.

_IN, _OUT, _ERR = 0, 1, 2


class OutputLost(OSError):
    """Standard output cannot be written: its disk is full, or it was closed."""


class _Output(io.FileIO):
    """Standard output. Its errors are OutputLost, to distinguish them from errors of other files."""

    def __init__(self) -> None:
        super().__init__(_OUT, "w", closefd=False)

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error


def take_streams() -> None:
    """Prepare the standard streams of this process. Call it once, before anything else.

    A closed stream is replaced by one that fails when it is used; otherwise a file opened later would get its
    descriptor, and the output. Characters that standard output cannot encode are escaped.
    """
    for number, mode in ((_IN, os.O_WRONLY), (_OUT, os.O_RDONLY), (_ERR, os.O_WRONLY)):
        _fill(number, mode)
    before = sys.stdout
    out = io.TextIOWrapper(
        io.BufferedWriter(_Output()),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=os.isatty(_OUT) or getattr(before, "write_through", False),  # as PYTHONUNBUFFERED asks
    )
    if before is not None:
        before.flush()
    sys.stdout = out
    if sys.stdin is None:
        sys.stdin = open(_IN, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


def drop_output(stream: TextIO) -> None:
    """Discard output that could not be written, so that the exit of the process does not retry it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fill(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        descriptor = os.open(os.devnull, mode)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)


# Files that commands write: atomically if they are regular; pipes and devices get the bytes as they come.

STDOUT = "-"
NAME_BYTES_KEPT = 200  # of the file name in the temporary one: file systems allow 255, and it has a suffix


def output_path(name: str) -> Path:
    """The file that a command writes; `-` is standard output. Raises InvalidUsage if that is a terminal."""
    if name != STDOUT:
        return Path(name)
    if os.isatty(_OUT):
        raise InvalidUsage(f"{STDOUT} is standard output, which is a terminal: redirect it, or name a file")
    return Path("/dev/stdout")


@contextmanager
def replacing(path: Path, *, owner_only: bool = False) -> Iterator[BinaryIO]:
    """Write a file that takes this name once it is complete; after an error it is removed. Raises InvalidUsage.

    The target of a symbolic link is replaced, not the link. An existing file keeps its mode and owner. A pipe or a
    device is written directly. `owner_only`: only the owner can read the file, whatever its mode was.
    """
    if path.is_dir():
        raise InvalidUsage(f"{str(path)!r} is a directory: name a file in it")
    try:
        existing: os.stat_result | None = None
        with suppress(FileNotFoundError):  # also for a dangling symbolic link
            existing = os.stat(path)
        if existing is not None and (is_stdout(path) or not stat.S_ISREG(existing.st_mode)):
            # Standard output is not reopened: that would write from its start, also after `>>` in a shell.
            with open(os.dup(_OUT) if is_stdout(path) else path, "wb") as out:
                yield out
        else:
            with _temporary(Path(os.path.realpath(path)), existing, owner_only) as out:
                yield out
    except OSError as error:
        raise InvalidUsage(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def is_stdout(path: Path) -> bool:
    """Whether this is the file, pipe or terminal that standard output is, such as /dev/stdout."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(_OUT))
    except OSError:  # one of them does not exist
        return False


@contextmanager
def _temporary(path: Path, existing: os.stat_result | None, owner_only: bool) -> Iterator[BinaryIO]:
    mode = 0o600 if owner_only or existing is not None else 0o666  # the mode of an existing file is copied below
    prefix = os.fsdecode(os.fsencode(path.name)[:NAME_BYTES_KEPT])
    temporary = path.with_name(f".{prefix}.{secrets.token_hex(8)}.part")
    while temporary.exists():  # a killed process may have left it behind
        temporary = path.with_name(f".{prefix}.{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as out:
            if existing is not None and not owner_only:
                with suppress(PermissionError):  # only root may change owners
                    os.fchown(descriptor, existing.st_uid, existing.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(existing.st_mode) & 0o777)
            yield out
            out.flush()
            os.fsync(descriptor)
        replace_file(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
