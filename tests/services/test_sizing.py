"""Sizing in docs/operations.md: its commands exist, its numbers are those of the settings, its sums are right."""

from __future__ import annotations

import importlib.util
import re
import urllib.request
from collections.abc import Iterator
from functools import reduce
from operator import and_
from pathlib import Path

import boto3
import pytest

from bench.cost import S3_STANDARD
from blob.s3 import S3Settings
from consensus.sql import POOL_SIZE
from persist.commit.background_duties import ROLLUP_BYTES
from rpc.cli.program import parser_for
from rpc.settings import Limits
from tests.services.metering_proxy import MeteringProxy
from tests.services.plugin import make_bucket
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, start_moto
from tests.support.pages import ROOT, page
from tests.support.server import Server

LOOKS = 10
DAY_S, EVERY_S = 86_400, 30
MIB = 1024**2
PAGE = page("docs/operations.md")
FLAT = re.sub(r"\s+", " ", PAGE)


def commands() -> list[str]:
    """What stands in the column of commands."""
    table = page("bench/README.md").partition("| what | figure | command |\n")[2].partition("\n\n")[0]
    return [line.rsplit("|", 2)[1].strip(" `") for line in table.splitlines()[1:]]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_figure_names_a_command_that_there_is(command: str) -> None:
    program, *words = command.split()
    if program == "make":
        benches = re.findall(r"^BENCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
        assert words[0].removeprefix("bench-") in benches
    elif program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1]) is not None
    else:
        assert program == "pytest"
        assert (ROOT / words[0]).exists()


def test_its_numbers_are_those_of_the_settings() -> None:
    limits = Limits()
    assert f"`spool_bytes_max` ({limits.spool_bytes_max >> 30} GiB)" in FLAT
    assert f"`--memory` ({parser_for('maintain').parse_args(['maintain', 'run']).memory})" in PAGE
    assert f"at most {POOL_SIZE + 2} connections: a pool of {POOL_SIZE}, one to publish" in FLAT
    assert f"at most {S3Settings('bucket', '').connections} (`connections` in the URL)" in FLAT
    assert f"{ROLLUP_BYTES >> 10} KiB of state diffs between two rollups" in FLAT


def test_its_sums_are_right() -> None:
    """Every `a x b = c` of numbers on the page."""
    found = re.findall(r"((?:[\d.,]+ x )*\(?[\d.,]+(?: [x+/] \(?[\d.,]+(?: ms)?\)?)+\)?) = \$?([\d.,]*\d)", FLAT)
    assert len(found) >= 4
    for sum_, told in found:
        terms = sum_.replace(",", "").replace("x", "*").replace(" ms", " / 1000")
        value, said = float(eval(terms, {"__builtins__": {}})), float(told.replace(",", ""))
        assert value == pytest.approx(said, rel=0.03), f"{sum_} = {told}"


# --- what a probe costs


@pytest.fixture
def bucket(tmp_path: Path, aws_environment: None) -> Iterator[MeteringProxy]:
    server = start_moto(tmp_path)
    with MeteringProxy(server.port) as proxy:
        make_bucket(boto3.session.Session(), server.endpoint, "bucket")
        yield proxy
    server.stop()


def test_a_look_at_readyz_is_five_requests_and_costs_what_the_page_says(tmp_path: Path, bucket: MeteringProxy) -> None:
    urls = ["--blob", f"s3://bucket?endpoint={bucket.endpoint}", "--consensus", f"sqlite:///{tmp_path}/log.db"]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": "us-east-1"}
    with Server(tmp_path, *urls, environment={**keys, "PERSIST_PUBLISH_EVERY": "0"}) as server:
        asked = []
        for _ in range(LOOKS):
            before = bucket.counts()
            with urllib.request.urlopen(f"{server.url}/readyz") as answer:
                assert answer.status == 200
            asked.append((bucket.counts() - before).requests)
    each = reduce(and_, asked)  # the least of each: now and then the server asks for something else meanwhile
    assert each == {"put": 2, "get": 1, "list": 1, "delete": 1}
    assert "2 PUT, 1 GET, 1 LIST, 1 DELETE" in page("bench/README.md")
    look = sum(S3_STANDARD.requests(kind, 1) * count for kind, count in each.items())
    assert f"| a probe of `/readyz` every {EVERY_S} s | ${look * DAY_S / EVERY_S:.3f} a day for each server |" in PAGE
