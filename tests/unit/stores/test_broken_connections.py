"""Found by the crash tests: connections that break whenever the pool hands them out."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from consensus import ConsensusUnavailable, open_consensus


def test_connections_that_break_as_soon_as_they_are_opened_are_bad_weather(tmp_path: Path) -> None:
    """The pool then raised an error of its own kind, which servers answered as a failure of theirs."""

    def breaks(*_: object) -> None:
        raise sa.exc.DisconnectionError("cut")

    first = open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    assert first.compare_and_set("k", 1, b"first")
    first.close()
    store = open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    store.check()
    sa.event.listen(sa.pool.Pool, "checkout", breaks)
    try:
        with pytest.raises(ConsensusUnavailable):
            store.head("k")
        with pytest.raises(ConsensusUnavailable):
            store.compare_and_set("k", 2, b"second")
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", breaks)
    head = store.head("k")
    assert head is not None
    assert head.data == b"first"
    store.close()
