"""The one error tree, named by what its handler does.

Every error has a stable `kind` (it crosses HTTP as problem+json and processes by pickle), one clear
sentence that names the thing and the remedy, and `details`: JSON values for programs.

    PersistError
      InvalidUsage         the caller's bug; never retry
        UnknownShard       no shard of that name
        ShardExists        a shard of that name exists with another schema
        TokenReused        a write with the token has landed, of another command or other rows
        NegativeMultiplicity  a row was deleted more often than inserted, so it cannot be shown as rows
        ConstraintViolated  rows, or what a shard holds, break a constraint of the shard
      Unauthorized         no or bad token
      Forbidden            the token does not allow this
        ReadOnly           a read-only region or copy: write at home
      Conflict             lost a race; carries the actual value
        UpperMismatch      the shard's upper is not the expected one
        OpaqueMismatch     another holder has fenced this critical reader
        AttributeMismatch  an attribute's condition does not hold
        SchemaMismatch     the schema is not the expected one
        OutcomeForgotten   the outcome of the token is no longer known, or it was minted in the future
      Expired              the lease has ended; read again, or open a new writer
      NotReadable          as_of is before since
      Overloaded           back off for `retry_after_s`, then retry
      Unavailable          definitely did not happen; retrying is safe
        NotComplete        the time is not complete yet; wait longer, or read an earlier time
      Indeterminate        may have happened; retry with the same token
      UpgradeNeeded        written by a newer build, or sent to an older one; upgrade the one that raises it
      Corruption           durable bytes contradict each other; stop
        HistoryLost        the log lost commits that this process has read; restart it to continue without them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class PersistError(Exception):
    """Root of every error that persist raises on purpose."""

    kind: ClassVar[str] = "persist_error"

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(cls: type[PersistError], message: str, details: dict[str, Any]) -> PersistError:
    return cls(message, **details)


class InvalidUsage(PersistError):
    kind = "invalid_usage"


class UnknownShard(InvalidUsage):
    kind = "unknown_shard"


class ShardExists(InvalidUsage):
    kind = "shard_exists"


class TokenReused(InvalidUsage):
    kind = "token_reused"


class NegativeMultiplicity(InvalidUsage):
    """Its message does not quote the row: messages are logged, and the row may have to be erased."""

    kind = "negative_multiplicity"


class ConstraintViolated(InvalidUsage):
    """Details: `constraint`, its name; `count` of the rows or keys that violate it; `keys`, the first of their keys."""

    kind = "constraint_violated"


class Unauthorized(PersistError):
    kind = "unauthorized"


class Forbidden(PersistError):
    kind = "forbidden"


class ReadOnly(Forbidden):
    """Details: `home`, URLs of servers at home, if they are known."""

    kind = "read_only"


class Conflict(PersistError):
    kind = "conflict"


class UpperMismatch(Conflict):
    """Details: `expected` and `actual`, frontiers as JSON (`[7]`, `[]`)."""

    kind = "upper_mismatch"


class OpaqueMismatch(Conflict):
    """Details: `expected`, `actual` (opaque tokens) and `since`."""

    kind = "opaque_mismatch"


class AttributeMismatch(Conflict):
    """Details: `actual`, a map from attribute key to its value or null."""

    kind = "attribute_mismatch"


class SchemaMismatch(Conflict):
    """Details: `expected` and `actual` schema ids."""

    kind = "schema_mismatch"


class OutcomeForgotten(Conflict):
    """Details: `born_ms`, when the token was minted, in milliseconds since 1970 by its maker's clock."""

    kind = "outcome_forgotten"


class Expired(PersistError):
    kind = "expired"


class NotReadable(PersistError):
    """Details: `as_of` and `since`."""

    kind = "not_readable"


class Overloaded(PersistError):
    """Details: `retry_after_s`, seconds to wait."""

    kind = "overloaded"


class Unavailable(PersistError):
    """Details, if a store can be read but not written: `writable`, false; and on a read-only disk `read_only`, true."""

    kind = "unavailable"

    @property
    def is_unwritable(self) -> bool:
        """Whether a store can be read but not written: waiting does not help, and reads still work."""
        return self.details.get("writable") is False

    @property
    def is_read_only(self) -> bool:
        """Whether the store cannot be written until its disk is repaired or mounted again: no retry helps."""
        return self.is_unwritable and self.details.get("read_only") is True


class NotComplete(Unavailable):
    """Details: `as_of` and `upper`, or the requested instant and the present one, in ms: `at_ms`, `now_ms`."""

    kind = "not_complete"


class Indeterminate(PersistError):
    """Details, if a later try was refused: `refused`, the kind of that error, and its details."""

    kind = "indeterminate"


class UpgradeNeeded(PersistError):
    kind = "upgrade_needed"


class Corruption(PersistError):
    kind = "corruption"


class HistoryLost(Corruption):
    """The log no longer contains commits that this process has read."""

    kind = "history_lost"


def _all(cls: type[PersistError]) -> list[type[PersistError]]:
    classes = [cls]
    for sub in cls.__subclasses__():
        classes.extend(_all(sub))
    return classes


def kinds() -> Mapping[str, type[PersistError]]:
    """Every kind of the tree and its class, without subclasses that keep their parent's kind."""
    return {cls.kind: cls for cls in _all(PersistError) if "kind" in vars(cls)}


def from_kind(kind: str, message: str, details: Mapping[str, Any]) -> PersistError:
    """Rebuild an error that crossed a wire; an unknown kind becomes the root of the tree."""
    cls = kinds().get(kind, PersistError)
    return cls(message, **dict(details))


def shown(value: object) -> str:
    """A caller's value for a message, at most 100 characters. Python refuses to format integers of many digits."""
    try:
        return repr(value)[:100]
    except ValueError:
        return "a number of too many digits"
