"""Rollups: making them, and whether one can be read back and holds what the log says.

That is asked before anything is deleted that a rollup stands for.

Two may make a rollup of one State, and one of them is named. The other one's blob is deleted by who wrote it: else the
sweep would find it a day later, and the receipt of an erasure would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from blob import BlobNotFound
from persist.commit.versions import SCAN_LIMIT, Versions
from persist.core import commands as c
from persist.core import state_diff
from persist.core.errors import Corruption, PersistError
from persist.core.ids import SeqNo
from persist.core.state import State
from persist.formats.state_frames import decode_state, encode_state
from persist.formats.store_errors import translated, translated_but_missing


def rolled_up(versions: Versions, state: State, apply: Callable[[c.Command], c.Result]) -> bool:
    """Write the State as a rollup and have it named; whether it is. Raises what the stores raise.

    After an error nobody knows whether it is named: then its blob stays.
    """
    command = c.AddRollup(state.seqno, *versions.write_rollup(state))
    result = apply(command)
    dropped(versions, command, result)
    return result == c.RollupAdded(True)


def dropped(versions: Versions, command: c.Command, result: c.Result) -> None:
    """Delete the rollup of a command that the shard has refused.

    It is never named later: another rollup stands in its place, or a newer one is there, and that is never undone.
    """
    if isinstance(command, c.AddRollup) and result == c.RollupAdded(False):
        with suppress(PersistError), translated():  # the sweep finds it
            versions.blob.delete([command.key])


def read_back(versions: Versions, state: State, seqno: SeqNo) -> State | None:
    """The State in the rollup that `state` names for this seqno; None: the rollup is gone.

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
    if logged and logged[0].seqno == seqno and logged[0].commit_id != found.commit_id:
        raise Corruption(f"rollup {key} holds another v{seqno} of shard {state.name!r} than its log")
    return found


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
    if made is not None and decode_state(encode_state(made), versions.build) != held:
        raise Corruption(
            f"rollup {state.rollups[seqno].key} of shard {state.name!r} holds another State than its log makes: the "
            "log is left as it is"
        )
    return True


def _base(versions: Versions, state: State, first: SeqNo) -> State | None:
    if first not in state.rollups:
        return None
    try:
        return read_back(versions, state, first)
    except Corruption:
        return None
