"""Damage: shards that cannot be read, blobs that are not there or have another size, entries of logs."""

from __future__ import annotations

from collections.abc import Iterator

from persist.copies.verify import auxiliary_sizes
from persist.core.errors import PersistError
from persist.core.keys import is_bundle_key
from persist.core.state import State
from persist.doctor.diagnosis import Diagnosis, diagnosis
from persist.doctor.saying import is_or_are, many, some
from persist.doctor.seen import Seen
from persist.formats.store_errors import translated
from persist.inspect.documents import Findings
from persist.inspect.part_list import placed
from persist.inspect.states import Rechecked

NOT_THERE = "is not there"  # what findings of an inspection say of a blob that is missing
MENDS = "bring it back from a copy of the blob store, or from a backup: a blob never changes"


def shard_unreadable(seen: Seen) -> Iterator[Diagnosis]:
    """No State can be made: nobody can read or write the shard."""
    if seen.state is not None:
        return
    why = "; ".join(dict.fromkeys(one.what for one in seen.wrong)) or "its log leads to none"
    yield diagnosis(
        "shard-unreadable",
        seen.name,
        f"nobody can read or write the shard: no State of its log, which ends at v{seen.head}, can be made",
        cause=why,
        remedy="stop what deletes (persist gc, and maintenance of servers); bring back the blobs, or the log",
        command=f"persist inspect log {seen.name}",
    )


def log_lost(name: str) -> Diagnosis:
    """The blob store has rollups of a shard, and the consensus store has nothing of it."""
    return diagnosis(
        "shard-unreadable",
        name,
        "nobody can read or write the shard: its log is not in the consensus store, and its blobs are there",
        cause="the consensus store has lost what it acknowledged, or is an older copy of itself",
        remedy="stop what deletes (persist gc, and maintenance of servers); restore a newer backup of the consensus "
        "store",
        command=f"persist verify {name}",
    )


def met(seen: Seen, error: PersistError) -> Iterator[Diagnosis]:
    """Something damaged was met on the way."""
    yield diagnosis(
        "blob-damaged",
        seen.name,
        f"something that the shard names cannot be read: {error.message}",
        cause="the bytes in the store are not those that were written, or a newer persist has written them",
        remedy=f"{MENDS}; persist verify --deep reads every byte",
        command=f"persist verify {seen.name}",
    )


def log_damaged(seen: Seen) -> Iterator[Diagnosis]:
    """Entries that cannot be read, or States that cannot be made of the log."""
    if seen.state is None:
        return
    found = [one.what for one in seen.wrong if one.key is None] + seen.log.wrong
    found = list(dict.fromkeys(found))
    if found:
        yield diagnosis(
            "log-damaged",
            seen.name,
            f"{many(len(found), 'thing')} in the log {is_or_are(len(found))} damaged: {found[0]}",
            cause="the consensus store has lost or changed what it acknowledged, or was restored to an older time",
            remedy="restore the consensus store, or begin the logs anew from the blob store",
            command=f"persist verify {seen.name}",
        )


def blobs(seen: Seen) -> Iterator[Diagnosis]:
    """Blobs that the State names, also by what bundles list: whether each is there, with its size."""
    if seen.state is None:
        return
    findings = Findings(seen.name)
    findings.take(seen.wrong)
    missing, damaged = _compared(seen, seen.state, findings)
    for one in findings:
        if one.key is not None:
            (missing if one.what.endswith(NOT_THERE) else damaged).setdefault(one.key, one.what)
    damaged = {key: what for key, what in damaged.items() if key not in missing}
    if missing:
        yield diagnosis(
            "blob-missing",
            seen.name,
            f"{many(len(missing), 'blob')} that the shard needs {is_or_are(len(missing))} not there: "
            f"{some(sorted(missing))}",
            cause="somebody or a rule of the bucket deleted them, or the store was copied without them",
            remedy=f"{MENDS}; what is lost for good is taken out by persist repair --excise",
            command=f"persist repair {seen.name}",
        )
    if damaged:
        yield diagnosis(
            "blob-damaged",
            seen.name,
            f"{many(len(damaged), 'blob')} of the shard {is_or_are(len(damaged))} damaged: "
            f"{next(iter(damaged.values()))}",
            cause="the bytes in the store are not those that were written",
            remedy=f"{MENDS}; persist verify --deep reads every byte",
            command=f"persist repair {seen.name} --deep",
        )


def _compared(seen: Seen, state: State, findings: Findings) -> tuple[dict[str, str], dict[str, str]]:
    """What is missing, and what has another size: each with what to say of it."""
    again = Rechecked(seen.look, state)
    missing: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for key, (size, named_by) in _named(seen, state, findings).items():
        known = seen.listed.get(key)
        if known is None:  # borrowed, or gone
            with translated():
                known = seen.look.blob.stat(key)
        if known is None:
            if again.is_named(named_by):
                missing[key] = f"the blob {key} {NOT_THERE}"
        elif size is not None and known.size != size:
            damaged[key] = f"the blob {key} has {known.size} bytes, not {size}"
    return missing, damaged


def _named(seen: Seen, state: State, findings: Findings) -> dict[str, tuple[int | None, str]]:
    """Every blob that the State names: its size, as far as it is known, and the key by which the State itself names it.

    A bundle that cannot be read is noted.
    """
    # Of a rollup that came with the shard itself no size is noted.
    found: dict[str, tuple[int | None, str]] = {key: (size, key) for key, size in auxiliary_sizes(state).items()}
    for one in placed(seen.look, state, findings):
        part = one.part
        if part.key is not None:
            size = None if is_bundle_key(part.key) else part.blob_size
            found[part.key] = size, (one.bundle or part).key or part.key
    return found
