"""Servers, maintenance and clients killed with SIGKILL behind networks that fail, over real stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.rounds import run_rounds

ROUNDS = 8 if os.environ.get("CI") == "true" else 3  # `python -m tests.crash --rounds 50` runs as many as asked


@pytest.mark.slow
def test_every_promise_is_kept_over_sqlite_and_files(tmp_path: Path) -> None:
    print(run_rounds(tmp_path, f"file://{tmp_path}/blob", f"sqlite:///{tmp_path}/consensus.db", ROUNDS))


@pytest.mark.slow
@pytest.mark.services
def test_every_promise_is_kept_over_postgresql_and_s3(tmp_path: Path, postgres_url: str, s3_url: str) -> None:
    print(run_rounds(tmp_path, s3_url, postgres_url, ROUNDS))


@pytest.mark.slow
@pytest.mark.services
def test_every_promise_is_kept_over_etcd_and_s3(tmp_path: Path, etcd_url: str, s3_url: str) -> None:
    print(run_rounds(tmp_path, s3_url, etcd_url, ROUNDS))
