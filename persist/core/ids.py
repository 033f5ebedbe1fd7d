"""Ids and sequence numbers. An id prints its type letter and 32 hex digits.

Nothing here makes randomness: ids are minted from bytes that the caller's `IdSource` gives.
"""

from __future__ import annotations

import hashlib
import re
from typing import Protocol, Self

from persist.core.errors import InvalidUsage

_HEX = re.compile(r"[0-9a-f]{32}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}(/[A-Za-z0-9._-]{1,128})?\Z")


class IdSource(Protocol):
    """Where fresh ids come from; a simulation passes a seeded one."""

    def uuid7(self) -> str:
        """32 hex digits of a UUID version 7, never given before."""
        ...


class Id(str):
    """A typed id: `letter` then 32 hex digits."""

    letter = ""
    __slots__ = ()

    @classmethod
    def mint(cls, ids: IdSource) -> Self:
        return cls(cls.letter + ids.uuid7())

    @classmethod
    def parse(cls, text: object) -> Self:
        """Check and type an id that came from outside. Raises InvalidUsage."""
        if not isinstance(text, str) or text[:1] != cls.letter or not _HEX.match(text[1:]):
            raise InvalidUsage(f"{cls.__name__} is '{cls.letter}' and 32 hex digits, not {text!r}")
        return cls(text)


class ShardId(Id):
    letter = "s"
    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> ShardId:
        """The id of the shard of that name: names are used once, so the id follows from the name."""
        return cls("s" + hashlib.sha256(b"persist shard\0" + name.encode()).hexdigest()[:32])


class WriterId(Id):
    letter = "w"
    __slots__ = ()


class ReaderId(Id):
    letter = "r"
    __slots__ = ()


class CriticalReaderId(Id):
    letter = "c"
    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> CriticalReaderId:
        """The id of the critical reader that users know by `name` (a cursor, a job)."""
        return cls("c" + hashlib.sha256(b"persist critical reader\0" + name.encode()).hexdigest()[:32])


class PartId(Id):
    letter = "p"
    __slots__ = ()


class Token(Id):
    """An idempotency token, minted once per API call and kept across its retries."""

    letter = "i"
    __slots__ = ()


class SeqNo(int):
    """A version of a shard's State; the first is v1."""

    __slots__ = ()

    def next(self) -> SeqNo:
        return SeqNo(self + 1)

    def __str__(self) -> str:
        return f"v{int(self)}"


def check_shard_name(name: object) -> str:
    """A shard's human name, `[A-Za-z0-9._-]{1,128}`, optionally `region/name`. Raises InvalidUsage."""
    if not isinstance(name, str) or not _NAME.match(name) or name.strip("./") == "" or ".." in name.split("/"):
        raise InvalidUsage(
            f"shard name {name!r} is not of the form name or region/name with letters, digits, '.', '_' and '-'"
        )
    return name
