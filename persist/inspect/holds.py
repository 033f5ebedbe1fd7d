"""The holders of a shard: leased readers, critical readers, writers, claims, tags and loans.

Leases are measured by the lease clock of the State, so the answer does not depend on when it is requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persist.copies.shard_facts import ShardFacts, newest
from persist.core.state import Leased, State
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyFormat, instant
from persist.inspect.readonly_location import ReadOnlyLocation


class HolderRow(JsonRecord, frozen=True, kw_only=True):
    """One holder. `kind` is `reader`, `cursor` (a critical reader), `writer`, `claim`, `tag`, `lent` or `borrowed`.

    `holder` is the purpose of a reader, the owner of a claim, the other shard of a loan. `since` is the frontier that
    is held, for a tag its time; a `point` holds only that time. `seqno` is the version whose blobs a reader holds, or
    after which a cursor was registered. `[lower, upper)` is the last append of a writer. `lapses_in_s` counts from the
    last version; a negative lease has lapsed. `until` null: a tag without end. `parts` are the inputs of a claim, or
    the blobs of a loan; `done` the outputs of a claim so far, `done_bytes` their bytes, `resumes_at` the key at which
    it continues. `key` is the blob that lists a loan; the list of a borrowed loan is kept by the owner.
    """

    kind: str
    id: str
    holder: str
    since: Frontier | None = None
    point: bool | None = None
    seqno: int | None = None
    lower: Frontier | None = None
    upper: Frontier | None = None
    begun: str | None = None
    renewed: str | None = None
    lease_s: float | None = None
    lapses_in_s: float | None = None
    until: str | None = None
    by_policy: bool | None = None
    parts: int | None = None
    done: int | None = None
    done_bytes: int | None = None
    resumes_at: str | None = None
    key: str | None = None


def holds_document(location: ReadOnlyLocation, name: str, keys: KeyFormat) -> Document:
    """All holders of a shard. The list of each loan is read."""
    facts = newest(location, name)
    state = facts.known()
    rows = [*_leases(state, keys), *_tags(state), *_loans(location, facts)]
    return Document("holds", facts.faults, name, int(state.seqno), rows=rows)


def _leases(state: State, keys: KeyFormat) -> Iterator[HolderRow]:
    for reader_id, reader in sorted(state.leased_readers.items()):
        yield HolderRow(
            kind="reader",
            id=str(reader_id),
            holder=reader.purpose,
            since=reader.since.to_json(),
            point=reader.point,
            seqno=int(reader.seqno),
            **_lease(state, reader),
        )
    for cursor_id, cursor in sorted(state.critical_readers.items()):
        since, registered = cursor.since.to_json(), int(cursor.registered)
        yield HolderRow(kind="cursor", id=str(cursor_id), holder=cursor.purpose, since=since, seqno=registered)
    for writer_id, writer in sorted(state.writers.items()):
        interval: dict[str, Any] = {}
        if writer.token is not None:
            interval = {"lower": writer.lower.to_json(), "upper": writer.upper.to_json()}
        yield HolderRow(kind="writer", id=str(writer_id), holder="", **interval, **_lease(state, writer))
    for key, claim in sorted(state.claims.items()):
        yield HolderRow(
            kind="claim",
            id=key,
            holder=claim.owner,
            since=claim.since.to_json(),
            parts=len(claim.inputs),
            done=len(claim.done),
            done_bytes=sum(part.size for part in claim.done),
            resumes_at=keys(claim.resume_key) if claim.done else None,
            **_lease(state, claim),
        )


def _lease(state: State, lease: Leased) -> dict[str, Any]:
    return {
        "renewed": instant(lease.heartbeat_ms),
        "lease_s": lease.lease_ms / 1000,
        "lapses_in_s": round((lease.lapses_ms - state.lease_now_ms) / 1000, 3),
    }


def _tags(state: State) -> Iterator[HolderRow]:
    for name, tag in sorted(state.tags.items()):
        until = instant(tag.until_ms)
        yield HolderRow(kind="tag", id=name, holder="", since=[tag.time], until=until, by_policy=tag.laddered)


def _loans(location: ReadOnlyLocation, facts: ShardFacts) -> Iterator[HolderRow]:
    state = facts.known()
    for loan_id in facts.lent(facts.faults):
        loan = state.loans[loan_id]
        yield HolderRow(
            kind="lent",
            id=str(loan_id),
            holder=location.shown_name(loan.borrower),
            begun=instant(loan.begun_ms),
            parts=loan.keys,
            key=loan.list_key,
        )
    for loan_id, owner in sorted(state.borrowed.items()):
        yield HolderRow(kind="borrowed", id=str(loan_id), holder=location.shown_name(owner))
