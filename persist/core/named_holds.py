"""Named holds: tags keep single times readable, loans retain blobs that a clone names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from persist.core.blob_keys import shard_of
from persist.core.errors import InvalidUsage, shown
from persist.core.ids import family_of
from persist.core.record import Record

TAGS_MAX = 1_000  # of a shard
KEEP_MS_MAX = 36_500 * 24 * 3600 * 1000  # 100 years
_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")


class Tag(Record, frozen=True):
    """A time that stays readable until the instant `until_ms` (UTC, since 1970); None: until it is removed.

    `laddered`: set, and later removed, by a row policy.
    """

    time: int
    until_ms: int | None = None
    laddered: bool = False


def check_tag_name(name: object) -> str:
    """The name, if it is valid for a tag. Raises InvalidUsage."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):  # a path cannot hold these
        raise InvalidUsage(
            f"tag {shown(name)} is no name of a tag: use 1 to 128 of the characters A-Z a-z 0-9 . _ -, not - first, "
            "and neither . nor .. alone"
        )
    return name


# Loans: blobs of one shard that another one, a clone, may name. Pure.
#
# The owner has one `Loan` per clone, which names a list of blob keys. The borrower records the owners of its loans.
# Blobs in a list are not deleted while the loan exists.


LOANS_MAX = 10_000  # of one owner
LENT_KEYS_MAX = 1_000_000  # of one list


class Loan(Record, frozen=True):
    """The owner's record of a clone: the shard `borrower` may name the `keys` blobs in the list at `list_key`.

    `begun_ms` is when the loan began, by the committer's clock.
    """

    borrower: str
    list_key: str
    begun_ms: int
    keys: int


class LentKeys(Record, frozen=True):
    """A list of blob keys of one owner, ascending, including those that its bundles list."""

    keys: tuple[str, ...]


def is_foreign(key: str, shard: str) -> bool:
    """Whether a well-formed blob key belongs to another name than the shard of this id, in any life."""
    return not key.startswith(family_of(shard))


def by_owner(keys: Iterable[str]) -> dict[str, set[str]]:
    """Blob keys by the family of shard ids to which they belong."""
    owners: dict[str, set[str]] = {}
    for key in keys:
        owners.setdefault(family_of(shard_of(key)), set()).add(key)
    return owners


def compact(key: str) -> bytes:
    """The 16 bytes of the id in a well-formed blob key, which is unique to it."""
    return bytes.fromhex(key.rpartition("/")[2][1:33])
