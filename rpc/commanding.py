"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persist.core import commands as c
from persist.core.ids import check_shard_name
from persist.core.recorded import NOBODY, Caller
from persist.formats.http_messages import decode_command
from persist.formats.records import encoded
from rpc.auth import Principal

if TYPE_CHECKING:
    from rpc.service import Service


async def answer(service: Service, name: str, principal: Principal, data: bytes, caller: Caller = NOBODY) -> bytes:
    """Commit the command of a body; the body of the answer. Raises the error with which it was refused."""
    command = decode_command(data)
    check_shard_name(name)
    if is_reserved(name):
        check_reserved(command, principal, name)
    else:
        principal.require(command.scope, name)
    service.audit.command(command)
    machine = service.location.machine(name)
    give_back = admit(service.quotas, principal, name, command, lambda: machine.cached)
    try:
        return encoded(await service.work.apply(machine, as_allowed(command, principal), caller))
    except PersistError as error:
        if give_back is not None and not isinstance(error, Indeterminate):
            give_back()
        raise


def check_reserved(command: c.Command, principal: Principal, name: str) -> None:
    """Raises Forbidden unless the command reads one of persist's own shards, or is a step of its maintenance."""
    principal.require(ADMIN, name)
    by_hand = command.scope == WRITE and not isinstance(command, UPKEEP)
    if principal is not MAINTENANCE and (by_hand or isinstance(command, AUDITED)):
        raise Forbidden(f"shard {name!r} is persist's own: it is read only")


def as_allowed(command: c.Command, principal: Principal) -> c.Command:
    """The command as this principal may have it done: who may only read makes nobody else forget history."""
    if isinstance(command, c.DowngradeSince) and c.WRITE not in principal.scopes:
        return c.MoveHold(command.reader, command.since, command.seqno, shard=command.shard)
    return command
