"""What a command uses of the quotas of who gives it, before it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from persist.core import commands as c
from persist.core.attribute import DELETE
from persist.core.batch import Part
from persist.core.errors import Forbidden
from persist.core.state import State
from rpc.auth import Principal
from rpc.quotas import Owner, Quotas
from rpc.token_leases import is_gone

# Where these bring nothing but retractions they take rows away, which is possible where no quota of bytes is left.
FREEING = (c.Truncate, c.DropBefore, c.Erase, c.RetractAged)


class Asked(NamedTuple):
    """A command on a shard, by whose quotas it goes, and the shard's State as far as it is in memory."""

    quotas: Quotas
    owners: list[Owner]
    shard: str
    known: Callable[[], State | None]


def check_room(quotas: Quotas, principal: Principal, shard: str, command: c.Command) -> None:
    """Raises QuotaFull where nothing more may be written: then nobody looks at what the command brings."""
    if brings_rows(command):
        quotas.rates(quotas.owners(principal, shard), rows_per_s=0, bytes_per_s=0)


def admit(
    quotas: Quotas, principal: Principal, shard: str, command: c.Command, known: Callable[[], State | None]
) -> None:
    """Count what a command uses, once it is known that its parts are what it says. Raises QuotaFull."""
    counts = _COUNTS.get(type(command))
    if counts is not None and (owners := quotas.owners(principal, shard)):
        counts(Asked(quotas, owners, shard, known), command)


def settle(
    quotas: Quotas, principal: Principal, shard: str, command: c.Command, known: Callable[[], State | None]
) -> None:
    """After a command was done: what it gave up counts no more, once the shard's State does not have it."""
    if isinstance(command, c.ExpireReader) and is_gone(known(), "leased_readers", command.reader):
        quotas.gives_back(quotas.owners(principal, shard), "leases", f"{shard}\0{command.reader}")
    elif isinstance(command, c.ExpireWriter) and is_gone(known(), "writers", command.writer):
        quotas.gives_back(quotas.owners(principal, shard), "writers", f"{shard}\0{command.writer}")
    elif brings_rows(command) and (owners := quotas.owners(principal, shard)):
        named = {key for key in keys_of(parts_of(command)) if any(key in owner.staged for owner in owners)}
        state = known() if named else None
        if state is not None:  # what another replica, or an earlier try, has brought is answered, and names no part
            quotas.committed(owners, [part.key for part in state.trace.parts() if part.key in named])


def brings_rows(command: c.Command) -> bool:
    """Whether the command may bring parts whose rows are added to the shard, of which the quotas count the bytes."""
    return _COUNTS.get(type(command)) is _written


def parts_of(command: Any) -> list[Part]:
    """The parts that a command brings to be added."""
    return [part for run in command.runs for part in run.parts]


def keys_of(parts: Iterable[Part]) -> list[str]:
    """The keys of those that are blobs."""
    return [part.key for part in parts if part.key is not None]


def check_takes_away(command: c.Command, known: Callable[[], State | None]) -> None:
    """Raise Forbidden where what is to take rows away adds some, for who may not write.

    Rows of a truncation add some only where others are there less often than not at all, which no shard has without a
    retraction.
    """
    if not isinstance(command, FREEING) or all(part.diff_max <= 0 for part in parts_of(command)):
        return
    state = known()
    if state is None or not any(part.diff_min < 0 for part in state.trace.parts()):
        raise Forbidden(
            "the rows of this command add some, and nothing in the shard was retracted that they could make up for: "
            "without the scope 'write' nobody adds rows"
        )


def frees(command: c.Command) -> bool:
    """Whether a command takes rows away, and adds none: what its parts say was compared with their rows."""
    is_such = isinstance(command, FREEING) or getattr(command, "verb", "") == "delete"
    return is_such and all(part.diff_max < 0 for part in parts_of(command))


def _written(asked: Asked, command: Any) -> None:
    parts = parts_of(command)
    rows, size = sum(part.rows for part in parts), sum(part.size for part in parts)
    quotas, owners, shard, _ = asked
    wanted = []
    for owner in owners:
        fresh = sum(part.size for part in parts if part.key is None or not quotas.was_counted(part.key, owner))
        wanted.append((owner, {"rows_per_s": rows, "bytes_per_s": fresh}))
    quotas.rates_of(wanted)
    quotas.adds(owners, shard, "bytes", size, frees=frees(command), staged=keys_of(parts))
    _attributes(asked, command)
    quotas.renews(owners, "writers", f"{shard}\0{command.writer}")


def _attributes(asked: Asked, command: Any) -> None:
    """Values of attributes that are set. Those of which the State knows that they are there take no more room."""
    changed = [update for update in getattr(command, "attributes", ()) if update.verb != DELETE]
    if changed and any("attributes" in owner.most for owner in asked.owners):
        state = asked.known()
        there = {} if state is None else state.attributes
        fresh = sum(there.get(update.key) is None for update in changed)
        if fresh:
            asked.quotas.adds(asked.owners, asked.shard, "attributes", fresh)


def _registered(quota: str, field: str, there: str) -> Callable[[Asked, Any], None]:
    """Counts what is held under a lease: its id is the command's `field`, and the State has it in `there`."""

    def counted(asked: Asked, command: Any) -> None:
        quotas, owners, shard, known = asked
        key = f"{shard}\0{getattr(command, field)}"
        state = known() if any(quota in owner.most and not owner.is_token for owner in owners) else None
        if state is None or getattr(command, field) not in getattr(state, there):
            quotas.adds(owners, shard, quota)
        quotas.registers(owners, quota, key, command.lease_ms / 1000)

    return counted


def _renewed(quota: str, field: str) -> Callable[[Asked, Any], None]:
    return lambda asked, command: asked.quotas.renews(asked.owners, quota, f"{asked.shard}\0{getattr(command, field)}")


def _cursor(asked: Asked, command: c.RegisterCriticalReader) -> None:
    if any("cursors" in owner.most for owner in asked.owners):
        state = asked.known()
        if state is None or command.reader not in state.critical_readers:
            asked.quotas.adds(asked.owners, asked.shard, "cursors")


def _made(asked: Asked, _: c.Command) -> None:
    asked.quotas.adds(asked.owners, asked.shard, "shards")


_COUNTS: Mapping[type[c.Command], Callable[[Asked, Any], None]] = {
    **dict.fromkeys((c.Insert, c.CompareAndAppend, c.Append), _written),
    **dict.fromkeys(c.kinds(c.Rewrite), _written),
    c.UpdateAttributes: _attributes,
    c.RegisterReader: _registered("leases", "reader", "leased_readers"),
    c.HoldPoint: _registered("leases", "reader", "leased_readers"),
    c.HeartbeatReader: _renewed("leases", "reader"),
    c.DowngradeSince: _renewed("leases", "reader"),
    c.MoveHold: _renewed("leases", "reader"),
    c.RegisterWriter: _registered("writers", "writer", "writers"),
    c.HeartbeatWriter: _renewed("writers", "writer"),
    c.RegisterCriticalReader: _cursor,
    c.Recreate: _made,
}
