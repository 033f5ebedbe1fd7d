"""What writes: one command of a rich client, and rows that are posted."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from starlette.requests import Request

from persist.client.optimistic_edit import unless_landed
from persist.client.server_writer import Making, Names, ThinWriter
from persist.codecs import rows
from persist.codecs.allowance import Allowance, BodyTooLarge
from persist.commit.machine import Machine
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import (
    Expired,
    Forbidden,
    Indeterminate,
    InvalidUsage,
    Overloaded,
    PersistError,
    SchemaMismatch,
    Unavailable,
)
from persist.core.frontier import Antichain
from persist.core.ids import Token, check_shard_name
from persist.core.record import replace
from persist.core.transitions.context import Verdict
from persist.formats.http_messages import decode_command, validate_command
from persist.formats.records import encoded
from persist.parts import ShardSchema
from rpc.app_state import Service
from rpc.audit import DID, of_command, upper_of
from rpc.auth import Principal, label_of
from rpc.concurrency_limits import ABOUT
from rpc.post_groups import PreparedPost
from rpc.quotas import admit, check_room, check_takes_away, settle
from rpc.request_body import decoded

COMMAND_BYTES_MAX = 16 * 1024 * 1024  # body of one command
READ_COMMAND_BYTES_MAX = 64 * 1024  # of one by a token that may only read


def bytes_max_of(principal: Principal, name: str) -> int:
    """How long a command on this shard may be. Raises Forbidden, InvalidUsage, before any of it is taken in.

    What it is, and which scope it needs, is known only once it is read. No command of a reader is long.
    """
    principal.require_shard(check_shard_name(name))
    if principal.scopes <= {c.READ}:
        return min(READ_COMMAND_BYTES_MAX, COMMAND_BYTES_MAX)
    return COMMAND_BYTES_MAX


async def answer(
    service: Service,
    name: str,
    principal: Principal,
    data: bytes,
    caller: Caller = NOBODY,
    told: MutableMapping[str, Any] | None = None,
) -> bytes:
    """Commit the command of a body; the body of the answer. Raises the error with which it was refused.

    What the audit tells of it goes into `told`, whatever becomes of it.
    """
    with service.allowance() as allowed:
        command = await decoded(service.work, data, decode_command, allowed)
        if told is not None:
            told[DID] = of_command(command)
        return await _answered(service, name, principal, command, caller, told)


async def _answered(
    service: Service,
    name: str,
    principal: Principal,
    command: c.Command,
    caller: Caller,
    told: MutableMapping[str, Any] | None,
) -> bytes:
    for scopes in c.scopes_of(command):
        principal.require_any(scopes, check_shard_name(name))
    if type(command) in _LOOKED_AT:
        command = as_allowed(command, principal)
        if told is not None:
            told[DID] = of_command(command)  # what is done: without `manage` a since stays where it is
    machine = service.location.machine(name)
    if service.leases is not None and type(command) in ABOUT:
        with service.leases.counted(label_of(principal), name, command, lambda: machine.cached):
            return await _applied(service, machine, principal, command, caller, told)
    return await _applied(service, machine, principal, command, caller, told)


async def _applied(
    service: Service,
    machine: Machine,
    principal: Principal,
    command: c.Command,
    caller: Caller,
    told: MutableMapping[str, Any] | None,
) -> bytes:
    """Commit it within the quotas."""
    name = machine.name
    if c.WRITE not in principal.scopes:
        check_takes_away(command, lambda: machine.cached)
    check_room(service.quotas, principal, command)

    def admitted(verdict: Verdict) -> None:
        if told is not None and verdict.constrains:  # which is known now
            told[DID] = of_command(command, verdict)
        admit(service.quotas, principal, name, command)

    await service.give_back(name, command)
    done = await service.work.apply(machine, command, caller, admitted)
    settle(service.quotas, principal, name, command, lambda: machine.cached)
    return encoded(done)


_LOOKED_AT = ABOUT | {c.CompareAndAppend, c.Append}


def as_allowed(command: c.Command, principal: Principal) -> c.Command:
    """The command as this principal may have it done: without `manage` nobody else forgets history by it.

    Raises Forbidden where it closes the shard.
    """
    if c.MANAGE in principal.scopes:
        return command
    if isinstance(command, c.DowngradeSince):
        return replace(command, moves_since=False)
    if isinstance(command, (c.CompareAndAppend, c.Append)):
        check_upper(principal, upper_of(command))
    return command


def check_upper(principal: Principal, upper: Antichain) -> None:
    """Raises Forbidden where a write would close the shard for everybody, and this principal may not."""
    if upper.is_empty and c.MANAGE not in principal.scopes:
        raise Forbidden(f"the token {principal.name!r} has no scope 'manage': it may not close a shard to writes")


# Rows that are posted: decoded, staged and committed.
#
# Few rows go their whole way on the event loop, which costs less than to hand them to a thread and back: threads that
# decode JSON side by side mostly wait for one another. What takes a call of a store, or a moment, goes to a thread.


AT_ONCE_BYTES_MAX = 16 * 1024  # of a body that is decoded on the event loop
AT_ONCE_COLUMNS_MAX = 32  # none of them nested
AT_ONCE_ROWS_BYTES_MAX = 128 * 1024  # that rows take in memory, however few bytes stand for each
READINGS_MAX = 10  # of one body, where the shard gets other columns each time


@dataclass(frozen=True, slots=True)
class InsertKind:
    """What is to become of the rows: the time of those without one, and the command.

    `is_joined`: posts that wait for one shard are prepared together.
    """

    default_time: int | None
    command: Making
    is_joined: bool = False


@dataclass(slots=True)
class Posted:
    """Rows that came for a shard."""

    name: str
    form: str
    kind: InsertKind
    token: Token | None
    caller: Caller
    principal: Principal
    are_counted: bool = False  # in the quotas


async def post(service: Service, request: Request, posted: Posted) -> c.Appended:
    """Take the body in and commit its rows. Raises what `WriteHandle.insert` does, BodyTooLarge, QuotaFull."""
    async with service.body(request, service.limits.rows_bytes_max) as data:
        if len(data) <= AT_ONCE_BYTES_MAX and posted.form == "ndjson":
            done = await _at_once(service, posted, data)
            if done is not None:
                return done
        return await service.work.run(_as_of_now, service, posted, data)


async def _at_once(service: Service, posted: Posted, data: bytes) -> c.Appended | None:
    """As `_written`, without a thread. None: nothing was written by this try, and it takes one."""
    machine = service.location.machine(posted.name)
    state = machine.cached
    if state is None or state.is_closed:
        return None
    writers = service.writers
    names = writers.names(state)
    schema = names.schema
    rows_bytes = data.count(b"{") * schema.row_bytes  # a line may hold any number of rows
    most = min(AT_ONCE_ROWS_BYTES_MAX, service.transport.policy.inline_part_bytes_max)
    if not schema.is_flat or schema.width > AT_ONCE_COLUMNS_MAX or rows_bytes > most:
        return None  # it takes longer than a moment, or a call of a store
    joined = posted.kind.is_joined and posted.token is None and not schema.details.unique
    prepared = await service.posts.prepared(posted.name, names, data, rows_bytes) if joined else None
    if joined and prepared is None:
        return None
    try:
        handle, command = writers.take(posted.name, names, posted.caller), None
        try:
            command = _command(service, posted, data, handle, prepared)
        finally:
            if command is None:
                writers.give_back(handle)
        if command is None:
            return None
        command = validate_command(command)
        # Nobody need look at parts that were made here.
        verdict = Verdict(shard=names.shard, schema=names.newest)
        try:
            done = await service.work.commit(machine, command, verdict, posted.caller)
        except (Unavailable, Overloaded, Indeterminate) as error:
            if prepared is not None:
                prepared.end()  # this may take long, and holds up no other post
            done = await service.work.run(handle.resumed, command, posted.caller, error)
    except (Expired, InvalidUsage, SchemaMismatch):
        return None
    finally:
        if prepared is not None:
            prepared.end()
    writers.give_back(handle)
    assert isinstance(done, c.Appended)
    return done


def _command(
    service: Service, posted: Posted, data: bytes, handle: ThinWriter, prepared: PreparedPost | None
) -> c.Command | None:
    """The command for the rows of a small body. None: it has another schema by now, or takes a call of a store.

    Raises QuotaFull, Overloaded.
    """
    if prepared is not None:
        _count(service, posted, prepared.rows, len(data))
        return handle.made(prepared.runs, posted.kind.command)
    try:
        with service.allowance() as allowed:
            table = _read(service, posted, data, handle.names.schema, allowed)
            return handle.at_once(table, posted.kind.default_time, posted.kind.command, posted.token)
    except InvalidUsage:
        return None  # who looks at the store knows


def _as_of_now(service: Service, posted: Posted, data: bytes) -> c.Appended:
    """As `_written`, of the shard as it is now: through another server it may have got other columns, or a new life."""
    machine = service.location.machine(posted.name)
    state = machine.state()
    for left in range(READINGS_MAX, 0, -1):
        try:
            return _written(service, posted, data, service.writers.names(state))
        except (InvalidUsage, SchemaMismatch) as error:
            known, state = state, machine.refresh()
            if left > 1 and (state.shard_id, state.schema_id) != (known.shard_id, known.schema_id):
                continue
            _check_landed(service, posted, service.writers.names(state), error)
            raise
    raise AssertionError("the last try returns or raises")


def _check_landed(service: Service, posted: Posted, names: Names, refused: PersistError) -> None:
    """Raise TokenReused where a body is refused, and a write with its token has landed."""
    if not isinstance(refused, InvalidUsage) or isinstance(refused, BodyTooLarge):
        return
    with service.writers.writer(posted.name, names, posted.caller) as handle, unless_landed(handle, posted.token):
        raise refused


def _written(service: Service, posted: Posted, data: bytes, names: Names) -> c.Appended:
    with service.allowance() as allowed:
        table = _read(service, posted, data, names.schema, allowed)
        with service.writers.writer(posted.name, names, posted.caller) as handle:
            return handle.write(table, posted.kind.default_time, posted.kind.command, posted.token)


def _read(service: Service, posted: Posted, data: bytes, schema: ShardSchema, allowed: Allowance) -> pa.Table:
    """The rows of the body, which are counted in the quotas once."""
    table = rows.read(data, posted.form, schema, service.limits.rows_max, allowed)
    _count(service, posted, table.num_rows, len(data))
    return table


def _count(service: Service, posted: Posted, count: int, nbytes: int) -> None:
    """Count the rows of a body in the quotas, once. Raises QuotaFull."""
    if not posted.are_counted:
        service.quotas.rows(posted.principal, count)
        service.quotas.adds(posted.principal, posted.name, "bytes", nbytes)
        posted.are_counted = True
