"""Broken builds that are each meant for one check: other checks may notice them too, but that one must.

`MEANT_FOR` says which. Seeds in which another check was faster are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import persist.parts.writer
import persist.reading
import persist.transitions
import persist.writing
from persist import commands as c
from persist import state_diff
from persist.antichain import Antichain
from persist.batch import Run
from persist.codec import encode_diff, encode_state
from persist.errors import Indeterminate, NotReadable
from persist.ids import PartId, Token, WriterId
from persist.keys import rollup_key
from persist.machine import Machine
from persist.state import State, blank_state
from persist.transitions import readers
from persist.transport import ShardView, ViewRequest
from persist.versions import Versions
from persist.versions import _with_rollup as with_rollup
from tests.simulation.host import WEATHER

Broken = AbstractContextManager[Any]
IDS_KEPT = 12  # of inline parts, before the first of them is given out again
LAG = 8
OTHER_LEASE_MS = 3_000


def retried_as_another_writer() -> Broken:
    """An insert whose outcome is not known is sent again, with the same token, by a writer who does not know it."""

    def send(transport: Any, name: str, command: Any, retry_s: float) -> Any:
        deadline = transport.clock.monotonic() + retry_s
        while True:
            try:
                return transport.apply(name, command)
            except WEATHER:
                if transport.clock.monotonic() > deadline:
                    raise
                transport.clock.sleep(0.1)
                if isinstance(command, c.Insert):
                    command = replace(
                        command, writer=WriterId.mint(transport.ids), runs=renamed(command.runs, transport)
                    )
                    with suppress(*WEATHER):
                        transport.apply(name, c.RegisterWriter(command.writer, OTHER_LEASE_MS))

    def renamed(runs: tuple[Run, ...], transport: Any) -> tuple[Run, ...]:
        return tuple(Run(tuple(replace(part, id=PartId.mint(transport.ids)) for part in run.parts)) for run in runs)

    return _all(
        patch.object(persist.writing, "send", send),
        # Without this the committer settles nearly every unknown outcome before anybody has to retry.
        patch.object(Machine, "_is_ours", _give_up),
    )


def part_ids_come_round() -> Broken:
    """Inline parts take the ids of parts that are long gone."""
    given: list[PartId] = []
    real = persist.parts.writer.encode_inline

    def encode_inline(table: Any, schema: Any, schema_id: int, part_id: PartId) -> Any:
        given.append(part_id if len(given) < IDS_KEPT else given.pop(0))
        return real(table, schema, schema_id, given[-1])

    return patch.object(persist.parts.writer, "encode_inline", encode_inline)


def tokens_made_anew() -> Broken:
    """The committer gives every insert a token of its own."""
    real = Machine.apply

    def apply(self: Machine, command: c.Command) -> c.Result:
        if isinstance(command, c.Insert):
            command = replace(command, token=Token.mint(self._ids))
        return real(self, command)

    return patch.object(Machine, "apply", apply)


def first_rollup_without_its_name() -> Broken:
    """The rollup of a new shard is the State before that names it."""

    def create(self: Versions, state: State, commit_id: str) -> tuple[bytes, State]:
        key = rollup_key(state.shard_id, state.seqno, self._ids)
        named = with_rollup(state, state.seqno, key, 0)
        self.blob.put(key, encode_state(state))
        return encode_diff(state_diff.diff(blank_state(state.name), named, commit_id)), named

    return patch.object(Versions, "create", create)


def upper_taken_for_complete() -> Broken:
    """The latest time is the upper itself, and nobody waits until it is complete."""
    real = persist.reading.latest

    def latest(view: ShardView) -> int:
        return view.upper.element or real(view)

    def at_once(transport: Any, name: str, *_: Any) -> Any:
        return transport.view(name, ViewRequest())

    return _all(
        patch.object(persist.reading, "latest", latest), patch.object(persist.reading, "wait_for_upper", at_once)
    )


def since_itself_refused() -> Broken:
    """A read as of since is refused as if since had passed it."""
    real = readers.register

    def register(state: State, command: c.RegisterReader, context: Any) -> Any:
        if command.since is not None and command.since == state.since != Antichain(0):
            raise NotReadable(f"shard {state.name!r} forgot {command.since}", as_of=None, since=state.since.to_json())
        return real(state, command, context)

    return patch.dict(persist.transitions._TRANSITIONS, {c.RegisterReader: register})


def latest_lags() -> Broken:
    """A read of the latest time takes an earlier one, which may be forgotten already."""
    real = persist.reading.latest
    return patch.object(persist.reading, "latest", lambda view: max(0, real(view) - LAG))


def _give_up(self: Machine, *_: Any) -> bool:
    raise Indeterminate("the outcome of a commit stays unread")


@contextmanager
def _all(*broken: Broken) -> Iterator[None]:
    with ExitStack() as stack:
        for each in broken:
            stack.enter_context(each)
        yield


MEANT_FOR: dict[Callable[[], Broken], str] = {
    retried_as_another_writer: "once",
    part_ids_come_round: "single-use",
    tokens_made_anew: "phantom",
    first_rollup_without_its_name: "created",
    upper_taken_for_complete: "complete",
    since_itself_refused: "readable",
    latest_lags: "latest",
}
