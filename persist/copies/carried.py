"""What of a State is carried to another location, and which blobs go with it. Pure, but for what bundles list."""

from __future__ import annotations

from blob import Blob
from persist.commit.examine import all_parts
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.core.state import State, auxiliary_blob_keys
from persist.core.transitions.outcomes import retired

UNKNOWN = -1  # a size or a checksum that the State does not tell


def carried(state: State, commit_id: str) -> State:
    """The State of the next seqno that takes this one's place where it is brought back. It names no rollup.

    Readers, writers and claims under a lease stay behind: their holders do not know the other place. What the last
    token of each writer came to is remembered. Critical readers, tags, history and the outcomes of tokens are carried.
    """
    while state.writers:
        state = retired(state, state.writers, state.lease_now_ms)
    return replace(
        state,
        seqno=SeqNo(state.seqno + 1),
        commit_id=commit_id,
        leased_readers={},
        claims={},
        rollups={},
        long_diffs={},
    )


def without_policy(state: State) -> State:
    """The State without its policy of rows, which would take at once what somebody wants to have back."""
    settings = state.settings
    if settings.rows is None:
        return state
    return replace(state, settings=replace(settings, rows=None, version=settings.version + 1), cuts={})


def blobs_of(state: State, blob: Blob) -> dict[str, tuple[int, int]]:
    """The blobs that a State names, also by what bundles list: key to size and CRC-32, UNKNOWN where it tells none.

    Raises BlobNotFound or Corruption (a bundle is missing or damaged), Unavailable.
    """
    found = dict.fromkeys(auxiliary_blob_keys(state), (UNKNOWN, UNKNOWN))
    for named in all_parts(state, blob):
        if named.failed is not None:
            raise named.failed
        part = named.part
        if part.key is not None:
            listed = part.bundle
            found[part.key] = part.size if listed is None else listed.size, part.checksum
    return found
