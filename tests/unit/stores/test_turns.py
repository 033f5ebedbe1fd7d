"""Processes that would race for a commit take turns; nothing depends on it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consensus.advisory_locks import DISTRUST_S, WAITERS_MAX, FileTurns, Turn
from consensus.sqlite import SqliteConsensus
from tests.support.turns import holding
from tests.support.waiting import WAIT_S, wait_until

HOLDER = """
import sys
from consensus.advisory_locks import FileTurns
turns = FileTurns(sys.argv[1])
with turns.turn(sys.argv[2], 0) as turn:
    print(turn.name, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(path: Path, key: str = "orders") -> Iterator[subprocess.Popen[str]]:
    """Another process has that turn."""
    with holding(HOLDER, str(path), key) as holder:
        yield holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def turns(path: Path) -> Iterator[FileTurns]:
    opened = FileTurns(str(path))
    yield opened
    opened.close()


def test_a_turn_is_had_by_one_process_and_given_back(path: Path, turns: FileTurns) -> None:
    with held(path):
        with turns.turn("orders", 0) as turn:
            assert turn is Turn.NONE
        with turns.turn("others", 0) as turn:
            assert turn is Turn.AT_ONCE
    with turns.turn("orders", 0) as turn:
        assert turn is Turn.AT_ONCE, "the system gives back what a killed process had"
    with held(path):
        pass  # it was given back here, too


def test_who_waits_is_told_that_others_had_theirs(path: Path, turns: FileTurns) -> None:
    with held(path) as holder:
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        with turns.turn("orders", WAIT_S) as turn:
            assert turn in (Turn.WAITED, Turn.AT_ONCE)
            if turn is Turn.WAITED:
                holder.wait(WAIT_S)


def test_nobody_waits_long_for_a_process_that_was_stopped(path: Path) -> None:
    now = [0.0]
    turns = FileTurns(str(path), monotonic=lambda: now[0])
    with held(path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        with turns.turn("orders", 0.01) as turn:
            assert turn is Turn.NONE
        with turns.turn("orders", WAIT_S) as turn:
            assert turn is Turn.NONE, "nor does who comes next, for a while"
        now[0] += DISTRUST_S
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(WAIT_S)
        with turns.turn("orders", WAIT_S) as turn:
            assert turn is not Turn.NONE
    turns.close()


def test_a_turn_that_comes_too_late_is_given_back_at_once(path: Path, turns: FileTurns) -> None:
    with held(path), turns.turn("orders", 0.01) as turn:
        assert turn is Turn.NONE
    other = FileTurns(str(path))

    def is_free() -> bool:
        with held_or_not(path) as found:
            return found

    wait_until(is_free, "the late turn is given back")
    other.close()


@contextmanager
def held_or_not(path: Path) -> Iterator[bool]:
    """Whether another process can have the turn now."""
    command = [sys.executable, "-c", HOLDER, str(path), "orders"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            yield holder.stdout.readline() == "AT_ONCE\n"
        finally:
            holder.kill()


def test_the_threads_that_wait_are_bounded(path: Path) -> None:
    now = [0.0]
    turns = FileTurns(str(path), monotonic=lambda: now[0])
    with held(path):
        for _ in range(WAITERS_MAX + 3):
            with turns.turn("orders", 0.001) as turn:
                assert turn is Turn.NONE
            now[0] += DISTRUST_S
        assert turns._waiters <= WAITERS_MAX
    wait_until(lambda: turns._waiters == 0, "all of them have ended")
    turns.close()


def test_where_no_file_can_be_made_everybody_has_each_turn(tmp_path: Path) -> None:
    turns = FileTurns(str(tmp_path / "nowhere" / "turns"))
    with turns.turn("orders", WAIT_S) as turn:
        assert turn is Turn.AT_ONCE
    turns.close()


def test_a_file_of_another_user_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be opened was taken for a turn that somebody has, and each commit ended by that error."""

    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(os, "open", refused)
    turns = FileTurns(str(tmp_path / "turns"))
    with turns.turn("orders", WAIT_S) as turn:
        assert turn is Turn.AT_ONCE
    turns.close()


def test_a_closed_one_keeps_nobody_waiting(path: Path, turns: FileTurns) -> None:
    with turns.turn("orders", 0):
        turns.close()
    with turns.turn("orders", WAIT_S) as turn:
        assert turn is Turn.AT_ONCE


def test_a_database_file_has_turns_beside_it_and_only_its_owner_opens_them(tmp_path: Path) -> None:
    store = SqliteConsensus(str(tmp_path / "log.db"))
    with store.turn("orders", 0) as turn:
        assert turn is Turn.AT_ONCE
    [file] = tmp_path.glob("log.db-turns")
    assert file.stat().st_mode & 0o777 == 0o600
    store.close()
