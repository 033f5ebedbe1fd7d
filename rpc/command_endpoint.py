"""Writes: commands of rich clients, and posted rows."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from starlette.requests import Request

from persist.client.optimistic_edit import unless_landed
from persist.client.server_writer import Making, Names, ThinWriter
from persist.codecs import rows
from persist.codecs.decode_limits import Allowance, BodyTooLarge
from persist.commit.committer import Machine
from persist.core import commands as c
from persist.core.audit_log import Caller
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
from persist.core.ids import Token
from persist.core.record import replace
from persist.core.transitions.context import Verdict
from persist.formats.http_messages import decode_command, validate_command
from persist.formats.records import encoded
from persist.parts import ShardSchema
from rpc.app_state import Service
from rpc.audit import ACTION_KEY, describe_command, upper_of
from rpc.auth import Principal, label_of
from rpc.concurrency_limits import LEASE_COMMANDS
from rpc.post_batching import PreparedPost
from rpc.quotas import check_only_deletes
from rpc.request_body import decode_record

COMMAND_BYTES_MAX = 16 * 1024 * 1024  # body of one command
READ_COMMAND_BYTES_MAX = 64 * 1024  # of a command by a token with the scope `read` alone


def bytes_max_of(principal: Principal, name: str) -> int:
    """The size limit of a command on this shard, known before its body is read. Raises Forbidden.

    The body says which scopes are required. Commands of readers are short.
    """
    principal.require_shard(name)
    if principal.scopes <= {c.READ}:
        return min(READ_COMMAND_BYTES_MAX, COMMAND_BYTES_MAX)
    return COMMAND_BYTES_MAX


async def commit_command(
    service: Service, name: str, principal: Principal, data: bytes, caller: Caller, scope: MutableMapping[str, Any]
) -> bytes:
    """Commit the command in a body; returns the body of the response. Raises the error of the refusal.

    `scope` is that of the request; the audit details go there, whatever the outcome.
    """
    with service.allowance() as allowed:
        command = await decode_record(service.work, data, decode_command, allowed)
        scope[ACTION_KEY] = describe_command(command)
        for scopes in c.scopes_of(command):
            principal.require_any(scopes, name)
        if type(command) in _RESTRICTED:
            command = restrict(command, principal)
            scope[ACTION_KEY] = describe_command(command)  # the effective one: without `manage` since does not move
        machine = service.location.machine(name)
        if service.leases is None or type(command) not in LEASE_COMMANDS:
            return await _commit(service, machine, principal, command, caller, scope)
        with service.leases.counted(label_of(principal), name, command, lambda: machine.cached):
            return await _commit(service, machine, principal, command, caller, scope)


async def _commit(
    service: Service,
    machine: Machine,
    principal: Principal,
    command: c.Command,
    caller: Caller,
    scope: MutableMapping[str, Any],
) -> bytes:
    """Commit a command within the quotas of the principal."""
    name = machine.name
    if c.WRITE not in principal.scopes:
        check_only_deletes(command, lambda: machine.cached)
    if isinstance(command, c.WRITES_ROWS):  # before its parts are validated
        service.quotas.count_rows(principal, 0)

    def admitted(verdict: Verdict) -> None:
        if verdict.constrains:
            scope[ACTION_KEY] = describe_command(command, verdict)
        service.quotas.admit(principal, name, command)

    await service.give_back(name, command)
    result = await service.work.apply(machine, command, caller, admitted)
    service.quotas.settle(principal, name, command, lambda: machine.cached)
    return encoded(result)


_RESTRICTED = LEASE_COMMANDS | {c.CompareAndAppend, c.Append}


def restrict(command: c.Command, principal: Principal) -> c.Command:
    """The command without the effects that need the scope `manage` if the principal lacks it.

    A downgrade then does not move the shard's since. Raises Forbidden if the command would close the shard.
    """
    if c.MANAGE in principal.scopes:
        return command
    if isinstance(command, c.DowngradeSince):
        return replace(command, moves_since=False)
    if isinstance(command, (c.CompareAndAppend, c.Append)):
        check_upper(principal, upper_of(command))
    return command


def check_upper(principal: Principal, upper: Antichain) -> None:
    """Raises Forbidden if a write would close the shard and this principal lacks the scope `manage`."""
    if upper.is_empty and c.MANAGE not in principal.scopes:
        raise Forbidden(f"the token {principal.name!r} has no scope 'manage': it may not close a shard to writes")


# Posted rows: decoded, staged and committed.
#
# Small posts are handled on the event loop, which is cheaper than a round trip through a thread: threads that decode
# JSON in parallel mostly wait for the GIL. Work that takes long or calls a store goes to a thread.

AT_ONCE_BYTES_MAX = 16 * 1024  # of a body that is decoded on the event loop
AT_ONCE_COLUMNS_MAX = 32  # none of them nested
AT_ONCE_ROWS_BYTES_MAX = 128 * 1024  # of its rows in memory, however compact their JSON is
READINGS_MAX = 10  # of one body while the shard's schema keeps changing


@dataclass(frozen=True, slots=True)
class InsertKind:
    """How rows are written: the time of rows without one, and the command.

    `is_joined`: posts that wait for the same shard are prepared together.
    """

    default_time: int | None
    command: Making
    is_joined: bool = False


@dataclass(slots=True)
class Posted:
    """Rows that were posted to a shard."""

    name: str
    form: str
    kind: InsertKind
    token: Token | None
    caller: Caller
    principal: Principal
    are_counted: bool = False  # against the quotas


async def post(service: Service, request: Request, posted: Posted) -> c.Appended:
    """Read the body and commit its rows. Raises what `WriteHandle.insert` raises, BodyTooLarge, QuotaFull."""
    async with service.body(request, service.limits.rows_bytes_max) as data:
        if len(data) <= AT_ONCE_BYTES_MAX and posted.form == "ndjson":
            result = await _insert_at_once(service, posted, data)
            if result is not None:
                return result
        return await service.work.run(_insert_blocking, service, posted, data)


async def _insert_at_once(service: Service, posted: Posted, data: bytes) -> c.Appended | None:
    """Commit the rows without a thread. None: nothing was written, and `_insert_blocking` has to do it."""
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
        return None  # it takes long, or calls a store
    joined = posted.kind.is_joined and posted.token is None and not schema.details.unique
    prepared = await service.posts.prepared(posted.name, names, data, rows_bytes) if joined else None
    if joined and prepared is None:
        return None
    handle, command = writers.take(posted.name, names, posted.caller), None
    try:
        try:
            command = _command(service, posted, data, handle, prepared)
        finally:
            if command is None:
                writers.give_back(handle)
        if command is None:
            return None
        command = validate_command(command)
        # Parts that were made here need no validation.
        verdict = Verdict(shard=names.shard, schema=names.newest)
        try:
            result = await service.work.commit(machine, command, verdict, posted.caller)
        except (Unavailable, Overloaded, Indeterminate) as error:
            if prepared is not None:
                prepared.ended.set()  # a retry may take long and must not delay other posts
            result = await service.work.run(handle.resumed, command, posted.caller, error)
    except (InvalidUsage, SchemaMismatch):  # nothing was written, so the writer can be reused
        if command is not None:
            writers.give_back(handle)
        return None
    except Expired:
        return None
    finally:
        if prepared is not None:
            prepared.ended.set()
    writers.give_back(handle)
    assert isinstance(result, c.Appended)
    return result


def _command(
    service: Service, posted: Posted, data: bytes, handle: ThinWriter, prepared: PreparedPost | None
) -> c.Command | None:
    """The command for the rows of a small body. None: the schema has changed, or a store has to be called.

    Raises QuotaFull, Overloaded.
    """
    if prepared is not None:
        _count(service, posted, prepared.rows, len(data))
        return handle.build_command(prepared.runs, posted.kind.command)
    try:
        with service.allowance() as allowed:
            table = _read(service, posted, data, handle.names.schema, allowed)
            return handle.at_once(table, posted.kind.default_time, posted.kind.command, posted.token)
    except InvalidUsage:
        return None  # decided on a thread, with the newest State


def _insert_blocking(service: Service, posted: Posted, data: bytes) -> c.Appended:
    """Write the rows to the newest State: another server may have changed the schema or recreated the shard."""
    machine = service.location.machine(posted.name)
    state = machine.state()
    for left in range(READINGS_MAX, 0, -1):
        try:
            return _write(service, posted, data, service.writers.names(state))
        except (InvalidUsage, SchemaMismatch) as error:
            known, state = state, machine.refresh()
            if left > 1 and (state.shard_id, state.schema_id) != (known.shard_id, known.schema_id):
                continue
            _check_landed(service, posted, service.writers.names(state), error)
            raise
    raise AssertionError("the last attempt returns or raises")


def _check_landed(service: Service, posted: Posted, names: Names, refused: PersistError) -> None:
    """Raise TokenReused if a body is refused although a write with its token has landed."""
    if posted.token is None or not isinstance(refused, InvalidUsage) or isinstance(refused, BodyTooLarge):
        return
    with service.writers.writer(posted.name, names, posted.caller) as handle, unless_landed(handle, posted.token):
        raise refused


def _write(service: Service, posted: Posted, data: bytes, names: Names) -> c.Appended:
    with service.allowance() as allowed:
        table = _read(service, posted, data, names.schema, allowed)
        with service.writers.writer(posted.name, names, posted.caller) as handle:
            return handle.write(table, posted.kind.default_time, posted.kind.command, posted.token)


def _read(service: Service, posted: Posted, data: bytes, schema: ShardSchema, allowed: Allowance) -> pa.Table:
    """The rows of the body, counted once against the quotas."""
    table = rows.read(data, posted.form, schema, service.limits.rows_max, allowed)
    _count(service, posted, table.num_rows, len(data))
    return table


def _count(service: Service, posted: Posted, count: int, nbytes: int) -> None:
    """Count the rows of a body against the quotas, once. Raises QuotaFull."""
    if not posted.are_counted:
        service.quotas.count_rows(posted.principal, count)
        service.quotas.add(posted.principal, posted.name, "bytes", nbytes)
        posted.are_counted = True
