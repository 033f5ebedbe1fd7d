"""Servers, maintenance and clients killed with SIGKILL behind networks that fail, over real stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.rounds import run_rounds
from tests.support.examples import size

FEW, MANY = 1, 8  # rounds; `python -m tests.crash --rounds 50` runs as many as asked
OVER_SERVERS = size(1, MANY)


@pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.proof)])
def test_every_promise_is_kept_over_sqlite_and_files(tmp_path: Path, rounds: int) -> None:
    print(run_rounds(tmp_path, f"file://{tmp_path}/blob", f"sqlite:///{tmp_path}/consensus.db", rounds))


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.services
def test_every_promise_is_kept_over_postgresql_and_s3(tmp_path: Path, postgres_url: str, s3_url: str) -> None:
    print(run_rounds(tmp_path, s3_url, postgres_url, OVER_SERVERS))


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.services
def test_every_promise_is_kept_over_etcd_and_s3(tmp_path: Path, etcd_url: str, s3_url: str) -> None:
    print(run_rounds(tmp_path, s3_url, etcd_url, OVER_SERVERS))
