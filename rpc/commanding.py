"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import Forbidden
from persist.core.ids import check_shard_name
from persist.core.recorded import NOBODY, Caller
from persist.formats.http_messages import decode_command
from persist.formats.records import encoded
from rpc.auth import Principal
from rpc.settings import Limits
from rpc.token_leases import ABOUT

if TYPE_CHECKING:
    from rpc.service import Service

AHEAD_TIMES_MAX = 2**50  # how far the scope `write` moves upper beyond the rows: 35 years of microseconds


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
    principal.require_any(command.scopes, check_shard_name(name))
    if type(command) in _LOOKED_AT:
        command = as_allowed(command, principal)
        if service.leases is not None and type(command) in ABOUT:
            with service.leases.counted(principal.name, name, command):
                return encoded(await service.apply(name, command, caller))
    return encoded(await service.apply(name, command, caller))


_LOOKED_AT = ABOUT | {c.CompareAndAppend, c.Append}


def as_allowed(command: c.Command, principal: Principal) -> c.Command:
    """The command as this principal may have it done: without `manage` nobody else forgets history by it.

    Raises Forbidden where it closes the shard, or moves its upper far ahead.
    """
    if c.MANAGE in principal.scopes:
        return command
    if isinstance(command, c.DowngradeSince):
        return c.MoveHold(command.reader, command.since, command.seqno, shard=command.shard)
    if isinstance(command, (c.CompareAndAppend, c.Append)):
        if isinstance(command, c.Append):
            lower, upper = command.lower, command.upper
        else:
            lower, upper = command.expected_upper, command.new_upper
        last = max((part.time_max for run in command.runs for part in run.parts), default=0)
        check_upper(principal, lower, upper, last)
    return command


def check_upper(principal: Principal, lower: Antichain, upper: Antichain, last: int) -> None:
    """Raises Forbidden unless this principal may move upper there with rows whose last time is `last`.

    It cannot be undone: every time in between is complete for ever.
    """
    if c.MANAGE in principal.scopes:
        return
    if upper.element is None:
        raise Forbidden(
            f"the token {principal.name!r} has no scope 'manage', and so it may not close a shard to writes"
        )
    ahead = upper.element - max(last, lower.element or 0)
    if ahead > AHEAD_TIMES_MAX:
        raise Forbidden(
            f"the token {principal.name!r} has no scope 'manage', and so it may move upper {AHEAD_TIMES_MAX} times "
            f"beyond its rows, not {ahead}: is {upper} in the right unit?"
        )
