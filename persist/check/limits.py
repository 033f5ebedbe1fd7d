"""From when on something is a finding: every number by its name, and those that the caller may choose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from persist.core.errors import InvalidUsage
from persist.core.shard_settings import history_ms

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

OFFSET_MS_MAX = 10_000  # by so much two clocks that agree may differ
LOG_ENTRIES_LONG = 2_000  # entries of a log that nobody holds, which a collection would take away
LOG_ENTRIES_READ_MAX = 100_000  # that are read of one log
ROLLUP_ENTRIES_MAX = 4_096  # state diffs after the newest rollup, all of which are read when a shard is opened
BATCHES_MANY = 256  # with so many batches a merge that is due is late
CLAIM_SILENT_LEASES = 10  # after so many leases without a word the worker is gone
CLAIM_SILENT_MS = HOUR_MS
HELD_ENTRIES_MANY = 1_000  # log entries that a reader keeps, where it keeps no part
LAPSES_MANY = 5  # leases of one shard that lapsed within a day
READERS_MANY = 1_000
WRITERS_MANY = 1_000
ORPHANS_MANY = 100  # blobs that nothing names, older than a day
ORPHAN_BYTES_MANY = 1024**3
RACES_MANY = 20  # commits that lost a race
RACES_PERCENT_MAX = 10  # of all that were tried
FAILURES_MANY = 5  # calls to a store that failed
FAILURES_PERCENT_MAX = 1  # of all of that kind
KEYS_TOLD_MAX = 3  # blobs that one sentence names
_PERCENT = re.compile(r"[0-9]{1,3}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the caller may choose.

    `held_ms`: who holds history or blobs for longer is told. `behind_ms`: so late may maintenance be. `backup_ms`: so
    old may the newest backup be. `token_ms`: a token that ends sooner is told. `free_percent`: with less room than that
    a disk is nearly full; 0: no disk is.
    """

    held_ms: int = DAY_MS
    behind_ms: int = DAY_MS
    backup_ms: int = 2 * DAY_MS
    token_ms: int = 14 * DAY_MS
    free_percent: int = 10


# What each is called: as an option with two dashes, and as a parameter over HTTP. What it says is in `--help`.
AGES = {
    "held": "tell who holds history, or blobs, for longer (1d)",
    "behind": "so late may maintenance be (1d)",
    "backup_age": "so old may the newest backup be (2d)",
    "token_age": "tell tokens that end sooner (14d)",
}
FREE = "with less of a disk free it is nearly full (10)"


def read_limits(held: str = "", behind: str = "", backup_age: str = "", token_age: str = "", free: str = "") -> Limits:
    """The limits that texts such as `12h` and `10` tell; "": the default. Raises InvalidUsage."""
    known = Limits()
    return Limits(
        _age("held", held, known.held_ms),
        _age("behind", behind, known.behind_ms),
        _age("backup-age", backup_age, known.backup_ms),
        _age("token-age", token_age, known.token_ms),
        _percent(free, known.free_percent),
    )


def _age(what: str, text: str, default: int) -> int:
    if not text:
        return default
    found = history_ms(text, what, takes_none=False)
    if found is None:
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be an age such as '1d' (ms, s, m, h, d or w)")
    return found


def _percent(text: str, default: int) -> int:
    if not text:
        return default
    if not _PERCENT.fullmatch(text) or int(text) > 100:
        raise InvalidUsage(f"free is {text!r:.100}; it must be a number of percent in [0, 100]")
    return int(text)
