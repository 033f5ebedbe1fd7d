"""Consensus stores: per key a log that moves by compare-and-set. `open_consensus(url)` opens one."""

from __future__ import annotations

from typing import cast

from blob import optional, without_secrets
from blob.memory_blobs import NamedStores
from consensus.interface import (
    ENDED,
    HIDDEN,
    Consensus,
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    ConsensusUsage,
    Entry,
)
from consensus.memory_logs import MemoryConsensus

__all__ = [
    "ENDED",
    "HIDDEN",
    "Consensus",
    "Entry",
    "ConsensusDamaged",
    "ConsensusError",
    "ConsensusIndeterminate",
    "ConsensusMisconfigured",
    "ConsensusNotWritable",
    "ConsensusUnavailable",
    "ConsensusUsage",
    "open_consensus",
]

_memory = NamedStores(MemoryConsensus, "consensus", ConsensusMisconfigured)


def open_consensus(url: str, *, reads_only: bool = False) -> Consensus:
    """Open the consensus store at `url`; ConsensusMisconfigured says what is wrong with it.

    `mem:` (private), `mem:name` (shared in this process), `sqlite:///relative.db`, `sqlite:////absolute.db`,
    `postgresql://user:password@host:5432/database`, `etcd://host:2379,host2:2379/prefix`.
    Nothing is contacted; call `check()` to probe the store. With `reads_only` it never writes and creates no file or
    table; read-only credentials suffice.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "mem":
        return _memory.open(url)
    if scheme == "etcd":
        etcd = optional("consensus.etcd", "etcd:", "persist-shards[etcd]", ConsensusMisconfigured)
        return cast(Consensus, etcd.EtcdConsensus.from_url(url))
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise ConsensusMisconfigured(
            f"consensus location {without_secrets(url)!r} must start with mem: sqlite: postgresql: or etcd:"
        )
    from consensus.sql import parsed_url

    parsed = parsed_url(url)
    if parsed.drivername == "sqlite":
        from consensus.sqlite import ReadingSqlite, SqliteConsensus

        return (ReadingSqlite if reads_only else SqliteConsensus).from_url(parsed)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        sql = optional("consensus.postgres", "postgresql:", "persist-shards[postgres]", ConsensusMisconfigured)
        store_class = sql.ReadingPostgres if reads_only else sql.PostgresConsensus
        return cast(Consensus, store_class.from_url(parsed))
    raise ConsensusMisconfigured(f"consensus driver {parsed.drivername!r} is not one of sqlite, postgresql")
