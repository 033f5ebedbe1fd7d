"""The log of a shard, entry by entry: one that cannot be read hides no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from persist.commit.state_loader import Cut
from persist.core.batch import HollowBatch
from persist.core.errors import Corruption, InvalidUsage, NotReadable, UnknownShard, UpgradeNeeded
from persist.core.ids import SeqNo
from persist.core.state_diff import MAPPINGS, SCALARS, StateDiff
from persist.formats.store_errors import translated
from persist.inspect.documents import VERSION, Document, Findings, Frontier, JsonRecord, instant
from persist.inspect.readonly_location import Look

PAGE = 200  # entries that are read at once
POLL_S = 0.5  # how often `--follow` looks for new ones


@dataclass(frozen=True, slots=True)
class Logged:
    """An entry as it lies in the log. `change` is None where it cannot be read: `wrong` says why."""

    seqno: int
    size: int
    change: StateDiff | None
    wrong: str | None = None


class LoggedBatch(JsonRecord, frozen=True):
    """A batch that a commit brought."""

    lower: Frontier
    upper: Frontier
    since: Frontier
    parts: int
    rows: int
    bytes: int


class LogEntry(JsonRecord, frozen=True, kw_only=True):
    """A state diff. `bytes` are those of its entry; `kinds` are the parts of the State that changed.

    `operations` are what the commit history says of it. Of the trace, `added` batches came at its end, and `replaced`
    came in the place of `replaces` batches from the `first` one on, by position. `gone` counts blobs that left the
    State. `rollup` is the version of the newest rollup by then. `elsewhere` is the blob of a diff that the log does not
    take. Where it cannot be read `finding` says why, and what it would tell is empty.
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


@dataclass(frozen=True, slots=True)
class Span:
    """Which entries are asked for: `[first, last]`, both inclusive. None: from the beginning, or to the end."""

    first: int | None = None
    last: int | None = None

    def check(self) -> None:
        """Raises InvalidUsage where that makes no sense."""
        for name, value in (("from", self.first), ("to", self.last)):
            if value is not None and not 0 < value < 2**63:
                raise InvalidUsage(f"{name} is {value}; versions are in [1, {2**63 - 1}]")
        if self.first is not None and self.last is not None and self.first > self.last:
            raise InvalidUsage(f"from is {self.first} and to is {self.last}: from must not be later")


def head_of(look: Look, name: str) -> int:
    """The newest seqno. Raises UnknownShard, Unavailable, Corruption (the store itself is damaged)."""
    with translated():
        head = look.consensus.head(name)
    if head is None:
        raise UnknownShard(f"there is no shard {name!r} here; `persist shards` lists them")
    return head.seqno


def walked(look: Look, name: str, first: int = 1, last: int | None = None) -> Iterator[Logged]:
    """The live entries of `[first, last]`, ascending; long diffs are read from their blobs."""
    while last is None or first <= last:
        with translated():
            page = look.consensus.scan(name, first, PAGE if last is None else min(PAGE, last - first + 1))
        for entry in page:
            if last is not None and entry.seqno > last:
                return
            yield _read(look, name, entry.seqno, entry.data)
        if not page:
            return
        first = page[-1].seqno + 1


def _read(look: Look, name: str, seqno: int, data: bytes) -> Logged:
    try:
        change = look.versions.whole(name, look.versions.decode(data))
    except (Corruption, UpgradeNeeded) as error:
        return Logged(seqno, len(data), None, f"the log entry v{seqno} cannot be read: {error.message}")
    except Cut as error:
        return Logged(seqno, len(data), None, error.message)
    if change.seqno != seqno:
        return Logged(seqno, len(data), None, f"the log entry v{seqno} holds the state diff v{change.seqno}")
    return Logged(seqno, len(data), change)


def log_document(look: Look, name: str, span: Span, *, waits: bool = False) -> Document:
    """The entries of the log, a line each. `waits`: none of them may be there yet.

    Raises UnknownShard, InvalidUsage (the span begins after the log), NotReadable (it ends before the log).
    """
    span.check()
    head = head_of(look, name)
    if span.first is not None and span.first > head and not waits:
        raise InvalidUsage(f"shard {name!r} has no v{span.first} yet: its log ends at v{head}")
    if span.last is not None and span.last < (first := first_live(look, name)):
        raise NotReadable(f"v{span.last} of shard {name!r} is not there any more: its log begins at v{first}")
    findings = Findings(name)

    def rows() -> Iterator[LogEntry]:
        before: int | None = None
        for logged in walked(look, name, span.first or 1, span.last):
            gap = before is not None and logged.seqno != before + 1
            wrong = f"entries v{(before or 0) + 1} to v{logged.seqno - 1} are missing" if gap else None
            told = _told(name, logged, wrong)
            before = logged.seqno
            if told.finding is not None:
                findings.note(told.finding)
            yield told

    return Document("log", findings, name, head, rows=rows(), lines=True)


def _told(name: str, logged: Logged, gap: str | None) -> LogEntry:
    finding = "; ".join(filter(None, (gap, logged.wrong))) or None
    change = logged.change
    if change is None:
        empty: dict[str, Any] = {"kinds": [], "operations": [], "added": [], "replaced": []}
        empty |= dict.fromkeys(("timestamp", "commit_id", "first", "rollup", "elsewhere"))
        return LogEntry(shard=name, seqno=logged.seqno, bytes=logged.size, replaces=0, gone=0, finding=finding, **empty)
    trace = change.trace
    brought = [] if trace is None else [logged_batch(batch) for batch in trace.batches]
    replaces = 0 if trace is None else trace.count
    return LogEntry(
        shard=name,
        seqno=logged.seqno,
        timestamp=instant(change.walltime_ms),
        bytes=logged.size,
        commit_id=change.commit_id or None,
        kinds=kinds_of(change),
        operations=operations_of(change),
        added=[] if replaces else brought,
        first=trace.first if trace is not None and replaces else None,
        replaces=replaces,
        replaced=brought if replaces else [],
        gone=len(change.gone),
        rollup=int(change.rollup_seqno) or None,
        elsewhere=None if change.elsewhere is None else change.elsewhere.key,
        finding=finding,
    )


def kinds_of(change: StateDiff) -> list[str]:
    """The parts of the State that a diff changes, by their names."""
    return [name for name in ("trace", *SCALARS, *MAPPINGS) if getattr(change, name) is not None]


def operations_of(change: StateDiff) -> list[str]:
    """What the commit history says of this commit."""
    held = None if change.entries is None else change.entries.set.get(change.seqno)
    return [] if held is None else [entry.operation for entry in held.entries]


def logged_batch(batch: HollowBatch) -> LoggedBatch:
    desc = batch.desc
    frontiers = (desc.lower.to_json(), desc.upper.to_json(), desc.since.to_json())
    return LoggedBatch(*frontiers, batch.part_count, batch.rows, batch.size)


def first_live(look: Look, name: str) -> SeqNo:
    """Where the log begins now."""
    with translated():
        entries = look.consensus.scan(name, 1, 1)
    return SeqNo(entries[0].seqno if entries else 0)
