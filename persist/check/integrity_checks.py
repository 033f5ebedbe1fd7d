"""Damage: shards that cannot be read, blobs that are not there or have another size, entries of logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from persist.check.findings import CheckedShard, Diagnosis, diagnosis, is_or_are, many, some
from persist.copies.shard_facts import Fault, FaultKind, Faults
from persist.core.errors import PersistError

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
        "stop what deletes (persist maintain gc, and maintenance of servers); restore the shard from a backup, and "
        "report it",
        "persist check {} --deep",
    ),
    "loan-broken": (
        "the shard that lends was restored without its loans, or a list of a loan is damaged",
        "stop what deletes (persist maintain gc, and maintenance of servers); restore both shards from one backup",
        "persist inspect holds {}",
    ),
}
OF_KIND: Mapping[FaultKind, str] = {
    FaultKind.LOG: "log-damaged",
    FaultKind.ROLLUP: "blob-damaged",
    FaultKind.STEP: "state-damaged",
    FaultKind.STATE: "state-damaged",
    FaultKind.LOAN: "loan-broken",
    FaultKind.MISSING: "blob-missing",
    FaultKind.SIZE: "blob-damaged",
    FaultKind.BUNDLE: "blob-damaged",
    FaultKind.PART: "blob-damaged",
    FaultKind.ORDER: "blob-damaged",
    FaultKind.INDEX: "blob-damaged",
    FaultKind.BLOB: "blob-damaged",
}


def damage(found: str, shard: str, what: str, key: str = "") -> Diagnosis:
    """A finding of damage, with its cause and remedy. `key`: of the blob."""
    cause, remedy, command = ADVICE[found]
    command = command.format(shard)
    return diagnosis(found, shard, what, cause=cause, remedy=remedy, command=command, key=key or None)


def of_fault(fault: Fault) -> Diagnosis:
    """The finding that a fault is. A rollup without a key is of the log."""
    found = OF_KIND[fault.kind]
    if fault.kind is FaultKind.ROLLUP and not fault.key:
        found = "log-damaged"
    return damage(found, fault.shard or "", fault.what, fault.key)


def shard_unreadable(seen: CheckedShard) -> Iterator[Diagnosis]:
    """No State can be made: nobody can read or write the shard."""
    if seen.state is not None:
        return
    why = "; ".join(dict.fromkeys(one.what for one in seen.faults)) or "its log leads to none"
    yield diagnosis(
        "shard-unreadable",
        seen.name,
        f"nobody can read or write the shard: no State of its log, which ends at v{seen.head}, can be made",
        cause=why,
        remedy="stop what deletes (persist maintain gc, and maintenance of servers); bring back the blobs, or the log",
        command=f"persist inspect log {seen.name}",
    )


def log_lost(name: str) -> Diagnosis:
    """The blob store has rollups of a shard, and the consensus store has nothing of it."""
    return diagnosis(
        "shard-unreadable",
        name,
        "nobody can read or write the shard: its log is not in the consensus store, and its blobs are there",
        cause="the consensus store has lost what it acknowledged, or is an older copy of itself",
        remedy="stop what deletes (persist maintain gc, and maintenance of servers); restore a newer backup of the "
        "consensus store",
        command=f"persist check {name}",
    )


def met(seen: CheckedShard, error: PersistError) -> Iterator[Diagnosis]:
    """Another check has met something damaged."""
    yield damage("blob-damaged", seen.name, f"something that the shard names cannot be read: {error.message}")


def counted(faults: Faults) -> Iterator[Diagnosis]:
    """What a quick look finds, of each kind of damage one finding."""
    log, missing, damaged = list[str](), dict[str, str](), dict[str, str]()
    for fault in faults:
        if not fault.key:
            log.append(fault.what)
        else:
            (missing if fault.kind is FaultKind.MISSING else damaged).setdefault(fault.key, fault.what)
    damaged = {key: what for key, what in damaged.items() if key not in missing}
    name = faults.shard or ""
    if log:
        count = f"{many(len(log), 'thing')} in the log {is_or_are(len(log))} damaged"
        yield damage("log-damaged", name, f"{count}: {log[0]}")
    if missing:
        count = f"{many(len(missing), 'blob')} that the shard needs {is_or_are(len(missing))} not there"
        yield damage("blob-missing", name, f"{count}: {some(sorted(missing))}")
    if damaged:
        count = f"{many(len(damaged), 'blob')} of the shard {is_or_are(len(damaged))} damaged"
        yield damage("blob-damaged", name, f"{count}: {next(iter(damaged.values()))}")
