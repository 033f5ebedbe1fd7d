"""Loans: blobs of one shard that another one, a clone, may name. Pure.

The owner keeps one `Loan` a clone, which names a list of blob keys. The borrower keeps whose loans it has. What a list
holds, nobody deletes while the loan stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from persist.core.ids import LoanId, family_of
from persist.core.keys import shard_of
from persist.core.record import Record

LOANS_MAX = 10_000  # of one owner
LENT_KEYS_MAX = 1_000_000  # of one list


class Loan(Record, frozen=True):
    """What the owner keeps of a clone: the shard `borrower` may name the `keys` blobs that the list at `list_key` has.

    `begun_ms` is when it was lent, by the committer's clock.
    """

    borrower: str
    list_key: str
    begun_ms: int
    keys: int


class LentKeys(Record, frozen=True):
    """A list: blob keys of one owner, ascending, among them what bundles that it has list in turn."""

    keys: tuple[str, ...]


Loans = Mapping[LoanId, Loan]
Borrowed = Mapping[LoanId, str]  # the names of owners


def is_foreign(key: str, shard: str) -> bool:
    """Whether a well-formed blob key belongs to another name than the shard of this id, whichever life it is of."""
    return not key.startswith(family_of(shard))


def by_owner(keys: Iterable[str]) -> dict[str, set[str]]:
    """Blob keys by the family of ids to which they belong."""
    found: dict[str, set[str]] = {}
    for key in keys:
        found.setdefault(family_of(shard_of(key)), set()).add(key)
    return found


def compact(key: str) -> bytes:
    """The 16 bytes of the id in a well-formed blob key, which no other key has."""
    return bytes.fromhex(key.rpartition("/")[2][1:33])
