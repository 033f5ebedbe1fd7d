"""Consensus stores: per key a log that moves by compare-and-set. `open_consensus(url)` opens one."""

from __future__ import annotations

from consensus.consensus_urls import open_consensus
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
