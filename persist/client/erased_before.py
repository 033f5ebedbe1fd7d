"""What may still show rows that were gone before a time, whoever took them away: told of both stores by a scan."""

from __future__ import annotations

from typing import Any

from persist.client.erase import wait_json
from persist.client.wall_clock import instant_ms, instant_text, shown_instant
from persist.commit.erased import scanned
from persist.commit.location import Location
from persist.core.antichain import TIME_MAX
from persist.core.erasing import gone_at, is_rewritten, states_held, waits
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name


def erased_before(location: Location, name: str, before: int) -> dict[str, Any]:
    """The answer of `persist erased NAME --before T`: what holds such rows, or, where nothing does, the receipt.

    Args:
        before: rows that were retracted before this time, or by a truncation before it or a later one, are meant.
    Changes nothing; repeating it is safe. Raises InvalidUsage (the time is not complete), UnknownShard, Unavailable.
    """
    if type(before) is not int or not 0 <= before <= TIME_MAX:
        raise InvalidUsage(f"before must be a time in [0, {TIME_MAX}]")
    machine = location.machine(check_shard_name(name))
    state = machine.refresh()
    at = gone_at(state, before)
    if not state.tombstone and state.upper.less_equal(at):
        raise InvalidUsage(f"time {at} of shard {name!r} is not complete: its upper is {state.upper}")
    found = scanned(location, machine, at)
    state = machine.refresh()
    held = waits(state, at) if not is_rewritten(state, at) else states_held(state, int(state.seqno))
    return {
        "shard": name,
        "before": before,
        "at": at,
        "phase": "erased" if found.is_clean else "rewritten" if is_rewritten(state, at) else "retracted",
        "waits": [] if found.is_clean else [wait_json(wait) for wait in held],
        "blobs_to_delete": {"count": found.older_count, "bytes": found.older_size, "keys": list(found.older)},
        "unnamed_blobs": {"count": found.unnamed_count, "keys": list(found.unnamed)},
        "scanned_at": instant_text(instant_ms("scanned_at", shown_instant(found.at_ms))),
        "log_begins": found.horizon,
        "scanned": {"log_entries": found.entries, "blobs": found.blobs, "bytes": found.size},
    }
