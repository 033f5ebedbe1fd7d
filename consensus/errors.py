"""Errors of consensus stores, named by what the caller may conclude.

    ConsensusError
      ConsensusUnavailable     definitely did not happen; retrying is safe
        ConsensusNotWritable   the disk is full or read-only: reads work
      ConsensusIndeterminate   may have happened; read the head before deciding anything
      ConsensusDamaged         the stored bytes are damaged; stop, retrying cannot help
      ConsensusMisconfigured   a setting is wrong; retrying cannot help
      ConsensusUsage           the caller's bug (bad key, seqno, limit or size); nothing was sent

A lost race is not an error: `compare_and_set` returns False.
"""

from __future__ import annotations


class ConsensusError(Exception):
    """Root of every error a consensus store raises on purpose."""


class ConsensusUnavailable(ConsensusError):
    """The operation definitely did not happen. Retrying is safe."""


class ConsensusNotWritable(ConsensusUnavailable):
    """The disk is full or read-only, and nothing was written. Reads work."""


class ConsensusIndeterminate(ConsensusError):
    """The operation may have happened or may still happen. Read the head again before concluding."""


class ConsensusDamaged(ConsensusError):
    """The store found its own bytes damaged. Nothing was written. Retrying cannot help; a backup can."""


class ConsensusMisconfigured(ConsensusError):
    """A setting or URL is wrong. The message names it. Retrying cannot help."""


class ConsensusUsage(ConsensusError):
    """The caller asked for something no store may do. Nothing was sent."""
