"""Nothing that a server started outlives it, and SIGTERM ends every command whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import persist
from tests.support.examples import size
from tests.support.forked import Module
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until


def read_proc(path: Path) -> bytes:
    """A file of /proc; empty where the process or thread has ended, which may happen at any moment."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_gone(pid: int) -> bool:
    stat = read_proc(Path(f"/proc/{pid}/stat"))
    return not stat or stat.rpartition(b")")[2].split()[0] == b"Z"


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: is_gone(pid), f"the end of process {pid}")


class Program:
    """A program of `signal_programs`, which runs, and the lines that it and its children have written."""

    def __init__(self, directory: Path, *words: str) -> None:
        self._said = directory / "said"
        self._said.touch()
        self.process = Module("tests.support.signal_programs", words, said=self._said)

    @property
    def lines(self) -> list[str]:
        return self._said.read_text().splitlines()

    def child(self) -> int:
        """The process id that it wrote."""
        wait_until(lambda: any(map(str.isdecimal, self.lines)), "it has a child")
        return int(next(filter(str.isdecimal, self.lines)))

    def wait_for(self, text: str) -> None:
        wait_until(lambda: any(text in line for line in self.lines), text)


def test_maintenance_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    persist.connect(f"persist://{tmp_path}/x").close()  # makes the location
    parent = Program(tmp_path, "maintain", f"{tmp_path}/x", "sleep")
    child = parent.child()
    parent.wait_for("running")
    assert not is_gone(child)
    parent.process.kill()
    wait_until_gone(child)


@pytest.mark.smoke
@pytest.mark.proof
def test_maintenance_ends_with_a_parent_that_is_gone_before_it_can_look(tmp_path: Path) -> None:
    """The parent ends at once; its child has not even begun to import anything."""
    persist.connect(f"persist://{tmp_path}/x").close()
    parent = Program(tmp_path, "maintain", f"{tmp_path}/x", "exit")
    wait_until_gone(parent.child())
    assert parent.lines[-1].endswith(", which started this one, has exited")


@pytest.mark.smoke
@pytest.mark.proof
def test_maintenance_of_a_server_that_is_killed_as_soon_as_it_is_up_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rpc.cli", "serve", "--dir", f"{tmp_path}/x", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"http://")
    process.kill()
    process.communicate(timeout=WAIT_S)  # returns when nobody holds the other end of its standard error any more


def test_a_child_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    parent = Program(tmp_path, "be stubborn")
    child = parent.child()
    parent.wait_for("watching")
    parent.process.kill()
    wait_until_gone(child)


SERVE = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0"]


def test_sigterm_between_ready_and_listening_is_not_swallowed(tmp_path: Path) -> None:
    server = Program(tmp_path, "end when ready", f"persist://{tmp_path}/x")
    assert server.process.wait(WAIT_S) == 0, server.lines


@pytest.mark.smoke
@pytest.mark.proof
def test_sigterm_at_any_point_of_the_start_ends_a_server_and_its_children(tmp_path: Path) -> None:
    for number in range(size(2, 6)):
        command = [*SERVE, "--dir", f"{tmp_path}/x"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(0.5 * number)
        process.terminate()
        _, said = process.communicate(timeout=WAIT_S)  # returns when no child holds its standard error any more
        assert process.returncode in (0, -signal.SIGTERM), said


@pytest.mark.smoke
@pytest.mark.proof
def test_impatient_signals_do_not_leave_maintenance_behind(tmp_path: Path) -> None:
    """The second signal killed a server that was still ending its children."""
    process = subprocess.Popen([*SERVE, "--dir", f"{tmp_path}/x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None:
        process.terminate()
        time.sleep(0.01)
    process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, -signal.SIGTERM), "a signal may still strike while Python itself ends"


def test_sigterm_ends_the_loop_of_maintenance_at_any_line(tmp_path: Path) -> None:
    """Also where the loop holds the lock of the event by which it is told to stop."""
    loops = Program(tmp_path, "interrupt at any line")
    assert loops.process.wait() == 0, loops.lines


def children_of(server: Server) -> list[int]:
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    every = [int(pid) for task in tasks for pid in read_proc(task).split()]
    return [pid for pid in every if b"maintain" in read_proc(Path(f"/proc/{pid}/cmdline"))]


def test_maintenance_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """Nobody did: from then on no shard of the location was merged or collected."""
    with Server(tmp_path / "x", maintenance="own") as server:
        wait_until(lambda: bool(children_of(server)), "maintenance is started")
        (first,) = children_of(server)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: children_of(server) not in ([], [first]), "it is started again")
        assert server.stop() == 0
    assert "maintenance ended; it is restarted" in server.said()
