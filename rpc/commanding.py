"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persist.core import commands as c
from persist.core.ids import check_shard_name
from persist.core.recorded import NOBODY, Caller
from persist.formats.http_messages import decode_command
from persist.formats.records import encoded
from rpc.auth import Principal
from rpc.settings import Limits

if TYPE_CHECKING:
    from rpc.service import Service


def bytes_max_of(principal: Principal, name: str, limits: Limits) -> int:
    """How long a command on this shard may be. Raises Forbidden, InvalidUsage, before any of it is taken in.

    What it is, and which scope it needs, is known only once it is read. No command of a reader is long.
    """
    principal.require_shard(check_shard_name(name))
    if principal.scopes <= {c.READ}:
        return min(limits.read_command_bytes_max, limits.command_bytes_max)
    return limits.command_bytes_max


async def answer(service: Service, name: str, principal: Principal, data: bytes, caller: Caller = NOBODY) -> bytes:
    """Commit the command of a body; the body of the answer. Raises the error with which it was refused."""
    command = decode_command(data)
    principal.require(command.scope, check_shard_name(name))
    return encoded(await service.apply(name, as_allowed(command, principal), caller))


def as_allowed(command: c.Command, principal: Principal) -> c.Command:
    """The command as this principal may have it done: who may only read makes nobody else forget history."""
    if isinstance(command, c.DowngradeSince) and c.WRITE not in principal.scopes:
        return c.MoveHold(command.reader, command.since, command.seqno, shard=command.shard)
    return command
