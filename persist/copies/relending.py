"""Loans of shards that are recovered: each owner lends what its clones name, whatever it knew of that.

A clone may come back as of another moment than its owner: the commit that lent may be lost, or the one by which the
clone gave something back. Then the owner would delete what the clone names.
"""

from __future__ import annotations

from collections.abc import Mapping

from blob import Blob, BlobNotFound
from persist.commit.bundler import keys_in
from persist.commit.lists import LoanLists
from persist.commit.versions import Versions
from persist.core.cloning import fence_of
from persist.core.errors import Corruption
from persist.core.ids import LoanId, SeqNo, family_of, shard_id_of
from persist.core.keys import is_bundle_key
from persist.core.loans import Loan, is_foreign
from persist.core.record import replace
from persist.core.state import State
from persist.formats.store_errors import translated_but_missing


def relent(states: Mapping[str, State], versions: Versions, now_ms: int, fenced_at: SeqNo) -> dict[str, State]:
    """These first States, by their names, with loans for all that any of them has borrowed. Writes lists.

    An owner that does not come back at all is there as a shard that was dropped, whose log begins at `fenced_at`: else
    the next shard of its name would take what it has lent for its own. Repeating it is safe.
    """
    lent, lists = dict(states), LoanLists(versions.blob)
    for state in states.values():
        for loan_id, owner in state.borrowed.items():
            keys = _borrowed(state, owner, versions.blob)
            found = lent.get(owner)
            if not keys or (found is not None and _holds(found, loan_id, keys, lists)):
                continue
            if found is None:
                schema = state.schemas[state.schema_id]
                found = replace(fence_of(owner, schema, now_ms, f"{loan_id[1:]}"), seqno=fenced_at)
            key = versions.write_lent(found.shard_id, tuple(sorted(keys)))
            lent[owner] = replace(found, loans={**found.loans, loan_id: Loan(state.name, key, now_ms, len(keys))})
    return lent


def _borrowed(state: State, owner: str, blob: Blob) -> set[str]:
    """The blobs of this owner that the State names, also by what bundles list."""
    family = family_of(shard_id_of(owner))
    keys = {key for key in state.blob_keys() if is_foreign(key, state.shard_id) and key.startswith(family)}
    for bundle in sorted(filter(is_bundle_key, keys)):
        with translated_but_missing():
            keys.update(keys_in(blob, bundle))
    return keys


def _holds(owner: State, loan_id: LoanId, keys: set[str], lists: LoanLists) -> bool:
    """Whether the owner's loan has all of these keys."""
    loan = owner.loans.get(loan_id)
    try:
        return loan is not None and keys.issubset(lists.keys(loan.list_key))
    except (BlobNotFound, Corruption):
        return False
