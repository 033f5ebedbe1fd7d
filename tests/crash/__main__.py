"""Crash tests for as long as asked: `python -m tests.crash --rounds 50 --backend postgres`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import boto3

from tests.crash.rounds import run_rounds
from tests.services.etcd import start_etcd
from tests.services.plugin import make_bucket
from tests.services.postgres import start_postgres
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, start_s3
from tests.simulation.oracle import Violation

BACKENDS = ("sqlite", "postgres", "etcd")
BUCKET = "crash"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--backend", choices=BACKENDS, help="default: one after the other")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failures = 0
    for backend in [options.backend] if options.backend else BACKENDS:
        started = time.monotonic()
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="persist-crash-") as name:
            directory = Path(name)
            directory.chmod(0o755)  # PostgreSQL has another user
            blob, consensus = _stores(stack, directory, backend)
            try:
                said = run_rounds(directory, blob, consensus, options.rounds, options.seed)
            except Violation as violation:
                failures += 1
                said = f"a promise was broken: {violation}\n{(directory / 'log').read_text()[-4_000:]}"
            print(f"{backend}, {time.monotonic() - started:.0f} s: {said}", flush=True)
    return 1 if failures else 0


def _stores(stack: ExitStack, directory: Path, backend: str) -> tuple[str, str]:
    """URLs of fresh stores; their servers end with the stack."""
    if backend == "sqlite":
        return f"file://{directory}/blob", f"sqlite:///{directory}/consensus.db"
    s3 = start_s3(directory / "s3")
    stack.callback(s3.stop)
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION="us-east-1")
    make_bucket(boto3.session.Session(), s3.endpoint, BUCKET)
    blob = f"s3://{BUCKET}/some/prefix?endpoint={s3.endpoint}"
    if backend == "etcd":
        cluster = start_etcd(directory / "etcd", 1)
        stack.callback(cluster.stop)
        return blob, cluster.url("crash")
    server = start_postgres(directory / "postgres")
    stack.callback(server.stop)
    return blob, server.create_database("crash")


if __name__ == "__main__":
    sys.exit(main())
