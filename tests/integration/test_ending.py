"""Nothing that a server started outlives it, and SIGTERM ends every command whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.examples import size
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

GRACE_S = 1.0


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


def started(program: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that runs `program`, and the number that it printed first: the id of a child of its own."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def closed(process: subprocess.Popen[bytes]) -> None:
    process.wait(WAIT_S)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


MAINTAINED = """
import subprocess, sys, time
from rpc.cli.serve import maintenance_command
from rpc.settings import ServerSettings
child = subprocess.Popen(maintenance_command(ServerSettings(directory={directory!r}), None))
print(child.pid, flush=True)
{then}
"""


def test_maintenance_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with Server(tmp_path / "x"):
        pass  # makes the location
    parent, child = started(MAINTAINED.format(directory=f"{tmp_path}/x", then="time.sleep(600)"))
    assert parent.stderr is not None
    assert b"running" in parent.stderr.readline()
    assert not is_gone(child)
    parent.kill()
    wait_until_gone(child)
    closed(parent)


@pytest.mark.smoke
@pytest.mark.proof
def test_maintenance_ends_with_a_parent_that_is_gone_before_it_can_look(tmp_path: Path) -> None:
    """The parent ends at once; its child has not even begun to import anything."""
    with Server(tmp_path / "x"):
        pass
    parent, child = started(MAINTAINED.format(directory=f"{tmp_path}/x", then="import os; os._exit(0)"))
    wait_until_gone(child)
    assert parent.stderr is not None
    assert parent.stderr.read().endswith(b", which started this one, has exited\n")
    closed(parent)


@pytest.mark.smoke
@pytest.mark.proof
def test_maintenance_of_a_server_that_is_killed_as_soon_as_it_is_up_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rpc.cli", "serve", "--dir", f"{tmp_path}/x", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"http://")
    process.kill()
    process.communicate(timeout=WAIT_S)  # returns when nobody holds the other end of its standard error any more


STUBBORN = f"""
import os, signal, subprocess, sys, time
from persist.cli import long_running
long_running.GRACE_S = {GRACE_S}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print(child, flush=True)
    time.sleep(600)
long_running.end_with_parent(os.getppid())
print("watching", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_child_that_does_not_end_by_itself_is_killed() -> None:
    parent, child = started(STUBBORN)
    assert parent.stderr is not None
    assert parent.stderr.readline() == b"watching\n"
    parent.kill()
    wait_until_gone(child)
    closed(parent)


SERVE = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0"]
# A server that is told to end at the very moment when it is ready, before uvicorn listens to signals.
ENDED_WHEN_READY = """
import os, signal, sys
from persist.commit.location import open_location
from rpc.app import bind, serve
from rpc.settings import ServerSettings
location = open_location(sys.argv[1])
serve(location, ServerSettings(), bind("127.0.0.1", 0), lambda: os.kill(os.getpid(), signal.SIGTERM))
location.close()
print("ended", flush=True)
"""


def test_sigterm_between_ready_and_listening_is_not_swallowed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED_WHEN_READY, f"persist://{tmp_path}/x"]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr.decode()


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


# Runs a loop of maintenance again and again; each time SIGTERM comes one line of Python later than the time before,
# counted over the lines of the loop and of the events that it waits for.
INTERRUPTED = """
import signal, sys, threading, faulthandler
import compactor.loop
from compactor.loop import Loop
from persist.cli.long_running import on_signals
from persist.commit.location import open_stores

FILES = (compactor.loop.__file__, threading.__file__)
location = open_stores("mem:", "mem:")
rounds = 0
compactor.loop.RESCAN_S = 0.0001

def interrupted(at):
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        lines += 1
        if lines == at:
            signal.raise_signal(signal.SIGTERM)
        return trace

    compactor.loop.INTERVAL_S = 0.0001
    loop = Loop(location, lambda name: None)
    on_signals(loop.stop)
    sys.settrace(trace)
    try:
        loop.run()
    finally:
        sys.settrace(None)

for at in range(1, 400):
    faulthandler.dump_traceback_later({wait}, exit=True)
    interrupted(at)
print("ended", flush=True)
"""


def test_sigterm_ends_the_loop_of_maintenance_at_any_line() -> None:
    """Also where the loop holds the lock of the event by which it is told to stop."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED.replace("{wait}", str(WAIT_S))], capture_output=True)
    assert done.stdout == b"ended\n", done.stderr.decode()


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    every = [int(pid) for task in tasks for pid in read_proc(task).split()]
    return [pid for pid in every if b"maintain" in read_proc(Path(f"/proc/{pid}/cmdline"))]


def test_maintenance_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """Nobody did: from then on no shard of the location was merged or collected."""
    command = [*SERVE, "--dir", f"{tmp_path}/x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"http://")
    wait_until(lambda: bool(children_of(process)), "maintenance is started")
    (first,) = children_of(process)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children_of(process) not in ([], [first]), "it is started again")
    process.terminate()
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert b"maintenance ended; it is restarted" in said
