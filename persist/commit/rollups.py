"""Whether a rollup can be read back, and holds what the log says. Asked before anything is deleted that it stands for.

Writes nothing; repeating it is safe.
"""

from __future__ import annotations

from blob import BlobNotFound
from persist.commit.versions import SCAN_LIMIT, Versions
from persist.core import state_diff
from persist.core.errors import Corruption
from persist.core.ids import SeqNo
from persist.core.state import State
from persist.formats.state_frames import decode_state, encode_state, level_of
from persist.formats.store_errors import translated_but_missing


def read_back(versions: Versions, state: State, seqno: SeqNo) -> tuple[State, int] | None:
    """The State in the rollup that `state` names for this seqno, and its level; None: the rollup is gone.

    Raises Corruption where it cannot be decoded, is of another seqno, or of another commit than the log tells of.
    """
    key = state.rollups[seqno].key
    try:
        with translated_but_missing():
            data = versions.blob.get(key)
    except BlobNotFound:
        return None
    found = decode_state(data, versions.build)
    if (found.seqno, found.name) != (seqno, state.name):
        raise Corruption(f"rollup {key} holds v{found.seqno} of shard {found.name!r}, not v{seqno} of {state.name!r}")
    logged = versions.diffs(state.name, seqno, 1)
    if logged and logged[0].seqno == seqno and logged[0].commit_id != found.commit_id and found.commit_id:
        raise Corruption(f"rollup {key} holds another v{seqno} of shard {state.name!r} than its log")
    return found, level_of(data)


def check_replayed(versions: Versions, state: State, first: SeqNo, seqno: SeqNo) -> bool:
    """Whether the rollup of `seqno` is there. It is compared with what the log makes of the rollup of `first`.

    Raises Corruption where they differ. Of a rollup of `first` that cannot be read nothing can be made: then the one of
    `seqno` is read back only. Reads `seqno - first` log entries.
    """
    held = read_back(versions, state, seqno)
    if held is None:
        return False
    made = _base(versions, state, first)
    while made is not None and made.seqno < seqno:
        page = versions.diffs(state.name, SeqNo(made.seqno + 1), min(SCAN_LIMIT, seqno - made.seqno))
        if not page or page[0].seqno != made.seqno + 1:
            return True  # another collector has cut the log meanwhile
        for change in page:
            made = state_diff.apply(versions.whole(state.name, change), made)
    found, level = held
    if made is not None and decode_state(encode_state(made, level, versions.build), versions.build) != found:
        raise Corruption(
            f"rollup {state.rollups[seqno].key} of shard {state.name!r} holds another State than its log makes: the "
            "log is left as it is"
        )
    return True


def _base(versions: Versions, state: State, first: SeqNo) -> State | None:
    if first not in state.rollups:
        return None
    try:
        found = read_back(versions, state, first)
    except Corruption:
        return None
    return None if found is None else found[0]
