"""Ids, sequence numbers and shard names, and the record that binds two stores into one location.

An id is its type letter and 32 hex digits, a plain string, as records hold it. Nothing here is random: ids are minted
from the caller's `IdSource`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import NewType, Protocol, TypeVar

from persist.core.errors import InvalidUsage, shown
from persist.core.record import Meta, Record

_HEX = re.compile(r"[0-9a-f]{32}\Z")
LIFE_DIGITS = 8  # of a shard's id, which distinguish the lives of a name
INCARNATION_MAX = 16**LIFE_DIGITS - 1
TOKEN_CHARS_MAX = 200  # of a caller's own text
NAME_CHARS_MAX = 256  # that every consensus store accepts in a key
PART_CHARS_MAX = 128  # of the region, and of the rest, of the name of a shard
_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9._-]{1,128})?\Z")


class IdSource(Protocol):
    """A source of fresh ids; a simulation passes a seeded one."""

    def uuid7(self) -> str:
        """32 hex digits of a new UUID version 7."""


ShardId = NewType("ShardId", str)
WriterId = NewType("WriterId", str)
ReaderId = NewType("ReaderId", str)
CriticalReaderId = NewType("CriticalReaderId", str)
PartId = NewType("PartId", str)
LoanId = NewType("LoanId", str)  # of one clone's loan
Token = NewType("Token", str)  # of idempotency: minted once per API call and kept across its retries
SeqNo = NewType("SeqNo", int)  # a version of a shard's State; the first is 1, printed v1

_LETTERS: Mapping[object, str] = {
    ShardId: "s",
    WriterId: "w",
    ReaderId: "r",
    CriticalReaderId: "c",
    PartId: "p",
    Token: "i",
    LoanId: "l",
}
_Id = TypeVar("_Id", bound=str)


def mint(kind: Callable[[str], _Id], ids: IdSource) -> _Id:
    """A fresh id of that kind: `mint(Token, ids)`."""
    return kind(_LETTERS[kind] + ids.uuid7())


def parse(kind: Callable[[str], _Id], text: object) -> _Id:
    """Check an untrusted id: `parse(Token, text)`. Raises InvalidUsage."""
    if not isinstance(text, str) or text[:1] != _LETTERS[kind] or not _HEX.match(text[1:]):
        name = getattr(kind, "__name__", kind)
        raise InvalidUsage(f"{name} is '{_LETTERS[kind]}' and 32 hex digits, not {shown(text)}")
    return kind(text)


def written(kind: object) -> Meta:
    """The annotation that makes a record's decoder check an id as `parse` does: `Annotated[Token, written(Token)]`."""
    return Meta(pattern=rf"\A{_LETTERS[kind]}[0-9a-f]{{32}}\Z")


def writer_of(token: Token) -> WriterId:
    """The writer of a command with a caller's token. It is never registered: the token itself is remembered."""
    return WriterId(_LETTERS[WriterId] + token[1:])


def token_of_key(key: str) -> Token:
    """The token that a text of your own stands for as `token`, or as `Idempotency-Key` over HTTP.

    The same text is the same token, so choose one that identifies one write, such as `load-2030-01-01`. Raises
    InvalidUsage (`key` is no text, or empty).
    """
    if not isinstance(key, str) or not key or any("\ud800" <= char <= "\udfff" for char in key):
        raise InvalidUsage(f"a token is a non-empty Unicode text; {shown(key)} is not")
    digits = hashlib.sha256(b"persist token\0" + key.encode()).hexdigest()
    return Token(f"i{digits[:12]}8{digits[13:32]}")


def given_token(token: str | None) -> Token | None:
    """The token of a caller's text: one that persist made, or else `token_of_key` of it; None stays None.

    Raises InvalidUsage (it is no text of 1 to TOKEN_CHARS_MAX characters).
    """
    if token is None:
        return None
    if isinstance(token, str) and not 1 <= len(token) <= TOKEN_CHARS_MAX:
        raise InvalidUsage(f"a token has 1 to {TOKEN_CHARS_MAX} characters, not {len(token)}")
    try:
        return parse(Token, token)
    except InvalidUsage:
        return token_of_key(token)


def shard_id_of(name: str, incarnation: int = 0) -> ShardId:
    """The id of the shard of this name in this life: every drop ends a life, the first one is 0.

    The ids of all lives of a name differ in their last `LIFE_DIGITS` digits only (see `family_of`).
    """
    first = hashlib.sha256(b"persist shard\0" + name.encode()).hexdigest()[:32]
    return ShardId(f"s{int(first, 16) ^ incarnation:032x}")


def incarnation_of(name: str, shard: str) -> int:
    """The life of the name that has this id."""
    return int(shard[1:], 16) ^ int(shard_id_of(name)[1:], 16)


def family_of(shard: str) -> str:
    """The common prefix of the ids of all lives of one name, which no other name's ids have."""
    return shard[:-LIFE_DIGITS]


def critical_reader_id_of(name: str) -> CriticalReaderId:
    """The id of the critical reader that users know by `name` (a cursor, a job)."""
    return CriticalReaderId("c" + hashlib.sha256(b"persist critical reader\0" + name.encode()).hexdigest()[:32])


def check_shard_name(name: object) -> str:
    """A shard's human name, `[A-Za-z0-9._-]{1,128}`, optionally `region/name`. Raises InvalidUsage.

    It does not begin with `-`, since a command line would take it for an option.
    """
    if isinstance(name, str) and (most := max(map(len, name.split("/")))) > PART_CHARS_MAX:
        raise InvalidUsage(
            f"shard name {shown(name)} has a part of {most} characters; at most {PART_CHARS_MAX} are possible"
        )
    if not isinstance(name, str) or not _NAME.match(name) or name.strip("./") == "" or ".." in name.split("/"):
        raise InvalidUsage(
            f"shard name {shown(name)} is not of the form name or region/name with letters, digits, '.', '_' and '-', "
            "of which '-' is not the first"
        )
    if len(name) > NAME_CHARS_MAX:
        raise InvalidUsage(f"shard name {name!r} has {len(name)} characters; at most {NAME_CHARS_MAX} are possible")
    return name


class LocationBinding(Record, frozen=True):
    """What both stores of a location hold: its id, its epoch (1 at first), and an id of the pair, new at each epoch.

    Two consensus stores that were bound to one blob store at the same time differ in `pair` only.
    """

    location_id: str
    epoch: int
    pair: str
