"""Diagnoses: what is told of one finding, and every finding that there is, with its id and how bad it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from msgspec import Meta

from persist.inspect.documents import JsonRecord

PAGE = "docs/check.md"
# How bad a finding is. Critical: data is lost or cannot be read, or soon nothing can be written. Warning: what was
# promised is not kept, or room is not given back. Note: it costs something, or will one day.
CRITICAL, WARNING, NOTE = "critical", "warning", "note"
SEVERITIES = (CRITICAL, WARNING, NOTE)

# Every finding by its id, the worst first: in this order they are told. An id never changes its meaning.
IDS: Mapping[str, str] = {
    "shard-unreadable": CRITICAL,
    "stores-mispaired": CRITICAL,
    "blob-missing": CRITICAL,
    "blob-damaged": CRITICAL,
    "log-damaged": CRITICAL,
    "state-damaged": CRITICAL,
    "loan-broken": CRITICAL,
    "disk-full": CRITICAL,
    "format-newer": CRITICAL,
    "marker-wrong": WARNING,
    "files-open": WARNING,
    "clock-off": WARNING,
    "backup-unreadable": WARNING,
    "backup-old": WARNING,
    "erasure-late": WARNING,
    "store-failing": WARNING,
    "maintenance-away": WARNING,
    "retention-behind": WARNING,
    "retention-held": WARNING,
    "token-expires": WARNING,
    "compaction-behind": WARNING,
    "claim-stuck": WARNING,
    "cursor-still": WARNING,
    "since-held": WARNING,
    "gc-held": WARNING,
    "rollup-old": WARNING,
    "log-long": WARNING,
    "orphans-many": NOTE,
    "loan-stuck": NOTE,
    "readers-many": NOTE,
    "writers-many": NOTE,
    "lease-lapses": NOTE,
    "races-lost": NOTE,
    "backup-lacks": NOTE,
}
_ORDER = {found: number for number, found in enumerate(IDS)}


class Diagnosis(JsonRecord, frozen=True):
    """A finding. `shard` is the one it is of; null: it is of the location, or of what is beside it.

    `key` is that of the blob; null: it is of none, or of several. `what`, `cause` and `remedy` are a sentence each.
    `command` is one that helps; null: no command does. It takes the same location as the check. `page` says more.
    """

    id: Annotated[str, Meta(extra_json_schema={"enum": list(IDS)})]
    severity: Annotated[str, Meta(extra_json_schema={"enum": list(SEVERITIES)})]
    shard: str | None
    key: str | None
    what: str
    cause: str
    remedy: str
    command: str | None
    page: str


def diagnosis(  # noqa: PLR0913 - each is a field
    found: str,
    shard: str | None,
    what: str,
    *,
    cause: str,
    remedy: str,
    command: str | None = None,
    key: str | None = None,
) -> Diagnosis:
    """The finding of this id, which is one of `IDS`."""
    return Diagnosis(found, IDS[found], shard, key, what, cause, remedy, command, f"{PAGE}#{found}")


def ranked(found: Iterator[Diagnosis]) -> list[Diagnosis]:
    """The worst first; those of one id by the names of their shards, what is of no shard before."""
    return sorted(found, key=lambda one: (_ORDER.get(one.id, len(IDS)), one.shard or "", one.what))
