"""Damage: shards that cannot be read, blobs that are not there or have another size, entries of logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from persist.check.findings import Diagnosis, diagnosis, is_or_are, many, some
from persist.check.shard_probe import Seen
from persist.copies.shard_checks import Fault, Kind
from persist.copies.verify import auxiliary_sizes
from persist.core.blob_keys import is_bundle_key
from persist.core.errors import PersistError
from persist.core.state import State
from persist.formats.store_errors import translated
from persist.inspect.documents import Findings
from persist.inspect.part_listing import placed
from persist.inspect.state_history import Rechecked

NOT_THERE = "is not there"  # what findings of an inspection say of a blob that is missing
RESTORES = "bring it back from a copy of the blob store, or from a backup: a blob never changes"
# Of each kind of damage its cause, its remedy, and the command that helps.
ADVICE: Mapping[str, tuple[str, str, str]] = {
    "blob-missing": (
        "somebody or a rule of the bucket deleted it, or the store was copied without it",
        f"{RESTORES}; what is lost for good is taken out by persist check --repair --excise",
        "persist check {} --deep",
    ),
    "blob-damaged": (
        "the bytes in the store are not those that were written",
        f"{RESTORES}; persist check --deep reads every byte",
        "persist check {} --deep",
    ),
    "log-damaged": (
        "the consensus store has lost or changed what it acknowledged, or was restored to an older time",
        "restore the consensus store, or begin the logs anew from the blob store",
        "persist check {}",
    ),
    "state-damaged": (
        "bytes were changed so that their checksums hold, or a version of persist has a fault",
        "stop what deletes (persist gc, and maintenance of servers); restore the shard from a backup, and report it",
        "persist check {} --deep",
    ),
    "loan-broken": (
        "the shard that lends was restored without its loans, or a list of a loan is damaged",
        "stop what deletes (persist gc, and maintenance of servers); restore both shards from one backup",
        "persist inspect holds {}",
    ),
}
OF_KIND: Mapping[Kind, str] = {
    Kind.LOG: "log-damaged",
    Kind.ROLLUP: "blob-damaged",
    Kind.STEP: "state-damaged",
    Kind.STATE: "state-damaged",
    Kind.LOAN: "loan-broken",
    Kind.MISSING: "blob-missing",
    Kind.SIZE: "blob-damaged",
    Kind.BUNDLE: "blob-damaged",
    Kind.PART: "blob-damaged",
    Kind.ORDER: "blob-damaged",
    Kind.INDEX: "blob-damaged",
    Kind.BLOB: "blob-damaged",
}


def damage(found: str, shard: str, what: str, key: str = "") -> Diagnosis:
    """A finding of damage, with its cause and remedy. `key`: of the blob."""
    cause, remedy, command = ADVICE[found]
    command = command.format(shard)
    return diagnosis(found, shard, what, cause=cause, remedy=remedy, command=command, key=key or None)


def of_fault(fault: Fault) -> Diagnosis:
    """The finding that a fault is. A rollup without a key is of the log."""
    found = OF_KIND[fault.kind]
    if fault.kind is Kind.ROLLUP and not fault.key:
        found = "log-damaged"
    return damage(found, fault.shard, fault.what, fault.key)


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
        command=f"persist check {name}",
    )


def met(seen: Seen, error: PersistError) -> Iterator[Diagnosis]:
    """Another check has met something damaged."""
    yield damage("blob-damaged", seen.name, f"something that the shard names cannot be read: {error.message}")


def log_damaged(seen: Seen) -> Iterator[Diagnosis]:
    """Entries that cannot be read, or States that cannot be made of the log."""
    if seen.state is None:
        return
    found = list(dict.fromkeys([one.what for one in seen.wrong if one.key is None] + seen.log.wrong))
    if found:
        count = f"{many(len(found), 'thing')} in the log {is_or_are(len(found))} damaged"
        yield damage("log-damaged", seen.name, f"{count}: {found[0]}")


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
        count = f"{many(len(missing), 'blob')} that the shard needs {is_or_are(len(missing))} not there"
        yield damage("blob-missing", seen.name, f"{count}: {some(sorted(missing))}")
    if damaged:
        count = f"{many(len(damaged), 'blob')} of the shard {is_or_are(len(damaged))} damaged"
        yield damage("blob-damaged", seen.name, f"{count}: {next(iter(damaged.values()))}")


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
