"""What is published in the blob store of a location: log entries of many shards in one journal, and all names.

pub/<process-uuid7>/j<n:012d>.journal    what one process published at a time
pub/beat/<minute:012d>                   maintenance was at work in this minute since 1970
cat/<n:012d>.json                        the catalogue: the name of every shard

No key of a shard begins like these.
"""

from __future__ import annotations

import re

from persist.core.record import Record

JOURNALS = "pub/"
BEATS = "pub/beat/"
CATALOGUES = "cat/"

_JOURNAL = re.compile(r"pub/[0-9a-f]{32}/j[0-9]{12}\.journal\Z")
_BEAT = re.compile(r"pub/beat/[0-9]{12}\Z")
_CATALOGUE = re.compile(r"cat/[0-9]{12}\.json\Z")


class ShardEntries(Record, frozen=True):
    """Entries of the log of the shard `name`, as they stand there, ascending by seqno, not always without a gap."""

    name: str
    entries: tuple[bytes, ...]


class Journal(Record, frozen=True):
    """What a process published at a time. `epoch` is that of the location, `at_ms` the wall clock of the process."""

    epoch: int
    at_ms: int
    shards: tuple[ShardEntries, ...]


def journal_key(process: str, number: int) -> str:
    return f"{JOURNALS}{process}/j{number:012d}.journal"


def beat_key(now_ms: int) -> str:
    return f"{BEATS}{now_ms // 60_000:012d}"


def catalogue_key(number: int) -> str:
    return f"{CATALOGUES}{number:012d}.json"


def is_journal_key(key: str) -> bool:
    return _JOURNAL.match(key) is not None


def is_beat_key(key: str) -> bool:
    return _BEAT.match(key) is not None


def is_catalogue_key(key: str) -> bool:
    return _CATALOGUE.match(key) is not None


def catalogue_number(key: str) -> int:
    """The number of a well-formed key of a catalogue."""
    return int(key[len(CATALOGUES) : len(CATALOGUES) + 12])
