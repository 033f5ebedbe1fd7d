"""Broken builds that are each meant for one check: other checks may notice them too, but that one must.

`MEANT_FOR` says which. Seeds in which another check was faster are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import persist.client.idempotency
import persist.client.snapshot
import persist.commit.state_loader
import persist.parts.writer
from persist.client.embedded import EmbeddedTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Run
from persist.core.errors import Conflict, NotReadable
from persist.core.frontier import Antichain
from persist.core.ids import PartId, Token, WriterId, mint
from persist.core.record import replace
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.core.transitions import reader_holds
from tests.simulation.breaking import Broken, every, resent_as, transition

IDS_KEPT = 12  # of inline parts, before the first of them is given out again
LAG = 8
OTHER_LEASE_MS = 3_000


def retried_as_another_writer() -> Broken:
    """An insert whose outcome is not known is sent again, with the same token, by a writer who does not know it."""

    def another(transport: Any, name: str, command: Any) -> Any:
        if not isinstance(command, c.Insert):
            return command
        runs = renamed(command.runs, transport)
        return replace(command, writer=mint(WriterId, transport.ids), runs=runs, lease_ms=OTHER_LEASE_MS)

    def renamed(runs: tuple[Run, ...], transport: Any) -> tuple[Run, ...]:
        return tuple(Run(tuple(replace(part, id=mint(PartId, transport.ids)) for part in run.parts)) for run in runs)

    return resent_as(another)


def part_ids_come_round() -> Broken:
    """Inline parts take the ids of parts that are long gone."""
    given: list[PartId] = []
    real = persist.parts.writer.encode_inline

    def encode_inline(table: Any, schema: Any, schema_id: int, part_id: PartId) -> Any:
        given.append(part_id if len(given) < IDS_KEPT else given.pop(0))
        return real(table, schema, schema_id, given[-1])

    return patch.object(persist.parts.writer, "encode_inline", encode_inline)


def tokens_made_anew() -> Broken:
    """The transport gives every insert a token of its own."""
    real = EmbeddedTransport.apply

    def apply(self: EmbeddedTransport, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if isinstance(command, c.Insert):
            command = replace(command, token=mint(Token, self.ids))
        return real(self, name, command, caller)

    return patch.object(EmbeddedTransport, "apply", apply)


def first_rollup_without_its_name() -> Broken:
    """The rollup of a new shard is the State before that names it."""
    real = persist.commit.state_loader.encode_state

    def encode_state(state: State, version: int) -> bytes:
        return real(replace(state, rollups={}) if state.seqno == 1 else state, version)

    return patch.object(persist.commit.state_loader, "encode_state", encode_state)


def upper_taken_for_complete() -> Broken:
    """The latest time is the upper itself, and nobody waits until it is complete."""
    real = persist.client.snapshot.latest

    def latest(view: ShardView) -> int:
        return view.upper.element or real(view)

    def at_once(transport: Any, name: str, *_: Any) -> Any:
        return transport.view(name, ViewRequest())

    return every(
        patch.object(persist.client.snapshot, "latest", latest),
        patch.object(persist.client.snapshot, "wait_for_upper", at_once),
    )


def since_itself_refused() -> Broken:
    """A read as of since is refused as if since had passed it."""
    real = reader_holds.register

    def register(state: State, command: c.RegisterReader, context: Any) -> Any:
        if command.since is not None and command.since == state.since != Antichain(0):
            raise NotReadable(f"shard {state.name!r} forgot {command.since}", as_of=None, since=state.since.to_json())
        return real(state, command, context)

    return transition(c.RegisterReader, register)


def latest_lags() -> Broken:
    """A read of the latest time takes an earlier one, which may be forgotten already."""
    real = persist.client.snapshot.latest
    return patch.object(persist.client.snapshot, "latest", lambda view: max(0, real(view) - LAG))


def refused_while_under_way() -> Broken:
    """A refusal is told as one, though an earlier try is still under way and may find what it needs."""
    return patch.object(persist.client.idempotency, "is_final", lambda error: isinstance(error, Conflict))


MEANT_FOR: dict[Callable[[], Broken], str] = {
    retried_as_another_writer: "once",
    part_ids_come_round: "single-use",
    tokens_made_anew: "phantom",
    first_rollup_without_its_name: "created",
    upper_taken_for_complete: "complete",
    since_itself_refused: "readable",
    latest_lags: "latest",
    refused_while_under_way: "rejected",
}
