"""What a command uses of the quotas of who gives it, before it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from persist.core import commands as c
from persist.core.batch import Part
from persist.core.errors import Forbidden
from persist.core.state import State
from rpc.auth import Principal
from rpc.quotas import Quotas

# Where these bring nothing but retractions they take rows away, which is possible where no quota of bytes is left.
FREEING = (c.Truncate, c.DropBefore, c.Erase, c.RetractAged)
_BRINGING = frozenset({c.Insert, c.CompareAndAppend, c.Append, *c.kinds(c.Rewrite)})


def check_room(quotas: Quotas, principal: Principal, command: c.Command) -> None:
    """Raises QuotaFull where no more rows may be written: then nobody looks at what the command brings."""
    if brings_rows(command):
        quotas.rows(principal, 0)


def admit(quotas: Quotas, principal: Principal, shard: str, command: c.Command) -> None:
    """Count what a command uses, once it is known that its parts are what it says. Raises QuotaFull."""
    if isinstance(command, c.Recreate):
        quotas.adds(principal, shard, "shards")
    elif brings_rows(command):
        parts = parts_of(command)
        quotas.rows(principal, sum(part.rows for part in parts))
        quotas.adds(
            principal, shard, "bytes", sum(part.size for part in parts), frees=frees(command), staged=keys_of(parts)
        )


def settle(
    quotas: Quotas, principal: Principal, shard: str, command: c.Command, known: Callable[[], State | None]
) -> None:
    """After a command was done: parts that it brought and the shard's State has count there."""
    if brings_rows(command):
        quotas.committed(principal, shard, keys_of(parts_of(command)), known)


def brings_rows(command: c.Command) -> bool:
    """Whether the command may bring parts whose rows are added to the shard, of which the quotas count the bytes."""
    return type(command) in _BRINGING


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
