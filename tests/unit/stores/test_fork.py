"""Stores that have connections say so when a forked child uses them; nothing is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from blob import BlobMisconfigured, open_blob
from consensus import ConsensusUsage, open_consensus

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NOBODY = "127.0.0.1:1"


def in_a_fork(check: Callable[[], None]) -> bool:
    """Whether `check` passes in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("url", ["sqlite:///{}/c.db", f"postgresql://u:p@{NOBODY}/d", f"etcd://{NOBODY}/p"])
def test_a_consensus_store_is_not_for_a_forked_child(url: str, tmp_path: Path) -> None:
    with closing(open_consensus(url.format(tmp_path))) as store:
        if url.startswith("sqlite"):
            assert store.compare_and_set("k", 1, b"x")

        def check() -> None:
            for call in (lambda: store.head("k"), lambda: store.compare_and_set("k", 2, b"x")):
                with pytest.raises(ConsensusUsage, match="fork"):
                    call()

        assert in_a_fork(check)


def test_a_bucket_is_not_for_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with closing(open_blob(f"s3://bucket?endpoint=http://{NOBODY}&region=r")) as store:

        def check() -> None:
            for call in (lambda: store.get("k"), lambda: store.put("k", b"x"), lambda: list(store.list(""))):
                with pytest.raises(BlobMisconfigured, match="fork"):
                    call()
            store.close()

        assert in_a_fork(check)


def test_files_are_for_everybody(tmp_path: Path) -> None:
    store = open_blob(f"file://{tmp_path}")
    store.put("a", b"parent")

    def check() -> None:
        assert store.get("a") == b"parent"
        store.put("b", b"child")

    assert in_a_fork(check)
    assert store.get("b") == b"child"
