"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from persist.commit.machine import Machine
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Forbidden
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.formats.http_messages import decode_command
from persist.formats.records import encoded
from rpc.audit import DID, of_command, upper_of
from rpc.auth import Principal, label_of
from rpc.concurrency_limits import ABOUT
from rpc.quotas import admit, check_room, check_takes_away, settle
from rpc.request_body import decoded

if TYPE_CHECKING:
    from rpc.app_state import Service

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
    principal.require_any(command.scopes, check_shard_name(name))
    if type(command) in _LOOKED_AT:
        command = as_allowed(command, principal)
        if told is not None:
            told[DID] = of_command(command)  # what is done: without `manage` a since stays where it is
    machine = service.location.machine(name)
    if service.leases is not None and type(command) in ABOUT:
        with service.leases.counted(label_of(principal), name, command, lambda: machine.cached):
            return await _applied(service, machine, principal, command, caller)
    return await _applied(service, machine, principal, command, caller)


async def _applied(
    service: Service, machine: Machine, principal: Principal, command: c.Command, caller: Caller
) -> bytes:
    """Commit it within the quotas."""
    name = machine.name
    if c.WRITE not in principal.scopes:
        check_takes_away(command, lambda: machine.cached)
    check_room(service.quotas, principal, command)
    admitted = partial(admit, service.quotas, principal, name, command)
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
        return c.MoveHold(command.reader, command.since, command.seqno, shard=command.shard)
    if isinstance(command, (c.CompareAndAppend, c.Append)):
        check_upper(principal, upper_of(command))
    return command


def check_upper(principal: Principal, upper: Antichain) -> None:
    """Raises Forbidden where a write would close the shard for everybody, and this principal may not."""
    if upper.is_empty and c.MANAGE not in principal.scopes:
        raise Forbidden(f"the token {principal.name!r} has no scope 'manage': it may not close a shard to writes")
