"""A digest of the contents of a shard as of a time: equal contents have equal digests.

It does not depend on the order of rows, their distribution over parts, or the keys of blobs. So it is the same at home,
in a restored backup, in a clone and in another region. It has 64 bits, and is not resistant to deliberate collisions.
"""

from __future__ import annotations

import pyarrow.compute as pc

from blob import BlobNotFound
from persist.copies.shard_facts import TRIES, FaultKind, newest
from persist.core.errors import Corruption, InvalidUsage, NotReadable, Unavailable, UnknownShard
from persist.core.readable_times import is_kept
from persist.core.shard_phases import dropped
from persist.core.state import State
from persist.core.truncations_and_drops import contents, last_written
from persist.formats.store_errors import translated_but_missing
from persist.inspect.documents import Document, Frontier, JsonRecord
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import DIFF, PartReader, valid_schemas
from persist.parts import newest as newest_schema
from persist.parts.row_stats import MODULUS, digest_of_rows

MEMORY_BYTES = 64 * 1024 * 1024


class ContentDigest(JsonRecord, frozen=True):
    """The contents as of a time (-1: before all times): the number of `rows`, and their digest, 16 hex digits.

    None: a part cannot be read.
    """

    as_of: int
    since: Frontier
    upper: Frontier
    rows: int | None
    digest: str | None


def digest_document(location: ReadOnlyLocation, name: str, as_of: int | None) -> Document:
    """As of the latest complete time, or an earlier one. Raises UnknownShard, InvalidUsage, NotReadable, Unavailable.

    No lease is taken: if maintenance deletes a part meanwhile, the newest State is read, up to TRIES times.
    """
    for tries_left in range(TRIES, -1, -1):
        facts = newest(location, name)
        state = facts.known()
        if state.is_closed:
            raise UnknownShard(dropped(name))
        at = _time(state, name, as_of)
        rows: int | None = None
        digest: int | None = None
        try:
            rows, digest = _digest(location, state, at)
        except Corruption as error:
            facts.faults.note(FaultKind.PART, error.message)
        except BlobNotFound as error:
            if facts.has_moved:
                if tries_left:
                    continue
                raise Unavailable(f"shard {name!r} has moved on during each of {TRIES + 1} reads; ask again") from error
            facts.faults.note(FaultKind.MISSING, f"a blob is missing: {error}")
        break
    since, upper = state.since.to_json(), state.upper.to_json()
    about = ContentDigest(at, since, upper, rows, None if digest is None else f"{digest:016x}")
    return Document("digest", facts.faults, name, int(state.seqno), about)


def _time(state: State, name: str, as_of: int | None) -> int:
    upper = state.upper.element
    if as_of is None:
        if upper is None:
            return last_written(state.trace.parts(), state.drops)
        return upper - 1
    if as_of < 0:
        raise InvalidUsage(f"as-of is {as_of}; times begin at 0")
    if upper is not None and as_of >= upper:
        raise InvalidUsage(f"time {as_of} of shard {name!r} is not complete yet: its upper is {upper}")
    if not is_kept(state, as_of):
        raise NotReadable(
            f"time {as_of} of shard {name!r} is no longer readable: its since is {state.since}",
            as_of=as_of,
            since=state.since.to_json(),
        )
    return as_of


def _digest(location: ReadOnlyLocation, state: State, as_of: int) -> tuple[int, int]:
    """Rows and digest. Raises BlobNotFound, Corruption, Unavailable. Memory: `MEMORY_BYTES`."""
    sound = valid_schemas(state.schemas)
    reader = PartReader(location.blob, sound, newest_schema(sound)[1], memory_bytes=MEMORY_BYTES)
    runs = (run for batch in state.trace.batches if batch.desc.lower.less_equal(as_of) for run in batch.runs)
    rows = digest = 0
    if as_of >= 0:
        with translated_but_missing():
            for table in reader.read_range(contents(runs, state.drops, as_of), as_of=as_of):
                rows += int(pc.sum(table.column(DIFF)).as_py() or 0)
                digest = (digest + digest_of_rows(table)) % MODULUS
    return rows, digest
