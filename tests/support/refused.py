"""What a command says of wrong words, and locations on which it has to say something."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from persist.core import errors
from rpc.cli.program import main


@contextmanager
def errors_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[errors.PersistError]]:
    """The errors of persist that are made meanwhile, in their order: a command shows their sentences alone."""
    found: list[errors.PersistError] = []
    made = errors.PersistError.__init__

    def noted(self: errors.PersistError, *args: Any, **details: Any) -> None:
        made(self, *args, **details)
        found.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(errors.PersistError, "__init__", noted)
        yield found


def check_refused(
    command: str,
    arguments: Sequence[str],
    expected: tuple[str, int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command ends by an error of the kind, and with the exit code, that is expected, and says one sentence."""
    capsys.readouterr()
    with errors_made(monkeypatch) as found:
        code = main([command, *arguments])
    told = capsys.readouterr()
    assert (found[-1].kind, code) == expected, told.err
    assert told.err.startswith(f"persist {command}: ")
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


def emptied(place: Path) -> Path:
    """The directory of a location, with nothing in it."""
    shutil.rmtree(place)
    place.mkdir()
    return place


def without(place: Path, name: str) -> Path:
    """The location without that file, or that directory."""
    if (place / name).is_dir():
        shutil.rmtree(place / name)
    else:
        (place / name).unlink()
    return place
