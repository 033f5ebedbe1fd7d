"""Who holds what of a shard: readers, cursors, writers, claims, tags, loans; and what is to go for good.

Leases are told by the State's own clock of leases, so they are the same whoever looks, and whenever.
"""

from __future__ import annotations

from dataclasses import dataclass

from blob import BlobNotFound
from persist.commit.lists import LoanLists
from persist.core.antichain import Antichain
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.state import Leased, State
from persist.inspect.looking import Look
from persist.inspect.records import Document, KeyShower, Told, instant
from persist.inspect.states import Rechecked, newest


@dataclass(frozen=True, slots=True)
class ReaderTold(Told):
    """A leased reader. It holds `since` of the shard and the blobs of the State `seqno`.

    `point`: it holds the time `since` alone. `lapses_in_s` is from the last version on; below 0 it has lapsed.
    """

    id: str
    purpose: str
    since: Antichain
    seqno: int
    point: bool
    renewed: str | None
    lease_s: float
    lapses_in_s: float


@dataclass(frozen=True, slots=True)
class CursorTold(Told):
    """A critical reader: its hold on since never ends by itself. It was registered after the version `registered`."""

    id: str
    purpose: str
    since: Antichain
    registered: int


@dataclass(frozen=True, slots=True)
class WriterTold(Told):
    """A registered writer. Its last command has appended `[lower, upper)`, if it has written."""

    id: str
    has_written: bool
    lower: Antichain
    upper: Antichain
    renewed: str | None
    lease_s: float
    lapses_in_s: float


@dataclass(frozen=True, slots=True)
class ClaimTold(Told):
    """The claim of a worker: how many parts it reads, and what it has written so far."""

    key: str
    owner: str
    inputs: int
    done: int
    done_bytes: int
    resumes_at: str | None
    since: Antichain
    renewed: str | None
    lease_s: float
    lapses_in_s: float


@dataclass(frozen=True, slots=True)
class TagTold(Told):
    """A tag. `until` None: until it is taken away. `by_policy`: a policy has set it, and takes it away."""

    name: str
    time: int
    until: str | None
    by_policy: bool


@dataclass(frozen=True, slots=True)
class LoanTold(Told):
    """A loan. `direction` is `lent` or `borrowed`; `shard` is the clone, or the owner. `blobs` are those of the list.

    Of what is borrowed the owner keeps the list.
    """

    id: str
    direction: str
    shard: str
    begun: str | None
    blobs: int | None
    list_key: str | None


@dataclass(frozen=True, slots=True)
class ErasureTold(Told):
    """An erasure: rows before the time `at` are to go for good. `persist erased` tells for whom it waits.

    `phase` is `pending`, `retracted`, `rewritten` or `erased`. `doomed_blobs` are the blobs that showed the rows until
    the version `rewritten` (0: they still do). `left`: what the consensus store may keep.
    """

    id: str
    phase: str
    at: int
    reason: str
    requested: str | None
    deadline: str | None
    rewritten: int
    doomed_blobs: int
    doomed_bytes: int
    erased: str | None
    left: str | None


def readers_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [
        ReaderTold(str(key), one.purpose, one.since, int(one.seqno), one.point, *_lease(state, one))
        for key, one in sorted(state.leased_readers.items())
    ]
    return Document("readers", seen.findings, name, int(state.seqno), rows=rows)


def cursors_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [
        CursorTold(str(key), one.purpose, one.since, int(one.registered))
        for key, one in sorted(state.critical_readers.items())
    ]
    return Document("cursors", seen.findings, name, int(state.seqno), rows=rows)


def writers_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [
        WriterTold(str(key), one.token is not None, one.lower, one.upper, *_lease(state, one))
        for key, one in sorted(state.writers.items())
    ]
    return Document("writers", seen.findings, name, int(state.seqno), rows=rows)


def claims_document(look: Look, name: str, keys: KeyShower) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [
        ClaimTold(
            key,
            one.owner,
            len(one.inputs),
            len(one.done),
            sum(part.size for part in one.done),
            keys(one.resume_key) if one.done else None,
            one.since,
            *_lease(state, one),
        )
        for key, one in sorted(state.claims.items())
    ]
    return Document("claims", seen.findings, name, int(state.seqno), rows=rows)


def tags_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [TagTold(key, tag.time, instant(tag.until_ms), tag.laddered) for key, tag in sorted(state.tags.items())]
    return Document("tags", seen.findings, name, int(state.seqno), rows=rows)


def erasures_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = [
        ErasureTold(
            id=key,
            phase=one.phase,
            at=one.at,
            reason=one.reason,
            requested=instant(one.requested_ms),
            deadline=instant(one.deadline_ms),
            rewritten=int(one.rewritten),
            doomed_blobs=one.doomed.blobs,
            doomed_bytes=one.doomed.size,
            erased=None if one.proof is None else instant(one.proof.at_ms),
            left=None if one.proof is None else one.proof.left or None,
        )
        for key, one in sorted(state.erasures.items())
    ]
    return Document("erasures", seen.findings, name, int(state.seqno), rows=rows)


def loans_document(look: Look, name: str) -> Document:
    """What the shard has lent to clones, and borrowed as a clone. Each list is read."""
    seen = newest(look, name)
    state, lists = seen.known(), LoanLists(look.blob)
    rows = []
    for key, loan in sorted(state.loans.items()):
        try:
            held = len(lists.keys(loan.list_key))
            if held != loan.keys:
                seen.findings.note(f"list {loan.list_key} has {held} blobs, not {loan.keys}", loan.list_key)
        except BlobNotFound:
            if not Rechecked(look, state).is_named(loan.list_key):
                continue
            seen.findings.note(f"the blob {loan.list_key} is not there", loan.list_key)
        except (Corruption, UpgradeNeeded) as error:
            seen.findings.note(error.message, loan.list_key)
        rows.append(
            LoanTold(str(key), "lent", look.shown_name(loan.borrower), instant(loan.begun_ms), loan.keys, loan.list_key)
        )
    for key, owner in sorted(state.borrowed.items()):
        rows.append(LoanTold(str(key), "borrowed", look.shown_name(owner), None, None, None))
    return Document("loans", seen.findings, name, int(state.seqno), rows=rows)


def _lease(state: State, held: Leased) -> tuple[str | None, float, float]:
    """When it was renewed, for how long, and when it lapses, counted from the last version on."""
    return instant(held.heartbeat_ms), held.lease_ms / 1000, round((held.lapses_ms - state.lease_now_ms) / 1000, 3)
