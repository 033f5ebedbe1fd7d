"""Damage: shards that cannot be read, blobs that are missing or have the wrong size, log entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from persist.check.findings import CheckedShard, Diagnosis, diagnosis, is_or_are, many, some
from persist.copies.shard_facts import Fault, FaultKind, Faults
from persist.core.errors import PersistError

RESTORES = "restore it from a copy of the blob store, or from a backup: a blob never changes"
STOP_GC = "stop everything that deletes (persist maintain gc, and maintenance of servers)"
# kind of damage -> its cause, its remedy, and a command
ADVICE: Mapping[str, tuple[str, str, str]] = {
    "blob-missing": (
        "it was deleted by a user or a lifecycle rule of the bucket, or the store was copied without it",
        f"{RESTORES}; remove a lost part by persist check --repair --excise",
        "persist check {} --deep",
    ),
    "blob-damaged": (
        "the bytes in the store differ from those that were written",
        f"{RESTORES}; persist check --deep reads every byte",
        "persist check {} --deep",
    ),
    "log-damaged": (
        "the consensus store has lost or changed acknowledged data, or was restored to an earlier time",
        "restore the consensus store, or restart the logs from the blob store",
        "persist check {}",
    ),
    "state-damaged": (
        "bytes were changed together with their checksums, or a version of persist has a bug",
        f"{STOP_GC}; restore the shard from a backup, and report the bug",
        "persist check {} --deep",
    ),
    "loan-broken": (
        "the shard that lends was restored without its loans, or a list of a loan is damaged",
        f"{STOP_GC}; restore both shards from one backup",
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


def damage(finding_id: str, shard: str, what: str, key: str = "") -> Diagnosis:
    """Make a finding of damage, with its cause and remedy. `key`: of the blob."""
    cause, remedy, command = ADVICE[finding_id]
    command = command.format(shard)
    return diagnosis(finding_id, what, cause=cause, remedy=remedy, command=command, key=key or None, shard=shard)


def of_fault(fault: Fault) -> Diagnosis:
    """Turn a fault into a finding. A rollup fault without a key is about the log."""
    finding_id = OF_KIND[fault.kind]
    if fault.kind is FaultKind.ROLLUP and not fault.key:
        finding_id = "log-damaged"
    return damage(finding_id, fault.shard or "", fault.what, fault.key)


def shard_unreadable(shard: CheckedShard) -> Iterator[Diagnosis]:
    """No State can be loaded: the shard can be neither read nor written."""
    if shard.state is not None:
        return
    reason = "; ".join(dict.fromkeys(fault.what for fault in shard.faults)) or "no State follows from its log"
    yield shard.finding(
        "shard-unreadable",
        f"the shard can be neither read nor written: no State can be loaded from its log, which ends at v{shard.head}",
        cause=reason,
        remedy=f"{STOP_GC}; restore the blobs, or the log",
        command=f"persist inspect log {shard.name}",
    )


def log_lost(name: str) -> Diagnosis:
    """The blob store has rollups of a shard, and the consensus store has no log of it."""
    return diagnosis(
        "shard-unreadable",
        "the shard can be neither read nor written: its blobs exist, but its log is missing in the consensus store",
        cause="the consensus store has lost acknowledged data, or is an older copy of itself",
        remedy=f"{STOP_GC}; restore a newer backup of the consensus store",
        command=f"persist check {name}",
        shard=name,
    )


def unreadable(shard: CheckedShard, error: PersistError) -> Diagnosis:
    """Another check has met something damaged."""
    return damage("blob-damaged", shard.name, f"something that the shard names cannot be read: {error.message}")


def counted(faults: Faults) -> Iterator[Diagnosis]:
    """Summarize the faults of a quick check: one finding for each kind of damage."""
    log, missing, damaged = list[str](), dict[str, str](), dict[str, str]()
    for fault in faults:
        if not fault.key:
            log.append(fault.what)
        else:
            (missing if fault.kind is FaultKind.MISSING else damaged).setdefault(fault.key, fault.what)
    damaged = {key: what for key, what in damaged.items() if key not in missing}
    name = faults.shard or ""
    if log:
        count = f"{many(len(log), 'problem')} in the log"
        yield damage("log-damaged", name, f"{count}: {log[0]}")
    if missing:
        count = f"{many(len(missing), 'blob')} that the shard needs {is_or_are(len(missing))} missing"
        yield damage("blob-missing", name, f"{count}: {some(sorted(missing))}")
    if damaged:
        count = f"{many(len(damaged), 'blob')} of the shard {is_or_are(len(damaged))} damaged"
        yield damage("blob-damaged", name, f"{count}: {next(iter(damaged.values()))}")
