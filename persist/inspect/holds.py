"""Who holds what of a shard: leased readers, critical readers, writers, claims, tags and loans.

Leases are counted by the lease clock of the State, so the answer does not depend on when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persist.copies.shard_facts import ShardFacts, newest
from persist.core.state import Leased, State
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyShower, instant
from persist.inspect.readonly_location import ReadOnlyLocation


class HolderRow(JsonRecord, frozen=True, kw_only=True):
    """One holder. `kind` is `reader`, `cursor` (a critical reader), `writer`, `claim`, `tag`, `lent` or `borrowed`.

    `holder` is the purpose of a reader, the owner of a claim, the other shard of a loan. `since` is the frontier that
    it holds, of a tag its time; a `point` holds that time alone. `seqno` is the version whose blobs a reader holds, or
    after which a cursor was registered. A writer has appended `[lower, upper)` last. `lapses_in_s` counts from the
    last version; below 0 the lease has lapsed. `until` null: a tag without end. `parts` are those that a claim reads,
    or the blobs of a loan; `done` those that a claim has written, `done_bytes` their bytes, `resumes_at` the key from
    which it continues. `key` is the blob that lists a loan; of what is borrowed the owner keeps the list.
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


def holds_document(look: ReadOnlyLocation, name: str, keys: KeyShower) -> Document:
    """Every holder of a shard. The list of each loan is read."""
    facts = newest(look, name)
    state = facts.known()
    rows = [*_leases(state, keys), *_tags(state), *_loans(look, facts)]
    return Document("holds", facts.faults, name, int(state.seqno), rows=rows)


def _leases(state: State, keys: KeyShower) -> Iterator[HolderRow]:
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


def _lease(state: State, held: Leased) -> dict[str, Any]:
    return {
        "renewed": instant(held.heartbeat_ms),
        "lease_s": held.lease_ms / 1000,
        "lapses_in_s": round((held.lapses_ms - state.lease_now_ms) / 1000, 3),
    }


def _tags(state: State) -> Iterator[HolderRow]:
    for name, tag in sorted(state.tags.items()):
        until = instant(tag.until_ms)
        yield HolderRow(kind="tag", id=name, holder="", since=[tag.time], until=until, by_policy=tag.laddered)


def _loans(look: ReadOnlyLocation, facts: ShardFacts) -> Iterator[HolderRow]:
    state = facts.known()
    for loan_id in facts.lent(facts.faults):
        loan = state.loans[loan_id]
        yield HolderRow(
            kind="lent",
            id=str(loan_id),
            holder=look.shown_name(loan.borrower),
            begun=instant(loan.begun_ms),
            parts=loan.keys,
            key=loan.list_key,
        )
    for loan_id, owner in sorted(state.borrowed.items()):
        yield HolderRow(kind="borrowed", id=str(loan_id), holder=look.shown_name(owner))
