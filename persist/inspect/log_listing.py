"""The log of a shard, entry by entry. The listing continues past entries that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from persist.copies.shard_facts import FaultKind, Faults, LoggedDiff, first_live, head_of, walk_log
from persist.core.batch import HollowBatch
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.state_diff import MAPPINGS, SCALARS
from persist.inspect.documents import VERSION, Document, Frontier, JsonRecord, instant
from persist.inspect.readonly_location import ReadOnlyLocation

POLL_S = 0.5  # interval at which `--follow` polls for new entries


class LoggedBatch(JsonRecord, frozen=True):
    """A batch that a commit added."""

    lower: Frontier
    upper: Frontier
    since: Frontier
    parts: int
    rows: int
    bytes: int


class LogEntry(JsonRecord, frozen=True, kw_only=True):
    """A state diff. `bytes` is the size of its entry; `kinds` are the fields of the State that changed.

    `operations` are those in the commit history. `added` are batches appended to the trace; `replaced` are batches that
    replaced `replaces` batches from position `first` on. `gone` counts blobs that left the State. `rollup` is the
    version of the newest rollup at that time. `elsewhere` is the blob of a diff that is too long for the log. If the
    entry cannot be read, `finding` says why, and the other fields are empty.
    """

    version: Literal[1] = VERSION
    command: Literal["log"] = "log"
    shard: str
    seqno: int
    timestamp: str | None
    bytes: int
    commit_id: str | None
    kinds: list[str]
    operations: list[str]
    added: list[LoggedBatch]
    first: int | None
    replaces: int
    replaced: list[LoggedBatch]
    gone: int
    rollup: int | None
    elsewhere: str | None
    finding: str | None


Span = tuple[int | None, int | None]  # `[first, last]` of a log, both inclusive. None: from the start, or to the end


def version_at(location: ReadOnlyLocation, name: str, at_ms: int) -> int:
    """The last version committed by that instant, by its committer's clock. Raises NotReadable."""
    head_of(location, name)
    seqno: int | None = None
    earliest: int | None = None
    for logged in walk_log(location, name):
        if logged.change is None:
            continue
        earliest = logged.change.walltime_ms if earliest is None else min(earliest, logged.change.walltime_ms)
        if logged.change.walltime_ms <= at_ms:
            seqno = logged.seqno
    if seqno is None:
        raise NotReadable(f"the log of shard {name!r} has no version that old: it begins at {instant(earliest)}")
    return seqno


def log_document(location: ReadOnlyLocation, name: str, span: Span, *, waits: bool) -> Document:
    """The entries of the log, a line each. `waits`: the span may begin after the log.

    Raises UnknownShard, InvalidUsage (the span begins after the log), NotReadable (it ends before the log).
    """
    first, last = span
    head = head_of(location, name)
    if first is not None and first > head and not waits:
        raise InvalidUsage(f"shard {name!r} has no v{first} yet: its log ends at v{head}")
    if last is not None and last < (live := first_live(location, name)):
        raise NotReadable(f"v{last} of shard {name!r} was deleted from its log, which begins at v{live}")
    findings = Faults(name)

    def rows() -> Iterator[LogEntry]:
        before: int | None = None
        for logged in walk_log(location, name, first or 1, last):
            gap = ""
            if before is not None and logged.seqno != before + 1:
                gap = f"entries v{before + 1} to v{logged.seqno - 1} are missing"
            entry = _entry(name, logged, gap)
            before = logged.seqno
            if entry.finding is not None:
                findings.note(FaultKind.LOG, entry.finding)
            yield entry

    return Document("log", findings, name, head, rows=rows(), lines=True)


def _entry(name: str, logged: LoggedDiff, gap: str) -> LogEntry:
    finding = "; ".join(filter(None, (gap, logged.wrong))) or None
    change = logged.change
    if change is None:
        empty: dict[str, Any] = {"kinds": [], "operations": [], "added": [], "replaced": []}
        empty |= dict.fromkeys(("timestamp", "commit_id", "first", "rollup", "elsewhere"))
        return LogEntry(shard=name, seqno=logged.seqno, bytes=logged.size, replaces=0, gone=0, finding=finding, **empty)
    trace = change.trace
    brought = [] if trace is None else [_batch(batch) for batch in trace.batches]
    replaces = 0 if trace is None else trace.count
    record = None if change.entries is None else change.entries.set.get(change.seqno)
    return LogEntry(
        shard=name,
        seqno=logged.seqno,
        timestamp=instant(change.walltime_ms),
        bytes=logged.size,
        commit_id=change.commit_id or None,
        kinds=[field for field in ("trace", *SCALARS, *MAPPINGS) if getattr(change, field) is not None],
        operations=[] if record is None else [entry.operation for entry in record.entries],
        added=[] if replaces else brought,
        first=trace.first if trace is not None and replaces else None,
        replaces=replaces,
        replaced=brought if replaces else [],
        gone=len(change.gone),
        rollup=int(change.rollup_seqno) or None,
        elsewhere=None if change.elsewhere is None else change.elsewhere.key,
        finding=finding,
    )


def _batch(batch: HollowBatch) -> LoggedBatch:
    lower, upper, since = (frontier.to_json() for frontier in (batch.desc.lower, batch.desc.upper, batch.desc.since))
    return LoggedBatch(lower, upper, since, batch.part_count, batch.rows, batch.size)
