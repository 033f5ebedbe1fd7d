"""A caller may be interrupted (Ctrl-C) in the middle of the commit path: no other caller waits for it or fails by it.

The interruption is made by a trace function, at one place after another, until the call ends without one.
"""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from persist.commit import command_queue, committer
from persist.commit.committer import Machine
from persist.core import commands as c
from persist.core.errors import Indeterminate
from persist.core.frontier import Antichain
from tests.support.location import client_of, memory_location
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
FILES = (committer.__file__, command_queue.__file__)
PLACES_MAX = 500


class Interruption:
    """Raises KeyboardInterrupt at the n-th place of the commit path where Python looks for signals: after a call."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.struck = False
        self._was: dict[FrameType, str] = {}  # the instruction before

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.struck:
            before = self._was.get(frame, "")
            self._was[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # What follows the call in `with lock: return call()` lies outside of the `with`; a signal never does.
            if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and self._was[frame] != "SWAP":
                self.left -= 1
                if self.left < 0:
                    self.struck = True
                    raise KeyboardInterrupt
        return self


class Caller(threading.Thread):
    """One command on a thread of its own, interrupted at a place of the commit path, or never."""

    def __init__(self, machine: Machine, upper: int, at: int | None = None) -> None:
        super().__init__(daemon=True)
        self._machine = machine
        self._command = c.AdvanceUpper(Antichain(upper))
        self.interruption = None if at is None else Interruption(at)
        self.outcome: object = None

    def run(self) -> None:
        sys.settrace(self.interruption)
        try:
            self.outcome = self._machine.apply(self._command)
        except BaseException as error:
            self.outcome = error
        finally:
            sys.settrace(None)

    def ended(self) -> object:
        self.join(WAIT_S)
        assert not self.is_alive(), "a caller waits for ever"
        return self.outcome


@pytest.fixture
def shard() -> Machine:
    location = memory_location()
    client_of(location).create_shard("orders", SCHEMA, ["id"])
    return location.machine("orders")


def test_a_leader_may_be_interrupted_at_any_place(shard: Machine) -> None:
    for at in range(PLACES_MAX):
        caller = Caller(shard, 2 * at + 1, at)
        caller.start()
        outcome = caller.ended()
        after = Caller(shard, 2 * at + 2)
        after.start()
        assert isinstance(after.ended(), c.Appended), after.outcome
        assert caller.interruption is not None
        if not caller.interruption.struck:
            assert isinstance(outcome, c.Appended)
            return
        assert isinstance(outcome, KeyboardInterrupt)
    raise AssertionError(f"the commit path has more than {PLACES_MAX} places")


@pytest.mark.parametrize("who", ["leader", "waiter"])
def test_nobody_waits_for_a_caller_that_is_interrupted(
    shard: Machine, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three callers: the first commits, the other two wait for it. One of the three is interrupted."""
    uppers = itertools.count(1)
    for at in range(PLACES_MAX):
        go = threading.Event()
        real = shard._commit

        def held(*given: Any, go: threading.Event = go, real: Any = real) -> Any:
            go.wait(WAIT_S)
            return real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(shard, "_commit", held)
            first = Caller(shard, next(uppers), at if who == "leader" else None)
            second = Caller(shard, next(uppers), at if who == "waiter" else None)
            third = Caller(shard, next(uppers))
            for caller in (first, second, third):
                caller.start()
            go.set()
            outcomes = [caller.ended() for caller in (first, second, third)]
        interrupted = first if who == "leader" else second
        assert interrupted.interruption is not None
        for caller, outcome in zip((first, second, third), outcomes, strict=True):
            if caller is interrupted and interrupted.interruption.struck:
                assert isinstance(outcome, KeyboardInterrupt)
            else:
                assert isinstance(outcome, (c.Appended, Indeterminate)), outcome
        if not interrupted.interruption.struck:
            return
    raise AssertionError(f"the commit path has more than {PLACES_MAX} places")
