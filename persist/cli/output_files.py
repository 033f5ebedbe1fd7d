"""Standard streams of a command, and files that are written whole or not at all."""

from __future__ import annotations

import errno
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

# Standard input, output and error of a command: also where one was closed, and where output cannot be written.


_IN, _OUT, _ERR = 0, 1, 2


class OutputLost(OSError):
    """Standard output cannot be written: its disk is full, or it was closed."""


class _Output(io.FileIO):
    """Standard output. What goes wrong with it is told apart from what goes wrong with other files."""

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
    """Make the streams of this process such that a command can use them. To be called once, before all else.

    A stream that was closed fails when it is used, and no file that is opened later takes its number: it would get
    what is printed. What standard output has no character for is shown as an escape.
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
    """Let go of what could not be written, so that the end of the process does not try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fill(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        found = os.open(os.devnull, mode)
        if found != number:
            os.dup2(found, number)
            os.close(found)
        os.set_inheritable(number, True)


# Files that commands write: whole or not at all, where they are regular ones; others get the bytes as they come.


NAME_BYTES_KEPT = 200  # of the name in that of the temporary file: file systems take 255, and it has more parts
ATTEMPTS = 100
_STDOUT = 1


@contextmanager
def replacing(path: Path, *, owner_only: bool = False) -> Iterator[BinaryIO]:
    """A file that takes this name once it is whole; after an error nothing is left of it. Raises InvalidUsage.

    What a symbolic link names is replaced, not the link, and a file keeps its mode and its owner. A pipe or a device
    is written into. `owner_only`: nobody else may read the file, whatever it was before.
    """
    if path.is_dir():
        raise InvalidUsage(f"{str(path)!r} is a directory: name a file in it")
    try:
        there = _looked_at(path)
        if there is not None and (is_stdout(path) or not stat.S_ISREG(there.st_mode)):
            with _direct(path) as out:
                yield out
        else:
            with _beside(Path(os.path.realpath(path)), there, owner_only) as out:
                yield out
    except OSError as error:
        raise InvalidUsage(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def is_stdout(path: Path) -> bool:
    """Whether this is the file, pipe or terminal that is standard output, as /dev/stdout is."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(_STDOUT))
    except OSError:  # one of them is not there
        return False


def _looked_at(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:  # also where a symbolic link names what is not there
        return None


def _direct(path: Path) -> BinaryIO:
    # Standard output is not opened again: that would begin at its start, also where the shell has said `>>`.
    return open(os.dup(_STDOUT) if is_stdout(path) else path, "wb")


@contextmanager
def _beside(path: Path, there: os.stat_result | None, owner_only: bool) -> Iterator[BinaryIO]:
    is_private = owner_only or there is not None  # what is there says below who may read it
    descriptor, made = _made(path, 0o600 if is_private else 0o666)
    try:
        with open(descriptor, "wb") as out:
            if there is not None and not owner_only:
                with suppress(PermissionError):  # only root gives files away
                    os.fchown(descriptor, there.st_uid, there.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(there.st_mode) & 0o777)
            yield out
            out.flush()
            os.fsync(descriptor)
        replace_file(made, path)
    finally:
        with suppress(OSError):
            made.unlink()


def _made(path: Path, mode: int) -> tuple[int, Path]:
    """A file of a fresh name in the same directory. A process that was killed may have left others."""
    kept = os.fsdecode(os.fsencode(path.name)[:NAME_BYTES_KEPT])
    for _ in range(ATTEMPTS):
        made = path.with_name(f".{kept}.{secrets.token_hex(8)}.part")
        with suppress(FileExistsError):
            return os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), made
    raise FileExistsError(errno.EEXIST, "its temporary names are all taken", str(path))
